"""Rewards: how an answer becomes a verdict and a number. Runs in reward workers, processes of their own.

What always holds: whatever a reward function does (hangs, forks, crashes, prints for ever), it is ended at its
deadline with all it started, it delays no other check, and its verdict says what happened. Only `areal_async.messages`,
`errors`, `process_tree` and the worker's side of the wire are used; `loading` needs neither ZeroMQ nor torch.
"""
