"""Has answers checked that are there already, by the workers that a run would have (`areal-async score`).

What always holds: what is written keeps the order of the records; each result is written as soon as all earlier ones
are known; what is held in memory is bounded, however slow one check is and however many records there are. When it
ends, in whatever way, the workers and their folder are gone.
"""

import asyncio
import secrets
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from areal_async.config import RewardConfig
from areal_async.controller.checks import KeptPool, Pool
from areal_async.controller.controller import first_cause
from areal_async.controller.crew import Crew
from areal_async.errors import DataError
from areal_async.launch.recipes import Recipes
from areal_async.messages import Hello, RewardSpec, ScoreResult
from areal_async.rollout.completions import NO_TOKENS, Record
from areal_async.wire.router import Router

WINDOW: Final = 4096  # records that are read and not written: those behind a slow check go on meanwhile
WINDOW_BYTES: Final = 64 << 20  # what their lines may take: some have megabytes of tests
BATCH: Final = 256  # results that are written at once


class Scored(NamedTuple):
    """A record and what came of it."""

    record: Record
    result: ScoreResult


Write = Callable[[Sequence[Scored]], Awaitable[None]]


async def score(
    config: RewardConfig,
    spec: RewardSpec,
    records: AsyncIterator[Record],
    write: Write,
    *,
    started: Callable[[], None],
    recipes: Recipes | None = None,
) -> None:
    """Have all records checked. write: takes results in the order of the records. started: the workers are there.

    Errors: LaunchError where workers don't start or are lost for good; what `records` and `write` raise. A DataError of
    `records` is raised when all earlier records are written.
    """
    with tempfile.TemporaryDirectory(prefix="areal-") as folder:
        try:
            async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
                crew = Crew(group)
                pool = await _start(config, spec, Path(folder), recipes or Recipes(), crew, stack)
                try:
                    started()
                    await _Window(pool, crew).score(records, write)
                finally:
                    await crew.dismiss()  # before the workers end, which is no loss then
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None


async def _start(
    config: RewardConfig, spec: RewardSpec, folder: Path, recipes: Recipes, crew: Crew, stack: AsyncExitStack
) -> Pool:
    secret = secrets.token_hex(32)
    address = f"ipc://{folder / 'wire.sock'}"

    def joined(hello: Hello) -> str | None:
        return pool.on_joined(hello)

    def lost(name: str, why: str) -> None:
        pool.on_lost(name, why)

    router = await stack.enter_async_context(Router(address, secret, joined, lost))
    pool = KeptPool(config, spec, recipes, router, crew)
    await pool.start(stack, address, secret, folder, lambda name: folder / f"{name}.log")
    return pool


class _Held:
    """A record that isn't written yet. size: what it takes, bytes. result: None while it is being checked."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.size = record.size
        self.result: ScoreResult | None = None


class _Window:
    """Records between reading and writing; the pool has their checks wait for places, in order."""

    def __init__(self, pool: Pool, crew: Crew) -> None:
        self._pool = pool
        self._crew = crew
        self._held: deque[_Held] = deque()
        self._bytes = 0
        self._read_all = False
        self._changed = asyncio.Condition()

    async def score(self, records: AsyncIterator[Record], write: Write) -> None:
        wrong: DataError | None = None

        async def read() -> None:
            nonlocal wrong
            try:
                async for record in records:
                    await self._take(record)
            except DataError as error:
                wrong = error
            self._read_all = True
            await self._tell()

        self._crew.start(read(), "records")
        while batch := await self._first():
            await write(batch)
        if wrong is not None:
            raise wrong

    async def _take(self, record: Record) -> None:
        """Begin the check of a record as soon as there is room for it."""
        async with self._changed:
            await self._changed.wait_for(self._has_room)
            held = _Held(record)
            self._held.append(held)
            self._bytes += held.size
            if record.task is None:
                held.result = ScoreResult(
                    sample=str(record.line), attempt=0, verdict="bad_data", reward=None, why=record.wrong
                )
                self._changed.notify_all()
            else:
                self._crew.start(self._check(held), f"check of line {record.line}")

    def _has_room(self) -> bool:
        """The first record is always being checked or done, so room comes again."""
        return len(self._held) < WINDOW and self._bytes < WINDOW_BYTES

    async def _check(self, held: _Held) -> None:
        assert held.record.task is not None
        result = await self._pool.check(held.record.task, held.record.tokens)
        held.result = result
        held.record = msgspec.structs.replace(held.record, task=None, tokens=NO_TOKENS)  # tests may be megabytes
        self._bytes -= held.size
        held.size = len(result.extracted) + len(result.why)
        self._bytes += held.size
        await self._tell()

    async def _first(self) -> list[Scored]:
        """The records that may be written, some at least; none when all were."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._first_is_known() or (self._read_all and not self._held))
            batch: list[Scored] = []
            while self._first_is_known() and len(batch) < BATCH:
                held = self._held.popleft()
                assert held.result is not None
                self._bytes -= held.size
                batch.append(Scored(held.record, held.result))
            self._changed.notify_all()
            return batch

    def _first_is_known(self) -> bool:
        return bool(self._held) and self._held[0].result is not None

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
