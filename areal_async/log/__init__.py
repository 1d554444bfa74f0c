"""The run log: what happened and what was decided (`decisions.log`), and the samples themselves (payload segments).

`writer.RunLog` writes and reads back samples in a run; `reader` is for everything afterwards.
"""
