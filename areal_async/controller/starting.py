"""Waiting for a child process to be ready, which may end instead, or take too long."""

import asyncio
from collections.abc import Coroutine

from areal_async.errors import LaunchError
from areal_async.launch.child import Child


async def wait_for_start(child: Child, ready: Coroutine[object, object, object], timeout_s: float) -> None:
    """Return when `ready` does. Errors: LaunchError, with the end of its stderr, if the child ends before or the time
    is up; whatever `ready` raises."""
    ended = asyncio.ensure_future(child.wait())
    there = asyncio.ensure_future(ready)
    try:
        await asyncio.wait({ended, there}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if there.done():
            there.result()
            return
        if ended.done():
            raise LaunchError(f"it ended while it started: {child.why()}")
        raise LaunchError(f"not ready after {timeout_s:g} s (its start timeout): {child.why()}")
    finally:
        for task in (ended, there):
            task.cancel()
        await asyncio.gather(ended, there, return_exceptions=True)
