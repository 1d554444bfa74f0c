"""The story of one thing, told by `areal-async trace RUN --story ID`, as a child.

A story needs the whole log, read from its beginning: some seconds of a large one, in which the server would answer
nobody. So a child reads it.

What always holds: a child has a deadline, and is ended with the question that wanted it; not more than `AT_ONCE` run at
a time, each with the lowest priority; what it says is wrong is passed on in its words; memory follows what is shown.
"""

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from areal_async.errors import ArealError, ConfigError
from areal_async.trace.story import Line
from areal_async.trace.things import thing
from areal_async.view.api import Story, StoryLine

AT_ONCE: Final = 2
DEADLINE_S: Final = 60.0
MOST_LINES: Final = 4_000  # half of them from the beginning: a trainer's story may have 100,000
_NICENESS: Final = 19
_SAID_BYTES: Final = 4_000  # of its stderr
_LINE_BYTES: Final = 1 << 20
_NOT_FOUND: Final = 2  # exit code
_TRACE: Final = (sys.executable, "-m", "areal_async", "trace")


class NoSuchThing(ConfigError):
    """The run has none; the message names the nearest that there are."""


class Stories:
    """Of all runs of a server. program: what is run, with the log folder, `--story=ID` and `--json`."""

    def __init__(self, program: Sequence[str] = _TRACE, deadline_s: float = DEADLINE_S) -> None:
        self._program = tuple(program)
        self._deadline_s = deadline_s
        self._places = asyncio.Semaphore(AT_ONCE)

    async def tell(self, log_folder: Path, text: str) -> Story:
        """text: an id, as docs/trace.md has them. Errors: ConfigError: it can be no id; NoSuchThing; ArealError: the
        log can't be read, or not in time."""
        about = thing(text)
        async with self._places:
            try:
                async with asyncio.timeout(self._deadline_s):
                    lines = await self._run(log_folder, text)
            except TimeoutError:
                raise ArealError(
                    f"the story of {about.label} was not told within {self._deadline_s:.0f} s, and was given up; "
                    f"areal-async trace {log_folder.parent} --story '{text}' takes as long as it needs"
                ) from None
        return Story(thing=about.label, lines=lines)

    async def _run(self, log_folder: Path, text: str) -> list[StoryLine]:
        async with _child([*self._program, str(log_folder), f"--story={text}", "--json"]) as child:
            assert child.stdout is not None, "it is a pipe"
            assert child.stderr is not None, "it is a pipe"
            lines, said = await asyncio.gather(_lines(child.stdout), _end(child.stderr))
            code = await child.wait()
        if code == 0:
            return lines
        why = said.removeprefix("command line: trace: ") or f"it ended with exit code {code} and said nothing"
        if code == _NOT_FOUND:
            raise NoSuchThing(why)
        raise ArealError(f"the story of {text} can't be told: {why}")


@contextlib.asynccontextmanager
async def _child(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """It is gone when this is left, however that happens."""
    pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(*command, stdin=none, stdout=pipe, stderr=pipe, limit=_LINE_BYTES)
    try:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)
        yield child
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        await child.wait()


async def _lines(stream: asyncio.StreamReader) -> list[StoryLine]:
    """The first and the last ones, where there are too many."""
    decode = msgspec.json.Decoder(Line).decode
    first: list[StoryLine] = []
    last: deque[StoryLine] = deque(maxlen=MOST_LINES // 2)
    count = 0
    async for raw in stream:
        line = decode(raw)
        (first if count < MOST_LINES // 2 else last).append(StoryLine(at=line.at, text=line.text))
        count += 1
    if left_out := count - len(first) - len(last):
        first.append(
            StoryLine(at=first[-1].at, text=f"… {left_out:,} lines are left out here: areal-async trace has them")
        )
    return [*first, *last]


async def _end(stream: asyncio.StreamReader) -> str:
    """The last line of what it said."""
    said = b""
    while some := await stream.read(_SAID_BYTES):
        said = (said + some)[-_SAID_BYTES:]
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
