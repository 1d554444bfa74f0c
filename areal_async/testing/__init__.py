"""Scripted peers for tests and benchmarks: real processes on the real wire, without vLLM or DeepSpeed. Public.

`recipes.scripted()` for whole runs, `vllm_server.ScriptedServer` for a server with faults on order, `trainer` for ranks
that keep books of what they trained, `recorded.recorded()` for peers that answer as those of a recorded run did.
"""
