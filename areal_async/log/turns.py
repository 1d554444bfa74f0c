"""A run's decision log, event by event: what happened, what the core said to that, and what was noted in between.

What always holds: turns come in the order in which the core handled their events; nothing is kept but the turn that is
being read, so a log may be larger than memory; whether its last turn is whole nobody can know (a killed controller may
have handled an event and not written all of its commands), which is what `last` says.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from areal_async.errors import LogError
from areal_async.log.format import DECISIONS_NAME, PayloadRef, Torn
from areal_async.log.reader import Record, read_records, warn
from areal_async.messages import AnyCommand, AnyEvent, Command, Event, Note, Rules


@dataclass(slots=True)
class Turn:
    """One event and what followed from it.

    number: of the event, from 0 on. offset: where the event begins in `decisions.log`. payload: where the arrays of the
    sample lie (`SampleDone`). commands: as recorded, with the offset of each. notes: written after this event and
    before the next. last: the log ends with this turn; of its commands some may not have been written.
    """

    number: int
    event: AnyEvent
    payload: PayloadRef | None
    offset: int
    commands: list[AnyCommand] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    last: bool = False


class Recorded(NamedTuple):
    """rules: that the run began with (`RolledBack.resumed` has later ones). notes: written before the first event."""

    rules: Rules
    notes: list[Note]
    turns: Iterator[Turn]


def read_turns(folder: Path, on_torn: Callable[[Torn], None] = warn) -> Recorded | None:
    """The run whose log lies in `folder` (`runs/NAME/log`); None: nothing was recorded. Raises LogError, also while
    the turns are read: no log, corruption, records that this version doesn't know."""
    records = read_records(folder, on_torn)
    first = next(records, None)
    if first is None:
        return None
    assert isinstance(first.message, Rules)  # read_records has looked
    notes: list[Note] = []
    for record in records:
        if isinstance(record.message, Note):
            notes.append(record.message)
            continue
        return Recorded(first.message, notes, _turns(folder / DECISIONS_NAME, chain([record], records)))
    return Recorded(first.message, notes, iter(()))


Made = TypeVar("Made")


def taken(folder: Path, turns: Iterator[Turn], take: Callable[[Turn], Made]) -> Iterator[tuple[Turn, Made]]:
    """Each turn of the log in `folder`, and what `take` makes of it. Raises LogError where it can make nothing of it:
    the log tells what can't have happened (a sample that nobody asked for, a name that is none)."""
    for turn in turns:
        try:
            made = take(turn)
        except (AssertionError, LookupError, ValueError) as error:
            raise LogError(
                f"{folder / DECISIONS_NAME}: event {turn.number}, {type(turn.event).__name__} at offset {turn.offset},"
                f" doesn't follow from what is before it ({type(error).__name__}: {error}); the log was changed, or is"
                " of another version: `areal-async replay` shows where it differs"
            ) from error
        yield turn, made


class Gathering:
    """Puts records together to turns, one after another. turn: the one whose records are coming."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.turn: Turn | None = None

    def take(self, record: Record) -> Turn | None:
        """The turn before, where the record begins the next one. Raises LogError: it follows from nothing."""
        turn = self.turn
        match record.message:
            case Event() as event:
                self.turn = Turn(0 if turn is None else turn.number + 1, event, record.payload, record.offset)
                return turn
            case Command() as command if turn is not None:
                turn.commands.append(command)
                turn.offsets.append(record.offset)
            case Note() as note if turn is not None:
                turn.notes.append(note)
            case message:
                raise LogError(
                    f"{self._path}: at offset {record.offset} is {type(message).__name__}, which follows from nothing;"
                    " the log was changed"
                )
        return None


def _turns(path: Path, records: Iterator[Record]) -> Iterator[Turn]:
    gathering = Gathering(path)
    for record in records:
        if (turn := gathering.take(record)) is not None:
            yield turn
    if (turn := gathering.turn) is not None:
        turn.last = True
        yield turn
