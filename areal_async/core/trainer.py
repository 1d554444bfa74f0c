"""The trainer: which step it trains, which batches it has had, what it publishes, its checkpoints, losses and restarts.

What always holds: one thing at a time (publish, then write a checkpoint where one is due, then train); every version is
published before the next step; the groups of a step are kept until no checkpoint that is kept can ask for them again,
so that after going back the same steps are trained with the same batches, on a new branch, and not a sample longer; and
no batch leaves here in which a token older than η has a gradient, unless `when_older` is `train`.
"""

from areal_async.core import admission, batches
from areal_async.core.fleet import Fleet
from areal_async.core.ledger import Group, Ledger
from areal_async.core.lifecycle import TRAINER
from areal_async.core.restarts import Restarted
from areal_async.errors import IllegalTransition
from areal_async.messages import (
    Checkpoint,
    CheckpointDone,
    Fail,
    Failed,
    Forget,
    Joined,
    Lost,
    Publish,
    Published,
    Release,
    Restart,
    RolledBack,
    Rules,
    SampleId,
    StepDone,
    Train,
    Version,
)


class Trainer(Restarted):
    """version: of the weights that it holds. branch: how often training went back. first: the version it began with.
    first_loss: the cause of the first loss in the run, "" while there was none. failed_checkpoints: in a row, the last
    one for the cause `checkpoint_failure`.
    """

    __slots__ = (
        "_checkpoint_at",
        "_checkpoints",
        "_dropped",
        "_fleet",
        "_has_joined",
        "_ledger",
        "_lost_version",
        "_plans",
        "_rules",
        "_skipped",
        "_tried",
        "branch",
        "checkpoint_failure",
        "failed_checkpoints",
        "first",
        "first_loss",
        "version",
    )
    lifecycle = TRAINER

    def __init__(self, rules: Rules, ledger: Ledger, fleet: Fleet, at: float) -> None:
        super().__init__("trainer", at)
        self._rules = rules
        self._ledger = ledger
        self._fleet = fleet
        self._plans: dict[int, tuple[Group, ...]] = {}  # step -> its batch
        self._dropped: int = 0  # plans of steps before it are kept no longer
        self._checkpoints: list[Version] = []  # those that are kept, of the surviving history, the oldest first
        self._checkpoint_at = at  # run clock of the last one, or since when there could have been one
        self._tried: Version | None = None  # of this version a checkpoint was asked for
        self._skipped: list[int] = []  # steps of the surviving history whose update was left out
        self._lost_version: Version = 0  # at its last loss
        self._has_joined = False
        self.branch = 0
        self.version: Version = 0
        self.first: Version = 0
        self.first_loss = ""
        self.failed_checkpoints = 0
        self.checkpoint_failure = ""

    @property
    def label(self) -> str:
        return "trainer"

    @property
    def makes_checkpoints(self) -> bool:
        return bool(self._rules.checkpoint_steps or self._rules.checkpoint_s)

    @property
    def returns(self) -> tuple[Version, ...]:
        """Versions that training can go back to, the newest first: of checkpoints that are kept, or the first one."""
        versions = [*reversed(self._checkpoints), self.first]
        return tuple(version for version in dict.fromkeys(versions) if version >= self._dropped)

    def join(self, event: Joined) -> list[Publish]:
        """All ranks are there. A later version than 0 at the start of a run: the ledger begins with that step, its
        steps before count."""
        if event.at < self.since or (event.at == self.since and self.state != "starting"):
            return []  # told again
        if self.state != "starting":
            raise IllegalTransition(f"the trainer joined twice. Its story:\n{self.story()}")
        if not self._has_joined:
            self._has_joined = True
            self.version = self.first = self._dropped = self._ledger.step = event.version
        elif event.version != self.version:
            raise IllegalTransition(
                f"the trainer joined with version {event.version}, but training went back to {self.version}."
                f" Its story:\n{self.story()}"
            )
        self.since = self._checkpoint_at = event.at
        why = f"back to version {self.version}" if self.branch else "joined"
        return [self._publish(event.at, why)]

    def train(self, at: float) -> list[Train]:
        """The next step, if the trainer is idle and a batch may be formed (or was, before training went back)."""
        if self.state != "idle" or self.version >= self._rules.steps:
            return []
        groups = self._plans.get(self.version)
        if groups is None:
            groups = tuple(self._ledger.choose_batch())
            if not groups:
                return []
            train = batches.form(groups, step=self.version, branch=self.branch, rules=self._rules)
            self._check_fresh(groups, train)
            self._ledger.hand_over(groups, at)
            self._plans[self.version] = groups
        else:  # formed again from the same groups: the same samples and advantages, split as the rules say now
            train = batches.form(groups, step=self.version, branch=self.branch, rules=self._rules)
        self.move("training", at, "step {}, branch {}", self.version, self.branch)
        return [train]

    def step_done(self, event: StepDone) -> list[Forget | Release | Publish | Fail]:
        if self._told_again(event.branch, event.step < self.version):
            return []
        if self.state != "training" or event.step != self.version:
            raise IllegalTransition(f"the trainer was not told to train step {event.step}. Its story:\n{self.story()}")
        groups = self._plans[self.version]
        for group in groups:
            self._ledger.move_group(group, "trained", event.at, "step {} {}", event.step, event.skipped)
        self._ledger.move_samples(groups, "training", "trained", event.at)
        self._ledger.drop(groups)
        self.version += 1
        if event.skipped:
            self._skipped.append(event.step)
            if len(self._skipped) > self._rules.nan_budget:
                return [self._too_many_skipped(event)]
        forget = Forget(samples=tuple(_answers(groups)))
        release = [] if self.makes_checkpoints else self._drop_plans(self.version)
        publish = self._publish(event.at, event.skipped or f"step {event.step} is done")
        return [forget, *release, publish]

    def _too_many_skipped(self, event: StepDone) -> Fail:
        return Fail(
            why=f"the updates of {len(self._skipped)} steps were left out, and train.nan_budget is"
            f" {self._rules.nan_budget}. The last one was step {event.step}: {event.skipped}\n"
            "Usual causes: train.lr too high, bfloat16 where float32 is needed, a model that is broken already"
        )

    def published(self, event: Published) -> list[Checkpoint]:
        """Servers may load it; a checkpoint of it is written if one is due."""
        done = self.state != "publishing" and event.version <= self.version
        if self._told_again(event.branch, done or event.version < self.version):
            return []
        if self.state != "publishing" or event.version != self.version:
            raise IllegalTransition(
                f"the trainer was not told to publish version {event.version}. Its story:\n{self.story()}"
            )
        self.move("idle", event.at, "version {} is published, {} bytes", event.version, event.nbytes)
        self._fleet.published(event)
        return self._checkpoint(event.at) if self._is_due(event.at) else []

    # ----------------------------------------------------------------------------------------------- checkpoints

    def checkpoint_at_stop(self, at: float) -> list[Checkpoint]:
        """The run was asked to stop, and its last version is safe: so that a resume can go on from it."""
        if self.state != "idle" or not self.makes_checkpoints or not self._has_news:
            return []
        return self._checkpoint(at)

    def checkpoint_done(self, event: CheckpointDone) -> list[Release]:
        """Older checkpoints go, and with them what only they could ask for."""
        if self._told_again(event.branch, self.state != "checkpointing" or event.version != self.version):
            return []
        self._checkpoints = [*self._others(), event.version]
        self._checkpoint_at = event.at
        self.failed_checkpoints = 0
        self.move("idle", event.at, "the checkpoint is complete, {} bytes in {} s", event.nbytes, event.seconds)
        return self._drop_plans(self._checkpoints[0])

    def checkpoint_failed(self, event: Failed) -> None:
        """The run goes on without it; the next one is due after the next step."""
        if self.state != "checkpointing" or event.id != str(self.version) or event.at < self.since:
            return
        self.failed_checkpoints += 1
        self.checkpoint_failure = event.why
        self.move("idle", event.at, "no checkpoint, {} failed in a row: {}", self.failed_checkpoints, event.why)

    @property
    def _has_news(self) -> bool:
        """Whether there are steps that no checkpoint has, and more to come."""
        return max(self.returns, default=self.first) < self.version < self._rules.steps and self._tried != self.version

    def _is_due(self, at: float) -> bool:
        rules = self._rules
        if not self._has_news:
            return False
        steps = self.version - max(self.returns, default=self.first)
        return 0 < rules.checkpoint_steps <= steps or 0 < rules.checkpoint_s <= at - self._checkpoint_at

    def _checkpoint(self, at: float) -> list[Checkpoint]:
        self._tried = self.version
        self.move("checkpointing", at, "version {}, branch {}", self.version, self.branch)
        return [Checkpoint(version=self.version, branch=self.branch, keep=tuple(self._others()))]

    def _others(self) -> list[Version]:
        """Of the checkpoints, those that stay beside one more."""
        count = self._rules.checkpoint_keep - 1
        return self._checkpoints[-count:] if count > 0 else []

    def _drop_plans(self, before: int) -> list[Release]:
        """Nothing can go back to a step before this one: what was trained there isn't asked for again."""
        names: list[SampleId] = []
        for step in range(self._dropped, before):
            groups = self._plans.pop(step)
            names += _answers(groups)
            self._ledger.end(groups)
        self._dropped = max(before, self._dropped)
        return [Release(samples=tuple(names))] if names else []

    # ------------------------------------------------------------------------------------------ losses, going back

    def lost(self, event: Lost) -> list[Fail]:
        """Its processes have ended, or nothing is heard of them."""
        if self.restart_at is not None or event.at < self.since:
            return []  # told again
        return self._lose(event.at, event.why)

    def failed(self, event: Failed) -> list[Fail]:
        """A step or a publication could not be done. Some ranks may have done their part of it and others not, so none
        can be told to go on: it is a loss like any other. A checkpoint that could not be written changes nothing."""
        if event.of == "checkpoint":
            self.checkpoint_failed(event)
            return []
        doing = {"train": "training", "publish": "publishing"}[event.of]
        if self.state != doing or event.id != str(self.version) or event.at < self.since:
            return []
        return self._lose(event.at, f"{event.of} {event.id} failed: {event.why}")

    def _lose(self, at: float, why: str) -> list[Fail]:
        """It is to be started again after a while, or the run ends: it was lost too often, or no checkpoints are made.
        (Its restarts are forgotten only if it got further than ever: one that always ends at the same step may need
        longer to get there than it takes to forget.)"""
        if not self.makes_checkpoints:
            return [Fail(why=f"the trainer is gone at step {self._ledger.step}: {why}\n{self.story()}")]
        self.first_loss = self.first_loss or f"at {at:.1f} s, version {self.version}: {why}"
        if self.version > self._lost_version:
            self.forgive(at)
        self._lost_version = max(self.version, self._lost_version)
        if self.restarts >= self._rules.max_trainer_restarts:
            return [
                Fail(
                    why=f"the trainer was lost once more after {self.restarts} restarts (train.max_restarts)."
                    f" The first loss: {self.first_loss}\nThe last one: {why}\n{self.story()}"
                )
            ]
        self.end(why)
        self.wait_for_restart(at)
        self._fleet.forget_published()
        return []

    def wake(self, at: float) -> list[Restart]:
        """Its pause is over: it is started again."""
        if not self.start_again(at):
            return []
        back = self.returns[0]
        self.note(at, "told to start again, with version {}", back)
        return [Restart(peer="trainer", id=self.id, why=self.why, version=back)]

    def is_past(self, event: RolledBack) -> bool:
        """Whether it is told again. Raises IllegalTransition where training can't go back now, or not to there."""
        is_told = self.state == "lost" and self.restart_at is None
        if event.resumed is None and (event.at < self.since or (event.at == self.since and not is_told)):
            return True
        if event.resumed is None and not is_told:
            raise IllegalTransition(
                f"training went back to version {event.to}, but the trainer was not told to start again."
                f" Its story:\n{self.story()}"
            )
        if event.to not in self.returns:
            raise IllegalTransition(
                f"training can't go back to version {event.to}, only to {_listed(self.returns)}; it began with"
                f" {self.first} and is at {self.version}. Its story:\n{self.story()}"
            )
        return False

    def roll_back(self, event: RolledBack) -> None:
        """Start with `event.to`: the batches of the steps from there on wait in `training` for their second time."""
        for step in range(event.to, self.version):  # the one at self.version, if there is one, is in training already
            groups = self._plans[step]
            self._ledger.keep(groups)
            for group in groups:
                self._ledger.move_group(group, "training", event.at, "back to version {}", event.to)
            self._ledger.move_samples(groups, "trained", "training", event.at)
        self._checkpoints = [version for version in self._checkpoints if version <= event.to]
        self._skipped = [step for step in self._skipped if step < event.to]
        self._tried = None
        self.branch += 1
        self.version = event.to
        self.since = event.at
        self.move("starting", event.at, "back to version {}, branch {}: {}", event.to, self.branch, event.why)

    def resume(self, rules: Rules) -> None:
        """All that a new controller knows of it is what it has trained."""
        self._rules = rules
        self.restarts = self._lost_version = self.failed_checkpoints = 0
        self.first_loss = ""
        self.end("")

    def _publish(self, at: float, why: str) -> Publish:
        self.work("publishing", at, "version {}, branch {}: {}", self.version, self.branch, why)
        return Publish(version=self.version, branch=self.branch, free=self._fleet.free())

    def _told_again(self, branch: int, past: bool) -> bool:
        """Whether an event tells of what is over: an older branch, or a step that is done."""
        if branch > self.branch:
            raise IllegalTransition(f"an event tells of branch {branch}, but it is {self.branch}:\n{self.story()}")
        return branch < self.branch or past or self.state == "lost"

    def _check_fresh(self, groups: tuple[Group, ...], train: Train) -> None:
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


def _answers(groups: tuple[Group, ...]) -> list[SampleId]:
    """Their samples whose arrays are kept for training: those with a reward."""
    return [sample.id for group in groups for sample in group.samples if sample.reward is not None]


def _listed(versions: tuple[Version, ...]) -> str:
    return ", ".join(str(version) for version in versions) or "none"
