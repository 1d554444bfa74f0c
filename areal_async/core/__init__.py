"""The decisions of a run, pure: events in, commands out (`orchestrator.Orchestrator`).

What always holds: no clock, no randomness, no files, no sockets, no numpy, no asyncio. The same events give the same
commands on any machine, so a recorded run can be replayed and compared.
"""
