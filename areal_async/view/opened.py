"""The runs that somebody looks at, and the tasks that read their logs.

What always holds: a run is begun to be read when it is first asked for; at most `MOST` are kept, and the one that was
asked for longest ago is dropped, with its task and its file; one whose reading fails says so, and the others go on. A
folder that took another's place under its name is another run, and nothing of the one before is told of it.
"""

import asyncio
from pathlib import Path
from typing import Final

from areal_async.view.run import NotThere, Run
from areal_async.view.runs import RunFolders
from areal_async.view.story import Stories

MOST: Final = 8  # each has a database, and the open groups of its run in memory


class OpenRuns:
    """tasks: owns those that read. place: a folder for what was read, which is removed with the process."""

    def __init__(self, folders: RunFolders, tasks: asyncio.TaskGroup, place: Path) -> None:
        self.folders = folders
        self._tasks = tasks
        self._place = place
        self._runs: dict[str, tuple[Run, asyncio.Task[None]]] = {}  # the one asked for last comes last
        self._begun = 0
        self._stories = Stories()

    def run(self, key: str) -> Run:
        """The run of this key. Errors: NotThere."""
        folder = self.folders.folder(key)
        if folder is None:
            if key in self._runs:
                self._drop(key)
                raise NotThere(f"run {key!r} is gone: its folder was removed, or nobody may look into it")
            raise NotThere(f"{key[:80]!r}: there is no such run in {self.folders.path}")
        if key in self._runs and not self._runs[key][0].is_in_place():
            self._drop(key)
        if key in self._runs:
            self._runs[key] = self._runs.pop(key)
        else:
            self._begun += 1
            run = Run(folder, key, self._place / f"{self._begun}.sqlite", self._stories)
            self._runs[key] = run, self._tasks.create_task(run.follow(), name=f"reads {folder}")
            while len(self._runs) > MOST:
                self._drop(next(iter(self._runs)))
        return self._runs[key][0]

    def close(self) -> None:
        """All of them are left."""
        for key in list(self._runs):
            self._drop(key)

    def _drop(self, key: str) -> None:
        run, task = self._runs.pop(key)
        task.cancel()
        run.close()
