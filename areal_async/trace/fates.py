"""What became of groups and samples, as far as a log's events and commands tell it.

What always holds: this follows what was commanded, not what the core of today would command, so that a log of any
version can be drawn; only what isn't over is kept, so memory is bounded by what was outstanding at a time.

in_flight, ready, outstanding are the ledger's: samples that a server writes, groups that may be trained, groups that
are neither handed to training nor over.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from areal_async.log.turns import Turn
from areal_async.messages import (
    AnyCommand,
    DataEnded,
    Failed,
    GroupId,
    GroupRead,
    ReadGroup,
    Release,
    RolledBack,
    Rules,
    SampleDone,
    SampleId,
    Scored,
    StartSample,
    Train,
    group_of,
)

Fate: TypeAlias = Literal["trained", "filtered", "stale", "failed", "cancelled", "left"]
"""`left`: outstanding when the log ended."""


@dataclass(slots=True)
class Member:
    """A sample. done, scored: once they are known; outcome: it has one, a reward or none. failures: attempts that
    failed. running: an attempt of it is under way."""

    id: SampleId
    done: SampleDone | None = None
    scored: Scored | None = None
    outcome: bool = False
    lost: bool = False
    failures: int = 0
    running: bool = False


@dataclass(slots=True)
class Group:
    """floor: of its first start; None before."""

    id: GroupId
    position: int
    row: int | None = None
    prompt_tokens: int = 0
    floor: int | None = None
    members: dict[SampleId, Member] = field(default_factory=dict)
    ready: bool = False


class Fates:
    """rules: of the log's beginning."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.groups: dict[GroupId, Group] = {}
        self.in_flight = 0
        self.ready = 0

    @property
    def outstanding(self) -> int:
        return len(self.groups)

    def member(self, sample: SampleId) -> Member | None:
        group = self.groups.get(group_of(sample))
        return None if group is None else group.members.get(sample)

    def take(self, turn: Turn) -> list[tuple[Group, Fate]]:
        """What happened; the groups that are over with it, which leave."""
        event, over = turn.event, list[tuple[Group, Fate]]()
        match event:
            case GroupRead():
                over += self._read(event, turn.commands)
            case SampleDone() | Scored():
                over += self._outcome(event, turn.commands)
            case Failed(of="sample"):
                over += self._sample_failed(event)
            case Failed(of="group") | DataEnded():
                number = event.group if isinstance(event, DataEnded) else int(event.id)
                over += self._end([number], "failed" if isinstance(event, Failed) else "cancelled")
            case RolledBack():
                over += self._roll_back(event)
        for command in turn.commands:
            over += self._command(command)
        return over

    def rest(self) -> Iterator[tuple[Group, Fate]]:
        """What isn't over at the log's end."""
        yield from self._end(list(self.groups), "left")

    def _read(self, event: GroupRead, commands: Iterable[AnyCommand]) -> Iterator[tuple[Group, Fate]]:
        group = self.groups.get(event.group)
        if group is None:
            return
        group.row, group.prompt_tokens = event.row, event.prompt_tokens
        if not any(isinstance(command, StartSample) for command in commands):
            yield from self._end([group.id], "stale")  # too late before it began: nobody starts it any more

    def _outcome(self, event: SampleDone | Scored, commands: Iterable[AnyCommand]) -> Iterator[tuple[Group, Fate]]:
        group = self.groups.get(group_of(event.sample))
        member = self.member(event.sample)
        if group is None or member is None:
            return
        if isinstance(event, SampleDone):
            self._stop(member)
            member.done, member.outcome = event, event.reward is not None
        else:
            member.scored, member.outcome = event, True
        yield from self._decide(group, commands)

    def _sample_failed(self, event: Failed) -> Iterator[tuple[Group, Fate]]:
        group, member = self.groups.get(group_of(event.id)), self.member(event.id)
        if group is None or member is None:
            return
        self._stop(member)
        member.failures += 1
        member.lost = member.failures > self._rules.retries
        lost = sum(other.lost for other in group.members.values())
        if self._rules.group_size - lost < self._rules.min_group:
            yield from self._end([group.id], "failed")
        elif member.lost:
            yield from self._decide(group, ())

    def _decide(self, group: Group, commands: Iterable[AnyCommand]) -> Iterator[tuple[Group, Fate]]:
        """When the last outcome is known: ready, or all that has come is given up in the same moment."""
        if group.ready or not all(member.outcome or member.lost for member in group.members.values()):
            return
        released = {name for command in commands if isinstance(command, Release) for name in command.samples}
        if all(member.lost or member.id in released for member in group.members.values()):
            yield from self._end([group.id], "filtered")
        else:
            group.ready = True
            self.ready += 1

    def _roll_back(self, event: RolledBack) -> Iterator[tuple[Group, Fate]]:
        """What ran starts again; a group of which nothing has an outcome gets another number."""
        if event.resumed is not None:
            self._rules = event.resumed
        gone = []
        for group in self.groups.values():
            if group.ready:
                continue
            for member in group.members.values():
                self._stop(member)
            if not any(member.outcome and not member.lost for member in group.members.values()):
                gone.append(group.id)
        yield from self._end(gone, "cancelled")

    def _command(self, command: AnyCommand) -> Iterator[tuple[Group, Fate]]:
        match command:
            case ReadGroup():
                self.groups[command.group] = Group(command.group, command.position)
            case StartSample():
                self._start(command)
            case Train():
                yield from self._end(command.groups, "trained")
                if self._rules.when_older == "drop":
                    least = command.step + 1 - self._rules.max_staleness
                    late = [g.id for g in self.groups.values() if g.floor is not None and g.floor < least]
                    yield from self._end(late, "stale")

    def _start(self, command: StartSample) -> None:
        group = self.groups.get(group_of(command.sample))
        if group is None:
            return
        if group.floor is None:
            group.floor = command.floor
            for number in range(self._rules.group_size):
                name = f"{group.id}.{number}"
                group.members[name] = Member(name)
        member = group.members[command.sample]
        if not member.running:
            member.running = True
            self.in_flight += 1

    def _stop(self, member: Member) -> None:
        if member.running:
            member.running = False
            self.in_flight -= 1

    def _end(self, groups: Iterable[GroupId], fate: Fate) -> Iterator[tuple[Group, Fate]]:
        """Those that are still there: a step that is trained again has its groups no more."""
        for number in groups:
            group = self.groups.pop(number, None)
            if group is None:
                continue
            self.ready -= group.ready
            for member in group.members.values():
                self._stop(member)
            yield group, fate
