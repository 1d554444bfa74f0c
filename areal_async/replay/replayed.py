"""A whole log, or its beginning, decided again: how much it was, how long it took, where it differs, how it stood.

What always holds: nothing but the log is read, so a copy of its folder is enough on any machine; a log that is still
being written is read up to what is there.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from areal_async.core.orchestrator import Orchestrator
from areal_async.core.view import View
from areal_async.log.format import Torn
from areal_async.log.turns import read_turns
from areal_async.messages import AnyCommand, AnyEvent, Train
from areal_async.replay.deciding import Decided, Difference, begin, decide
from areal_async.replay.naming import named, names

Kind: TypeAlias = Literal["step", "event", "id"]
EVERY: Final = 1024  # events between two tellings of how far it is


class Until(NamedTuple):
    """Where to stop: after the event that forms the step, the event of this number, or the first that names the id."""

    kind: Kind
    value: int | str

    def is_here(self, decided: Decided) -> bool:
        turn, commands, _ = decided
        match self.kind:
            case "event":
                return turn.number == self.value
            case "step":
                return any(isinstance(command, Train) and command.step == self.value for command in commands)
            case "id":
                return any(names(str(self.value), message) for message in (turn.event, *commands))

    def __str__(self) -> str:
        return f"{self.kind}={self.value}"


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How the run stood after an event. commands: of this event. stories: of what was asked for by its id, or of what
    the event is about. waiting: who waits for whom."""

    number: int
    offset: int
    event: AnyEvent
    commands: tuple[AnyCommand, ...]
    view: View
    waiting: str
    stories: tuple[str, ...]


class Replayed(msgspec.Struct, kw_only=True):
    """events, commands: decided again and compared. run_s: of the run clock. took_s: reading and deciding. missing:
    commands of the last event that the log lacks. torn: its end, in words, if that is. over: at the end: who waits for
    whom, or how the run ended. standing: where `until` says. first: number of the last step formed, None before any."""

    events: int = 0
    commands: int = 0
    run_s: float = 0.0
    took_s: float = 0.0
    missing: tuple[AnyCommand, ...] = ()
    torn: str = ""
    over: str = ""
    last_step: int | None = None
    difference: Difference | None = None
    standing: Standing | None = None

    @property
    def events_per_s(self) -> float:
        return self.events / self.took_s if self.took_s else 0.0

    @property
    def times_faster(self) -> float:
        """Than the run was."""
        return self.run_s / self.took_s if self.took_s else 0.0


def replay(folder: Path, until: Until | None = None, progress: Callable[[int], None] = lambda _: None) -> Replayed:
    """The log in `folder`, up to its first difference, to `until`, or to its end. progress: told now and then up to
    which byte of it has been read. Raises LogError."""
    begun, done = time.perf_counter(), Replayed()
    torn: list[Torn] = []
    recorded = read_turns(folder, torn.append)
    if recorded is not None:
        core = begin(folder, recorded.rules)
        for decided in decide(core, recorded.turns):
            _count(done, decided)
            if until is not None and decided.difference is None and until.is_here(decided):
                done.standing = _standing(core, decided, until)
                break
            if not done.events % EVERY:
                progress(decided.turn.offset)
        done.over = core.waiting(done.run_s)
    done.took_s = time.perf_counter() - begun
    done.torn = str(torn[0]) if torn else ""
    return done


def _count(done: Replayed, decided: Decided) -> None:
    turn = decided.turn
    done.events += 1
    done.run_s = max(done.run_s, turn.event.at)
    done.commands += len(turn.commands)
    done.difference = decided.difference
    for command in decided.commands:
        if isinstance(command, Train):
            done.last_step = command.step
    if decided.difference is None and len(decided.commands) > len(turn.commands):
        done.missing = decided.missing


def _standing(core: Orchestrator, decided: Decided, until: Until) -> Standing:
    turn = decided.turn
    ids = [str(until.value)] if until.kind == "id" else list(dict.fromkeys(named(turn.event)))
    return Standing(
        number=turn.number,
        offset=turn.offset,
        event=turn.event,
        commands=tuple(decided.commands),
        view=core.view(),
        waiting=core.waiting(turn.event.at),
        stories=tuple(core.story(id) for id in ids),
    )
