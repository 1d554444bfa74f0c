"""How a run stands, from what its folder and the kernel tell: its row in the list of runs.

What always holds: the same rule as `areal-async why`: a run lives if a process of this host holds its log's lock; of
one on another host only the age of its status is known. A file that can't be read is one problem, and the rest counts.
"""

import os
import re
import socket
import time
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import yaml

from areal_async import run_processes
from areal_async.controller import status
from areal_async.controller.status import Status
from areal_async.errors import ConfigError
from areal_async.log.format import DECISIONS_NAME
from areal_async.run_processes import OLD_S
from areal_async.runfiles import CONFIG, METRICS
from areal_async.view.api import RunRow, RunState
from areal_async.view.rows import Row

TAIL_BYTES: Final = 1 << 16  # of metrics.jsonl: a line has about 2 kB
_STAMP: Final = re.compile(r"-(\d{8}-\d{6})(?:-\d+)?$")  # of `runs/NAME-TIME`
# ten times as fast, where PyYAML was built with it
_Loader: Final[type[yaml.SafeLoader] | type[yaml.CSafeLoader]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def holds_run(folder: Path) -> bool:
    """Whether the folder is a run's, whole or not: it has a log, or rows, or a status, or has just been made."""
    names = (f"log/{DECISIONS_NAME}", DECISIONS_NAME, METRICS, status.NAME)
    just_made = os.path.isfile(folder / CONFIG) and os.path.isdir(folder / "log")
    return just_made or any(os.path.isfile(folder / name) for name in names)  # False, too, where nobody may look


def log_of(folder: Path) -> Path:
    """Where a run has its log: a copy of the log folder alone is one, too."""
    return folder if os.path.isfile(folder / DECISIONS_NAME) else folder / "log"


class Settings(NamedTuple):
    """What the list needs of a configuration, of whatever version. steps: 0 where it isn't known."""

    name: str
    steps: int


class Told:
    """Of one run folder; files are read again only when they have changed."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        self.status: Status | None = None
        self.problem = ""
        self._status_mark = self._settings_mark = (0, 0, 0)
        self._settings = Settings("", 0)

    def look(self) -> None:
        """Read what has changed of `status.json`."""
        now = mark(self.folder / status.NAME)
        if now == self._status_mark:
            return
        try:
            self.status, self.problem = status.read(self.folder), ""
        except ConfigError as error:
            self.status, self.problem = None, str(error)
        self._status_mark = now

    def settings(self) -> Settings:
        """Of `config.yaml`; an unreadable one says nothing."""
        path = self.folder / CONFIG
        now = mark(path)
        if now != self._settings_mark:
            self._settings = _settings(path)
            self._settings_mark = now
        return self._settings

    def row(self, last: Row | None) -> RunRow:
        """last: of `metrics.jsonl`."""
        self.look()
        told = self.status
        state, end = self._state(last)
        name, steps = (told.name, told.steps) if told is not None else self.settings()
        seconds = told.at if told is not None else 0.0 if last is None else last.time_s
        return RunRow(
            key=self.key,
            name=name or self.key,
            folder=str(self.folder),
            state=state,
            began=self._began(),
            seconds=seconds,
            version=told.version if told is not None else 0 if last is None else last.version,
            steps=steps,
            reward=None if last is None else last.reward_mean,
            end=end,
            problem=self.problem if os.path.isdir(self.folder) else f"{self.folder}: is gone",
        )

    def _state(self, last: Row | None) -> tuple[RunState, str]:
        """How it stands; and how it ended, in words."""
        if not os.path.isdir(self.folder):
            return "unreadable", ""
        told = self.status
        if told is not None and told.host != socket.gethostname():
            return _elsewhere(told)
        pid = run_processes.controller(self.folder)
        if told is None:
            if self.problem:
                return ("running", "") if pid is not None else ("unreadable", "")
            return ("starting", "") if pid is not None else ("died", "it has told nothing: it has no status.json")
        if pid is not None and pid != told.pid:
            return "starting", ""  # what is told is of the controller before
        if told.ended:
            return "ended", told.ended
        if pid is None:
            return "died", f"no end is told: the controller was killed, after {told.at:.1f} s of its clock"
        if time.time() - told.time > OLD_S:
            return "silent", ""
        has_trained = last is not None and last.version > told.version  # since it told
        return ("running" if told.balance.get("admitted") or has_trained else "starting"), ""

    def _began(self) -> float | None:
        """By the folder's name, which a copy keeps; else by what it told; else by its configuration's time."""
        if stamp := _STAMP.search(self.folder.name):
            try:
                return time.mktime(time.strptime(stamp[1], "%Y%m%d-%H%M%S"))
            except ValueError:
                pass  # other digits
        if self.status is not None:
            return self.status.time - self.status.at
        _, modified_ns, _ = mark(self.folder / CONFIG)
        return modified_ns / 1e9 or None


def _elsewhere(told: Status) -> tuple[RunState, str]:
    if told.ended:
        return "ended", told.ended
    age_s = time.time() - told.time
    if age_s > OLD_S:
        return "died", f"no end is told: host {told.host} wrote last {age_s:.0f} s ago"
    return "running", ""


def mark(path: Path) -> tuple[int, int, int]:
    """Another one when the file is."""
    try:
        found = path.stat()
    except OSError:
        return -1, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size


def _settings(path: Path) -> Settings:
    try:
        read = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        name, steps = read["name"], read["train"]["steps"]
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, RecursionError):
        return Settings("", 0)
    # not str(name): of lists in lists, which YAML may name again and again, it would have no end
    return Settings(name if isinstance(name, str) else "", steps if isinstance(steps, int) else 0)


def last_row(folder: Path) -> Row | None:
    """The newest whole line of `metrics.jsonl`, found from its end; None: there is none, or it is broken."""
    path = folder / METRICS
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    try:
        return msgspec.json.decode(lines[-2], type=Row) if len(lines) > 1 else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
