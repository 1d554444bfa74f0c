"""Which runs there are: one that was named, or all in a folder, looked up anew each time that somebody asks.

What always holds: of each run only the small files are read (`status.json`, the configuration's name, the last line of
`metrics.jsonl`), and only when they have changed, so hundreds can be listed again and again; a run is found by its key
among the folders that there are, and a key is never joined to a path. A run that can't be read is a row with a problem,
and so is one whose folder's name is no text (others than UTF-8 can't be sent, nor stand in an address).
"""

import asyncio
import os
from pathlib import Path
from typing import Final

from areal_async.cli_folder import LOG_NAME
from areal_async.errors import ConfigError
from areal_async.runfiles import METRICS
from areal_async.view.api import RunRow, Runs
from areal_async.view.rows import Row
from areal_async.view.told import Told, holds_run, last_row, mark

NO_TEXT: Final = "its name isn't UTF-8, so it can't be shown; rename it, or make a link to it with another name"
AT_ONCE: Final = 20  # runs whose files are looked at before others get their turn; each takes about 0.2 ms


class RunFolders:
    """path: a run, or a folder of runs. Errors: ConfigError: it is neither."""

    def __init__(self, path: Path) -> None:
        if not is_text(str(path)):
            raise ConfigError(f"command line: view: {path.as_posix()!r}: {NO_TEXT}")
        if path.name == "log" and holds_run(path.parent) and os.path.isfile(path / LOG_NAME):
            path = path.parent  # the log folder in a run is the run
        self.single = holds_run(path)
        self.path = path
        self._key = _shown(_resolved(path).name) or "run"
        self._listed: dict[str, _Listed] = {}
        if not self.single and not self._find():
            raise ConfigError(_why_not(path))

    def folder(self, key: str) -> Path | None:
        """None: there is no such run."""
        if self.single:
            return self.path if key == self._key and os.path.isdir(self.path) else None
        folder = self._folders().get(key)
        return folder if folder is not None and is_text(folder.name) and holds_run(folder) else None

    async def rows(self) -> Runs:
        """The newest first."""
        found = self._find()
        self._listed = {key: self._listed.get(key) or _Listed(folder, key) for key, folder in found.items()}
        rows = []
        for number, (key, listed) in enumerate(list(self._listed.items())):
            rows.append(listed.row() if is_text(listed.told.folder.name) else _nameless(key, self.path))
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        return Runs(runs=sorted(rows, key=lambda row: (-(row.began or 0.0), row.key)), single=self.single)

    def _find(self) -> dict[str, Path]:
        if self.single:
            return {self._key: self.path}
        return {key: folder for key, folder in self._folders().items() if key in self._listed or holds_run(folder)}

    def _folders(self) -> dict[str, Path]:
        """All that are in the folder of runs."""
        try:
            with os.scandir(self.path) as entries:
                # os.path: entry.is_dir raises where links lead in a circle
                return {_shown(entry.name): Path(entry.path) for entry in entries if os.path.isdir(entry.path)}
        except OSError:
            return {}  # it was removed while somebody looks


class _Listed:
    """A run of the list."""

    def __init__(self, folder: Path, key: str) -> None:
        self.told = Told(folder, key)
        self._mark = (0, 0, 0)
        self._last: Row | None = None

    def row(self) -> RunRow:
        """The last line of `metrics.jsonl` is read again when it has grown."""
        now = mark(self.told.folder / METRICS)
        if now != self._mark:
            self._mark, self._last = now, last_row(self.told.folder)
        return self.told.row(self._last)


def is_text(name: str) -> bool:
    """Whether a name of a file is UTF-8: Python takes others in, too, but nobody can be sent them."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(name: str) -> str:
    return name if is_text(name) else os.fsencode(name).decode(errors="replace")


def _resolved(path: Path) -> Path:
    """As it is where links lead in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


def _nameless(key: str, parent: Path) -> RunRow:
    return RunRow(
        key=key, name=key, folder=f"{parent / key}", state="unreadable", began=None, seconds=0.0, version=0, steps=0,
        reward=None, problem=f"{parent / key}: {NO_TEXT}",
    )  # fmt: skip


def _why_not(path: Path) -> str:
    if not os.path.exists(path):
        return f"command line: view: {path}: no such folder; name a run folder (runs/NAME-TIME) or a folder of runs"
    if not os.path.isdir(path):
        return f"command line: view: {path}: is no folder; name a run folder (runs/NAME-TIME) or a folder of runs"
    try:
        empty = not any(path.iterdir())
    except OSError as error:
        return f"command line: view: {path}: can't be read: {error.strerror}"
    if empty:
        return f"command line: view: {path}: is empty; name a run folder (runs/NAME-TIME) or a folder of runs"
    return (
        f"command line: view: {path}: is no run (no log/{LOG_NAME}, {METRICS} or status.json), and no folder in "
        "it is one; name a run folder (runs/NAME-TIME) or a folder of runs"
    )
