"""Waiting in tests: for what has no event, and for an answer that is held back on purpose."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from typing import Final

from areal_async.rollout.session import Session
from areal_async.rollout.workflow import Prompt, Sample, SingleTurn

LOOK_S: Final = 0.005
# Deadlines against what would hang: they cost nothing where all is well, and a busy machine is ten times slower
DEADLINE_S: Final = 60.0  # of one condition
PATIENCE_S: Final = 120.0  # of a whole run
LEFT_S: Final = 20.0  # how long what has just been ended may still be there
SLACK_S: Final = 2.0  # after its limit, an end is in time


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Return when it holds: scripted peers have plain counters, threads and sockets have no event."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


def wait_until(condition: Callable[[], bool], deadline_s: float) -> float:
    """Seconds until the condition held."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < deadline_s, "waited too long"
        time.sleep(LOOK_S)
    return time.monotonic() - begin


def ends_well_unread(process: "subprocess.Popen[bytes]") -> None:
    """Whoever reads what it prints has enough before the first letter: that is no error, and nothing is said of it."""
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(DEADLINE_S) == 0


class Straggler:
    """The first prompt's answers come when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def run(self, session: Session, prompt: Prompt) -> Sample:
        if prompt.position == 0:
            await self.go.wait()
        return await SingleTurn().run(session, prompt)
