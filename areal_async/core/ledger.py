"""The ledger: every group and sample that the run knows of, counted by state.

What always holds, at every moment, for groups and for samples: admitted = trained + filtered + stale + failed +
cancelled + outstanding + training; and handed = step · B = groups in `training` or `trained` since the version that
the run began with. Counts change here only, in `move_group`, `move_sample` and `move_samples`, with the life cycle.
Things whose life is over are counted, not kept (the log has them); nothing here takes longer because more is in flight.
"""

from collections.abc import Collection, Iterable
from typing import Final

from areal_async.core import admission
from areal_async.core.lifecycle import GROUP, SAMPLE, Thing, Word
from areal_async.errors import IllegalTransition
from areal_async.messages import GroupId, Rules, SampleDone, SampleId, Version, group_of, sample_id

OUTSTANDING: Final = ("admitted", "running", "scored", "ready")
SAMPLE_OUTSTANDING: Final = ("waiting", "running", "held", "scoring", "scored")
OVER: Final = ("trained", "filtered", "stale", "failed", "cancelled")


class Sample(Thing):
    """One answer. done: what its rollout reported, once it is finished. server, incarnation: where its present attempt
    was placed; if that is lost, the attempt goes on elsewhere by itself. failures: attempts that failed; the others
    were ended because training went back. has_come: whether an answer of it came, so that its arrays are kept."""

    __slots__ = ("attempt", "done", "failures", "group", "has_come", "id", "incarnation", "member", "reward", "server")
    lifecycle = SAMPLE
    id: SampleId

    def __init__(self, group: "Group", member: int, at: float) -> None:
        self.id = sample_id(group.id, member)
        super().__init__(at)
        self.group = group
        self.member = member
        self.attempt = 0
        self.failures = 0
        self.has_come = False
        self.server = group.server
        self.incarnation = group.incarnation
        self.done: SampleDone | None = None
        self.reward: float | None = None


class Group(Thing):
    """The samples of one prompt. floor: no request of it goes to a server below this version. deadline: the last step
    that may train it without a token older than η. open: members whose outcome isn't known yet. lost: members that
    failed."""

    __slots__ = ("deadline", "floor", "id", "incarnation", "lost", "open", "position", "samples", "server")
    lifecycle = GROUP
    id: GroupId

    def __init__(
        self,
        number: GroupId,
        position: int,
        server: str,
        incarnation: int,
        floor: Version,
        last_step: int,
        size: int,
        at: float,
    ) -> None:
        self.id = number
        super().__init__(at, "position {}, floor {}, deadline {}, server {}", position, floor, last_step, server)
        self.position = position
        self.server = server
        self.incarnation = incarnation
        self.floor = floor
        self.deadline = last_step
        self.samples = [Sample(self, member, at) for member in range(size)]
        self.open = size
        self.lost = 0


class Ledger:
    """All groups and samples. step: the next step to be formed, so B · step groups have been handed to training."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.step = 0
        self.admitted = 0
        self.groups: dict[GroupId, Group] = {}
        self.samples: dict[SampleId, Sample] = {}
        self._counts = dict.fromkeys(GROUP.table, 0)
        self._sample_counts = dict.fromkeys(SAMPLE.table, 0)
        self._outstanding: dict[int, dict[GroupId, Group]] = {}  # by deadline
        self._ready: dict[int, dict[GroupId, Group]] = {}  # by deadline
        # step and rules for which these two hold no batch, so that it isn't looked for again at every event; that one
        # more group is outstanding changes nothing, for it can only stay behind, too
        self._refused: tuple[int, Rules] | None = None

    @property
    def outstanding(self) -> int:
        counts = self._counts
        return counts["admitted"] + counts["running"] + counts["scored"] + counts["ready"]

    @property
    def in_flight(self) -> int:
        """Samples that have a place at a server, or will as soon as their prompt is read."""
        counts = self._sample_counts
        return counts["waiting"] + counts["running"]

    @property
    def ready(self) -> int:
        return self._counts["ready"]

    @property
    def held(self) -> int:
        """Samples that ran when training went back, and are to start again."""
        return self._sample_counts["held"]

    @property
    def taken(self) -> int:
        """Groups handed to training + groups outstanding: what Eq. 3 limits."""
        return self.step * self.rules.batch_groups + self.outstanding

    def balance(self) -> dict[str, int]:
        """The balance for people and metrics; `stale` stays 0 unless groups are dropped (`when_older: drop`)."""
        counts, samples = self._counts, self._sample_counts
        size = self.rules.group_size
        return {
            "admitted": self.admitted,
            **{state: counts[state] for state in OVER},
            "outstanding": self.outstanding,
            "training": counts["training"],
            "samples_admitted": self.admitted * size,
            **{f"samples_{state}": samples[state] for state in OVER},
            "samples_outstanding": sum(samples[state] for state in SAMPLE_OUTSTANDING),
            "samples_training": samples["training"],
        }

    def admit(self, position: int, server: str, incarnation: int, floor: Version, at: float) -> Group:
        """A new group, with a place for each of its samples."""
        size = self.rules.group_size
        last_step = admission.deadline(floor, self.rules)
        group = Group(self.admitted, position, server, incarnation, floor, last_step, size, at)
        self.admitted += 1
        self.groups[group.id] = group
        for sample in group.samples:
            self.samples[sample.id] = sample
        self._counts["admitted"] += 1
        self._sample_counts["waiting"] += size
        self._outstanding.setdefault(last_step, {})[group.id] = group
        return group

    def move_sample(self, sample: Sample, state: str, at: float, why: str = "", *words: Word) -> None:
        old = sample.state
        sample.happen((at, state, why, words))
        self._sample_counts[old] -= 1
        self._sample_counts[state] += 1

    def move_samples(self, of: Iterable[Group], old: str, state: str, at: float, why: str = "", *words: Word) -> None:
        """All samples of these groups that are in state `old`; they share what is told of it, thousands in a batch."""
        happening = (at, state, why, words)
        count = 0
        for group in of:
            for sample in group.samples:
                if sample.state == old:
                    sample.happen(happening)
                    count += 1
        self._sample_counts[old] -= count
        self._sample_counts[state] += count

    def move_group(self, group: Group, state: str, at: float, why: str = "", *words: Word) -> None:
        old = group.state
        group.move(state, at, why, *words)
        self._counts[old] -= 1
        self._counts[state] += 1
        if state == "ready":
            self._ready.setdefault(group.deadline, {})[group.id] = group
            self._refused = None
        if old in OUTSTANDING and state not in OUTSTANDING:
            self._leave(group)

    def find_group(self, number: GroupId) -> Group | None:
        """The live group; None if its life is over. Raises IllegalTransition if there never was one."""
        group = self.groups.get(number)
        if group is None and not 0 <= number < self.admitted:
            raise IllegalTransition(f"an event tells of group {number}, but only {self.admitted} were ever admitted")
        return group

    def find_sample(self, name: SampleId, attempt: int) -> Sample | None:
        """The live sample in this attempt; None if the attempt or the sample is over.

        Raises IllegalTransition if there never was such a sample or attempt.
        """
        sample = self.samples.get(name)
        if sample is not None:
            if attempt > sample.attempt:
                raise IllegalTransition(
                    f"an event tells of attempt {attempt} of sample {name}, which is in attempt {sample.attempt}."
                    f" Its story:\n{sample.story()}"
                )
            return sample if attempt == sample.attempt else None
        number, member = group_of(name), int(name.partition(".")[2] or -1)
        if not (0 <= number < self.admitted and 0 <= member < self.rules.group_size):
            raise IllegalTransition(f"an event tells of sample {name}, but there never was one")
        return None

    def find(self, name: str) -> list[Group | Sample]:
        """What lives and has this id ("1307", "1307.5") or label ("group 1307")."""
        name = name.rpartition(" ")[2]
        sample = self.samples.get(name)
        group = self.groups.get(int(name)) if name.isdecimal() else None
        return [thing for thing in (sample, group) if thing is not None]

    def drop(self, groups: Iterable[Group]) -> None:
        """Their life is over, or only a rollback can bring them back: they are counted, not kept."""
        for group in groups:
            del self.groups[group.id]
            for sample in group.samples:
                del self.samples[sample.id]

    def end(self, groups: Iterable[Group]) -> None:
        """Nothing can bring them back. A group and its samples know each other: so that their memory is free at once,
        without the garbage collector, which looks at all that lives, they forget each other."""
        for group in groups:
            group.samples.clear()

    def keep(self, groups: Iterable[Group]) -> None:
        """They live again (a rollback)."""
        for group in groups:
            self.groups[group.id] = group
            for sample in group.samples:
                self.samples[sample.id] = sample

    def hand_over(self, groups: Collection[Group], at: float) -> None:
        """They are the next step: from now on they are handed to training."""
        for group in groups:
            self.move_group(group, "training", at, "step {}", self.step)
        self.move_samples(groups, "scored", "training", at, "step {}", self.step)
        self.step += 1

    def choose_batch(self) -> list[Group]:
        """The B ready groups of earliest deadline, then in order of admission, if they may become the next step.

        Returned in order of admission; empty if there are too few, or if they have to pass the batch test and don't.
        """
        missing = self.rules.batch_groups
        if self.ready < missing or self._refused == (self.step, self.rules):
            return []
        batch: dict[int, int] = {}
        for last in sorted(self._ready):
            batch[last] = min(len(self._ready[last]), missing)
            missing -= batch[last]
        if admission.batches_wait(self.rules):
            everyone = {last: len(groups) for last, groups in self._outstanding.items()}
            late = admission.overdue(everyone, batch, step=self.step, batch_groups=self.rules.batch_groups)
            if late is not None:
                self._refused = self.step, self.rules
                return []
        chosen = [group for last, count in batch.items() for group in _first(self._ready[last], count)]
        return sorted(chosen, key=_number)

    def late(self) -> list[Group]:
        """Outstanding groups whose deadline has passed, in order of admission; it looks at no others."""
        passed = [last for last in self._outstanding if last < self.step]
        return sorted((group for last in passed for group in self._outstanding[last].values()), key=_number)

    def candidates(self) -> list[Group]:
        """The ready groups that would be the next batch, fewer than B if there aren't enough; for explanations."""
        ready = [group for last in sorted(self._ready) for group in sorted(self._ready[last].values(), key=_number)]
        return ready[: self.rules.batch_groups]

    def outstanding_groups(self) -> list[Group]:
        """In order of admission; looks at all of them, so it is for explanations and endings only."""
        return [group for group in self.groups.values() if group.state in OUTSTANDING]

    def _leave(self, group: Group) -> None:
        """It is outstanding no longer: its place and its deadline are free."""
        self._refused = None
        same = self._outstanding[group.deadline]
        del same[group.id]
        if not same:
            del self._outstanding[group.deadline]
        ready = self._ready.get(group.deadline)
        if ready is not None and ready.pop(group.id, None) is not None and not ready:
            del self._ready[group.deadline]


def _number(group: Group) -> GroupId:
    return group.id


def _first(groups: dict[GroupId, Group], count: int) -> list[Group]:
    return sorted(groups.values(), key=_number)[:count]
