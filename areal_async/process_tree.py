"""Who descends from a process, and how to end all of it: for the guard of a child and for the sandbox of checks.

What always holds: only the standard library (the guard starts without site-packages, and must not fail); a process
that is gone is nobody's error here. Linux only: sub-reapers, parent-death signals and /proc are its own.

Why a sub-reaper: a process whose parent died becomes a child of the nearest ancestor that is one. So whatever a tree
does (sessions of its own, double forks), all of it stays below the sub-reaper, and `waitpid` saying "no children"
there proves that nothing is left. Process groups and sessions prove nothing: any process may leave them.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
PR_SET_CHILD_SUBREAPER: Final = 36
SWEEPS: Final = 20  # a bomb of Python processes stands still after two or three

_libc: Final = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """From now on, orphans among the descendants of this process become its children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, or end it now if that has already happened.

    Call it right after a fork; parent: the pid that forked. It holds for this process only, not for what it starts.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def children(pid: int) -> list[int]:
    """Direct children of a process, zombies included; empty if it is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # a child belongs to the thread that forked it
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                found.extend(map(int, file.readall().split()))
        except FileNotFoundError:
            if not _kernel_lists_children():
                return [child for child, parent in _parents() if parent == pid]
        except OSError:  # the thread has just ended
            continue
    return found


def walk(pid: int) -> Iterator[int]:
    """Children, their children and so on, parents first, each looked for when it is its turn."""
    coming = children(pid)
    for descendant in coming:  # grows while it is walked
        yield descendant
        coming.extend(children(descendant))


def descendants(pid: int) -> list[int]:
    """All that `walk` finds. A snapshot: repeat it until `waitpid` says "no children"."""
    return list(walk(pid))


def kill_tree(pid: int) -> None:
    """Kill a process with its descendants, also if they multiply meanwhile: first everything is made to stand still.

    A signal to a process group reaches every member, and none can fork past it; so a bomb within a group ends at once.
    One that makes new groups all the time may outrun this: what escapes becomes a child of the sub-reaper above, which
    has to look again; a bound on the number of processes (a cgroup) or a pid namespace is what holds it for certain.
    """
    stopped: set[int] = set()
    groups: set[int] = set()
    for _ in range(SWEEPS):
        moving = [found for found in (pid, *walk(pid)) if found not in stopped]
        if not moving:
            break
        for found in moving:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(found)
                if group in groups or group == os.getpgrp():  # ours, if it has only just been forked
                    os.kill(found, signal.SIGSTOP)
                else:
                    groups.add(group)
                    os.killpg(group, signal.SIGSTOP)
        stopped.update(moving)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    signal_all(stopped, signal.SIGKILL)


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each; those that are gone are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def marked(variable: str, value: str) -> list[int]:
    """Processes whose environment at their start held `variable=value`."""
    wanted = f"{variable}={value}".encode()
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.append(int(entry))
    return found


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def _kernel_lists_children() -> bool:
    own = os.getpid()
    return os.path.exists(f"/proc/{own}/task/{own}/children")


def _parents() -> list[tuple[int, int]]:
    """(pid, parent's pid) of every process: the slow way, for kernels without CONFIG_PROC_CHILDREN."""
    found: list[tuple[int, int]] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
            # "pid (name) state parent ...", where the name may hold anything, also spaces and brackets
            found.append((int(entry), int(file.read().rpartition(b")")[2].split()[1])))
    return found
