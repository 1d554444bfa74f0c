"""The story of one thing, told by `areal-async trace RUN --story ID`, as a child.

A story needs the whole log, read from its beginning: some seconds of a large one, in which the server would answer
nobody. So a child reads it.

What always holds: a child has a deadline, and is ended with the question that wanted it; not more than `AT_ONCE` run at
a time; what it says is wrong is passed on in its words; memory follows what is shown.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from areal_async.errors import ArealError, ConfigError
from areal_async.trace.story import Line
from areal_async.trace.things import thing
from areal_async.view.api import Story, StoryLine
from areal_async.view.children import child, last_words

AT_ONCE: Final = 2
DEADLINE_S: Final = 60.0
MOST_LINES: Final = 4_000  # half of them from the beginning: a trainer's story may have 100,000
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
        async with child([*self._program, str(log_folder), f"--story={text}", "--json"]) as told:
            assert told.stdout is not None, "it is a pipe"
            assert told.stderr is not None, "it is a pipe"
            lines, said = await asyncio.gather(_lines(told.stdout), last_words(told.stderr))
            code = await told.wait()
        if code == 0:
            return lines
        why = said.removeprefix("command line: trace: ") or f"it ended with exit code {code} and said nothing"
        if code == _NOT_FOUND:
            raise NoSuchThing(why)
        raise ArealError(f"the story of {text} can't be told: {why}")


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
