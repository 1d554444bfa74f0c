"""The trainer's ranks: DeepSpeed processes under torchrun (`python -m areal_async.engines.deepspeed.rank`).

What always holds: a rank decides nothing. It does what a message says, answers each message once, and every rank makes
the same number of forward and backward passes. Importing this package imports neither torch nor DeepSpeed.
"""
