"""Code that runs inside other processes: the vLLM servers and the trainer's ranks.

What always holds: it is imported only as `areal_async.engines.…` (the folder is reached through a link), and nothing in
here is imported by the controller.
"""
