"""The tasks of a run: all in one task group, each with a name, and all can be told to stop.

What always holds: a task that raises ends the run with that exception; no task outlives the group.
"""

import asyncio
from collections.abc import Coroutine


class Crew:
    """A task group whose tasks can be cancelled together when the run is over."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def dismiss(self) -> None:
        """Cancel every task and wait until all have ended."""
        while tasks := list(self._tasks):  # one that ends may start another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
