"""The trainer: which step it trains, which batches it has had, what it publishes.

What always holds: one thing at a time (publish, then train); every version is published before the next step; batches
are kept as plans, so that after a rollback the same steps are trained with the same batches, on a new branch; and no
batch leaves here in which a token older than η has a gradient, unless `when_older` is `train`.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from areal_async.core import admission, batches
from areal_async.core.fleet import Fleet
from areal_async.core.ledger import Group, Ledger
from areal_async.core.lifecycle import TRAINER, Thing
from areal_async.errors import IllegalTransition
from areal_async.messages import (
    Fail,
    Forget,
    Joined,
    Publish,
    Published,
    RolledBack,
    Rules,
    StepDone,
    Train,
    Version,
)


@dataclass(frozen=True)
class Plan:
    """One step's batch, kept until no rollback can ask for it again."""

    train: Train
    groups: tuple[Group, ...]


class Trainer(Thing):
    """version: of the weights that it holds. branch: how often training went back. first: the version it began with."""

    __slots__ = ("_fleet", "_ledger", "_plans", "_rules", "_skipped", "branch", "first", "version")
    lifecycle = TRAINER

    def __init__(self, rules: Rules, ledger: Ledger, fleet: Fleet, at: float) -> None:
        super().__init__("trainer", at)
        self._rules = rules
        self._ledger = ledger
        self._fleet = fleet
        self._plans: dict[int, Plan] = {}
        self._skipped = 0
        self.branch = 0
        self.version: Version = 0
        self.first: Version = 0

    def join(self, event: Joined) -> Publish:
        """All ranks are there. A later version than 0: the ledger begins with that step, its steps before count."""
        if self.state != "starting":
            raise IllegalTransition(f"the trainer joined twice. Its story:\n{self.story()}")
        self.version = self.first = self._ledger.step = event.version
        return self._publish(event.at, "joined")

    def train(self, at: float) -> list[Train]:
        """The next step, if the trainer is idle and a batch may be formed (or was, before a rollback)."""
        if self.state != "idle" or self.version >= self._rules.steps:
            return []
        plan = self._plans.get(self.version)
        if plan is None:
            groups = self._ledger.choose_batch()
            if not groups:
                return []
            train = batches.form(groups, step=self.version, branch=self.branch, rules=self._rules)
            self._check_fresh(groups, train)
            self._ledger.hand_over(groups, at)
            self._plans[self.version] = Plan(train, tuple(groups))
        else:
            train = replace(plan.train, branch=self.branch)
        self.move("training", at, "step {}, branch {}", self.version, self.branch)
        return [train]

    def step_done(self, event: StepDone) -> list[Forget | Publish | Fail]:
        if self._told_again(event.branch, event.step < self.version):
            return []
        if self.state != "training" or event.step != self.version:
            raise IllegalTransition(f"the trainer was not told to train step {event.step}. Its story:\n{self.story()}")
        plan = self._plans[self.version]
        for group in plan.groups:
            self._ledger.move_group(group, "trained", event.at, "step {} {}", event.step, event.skipped)
            for sample in group.samples:
                if sample.state == "training":
                    self._ledger.move_sample(sample, "trained", event.at)
        self._ledger.drop(plan.groups)
        self.version += 1
        if event.skipped:
            self._skipped += 1
            if self._skipped > self._rules.nan_budget:
                return [self._too_many_skipped(event)]
        known = (sample for group in plan.groups for sample in group.samples if sample.reward is not None)
        forget = Forget(samples=tuple(sample.id for sample in known))
        return [forget, self._publish(event.at, event.skipped or f"step {event.step} is done")]

    def _too_many_skipped(self, event: StepDone) -> Fail:
        return Fail(
            why=f"the updates of {self._skipped} steps were left out, and train.nan_budget is {self._rules.nan_budget}."
            f" The last one was step {event.step}: {event.skipped}\n"
            "Usual causes: train.lr too high, bfloat16 where float32 is needed, a model that is broken already"
        )

    def published(self, event: Published) -> None:
        idle = self.state != "publishing" and event.version <= self.version
        if self._told_again(event.branch, idle or event.version < self.version):
            return
        if self.state != "publishing" or event.version != self.version:
            raise IllegalTransition(
                f"the trainer was not told to publish version {event.version}. Its story:\n{self.story()}"
            )
        self.move("idle", event.at, "version {} is published, {} bytes", event.version, event.nbytes)
        self._fleet.published(event)

    def roll_back(self, event: RolledBack) -> Publish:
        """Hold `event.to` again: the batches of the steps from there on wait in `training` for their second time."""
        if not self.first <= event.to <= self.version:
            raise IllegalTransition(
                f"training can't go back to version {event.to}: it began with {self.first} and is at {self.version}."
                f" Its story:\n{self.story()}"
            )
        for step, plan in self._plans.items():
            if not event.to <= step < self.version:
                continue  # of those, the one at self.version is in training already
            self._ledger.keep(plan.groups)
            for group in plan.groups:
                self._ledger.move_group(group, "training", event.at, "back to version {}", event.to)
                for sample in group.samples:
                    if sample.state == "trained":
                        self._ledger.move_sample(sample, "training", event.at)
        self.branch += 1
        self.version = event.to
        self._fleet.roll_back(self.branch)
        return self._publish(event.at, f"back to version {event.to}: {event.why}")

    def _publish(self, at: float, why: str) -> Publish:
        self.move("publishing", at, "version {}, branch {}: {}", self.version, self.branch, why)
        return Publish(version=self.version, branch=self.branch, free=self._fleet.free())

    def _told_again(self, branch: int, past: bool) -> bool:
        """Whether an event tells of what is over: an older branch, or a step that is done."""
        if branch > self.branch:
            raise IllegalTransition(f"an event tells of branch {branch}, but it is {self.branch}:\n{self.story()}")
        return branch < self.branch or past

    def _check_fresh(self, groups: list[Group], train: Train) -> None:
        """The promise of `when_older`, held against what is really about to be trained.

        wait, drop: no token is older than η. mask: none that is has a gradient. All of them, and train: none is older
        than its group's floor, so admission has bounded it.
        """
        allowed = admission.oldest_allowed(self.version, self._rules)
        for group in groups:
            for sample in group.samples:
                done = sample.done
                if sample.state != "scored" or done is None or not done.loss_tokens:
                    continue
                if max(done.oldest, train.mask_below) < allowed or done.oldest < group.floor:
                    raise IllegalTransition(
                        f"step {self.version} would train {sample.label}, whose oldest token is of version"
                        f" {done.oldest}; rollout.max_staleness {self._rules.max_staleness} and rollout.when_older"
                        f" {self._rules.when_older} allow {allowed}, its group's floor allows {group.floor}."
                        f" This is an error of areal-async. Its story:\n{sample.story()}\n{group.story()}"
                    )
