"""The core's decisions again: the recorded events to a fresh core, its commands against the recorded ones.

    recorded = read_turns(folder)
    core = begin(folder, recorded.rules)
    for turn, commands, difference in decide(core, recorded.turns):
        …

This is the one way in which a core is led through a log: `replay` looks for a difference with it, a resume finds its
core with it. What always holds: the core hears each event once, in the order of the log; at the first difference it
ends, since what would follow from it says nothing; what a killed controller didn't get written is no difference.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from areal_async.core.orchestrator import Orchestrator
from areal_async.errors import IllegalTransition, LogError
from areal_async.log.format import DECISIONS_NAME
from areal_async.log.turns import Turn
from areal_async.messages import AnyCommand, AnyEvent, Rules, Train
from areal_async.replay.naming import named

STORIES: Final = 3  # things whose story a difference tells


class Field(msgspec.Struct, frozen=True):
    """A field of a command that differs. name: the way to it, such as "samples[3].advantage"."""

    name: str
    expected: object
    recorded: object


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first place where the log isn't what this core decides.

    number, offset, event: where the core was. expected: the command that it gives, recorded: the one that the log has
    in its place, at offset `found_at`; None: no further command. place: how many commands of the event came before.
    all_expected, all_recorded: all commands of the event. fields: that differ, where both are of one kind.
    impossible: why the core can't take the event; there are no commands to compare then. last: the log ends with this
    event. stories: of what it concerns. waiting: who waits for whom, after the event.
    """

    number: int
    offset: int
    event: AnyEvent
    expected: AnyCommand | None
    recorded: AnyCommand | None
    found_at: int
    place: int
    all_expected: tuple[AnyCommand, ...]
    all_recorded: tuple[AnyCommand, ...]
    fields: tuple[Field, ...]
    impossible: str
    last: bool
    stories: tuple[str, ...]
    waiting: str


class Decided(NamedTuple):
    """turn: as recorded. commands: that this core gives. difference: between them, if there is one."""

    turn: Turn
    commands: list[AnyCommand]
    difference: Difference | None

    @property
    def missing(self) -> tuple[AnyCommand, ...]:
        """What the end of the log has cut off."""
        return tuple(self.commands[len(self.turn.commands) :])


def begin(folder: Path, rules: Rules) -> Orchestrator:
    """A core that knows nothing yet. folder: of the log, for the error. Raises LogError: it can't go by these rules."""
    try:
        return Orchestrator(rules)
    except ValueError as error:
        path = folder / DECISIONS_NAME
        raise LogError(f"{path}: this areal-async can't go by the rules that the run began with: {error}") from error


def decide(core: Orchestrator, turns: Iterable[Turn]) -> Iterator[Decided]:
    """Lead the core through these turns, up to the first difference. Raises LogError where reading them does."""
    for turn in turns:
        try:
            commands = core.handle(turn.event)
        except (IllegalTransition, ValueError) as error:
            yield Decided(turn, [], _difference(core, turn, [], str(error)))
            return
        found = None if commands == turn.commands else _compared(core, turn, commands)
        yield Decided(turn, commands, found)
        if found is not None:
            return


def _compared(core: Orchestrator, turn: Turn, commands: list[AnyCommand]) -> Difference | None:
    """The exact comparison, for the few turns whose commands aren't simply equal."""
    if len(commands) == len(turn.commands) or (turn.last and len(commands) > len(turn.commands)):
        pairs = zip(commands, turn.commands, strict=False)
        if not any(next(_fields("", *pair), None) for pair in pairs):
            return None
    return _difference(core, turn, commands, "")


def _difference(core: Orchestrator, turn: Turn, commands: Sequence[AnyCommand], impossible: str) -> Difference:
    pairs = list(zip(commands, turn.commands, strict=False))
    place = next((n for n, pair in enumerate(pairs) if any(_fields("", *pair))), len(pairs))
    expected = commands[place] if place < len(commands) else None
    recorded = turn.commands[place] if place < len(turn.commands) and not impossible else None
    same_kind = expected is not None and type(expected) is type(recorded)
    fields = tuple(_fields("", expected, recorded)) if same_kind else ()
    labels = [*_concerned(expected, recorded, fields), *named(turn.event)]
    return Difference(
        number=turn.number,
        offset=turn.offset,
        event=turn.event,
        expected=expected,
        recorded=recorded,
        found_at=turn.offsets[place] if recorded is not None else turn.offset,
        place=place,
        all_expected=tuple(commands),
        all_recorded=tuple(turn.commands),
        fields=fields,
        impossible=impossible,
        last=turn.last,
        stories=_stories(core, labels),
        waiting=core.waiting(turn.event.at),
    )


def _fields(name: str, expected: object, recorded: object) -> Iterator[Field]:
    """What differs between two values; NaN is the same as NaN."""
    if isinstance(expected, msgspec.Struct) and type(expected) is type(recorded):
        for key in expected.__struct_fields__:
            inner = f"{name}.{key}" if name else key
            yield from _fields(inner, getattr(expected, key), getattr(recorded, key))
    elif isinstance(expected, tuple) and isinstance(recorded, tuple) and len(expected) == len(recorded):
        for number, pair in enumerate(zip(expected, recorded, strict=True)):
            yield from _fields(f"{name}[{number}]", *pair)
    elif expected != recorded and not (_is_nan(expected) and _is_nan(recorded)):
        yield Field(name, expected, recorded)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _concerned(expected: AnyCommand | None, recorded: AnyCommand | None, fields: Sequence[Field]) -> Iterator[str]:
    """Labels of what two commands disagree about, what matters most first."""
    if isinstance(expected, Train) and isinstance(recorded, Train) and expected.groups == recorded.groups:
        for field in sorted(fields, key=_size, reverse=True):
            if field.name.startswith("samples["):
                yield f"sample {expected.samples[int(field.name[8 : field.name.index(']')])].sample}"
    ours = list(named(expected)) if expected is not None else []
    theirs = list(named(recorded)) if recorded is not None else []
    yield from (label for label in [*ours, *theirs] if (label in ours) != (label in theirs))
    yield from (label for label in ours if label in theirs)


def _size(field: Field) -> float:
    """Of the difference, of numbers."""
    expected, recorded = field.expected, field.recorded
    if isinstance(expected, int | float) and isinstance(recorded, int | float):
        return abs(expected - recorded)
    return 0.0


def _stories(core: Orchestrator, labels: Iterable[str]) -> tuple[str, ...]:
    """Of the first few that live."""
    found: list[str] = []
    for label in dict.fromkeys(labels):
        story = core.story(label)
        if story.partition("\n")[0] == label and len(found) < STORIES:
            found.append(story)
    return tuple(found)
