"""What a check may use, how many run at a time, and the watch that finds those which use too much.

Some limits the kernel holds for each process (`set_limits`, in the forked child). What counts for a check with all it
started, its processes and its memory, is looked at from outside (`Watch`): RLIMIT_NPROC counts all processes of a user,
so that checks would starve each other, and doesn't hold for root at all; RLIMIT_AS holds for one process, not for many.

What always holds: nothing here waits; a look at a check with any number of processes reads at most one more than it
may have.
"""

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import Final

from areal_async import process_tree
from areal_async.messages import Limits, RewardOptions

SLOW_S: Final = 0.5
"""A check that is older gives its place to one that waits, so that hanging ones hold up nobody until their deadline."""
SLOW_PLACES: Final = 4
"""For each quick place so many slow ones; when they are taken, a slow check keeps its quick place."""

CHECK_NICE: Final = 5  # added to the worker's: a run waits for servers and trainers, hardly ever for a check
SLOW_NICE: Final = 10  # a third of the share of a quick one; much less, and it would miss its deadline under load
LOWEST_NICE: Final = 19

LOOK_S: Final = 0.025  # between looks at a check, the first at that age: a bomb makes 10 processes in a millisecond
FILES_S: Final = 0.25  # between looks at memory files, which hardly any check has
SPARE_BYTES: Final = 64 << 20  # a check that ran out of memory may still say so

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
MIB: Final = 1 << 20
MEMFD: Final = "/memfd:"
START_OF_CODE: Final = 23  # of /proc/PID/stat, counted from the field after the name
BLOCK_BYTES: Final = 512  # of `st_blocks`


def places(options: RewardOptions) -> int:
    """Checks that one worker may have running at the same time, slow ones included."""
    return options.concurrent * (1 + SLOW_PLACES)


def most_processes(options: RewardOptions) -> int:
    """For RLIMIT_NPROC: all that run on the machine now, and twice what all checks of one worker may have.

    It holds for all processes of a user, if the user isn't root: too wide to be a check's limit, but the end of a bomb.
    """
    with open("/proc/loadavg", "rb", buffering=0) as file:
        running = int(file.read().split()[3].partition(b"/")[2])
    return running + 2 * places(options) * options.limits.processes


def set_limits(limits: Limits, address_bytes: int, processes: int) -> None:
    """The kernel's limits for the calling process and for all it will start.

    address_bytes: what the process that checks are forked from maps; a check may have `memory_mib` more.
    processes: see `most_processes`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if hard == resource.RLIM_INFINITY or processes < hard:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    soft = address_bytes + limits.memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (soft, soft + SPARE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits.open_files, limits.open_files))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_mib * MIB, limits.file_mib * MIB))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def spare_memory() -> None:
    """Let a check that ran out of address space have a little more, to say so."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def mapped_bytes() -> int:
    """Address space of the calling process."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[0]) * PAGE_BYTES


def lower(pid: int) -> None:
    """Let quick checks go before this one, with all it has started and will start."""
    nice = os.getpriority(os.PRIO_PROCESS, 0) + SLOW_NICE
    for process in (pid, *process_tree.walk(pid)):
        with contextlib.suppress(OSError):  # it has just ended
            for thread in os.listdir(f"/proc/{process}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)
        nice_session(process, nice)


def lower_own() -> None:
    """For a check, before it begins."""
    nice_session("self", os.nice(CHECK_NICE))


def nice_session(process: int | str, nice: int) -> None:
    """Where the scheduler groups tasks by session, their nice values hold within it only: the session has one, too."""
    with (
        contextlib.suppress(OSError),  # not this kernel's, or not allowed twice in 0.1 s: a courtesy, no guarantee
        open(f"/proc/{process}/autogroup", "wb", buffering=0) as file,
    ):
        file.write(str(min(nice, LOWEST_NICE)).encode())


class Watch:
    """Looks at one check's processes from outside.

    It reads only what the kernel gives without waiting for the process: `smaps`, which knows exactly what is shared,
    waits for a lock that a process of low priority may hold for seconds while others run.
    """

    def __init__(self, pid: int, limits: Limits, began: float, inherited: "Inherited") -> None:
        self._pid = pid
        self._limits = limits
        self._inherited = inherited
        self._files_at = began + FILES_S
        self._files = 0

    def look(self, now: float) -> str:
        """Over which limit the check is; "" if over none."""
        tasks, resident, pids = 0, 0, []
        for pid in (self._pid, *process_tree.walk(self._pid)):
            pids.append(pid)
            with contextlib.suppress(OSError):  # it has just ended
                tasks += os.stat(f"/proc/{pid}/task").st_nlink - 2  # cheaper than a list of threads
                resident += _resident_bytes(pid)
            if tasks > self._limits.processes:
                return f"had more than {self._limits.processes} processes and threads (reward.limits.processes)"
        if now >= self._files_at:
            self._files_at = now + FILES_S
            self._files = sum(dict(file for pid in pids for file in _memory_files(pid)).values())
        limit = self._limits.memory_mib * MIB
        if resident + self._files > limit and self._used_bytes(pids) > limit:
            return out_of_memory(self._limits.memory_mib)
        return ""

    def _used_bytes(self, pids: list[int]) -> int:
        """What the processes have of their own: without files, and what they got from the one they were forked from."""
        own = shared = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                memory = _status(pid)
                own += memory["RssAnon"] - min(memory["RssAnon"], self._inherited.bytes_of(pid))
                shared += memory["RssShmem"]
        return own + max(shared, self._files)  # what of a memory file is mapped, is in both


class Inherited:
    """What a process that was forked from the calling one, and has executed no other program, shares with it."""

    def __init__(self) -> None:
        self._bytes = _status(os.getpid())["RssAnon"]
        self._code = _start_of_code(os.getpid())

    def bytes_of(self, pid: int) -> int:
        return self._bytes if _start_of_code(pid) == self._code else 0


def out_of_memory(memory_mib: int) -> str:
    return f"used more than {memory_mib} MiB (reward.limits.memory_mib)"


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def _status(pid: int) -> dict[str, int]:
    """Resident bytes by kind: RssAnon, RssFile, RssShmem. OSError if there are none: it is ending."""
    with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
        rows = [line.split() for line in file.read().split(b"\n") if line.startswith(b"Rss")]
    if not rows:
        raise ProcessLookupError(pid)
    return {row[0].rstrip(b":").decode(): int(row[1]) * 1024 for row in rows}


def _start_of_code(pid: int) -> int:
    """Address of the program, which differs after each exec."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return int(file.read().rpartition(b")")[2].split()[START_OF_CODE])


def _memory_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """((device, inode), bytes) of each memory file (memfd_create) that a process holds, mapped or not."""
    with contextlib.suppress(OSError):  # it has just ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):  # just closed
                if os.readlink(path).startswith(MEMFD):
                    status = os.stat(path)
                    yield (status.st_dev, status.st_ino), status.st_blocks * BLOCK_BYTES
