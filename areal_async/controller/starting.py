"""Waiting for a child process to be ready, which may end instead, or take too long; and what an end may mean."""

import asyncio
from collections.abc import Coroutine
from typing import Final

from areal_async.errors import LaunchError
from areal_async.launch.child import Child

HINT_LINES: Final = 200  # of its output: the words about memory stand above a long traceback
NO_MEMORY: Final = (
    "out of memory",
    "OutOfMemoryError",
    "MemoryError",
    "Cannot allocate memory",
    "No available memory for the cache blocks",
    "can't allocate memory",
    "is less than desired GPU memory utilization",
    "larger than the available KV cache memory",
)
KILLED: Final = "was ended by SIGKILL"
SERVER_MEMORY: Final = (
    "a GPU server needs a smaller server.gpu_memory where others use the GPU too, else a smaller server.max_num_seqs "
    "or server.max_model_len; a CPU server a smaller server.kv_cache_gib"
)
TRAINER_MEMORY: Final = (
    "use a smaller train.max_tokens_per_microbatch, train.gradient_checkpointing, or a higher train.zero_stage with "
    "more ranks"
)


def explained(child: Child, memory: str) -> str:
    """`Child.why`, and what to do where memory was the cause. memory: what makes it need less."""
    why, said = child.why(), child.tail(HINT_LINES)
    if any(words in said for words in NO_MEMORY):
        return f"{why}\nIt ran out of memory: {memory}"
    if KILLED in why.partition("\n")[0]:
        return f"{why}\nIf nobody killed it, the machine ran out of memory (`dmesg` says so): {memory}"
    return why


async def wait_for_start(
    child: Child, ready: Coroutine[object, object, object], timeout_s: float, deadline: str, memory: str = ""
) -> None:
    """Return when `ready` does. Errors: LaunchError, with the end of its stderr, if the child ends before or the time
    is up; whatever `ready` raises.

    deadline: what `timeout_s` is called, for the error. memory: see `explained`.
    """
    ended = asyncio.ensure_future(child.wait())
    there = asyncio.ensure_future(ready)
    try:
        await asyncio.wait({ended, there}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if there.done():
            there.result()
            return
        if ended.done():
            raise LaunchError(f"it ended while it started: {explained(child, memory) if memory else child.why()}")
        raise LaunchError(f"not ready after {deadline} = {timeout_s:g} s: {child.why()}")
    finally:
        for task in (ended, there):
            task.cancel()
        await asyncio.gather(ended, there, return_exceptions=True)
