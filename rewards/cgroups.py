"""Control groups that bound how many processes a check can have, where this machine lets us make them.

The watch (`limits`) finds a fork bomb by looking; thousands of processes may be there before it gets to look, and root
isn't held by RLIMIT_NPROC. In a group, the kernel refuses to fork. Each place for a check has a group of its own, made
when the sandbox starts.

What always holds: a group has at most twice the processes that a check may have, so that the watch sees one too many
and gives its verdict; groups are removed at the end, by the worker if the sandbox was killed, and by the next sandbox
on the machine if both were. Without groups everything works, and only the bound is softer.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

NAME: Final = "areal-async"
ROOM: Final = 2
REMOVE_S: Final = 1.0  # a group is empty a moment after its last process was killed
PAUSE_S: Final = 0.005


class Cgroups:
    """One group for each place; none where they can't be made."""

    def __init__(self, places: int, processes: int) -> None:
        self._folders: list[Path] = []
        folder = parent()
        if folder is None:
            return
        remove_orphans(folder)
        try:
            for place in range(places):
                group = folder / f"{_prefix(os.getpid())}.{place}"
                group.mkdir()
                self._folders.append(group)
                (group / "pids.max").write_text(str(ROOM * processes))
        except OSError as error:  # such as a bound on the number of groups
            print(f"checks run without control groups: {folder}: {error}", file=sys.stderr)
            self.close()
            self._folders = []

    def enter(self, place: int) -> None:
        """Put the calling process into the group of its place."""
        if self._folders:
            # Unbuffered and by hand: this is part of the cost of each check
            descriptor = os.open(self._folders[place] / "cgroup.procs", os.O_WRONLY)
            os.write(descriptor, b"0")
            os.close(descriptor)

    def close(self) -> None:
        _remove(self._folders)


def parent() -> Path | None:
    """The folder in which groups that count processes can be made; None if there is none."""
    for folder in _candidates():
        if (
            (folder / "cgroup.procs").exists()
            and os.access(folder, os.W_OK)
            and os.access(folder / "cgroup.procs", os.W_OK)
        ):
            return folder
    return None


def remove_of(pid: int) -> None:
    """Remove the groups of a sandbox process that is gone."""
    if folder := parent():
        _remove(list(folder.glob(f"{_prefix(pid)}.*")))


def remove_orphans(folder: Path) -> None:
    """Remove the groups of sandbox processes that are gone, with their workers."""
    gone = []
    for group in folder.glob(f"{NAME}.{_namespace()}.*"):
        pid = group.name.split(".")[2]
        if not os.path.exists(f"/proc/{pid}"):
            gone.append(group)
    _remove(gone)


def _candidates() -> Iterator[Path]:
    """Version 1: our own group in the hierarchy of `pids`. Version 2: the nearest above that shares out `pids`."""
    roots = {kind: root for root, kind in _mounts()}
    own = dict(_memberships())
    if "pids" in roots and "pids" in own:
        yield roots["pids"] / own["pids"].lstrip("/")
        yield roots["pids"]
    if "" in roots and "" in own:
        at = Path(own[""])
        for folder in (at, *at.parents):
            group = roots[""] / str(folder).lstrip("/")
            with contextlib.suppress(OSError):
                if "pids" in (group / "cgroup.subtree_control").read_text().split():
                    yield group


def _memberships() -> Iterator[tuple[str, str]]:
    """(controller, path of our group in it); controller "" is version 2."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            yield from ((controller, path) for controller in controllers.split(","))


def _mounts() -> Iterator[tuple[Path, str]]:
    """(where it is mounted, controller)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, options, *_ = line.split()
            if kind == "cgroup" and "pids" in options.split(","):
                yield Path(place), "pids"
            elif kind == "cgroup2":
                yield Path(place), ""


def _namespace() -> int:
    """Containers may share groups, but not pids."""
    return os.stat("/proc/self/ns/pid").st_ino


def _prefix(pid: int) -> str:
    return f"{NAME}.{_namespace()}.{pid}"


def _remove(folders: list[Path]) -> None:
    limit = time.monotonic() + REMOVE_S
    left = folders
    while left:
        left = [folder for folder in left if not _removed(folder)]
        if time.monotonic() > limit:
            return  # something in it hangs in the kernel; the next sandbox tries again
        if left:
            time.sleep(PAUSE_S)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
