"""What an audit remembers: live groups and samples whole, of the rest a few bytes each.

What always holds: memory follows what is outstanding, and a byte and four for each group besides (`fates`, `steps`);
every change of a group's fate is made here, so the counts agree with the table.
"""

from array import array
from collections import Counter
from typing import Final

from areal_async.audit.findings import Findings
from areal_async.audit.outcomes import Answer, is_trained
from areal_async.messages import GroupId, Rules, SampleId, Version

OPEN, READY, HANDED, FILTERED, STALE, FAILED, CANCELLED = range(7)
FATES: Final = ("open", "ready", "handed to training", "filtered", "stale", "failed", "cancelled")


class Sample:
    """state: waiting, running, held (it ran when training went back), scoring, graded, failed. attempt: the last one
    that was started, -1 before the first. failures: attempts that failed. asked: its check was asked for. released:
    nothing may ask for it any more."""

    __slots__ = ("answer", "asked", "attempt", "failures", "released", "state")

    def __init__(self) -> None:
        self.state = "waiting"
        self.attempt = -1
        self.failures = 0
        self.answer: Answer | None = None
        self.asked = False
        self.released = False


class Group:
    """held: versions that servers held when it was admitted, ascending; its floor is one of them, and known (not None)
    from its first sample's start on. taken: groups handed over and outstanding at its admission, it included. unread:
    its prompt is not there yet. open: members whose outcome isn't known yet."""

    __slots__ = ("floor", "held", "id", "open", "position", "ready", "samples", "taken", "unread")

    def __init__(self, number: GroupId, position: int, size: int, taken: int, held: tuple[Version, ...]) -> None:
        self.id = number
        self.position = position
        self.taken = taken
        self.held = held
        self.floor: Version | None = None
        self.unread = True
        self.ready = False
        self.open = size
        self.samples = [Sample() for _ in range(size)]

    def earliest_floor(self, rules: Rules) -> Version:
        """Its floor, or the lowest that it can be: the lowest on which Eq. 3 lets it begin."""
        if self.floor is not None:
            return self.floor
        lowest = -(-self.taken // rules.batch_groups) - rules.max_staleness - 1
        return min((version for version in self.held if version >= lowest), default=self.latest_floor)

    @property
    def latest_floor(self) -> Version:
        """Its floor, or the highest that it can be."""
        return self.floor if self.floor is not None else self.held[-1] if self.held else 0


class Books:
    """live: groups that are outstanding. fates, steps: of every group by its number; the step that it was handed to, or
    -1. step: the next one to be formed. owed: what the event before asks for and no command has said yet.

    by_floor: outstanding groups by their floor, or the highest that it can be. version: of the trainer's weights.
    perhaps_over: groups of which the log doesn't tell yet whether they were dropped before they were read.
    """

    def __init__(self, rules: Rules, findings: Findings) -> None:
        self.rules = rules
        self.findings = findings
        self.add = findings.add
        self.live: dict[GroupId, Group] = {}
        self.ready: dict[GroupId, Group] = {}
        self.fates = bytearray()
        self.steps = array("i")
        self.by_floor: Counter[Version] = Counter()
        self.step = 0
        self.version: Version = 0
        self.perhaps_over: set[GroupId] = set()
        self.in_flight = 0
        self.owed: dict[tuple[str, str], str] = {}
        self.sample_ends: Counter[str] = Counter()
        self.attempts: Counter[int] = Counter()

    @property
    def taken(self) -> int:
        """Groups handed to training + those that are surely outstanding."""
        return self.step * self.rules.batch_groups + len(self.live) - len(self.perhaps_over)

    def admit(self, group: Group) -> None:
        self.live[group.id] = group
        self.fates.append(OPEN)
        self.steps.append(-1)
        self.by_floor[group.latest_floor] += 1
        self.in_flight += len(group.samples)

    def set_floor(self, group: Group, floor: Version) -> None:
        self.by_floor[group.latest_floor] -= 1
        group.floor = floor
        self.by_floor[floor] += 1

    def make_ready(self, group: Group) -> None:
        group.ready = True
        self.fates[group.id] = READY
        self.ready[group.id] = group

    def end(self, group: Group, fate: int) -> None:
        """Its life as an outstanding group is over: handed over, or over for good."""
        self.fates[group.id] = fate
        del self.live[group.id]
        self.perhaps_over.discard(group.id)
        self.ready.pop(group.id, None)
        self.by_floor[group.latest_floor] -= 1
        if not self.by_floor[group.latest_floor]:
            del self.by_floor[group.latest_floor]
        for sample in group.samples:
            if sample.state in ("waiting", "running"):
                self.in_flight -= 1
            self.sample_ends[_end(sample, fate, group.ready, self.rules)] += 1
            if sample.attempt >= 0:
                self.attempts[sample.attempt + 1] += 1

    def find(self, name: SampleId) -> tuple[Group | None, int]:
        """The live group of this sample, None if its life is over or there never was one; and the member's number, -1
        if there is none of this name."""
        number, _, member = name.partition(".")
        try:
            group, place = self.live.get(int(number)), int(member)
        except ValueError:
            return None, -1
        return group, place if 0 <= place < self.rules.group_size else -1

    def existed(self, name: SampleId) -> bool:
        """Whether there ever was a sample of this name, as far as can be told without keeping them all."""
        number, _, member = name.partition(".")
        if not (number.isdecimal() and member.isdecimal()):
            return False
        return int(number) < len(self.fates) and int(member) < self.rules.group_size

    def owe(self, what: str, about: str, text: str) -> None:
        self.owed[what, about] = text

    def fate_of(self, number: GroupId) -> str:
        if not 0 <= number < len(self.fates):
            return "never admitted"
        step = self.steps[number]
        return FATES[self.fates[number]] + (f" in step {step}" if step >= 0 else "")


def _end(sample: Sample, fate: int, ready: bool, rules: Rules) -> str:
    """What became of a sample when its group got this fate."""
    if sample.state == "failed":
        return "failed"
    without = ready and (sample.answer is None or not is_trained(sample.answer, rules))
    if without or fate == FILTERED:
        return "filtered"
    return {HANDED: "handed", STALE: "stale"}.get(fate, "cancelled")
