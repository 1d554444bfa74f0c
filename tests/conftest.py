"""What holds for every test: it leaves no task, no process, no open file and nothing in /dev/shm."""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import uvloop

uvloop.new_event_loop().close()  # libuv opens a pipe for signals once a process, and keeps it

ROOT = Path(__file__).resolve().parent.parent
SETTLE_S = 5.0  # how long a child or a socket that a test has just ended may take to go


@pytest.fixture(scope="session")
def oracles() -> Path:
    """Folder of the reference numbers."""
    return Path(os.environ.get("ORACLES_DIR", ROOT.parent / "shared" / "oracles"))


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    before = _held()
    yield
    deadline = time.monotonic() + SETTLE_S
    while left := _left(before):
        if time.monotonic() > deadline:
            pytest.fail(f"the test has left behind: {'; '.join(left)}")
        gc.collect()
        time.sleep(0.05)


def _held() -> dict[str, set[str]]:
    return {"process": _children(), "file": _files(), "shared memory": set(os.listdir("/dev/shm"))}


def _left(before: dict[str, set[str]]) -> list[str]:
    return [f"{kind} {name}" for kind, names in _held().items() for name in sorted(names - before[kind])]


def _children() -> set[str]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(f"{child.pid} {' '.join(child.cmdline())[:120]}")
        except psutil.NoSuchProcess:
            continue
    return found


def _files() -> set[str]:
    """Open files, pipes and sockets; event loops' own ones (anonymous inodes, which libraries keep) are left out."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if not target.startswith(("/dev/", "anon_inode:", "/proc/")):
            found.add(f"{fd} -> {target}")
    return found
