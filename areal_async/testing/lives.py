"""The lives of a run: each controller a process of its own, killed or not, and what it must not leave behind.

What always holds: whatever descends from a life carries its mark in its environment, so that nothing of it can hide,
whoever its parent is by now.
"""

import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from areal_async import process_tree
from areal_async.testing.crash import Life

MARK: Final = "AREAL_ASYNC_LIFE"
LIFE_S: Final = (
    120.0  # of seconds on a machine with nothing else to do: a small run that takes longer has stopped moving
)
GONE_S: Final = 10.0  # after the controller's end all of its processes are gone
LOOK_S: Final = 0.05


@dataclass(frozen=True)
class LifeEnd:
    """code: exit code, negative for a signal's number; None where it had to be ended, for nothing moved.
    said: what it wrote to stderr. mark: of all of its processes."""

    code: int | None
    said: str
    mark: str
    seconds: float


def live(life: Life, patience_s: float = LIFE_S) -> LifeEnd:
    """Have it lived; returns when the controller has ended, in whatever way, or was ended after `patience_s`."""
    mark, begun = uuid.uuid4().hex, time.monotonic()
    argument = msgspec.json.encode(life).decode()
    process = subprocess.Popen(
        [sys.executable, "-m", "areal_async.testing.crash", argument],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, MARK: mark},
    )
    try:
        _, said = process.communicate(timeout=patience_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
        code = None
    return LifeEnd(code, said.decode(errors="replace"), mark, time.monotonic() - begun)


def wait_for_the_end_of_all(mark: str) -> tuple[float, list[str]]:
    """Seconds until all processes of a life were gone, and the command lines of those that weren't after `GONE_S`."""
    begun = time.monotonic()
    while left := process_tree.marked(MARK, mark):
        if time.monotonic() - begun > GONE_S:
            return time.monotonic() - begun, [f"{pid} {_command_line(pid)}" for pid in left]
        time.sleep(LOOK_S)
    return time.monotonic() - begun, []


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "(gone)"
