"""Training steps, going back, checkpoints, releases: each group in one step of the surviving history.

What always holds: of a step that is over this keeps which groups and members it trained, and one number for all of its
samples and advantages; so the same batch is known again after training went back.
"""

from collections.abc import Iterator

from areal_async.audit import batch
from areal_async.audit.books import FATES, HANDED, READY, Books, Group
from areal_async.audit.groups import is_needless
from areal_async.audit.outcomes import Answer, is_trained
from areal_async.audit.servers import Servers
from areal_async.messages import (
    Checkpoint,
    CheckpointDone,
    Failed,
    Finish,
    GroupId,
    Joined,
    Publish,
    Published,
    Release,
    Restart,
    RolledBack,
    StepDone,
    Train,
    Version,
    group_of,
)


class Plan:
    """A step that was formed. members: of each of its groups, bits of the members that are trained, of those that were
    not released. content: hash of its samples, attempts and advantages. lags: trained samples by their lag."""

    __slots__ = ("branch", "content", "groups", "lags", "members", "released", "samples")

    def __init__(self, train: Train, lags: dict[int, int]) -> None:
        self.groups = train.groups
        self.content = hash(train.samples)
        self.samples = len(train.samples)
        self.branch = train.branch
        self.lags = lags
        self.released = ""
        self.members: dict[GroupId, int] = {}
        for entry in train.samples:
            number, _, member = entry.sample.partition(".")
            self.members[int(number)] = self.members.get(int(number), 0) | 1 << int(member)


class Steps:
    """state: starting, joined, publishing, idle, training, stepped (it has trained), checkpointing, lost. checkpoints:
    kept, complete, of the surviving history. dead_steps: of each branch, how many were done and are in no surviving
    history. made: checkpoints in all."""

    def __init__(self, books: Books, servers: Servers) -> None:
        self._books = books
        self._add = books.add
        self._servers = servers
        self._asked: dict[tuple[Version, int], tuple[Version, ...]] = {}  # checkpoints under way, what stays beside
        self._restarts_with: Version | None = None
        self.plans: dict[int, Plan] = {}
        self.state = "starting"
        self.first: Version | None = None
        self.branch = 0
        self.checkpoints: list[Version] = []
        self.released_before = 0  # steps below it had samples that were released
        self._kept_from = 0  # what steps before it trained was to be released
        self.dead_steps: dict[int, int] = {}
        self.made = 0
        self._skipped: list[int] = []  # steps of the surviving history whose update was left out

    # ----------------------------------------------------------------------------------------------------- the trainer

    def joined(self, event: Joined) -> None:
        books = self._books
        if self.state != "starting":
            return  # told again
        if self.first is None:
            self.first = books.version = books.step = event.version
        elif event.version != books.version:
            text = f"it joined with version {event.version}; training went back to {books.version}"
            self._add("trainer.version", "trainer", text)
        books.owe("publish", str(books.version), "the trainer has joined")
        self.state = "joined"

    def restart(self, command: Restart) -> None:
        if command.version != self.first and command.version not in self.checkpoints:
            text = f"it is started with version {command.version}; checkpoints: {self._listed_checkpoints()}"
            self._add("rollback.checkpoint", "trainer", text)
        self._restarts_with = command.version

    def publish(self, command: Publish) -> None:
        books, about = self._books, f"version {command.version}"
        books.owed.pop(("publish", str(command.version)), None)
        if (command.version, command.branch) != (books.version, self.branch):
            text = f"branch {command.branch} is published; the trainer holds version {books.version} of branch"
            self._add("publish.other", about, f"{text} {self.branch}")
        elif self.state not in ("joined", "stepped"):
            self._add("publish.early", about, f"it is published while the trainer is {self.state}")
        self.state = "publishing"

    def published(self, event: Published) -> None:
        if (event.version, event.branch) == (self._books.version, self.branch) and self.state == "publishing":
            self.state = "idle"

    # ----------------------------------------------------------------------------------------------------------- steps

    def train(self, train: Train) -> None:
        books, about = self._books, f"step {train.step}"
        if (train.step, train.branch) != (books.version, self.branch):
            text = f"branch {train.branch} is trained; it is the turn of step {books.version}, branch {self.branch}"
            self._add("step.order", about, text)
        elif self.state != "idle":
            self._add("step.early", about, f"it is trained while the trainer is {self.state}")
        if len(set(train.groups)) != books.rules.batch_groups or len(set(train.groups)) != len(train.groups):
            text = (
                f"{len(train.groups)} groups ({len(set(train.groups))} different), expected {books.rules.batch_groups}"
            )
            self._add("step.size", about, text)
        self.state = "training"
        for broken in (*batch.mask(train, books.rules), *batch.split(train, books.rules)):
            self._add(*broken)
        before = self.plans.get(train.step)
        if before is None:
            self._form(train)
        else:
            self._again(train, before)

    def _form(self, train: Train) -> None:
        books, rules = self._books, self._books.rules
        groups = [group for number in train.groups if (group := self._ready(train, number)) is not None]
        answers, floors = self._members(train, groups)
        if all(group.ready for group in groups) and len(groups) == len(train.groups):
            for broken in batch.turn(train, books.ready.values()):
                self._add(*broken)
        for broken in batch.ages(train, answers, floors, rules):
            self._add(*broken)
        known = [answer for answer in answers if answer is not None]
        if len(known) == len(answers):
            for broken in batch.sizes(train, known, rules):
                self._add(*broken)
        lags: dict[int, int] = {}
        for answer in known:
            if answer.loss_tokens:
                lags[train.step - answer.oldest] = lags.get(train.step - answer.oldest, 0) + 1
        for group in groups:
            books.end(group, HANDED)
        for number in train.groups:
            if 0 <= number < len(books.steps):
                books.fates[number] = HANDED
                books.steps[number] = train.step
        self.plans[train.step] = Plan(train, lags)
        books.step = max(books.step, train.step + 1)
        for broken in batch.behind(train, books.by_floor, rules):
            self._add(*broken)

    def _ready(self, train: Train, number: GroupId) -> Group | None:
        """The group, if it lives; it has to be ready."""
        books, about = self._books, f"group {number}"
        group = books.live.get(number)
        if group is None:
            name = "group.twice" if 0 <= number < len(books.steps) and books.steps[number] >= 0 else "group.dead"
            self._add(name, about, f"step {train.step} trains it; it is {books.fate_of(number)}")
        elif not group.ready:
            missing = [
                f"{number}.{member} is {sample.state}"
                for member, sample in enumerate(group.samples)
                if sample.state not in ("graded", "failed")
            ]
            self._add("group.unready", about, f"step {train.step} trains it; {batch.listed(missing)}")
        return group

    def _members(self, train: Train, groups: list[Group]) -> tuple[list[Answer | None], list[Version]]:
        """The answers of the batch's samples, None where there is none to train, and the floors of their groups."""
        rules = self._books.rules
        wanted = {
            f"{group.id}.{member}": sample.attempt
            for group in groups
            if group.ready
            for member, sample in enumerate(group.samples)
            if sample.answer is not None and is_trained(sample.answer, rules)
        }
        seen: set[str] = set()
        answers: list[Answer | None] = []
        floors: list[Version] = []
        alive = {group.id: group for group in groups}
        for entry in train.samples:
            group = alive.get(group_of(entry.sample))
            answers.append(self._member(train, group, entry.sample, entry.attempt))
            floors.append(group.floor or 0 if group is not None else 0)
            if entry.sample in seen:
                self._add("sample.twice", f"sample {entry.sample}", f"it is twice in step {train.step}")
            seen.add(entry.sample)
        for name in wanted.keys() - seen:
            self._add("sample.left", f"sample {name}", f"step {train.step} trains its group, and not it")
        return answers, floors

    def _member(self, train: Train, group: Group | None, name: str, attempt: int) -> Answer | None:
        about, step = f"sample {name}", f"step {train.step}"
        if group is None:
            if group_of(name) not in train.groups:
                self._add("sample.stranger", about, f"{step} trains it, and not its group")
            return None
        member = int(name.partition(".")[2])
        sample = group.samples[member] if member < len(group.samples) else None
        if sample is None or sample.attempt < 0:
            self._add("sample.unknown", about, f"{step} trains it, and nobody ever started it")
            return None
        if sample.attempt != attempt:
            text = f"{step} trains attempt {attempt}; the last one is {sample.attempt}"
            self._add("sample.attempt", about, text)
        answer = sample.answer
        if answer is None:
            self._add("sample.undone", about, f"{step} trains it; it is {sample.state}")
        elif sample.state != "graded":
            self._add("sample.unscored", about, f"{step} trains it before its check has ended; it is {sample.state}")
        elif not is_trained(answer, self._books.rules):
            why = "has no reward" if answer.reward is None else "was cut (train.truncated: mask)"
            self._add("sample.filtered", about, f"{step} trains it, and it {why}")
        if answer is not None and not answer.tokens:
            self._add("sample.empty", about, f"{step} trains it, and it has no tokens")
        if sample.released:
            self._add("release.trained", about, f"{step} trains it; it was released before")
        return answer

    def _again(self, train: Train, before: Plan) -> None:
        """After training went back: the same batch once more."""
        about = f"step {train.step}"
        if train.branch == before.branch:
            self._add("step.twice", about, f"it is trained twice on branch {train.branch}")
        if train.groups != before.groups:
            text = (
                f"trains groups {batch.listed(train.groups)}; before training went back {batch.listed(before.groups)}"
            )
            self._add("step.other", about, text)
        elif hash(train.samples) != before.content:
            text = "trains other samples, attempts or advantages than before training went back"
            self._add("step.other", about, text)
        if before.released:
            self._add(
                "release.trained", f"sample {before.released}", f"{about} trains it again; it was released before"
            )
        before.branch = train.branch

    def lost(self) -> None:
        """One of its ranks has ended, or could not do what it was told: all of them end."""
        self.state = "lost"

    def could_not(self, event: Failed) -> None:
        doing = {"train": "training", "publish": "publishing"}[event.of]
        if self.state == doing and event.id == str(self._books.version):
            self.state = "lost"

    def done(self, event: StepDone) -> None:
        books, about = self._books, f"step {event.step}"
        if event.branch < self.branch or (event.branch == self.branch and event.step < books.version):
            return  # told again, or of a history that didn't happen
        if self.state == "lost":
            return  # what it was at went with it
        if (event.step, event.branch) != (books.version, self.branch) or self.state != "training":
            text = f"branch {event.branch} is said to be done; the trainer is {self.state}, at step {books.version} of"
            self._add("step.untold", about, f"{text} branch {self.branch}")
            return
        books.version += 1
        self.state = "stepped"
        if event.skipped:
            self._skipped.append(event.step)
        if len(self._skipped) > books.rules.nan_budget:
            text = f"{len(self._skipped)} updates were left out, train.nan_budget is {books.rules.nan_budget}"
            books.owe("fail", about, text)
        else:
            books.owe("publish", str(books.version), f"{about} is done")
            if not self._makes_checkpoints:
                self._owe_release(books.version)

    # ------------------------------------------------------------------------------------------ checkpoints, going back

    def checkpoint(self, command: Checkpoint) -> None:
        books, about = self._books, f"version {command.version}"
        if (command.version, command.branch) != (books.version, self.branch) or self.state != "idle":
            text = f"branch {command.branch} gets a checkpoint; the trainer is {self.state}, at version {books.version}"
            self._add("checkpoint.other", about, f"{text} of branch {self.branch}")
        if gone := [version for version in command.keep if version not in self.checkpoints]:
            text = f"checkpoints of versions {batch.listed(gone)} are to stay beside it, and there are none"
            self._add("checkpoint.keep", about, text)
        self._asked[command.version, command.branch] = command.keep
        self.state = "checkpointing"

    def checkpoint_done(self, event: CheckpointDone) -> None:
        keep = self._asked.pop((event.version, event.branch), None)
        if keep is None:
            if event.branch == self.branch and event.version not in self.checkpoints:
                self._add("checkpoint.untold", f"version {event.version}", "its checkpoint is complete; nobody asked")
            return
        if event.branch != self.branch:
            return
        self.checkpoints = sorted({*keep, event.version})
        self.made += 1
        self._owe_release(self.checkpoints[0])
        self.state = "idle"

    def _owe_release(self, before: int) -> None:
        """Nothing can go back to a step before this one: what was trained there need not stay."""
        for step in range(self._kept_from, before):
            if step in self.plans and self.plans[step].members:
                self._books.owe("release", f"step {step} trained", "no checkpoint can ask for it")
        self._kept_from = max(self._kept_from, before)

    def checkpoint_failed(self, version: str) -> None:
        if self.state == "checkpointing" and version == str(self._books.version):
            self._asked.clear()
            self.state = "idle"

    def roll_back(self, event: RolledBack) -> None:
        books, to = self._books, event.to
        first = self.first if self.first is not None else 0
        if not first <= to <= books.version:
            text = f"training goes back to it; it began with {first} and is at {books.version}"
            self._add("rollback.range", f"version {to}", text)
        elif to != first and to not in self.checkpoints:
            text = f"training goes back to it; checkpoints: {self._listed_checkpoints()}, the first version: {first}"
            self._add("rollback.checkpoint", f"version {to}", text)
        elif to < self.released_before:
            text = f"training goes back to it; what steps before {self.released_before} trained on was released"
            self._add("rollback.released", f"version {to}", text)
        elif event.resumed is None and self._restarts_with is None:
            self._add("rollback.untold", f"version {to}", "training goes back to it; the trainer was not started again")
        self.dead_steps[self.branch] = max(books.version - to, 0)
        self.checkpoints = [version for version in self.checkpoints if version <= to]
        self._asked.clear()
        self._skipped = [step for step in self._skipped if step < to]
        self._restarts_with = None
        self.branch += 1
        books.version = to
        self.state = "starting"

    def release(self, command: Release) -> None:
        for name in command.samples:
            self._books.owed.pop(("release", name), None)
            number, _, member = name.partition(".")
            group = self._books.live.get(int(number))
            if group is not None:
                self._release_live(group, int(member), name)
            elif not self._books.existed(name):
                self._add("sample.unknown", f"sample {name}", "it is released, and never was")
            elif self._books.fates[int(number)] == HANDED:
                self._release_trained(self._books.steps[int(number)], int(number), int(member), name)

    def _release_live(self, group: Group, member: int, name: str) -> None:
        sample = group.samples[member] if member < len(group.samples) else None
        if sample is None:
            self._add("sample.unknown", f"sample {name}", "it is released, and never was")
            return
        sample.released = True
        if not is_needless(group, sample, self._books):
            text = f"it is released; it is {sample.state}, its group {FATES[READY] if group.ready else 'open'}"
            self._add("release.early", f"sample {name}", text)

    def _release_trained(self, step: int, number: GroupId, member: int, name: str) -> None:
        plan = self.plans.get(step)
        bits = plan.members.get(number, 0) if plan is not None else 0
        if plan is None or not bits >> member & 1:
            return  # it wasn't trained, or is released again
        plan.members[number] = bits & ~(1 << member)
        if not plan.members[number]:
            del plan.members[number]
        plan.released = plan.released or name
        self.released_before = max(self.released_before, step + 1)
        if not plan.members:
            self._books.owed.pop(("release", f"step {step} trained"), None)
        back = min(self.checkpoints, default=self.first or 0) if self._makes_checkpoints else self._books.version
        if step >= back:
            text = f"it is released; step {step} trained it, and training can still go back to version {back}"
            self._add("release.early", f"sample {name}", text)

    def finish(self, command: Finish) -> None:
        books = self._books
        if command.reason == "steps_done" and books.version < books.rules.steps:
            text = f"the run ends as if all were done; version {books.version} of {books.rules.steps}"
            self._add("end.reason", "the end", text)
        if self.state not in ("idle", "starting", "lost"):
            self._add("end.reason", "the end", f"the run ends while the trainer is {self.state}")

    @property
    def next_step(self) -> int:
        """The next one that is formed of groups which were not trained before."""
        return self._books.step

    @property
    def _makes_checkpoints(self) -> bool:
        return bool(self._books.rules.checkpoint_steps or self._books.rules.checkpoint_s)

    @property
    def waits_for_nothing(self) -> bool:
        """Whether the next step could be trained, and nothing allows to put it off."""
        books = self._books
        if self.state != "idle" or books.version >= books.rules.steps:
            return False
        waits = books.rules.when_older == "wait"
        return books.version in self.plans or (not waits and len(books.ready) >= books.rules.batch_groups)

    @property
    def can_go_back(self) -> bool:
        return bool(self.checkpoints) or self.released_before <= (self.first or 0)

    def surviving(self) -> Iterator[tuple[int, Plan]]:
        """Steps of the surviving history that are done."""
        first = self.first or 0
        return ((step, self.plans[step]) for step in range(first, self._books.version) if step in self.plans)

    def _listed_checkpoints(self) -> str:
        return batch.listed(self.checkpoints) or "none"
