"""Everything that happened to one thing of a run, in words: a group, a sample, a step, a server, a reward worker, the
trainer.

What always holds: a story is told from the log alone, in its order, over rollbacks and resumes; the log may be torn, of
another version, or still be growing. Of a thing that the log doesn't have, the error names the nearest that it has.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from areal_async.log.format import Torn
from areal_async.log.turns import Turn, read_turns, taken
from areal_async.messages import Rules
from areal_async.trace.life import Happening
from areal_async.trace.lives import Lives
from areal_async.trace.story_peers import ServerStory, TrainerStory, WorkerStory
from areal_async.trace.story_steps import StepStory
from areal_async.trace.things import Thing, wrong
from areal_async.trace.words import long, members

_OTHERS: Final = ("trainer", "rewards.0")  # ids that are words


class Line(msgspec.Struct, frozen=True):
    """event: number of the event that it came with. at: run clock in seconds."""

    event: int
    at: float
    text: str


class Teller(Protocol):
    """Is shown all turns of a log in their order. known: the nearest things that the log has, for an error."""

    def take(self, turn: Turn) -> Iterator[tuple[float, str]]: ...

    @property
    def known(self) -> str: ...


class LifeStory:
    """Of a group or a sample."""

    def __init__(self, thing: Thing, rules: Rules) -> None:
        self._thing = thing
        self._member = int(thing.name.partition(".")[2] or 0)
        self._lives = Lives(rules, thing)

    def take(self, turn: Turn) -> Iterator[tuple[float, str]]:
        self._lives.take(turn)
        if self._member >= self._lives.rules.group_size:
            return
        happened, self._lives.happenings = self._lives.happenings, []
        if self._thing.kind == "sample":
            yield from ((each.at, each.text) for each in happened)
            return
        for same in _runs(happened):
            who = [each.sample for each in same if each.sample is not None]
            yield same[0].at, (f"{members(who)}: " if who else "") + same[0].text

    @property
    def known(self) -> str:
        admitted, size = self._lives.admitted, self._lives.rules.group_size
        if not admitted:
            return "no group was admitted"
        group = int(self._thing.name.partition(".")[0])
        if group < admitted:
            return f"group {group} has the samples {group}.0 to {group}.{size - 1}"
        return f"groups are 0 to {admitted - 1}, each with samples .0 to .{size - 1}"


def tell(folder: Path, thing: Thing, on_torn: Callable[[Torn], None]) -> Iterator[Line]:
    """The story of a thing in the log folder, a line a happening. Raises LogError; ConfigError: there is no such thing,
    raised when all was read."""
    recorded = read_turns(folder, on_torn)
    known, empty = "nothing was recorded", True
    if recorded is not None:
        teller = _teller(thing, recorded.rules)
        for turn, happened in taken(folder, recorded.turns, lambda turn: list(teller.take(turn))):
            for at, text in happened:
                empty = False
                yield Line(turn.number, at, text)
        known = teller.known
    if empty:
        run = folder.parent if folder.name == "log" else folder
        raise wrong(f"{run}: there is no {thing.label}; {_with_words(thing, known)}")


def nearest(folder: Path, thing: Thing) -> str:
    """What the log in the folder has that is most like the thing, in words for an error. Raises LogError."""
    recorded = read_turns(folder, lambda torn: None)
    if recorded is None:
        return "nothing was recorded"
    teller = _teller(thing, recorded.rules)
    for _ in taken(folder, recorded.turns, lambda turn: list(teller.take(turn))):
        pass
    return _with_words(thing, teller.known)


def _with_words(thing: Thing, known: str) -> str:
    """What isn't known is taken for a server's name: a word that was written wrongly, too."""
    close = difflib.get_close_matches(thing.name, _OTHERS, 1) if thing.kind == "server" else []
    return f"{known}; did you mean {close[0]}?" if close else known


def shown(thing: Thing, lines: Iterator[Line]) -> Iterator[str]:
    """For people: run clock, time since the line before, words."""
    before: float | None = None
    for line in lines:
        if before is None:
            yield thing.label
        gap = line.at - before if before is not None else 0.0
        since = f"+{long(gap)}" if gap >= 0.0005 else ""
        before = line.at
        yield f"{line.at:>11.3f} s {since:>12}  {line.text}"


def _teller(thing: Thing, rules: Rules) -> Teller:
    match thing.kind:
        case "group" | "sample":
            return LifeStory(thing, rules)
        case "step":
            return StepStory(int(thing.name), rules)
        case "server":
            return ServerStory(thing.name, rules)
        case "worker":
            return WorkerStory(thing.name)
        case "trainer":
            return TrainerStory(rules)


def _runs(happened: Sequence[Happening]) -> Iterator[list[Happening]]:
    """Those of the members of a group that are the same, together."""
    same: list[Happening] = []
    for each in happened:
        if same and (each.sample is None or same[-1].sample is None or each[::3] != same[-1][::3]):
            yield same
            same = []
        same.append(each)
    if same:
        yield same
