"""Rows of `reasoning_gym:` data, made again for the sample that somebody looks at.

The same text gives the same rows (`rollout.reasoning_gym`), so a run keeps none of them. They are made by a child, all
of a source at once, since most of its second is the import of the package.

What always holds: nothing of the package comes into this process; the child has a deadline, a bound on what it may hold
and on what it may send, and the lowest priority; a source is made once, or once said why not; memory has a bound.
"""

import asyncio
import os
import resource
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from areal_async.errors import DataError
from areal_async.rollout import reasoning_gym
from areal_async.rollout.values import Json
from areal_async.view.children import child, last_words

DEADLINE_S: Final = 10.0
MOST_BYTES: Final = 1 << 24  # of a source: 50,000 short problems
MOST_SOURCES: Final = 4
CHILD_BYTES: Final = 8 << 30  # of addresses: libraries for arithmetic reserve much more than they use
_READ_BYTES: Final = 1 << 16
_PROGRAM: Final = (sys.executable, "-m", "areal_async.rollout.reasoning_gym")


class MadeRows:
    """Of a run. program: what is run with the source's text."""

    def __init__(self, program: Sequence[str] = _PROGRAM, deadline_s: float = DEADLINE_S) -> None:
        self._program = tuple(program)
        self._deadline_s = deadline_s
        self._made: dict[str, list[msgspec.Raw] | str] = {}  # the rows, or why there are none
        self._wanted: list[str] = []
        self._making = asyncio.Lock()

    def row(self, source: str, number: int) -> dict[str, Json]:
        """Errors: DataError: it isn't made yet (`make_wanted` does it), or can't be."""
        made = self._made.get(source)
        if made is None:
            self._wanted.append(source)
            raise DataError(f"{source}: its rows are not made again yet")
        if isinstance(made, str):
            raise DataError(made)
        if number >= len(made):
            raise DataError(f"{source}: makes {len(made)} rows by now")
        found: dict[str, Json] = msgspec.msgpack.decode(made[number])
        if "question" in found:  # the prompt, which may be messages that have it in them
            found["prompt"] = found.pop("question")
        return found

    async def make_wanted(self) -> bool:
        """Make the rows that were asked for in vain; whether there were any."""
        if not self._wanted:
            return False
        async with self._making:
            while self._wanted:
                source = self._wanted[-1]
                if source not in self._made:
                    self._made[source] = await self._rows(source)
                    while len(self._made) > MOST_SOURCES:
                        del self._made[next(iter(self._made))]
                self._wanted.remove(source)
        return True

    async def _rows(self, source: str) -> list[msgspec.Raw] | str:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._run(source)
        except TimeoutError:
            return f"{source}: its rows could not be made again within {self._deadline_s:g} s"
        except (OSError, msgspec.DecodeError) as error:
            return f"{source}: its rows can't be made again: {error}"

    async def _run(self, source: str) -> list[msgspec.Raw] | str:
        environment = {**os.environ, "PYTHONHASHSEED": reasoning_gym.HASH_SEED}
        async with child([*self._program, source], environment) as made:
            resource.prlimit(made.pid, resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
            assert made.stdout is not None, "it is a pipe"
            assert made.stderr is not None, "it is a pipe"
            data, said = await asyncio.gather(_taken(made, made.stdout), last_words(made.stderr))
            if data is None:
                return f"{source}: its rows are more than {MOST_BYTES >> 20} MB, too many to be made again for a page"
            code = await made.wait()
        if code:
            return f"{source}: its rows can't be made again: {said or f'the process ended with {code}'}"
        return msgspec.msgpack.decode(data, type=list[msgspec.Raw])


async def _taken(made: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> bytes | None:
    """All that it sends; None if that is too much, and it is ended."""
    data = bytearray()
    while some := await stream.read(_READ_BYTES):
        data += some
        if len(data) > MOST_BYTES:
            made.kill()
            return None
    return bytes(data)
