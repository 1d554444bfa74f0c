"""A run's processes as the kernel knows them, and what they wrote last: for whoever looks at a run from outside.

What always holds: it only reads `/proc` and the run folder, and asks the run nothing, so it answers also where the
controller stands still. Of a run on another host it finds nothing.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from areal_async import process_tree

OLD_S: Final = 10.0  # of a status, which is written every 2 s: older than this its loop stands still
TAIL_BYTES: Final = 1 << 14  # of a file's end: enough for the last lines of any child
TICKS: Final = os.sysconf("SC_CLK_TCK")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Process(msgspec.Struct, frozen=True):
    """A child of the controller. name: of its file in `stderr/`. state: as in /proc (R, S, D, …). cpu_s, resident:
    with all that it has started. processes: how many these are. age_s: since its start."""

    name: str
    pid: int
    state: str
    age_s: float
    cpu_s: float
    resident: int
    processes: int


def controller(run: Path) -> int | None:
    """Pid of the process that holds the run's log, if it lives."""
    lock = run / "log" / "lock"
    try:
        pid = int(lock.read_text())
    except (OSError, ValueError):
        return None  # there is none, or nobody may look
    try:
        open_files = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return pid  # another user's: it lives, and more can't be known
    except OSError:
        return None
    for name in open_files:  # the number alone may belong to another process by now
        with contextlib.suppress(OSError):
            if os.path.samefile(f"/proc/{pid}/fd/{name}", lock):
                return pid
    return None


def children(controller: int, run: Path) -> Iterator[Process]:
    """Its guards, by where their output goes, and what runs under each."""
    folder = (run / "stderr").resolve()
    for guard in process_tree.children(controller):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it has just ended
            output = Path(os.readlink(f"/proc/{guard}/fd/1"))
            below = [_stat(pid) for pid in process_tree.descendants(guard)]
            if output.parent == folder and below:
                first = below[0]
                cpu_s, resident = sum(stat.cpu_s for stat in below), sum(stat.resident for stat in below)
                yield Process(output.stem, first.pid, first.state, first.age_s, cpu_s, resident, len(below))


def file_of(label: str) -> str:
    """Name of a child's file in `stderr/`, without `.log`, by what the core calls it."""
    return label.removeprefix("reward worker ").replace("server ", "server-")


def last_lines(run: Path, name: str, most: int) -> list[str]:
    """The end of a child's output; nothing where there is no file (a server by URL, a rank on another host)."""
    path = run / "stderr" / f"{name}.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-most:]
    except OSError:
        return []


class _Stat(NamedTuple):
    pid: int
    state: str
    age_s: float
    cpu_s: float
    resident: int


def _stat(pid: int) -> _Stat:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / TICKS
    return _Stat(pid, fields[0], age_s, (int(fields[11]) + int(fields[12])) / TICKS, int(fields[21]) * PAGE)
