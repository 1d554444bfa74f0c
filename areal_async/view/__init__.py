"""A page that shows a run, live or finished (`areal-async view`): a reader beside it.

What always holds: only files of run folders are read, nothing in them is changed and the controller is asked nothing;
what is kept lies in a temporary folder that goes with the process.
"""
