"""One run that somebody looks at: its rows, its status, its evaluations, and what was read of its log.

What always holds: a run may be live, finished, copied or half there; what can't be read of it is a line of `problems`,
and the rest is shown. Its log is read by `follow` in short slices, so that answers come in between. An error there ends
the reading of this run, and is told with every answer.
"""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from areal_async.errors import ArealError
from areal_async.log.format import DECISIONS_NAME
from areal_async.runfiles import METRICS
from areal_async.trace.samples import find_decoder
from areal_async.trace.things import thing
from areal_async.view import tables
from areal_async.view.api import (
    Lags,
    Overview,
    Peers,
    Reading,
    RunState,
    SampleFull,
    SamplePage,
    SampleQuery,
    Story,
    Timeline,
)
from areal_async.view.chosen import Chosen, choose, named
from areal_async.view.configs import Configs, configurations
from areal_async.view.evaluations import Evaluations
from areal_async.view.index import Index
from areal_async.view.peers import PeersWatch
from areal_async.view.rows import Rows
from areal_async.view.samples import Samples
from areal_async.view.story import NoSuchThing, Stories
from areal_async.view.told import Told, log_of

logger = logging.getLogger("areal_async")

SLICE_S: Final = 0.03  # of reading, before others get their turn
PAUSE_S: Final = 0.005  # between slices: an answer takes several turns of the loop, which all fit in here
EVERY_S: Final = 1.0  # how often it is looked whether the log has grown
FIRST_S: Final = 0.2  # the page and its files come before the log
TROUBLES: Final = 50
OVER: Final = ("ended", "died")  # states of a run that writes nothing any more


class NotThere(ArealError):
    """There is no such run, sample, file; the message says which."""


class Run:
    """folder: of the run. key: in addresses. database: a file that isn't there yet, for what is read of the log."""

    def __init__(self, folder: Path, key: str, database: Path, stories: Stories) -> None:
        self.folder = folder
        self.key = key
        self._identity = _identity(folder)
        self._log = log_of(folder)
        self._rows = Rows(folder)
        self._evaluations = Evaluations(folder)
        self._told = Told(folder, key)
        self._peers = PeersWatch(folder)
        self._path = database
        self._stories = stories
        self._index: Index | None = None
        self._samples: Samples | None = None
        self._begun = asyncio.Event()  # the log is being read, or can't be
        self._failed = ""

    async def follow(self) -> None:
        """Read the log, and go on as it grows."""
        await asyncio.sleep(FIRST_S)
        try:
            decode, missing = find_decoder(self._log)
            database = tables.open_database(self._path)
            self._path.unlink()  # it is open: so not even a kill leaves it behind
            self._index = index = Index(self._log, database, decode)
            self._samples = Samples(self.folder, self._log, index, decode, missing)
            self._begun.set()
            while True:
                more = index.read_some(SLICE_S)
                await asyncio.sleep(PAUSE_S if more else EVERY_S)
        except (ArealError, OSError) as error:
            self._failed = f"{self._log}: can't be read on: {error}"
        except sqlite3.Error as error:
            self.close()  # half of a change may be in it
            self._failed = (
                f"{self._log}: can't be looked through: what is read of it lies in {self._path.parent}: {error}; make "
                "room there, or set TMPDIR to another folder, and start areal-async view again"
            )
        except Exception as error:  # of this run: the others are still shown; whoever started the server has to know
            logger.exception("areal-async view: %s can't be read on", self._log)
            self._failed = f"{self._log}: can't be read on: {error!r}, an error of areal-async; its terminal has it"
        finally:
            self._begun.set()

    def is_in_place(self) -> bool:
        """Whether its folder is still the one that has this name."""
        return self._identity == _identity(self.folder)

    def close(self) -> None:
        """It is left; what was read goes."""
        if self._index is not None:
            self._index.close()
            self._index.database.close()
            self._index = None

    # ------------------------------------------------------------------------------------------------------- answers

    async def overview(self, since: int) -> Overview:
        """Rows from line `since` on, and how it stands."""
        rows, following, unread = await self._rows_since(since)
        last = self._rows.last
        run = self._told.row(last)
        told = self._told.status
        self._evaluations.look()
        evaluated = self._evaluations.points
        troubles = [] if self._index is None else self._index.troubles(TROUBLES)
        if run.state == "died" and troubles and troubles[-1].what == "fail":  # the log tells what the controller didn't
            run = msgspec.structs.replace(run, end=troubles[-1].text)
        return Overview(
            run=run,
            branch=max(0 if told is None else told.branch, 0 if last is None else last.branch),
            rows=rows,
            next=following,
            file=self._rows.mark,
            evaluations=self._rows.evaluations if evaluated is None else evaluated,  # a copy may lack the file
            waits=[] if told is None else list(told.waits),
            phase="" if told is None else told.phase,
            in_flight=0 if told is None else told.in_flight,
            ready=0 if told is None else told.ready,
            balance=told.balance if told is not None else {} if last is None else last.ledger,
            troubles=troubles,
            reading=self._reading_of(run.state),
            problems=[*filter(None, [self._told.problem, unread, self._evaluations.problem]), *self._rows.problems],
        )

    async def _rows_since(self, since: int) -> tuple[list[msgspec.Raw], int, str]:
        """Them, the number of the next, and why there are none."""
        try:
            more = True
            while more:
                more = self._rows.read_some(SLICE_S)
                await asyncio.sleep(0)
            return *self._rows.since(since), ""
        except OSError as error:
            return [], since, f"{self.folder / METRICS}: can't be read: {error.strerror}"

    async def lags(self, begin: int, end: int) -> Lags:
        """Of trained tokens of the steps begin … end - 1."""
        index, _ = await self._read()
        tokens, unknown = index.lags(begin, end)
        return Lags(tokens=tokens, eta=0 if index.lives is None else index.lives.rules.max_staleness, unknown=unknown)

    async def timeline(self, begin: float, end: float, width: int, opened: list[str] | None) -> Timeline:
        """What was there between begin and end, for so many pixels."""
        index, _ = await self._read()
        return index.timeline(begin, end, width, opened)

    async def story(self, about: str) -> Story:
        """What happened to one thing. Errors: NotThere; ConfigError: it can be no id."""
        try:
            return await self._stories.tell(self._log, about)
        except NoSuchThing as error:
            raise NotThere(str(error)) from None

    async def samples(self, query: SampleQuery) -> SamplePage:
        """Those that the filters leave, as far as the log was read."""
        _, samples = await self._read()
        return samples.page(query)

    async def sample(self, name: str) -> SampleFull:
        """One in full. Errors: NotThere."""
        about = thing(name)
        _, samples = await self._read()
        full = samples.full(about.name) if about.kind == "sample" else None
        if await samples.made.make_wanted():
            full = samples.full(about.name)
        if full is None:
            reading = self._reading()
            further = "" if reading.done else "; the log is still being read"
            raise NotThere(f"sample {name[:40]!r}: there is none with an answer in the log of {self.folder}{further}")
        return full

    async def chosen(self, wanted: int | Sequence[str]) -> list[Chosen]:
        """So many that say much, or those that are named. Errors: ConfigError: there is none of this name."""
        index, _ = await self._read()
        index.write()
        return choose(index.database, wanted) if isinstance(wanted, int) else named(index.database, wanted)

    async def peers(self) -> Peers:
        """Its servers, reward workers and the trainer, as they are now."""
        index = self._index
        return await self._peers.look(None if index is None or index.lives is None else dict(index.verdicts))

    def config(self) -> str:
        """Text of its configuration, and of those before a resume. Errors: NotThere."""
        try:
            return configurations(self.folder, Configs() if self._index is None else self._index.configs)
        except OSError as error:
            raise NotThere(f"{error.filename}: can't be read: {error.strerror}") from None

    async def _read(self) -> tuple[Index, Samples]:
        """What was read of the log so far. Errors: ArealError: it can't be read at all."""
        await self._begun.wait()
        if self._index is None or self._samples is None:
            raise ArealError(self._failed or f"{self.folder}: was left; ask again")
        return self._index, self._samples

    def _reading_of(self, state: RunState) -> Reading:
        """Of a run that is over nobody asks again once all is read: its last records must not be missing then."""
        reading = self._reading()
        if state not in OVER or not reading.done or reading.problem:
            return reading
        return msgspec.structs.replace(reading, done=self._size() == reading.of)

    def _size(self) -> int:
        """Bytes of its log now."""
        path = self._log / DECISIONS_NAME
        return path.stat().st_size if path.is_file() else 0

    def _reading(self) -> Reading:
        if self._index is not None:
            reading = self._index.reading()
            return msgspec.structs.replace(reading, done=True, problem=self._failed) if self._failed else reading
        return Reading(nbytes=0, of=self._size(), events=0, samples=0, done=bool(self._failed), problem=self._failed)


def _identity(folder: Path) -> tuple[int, int]:
    """Of the folder itself, whatever it is called."""
    try:
        found = os.stat(folder)
    except OSError:
        return 0, 0  # it is being replaced
    return found.st_dev, found.st_ino
