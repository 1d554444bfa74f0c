"""Groups and samples on their way to `ready`, or to another end: each begins as Eq. 3 allows, each ends once.

What always holds: what becomes of a group is worked out here from what its samples did, by the rules alone; then the
commands have to agree: what must be stopped is cancelled, what is over is forgotten, and nothing else is.
"""

from areal_async.audit.books import CANCELLED, FAILED, FILTERED, HANDED, STALE, Books, Group, Sample
from areal_async.audit.outcomes import answer, fate, is_trained, usable
from areal_async.audit.prompts import Prompts
from areal_async.audit.servers import Servers
from areal_async.messages import (
    Cancel,
    DataEnded,
    Failed,
    Forget,
    GroupId,
    GroupRead,
    ReadGroup,
    SampleDone,
    Score,
    Scored,
    StartSample,
    sample_id,
)


class Groups:
    def __init__(self, books: Books, prompts: Prompts, servers: Servers) -> None:
        self._books = books
        self._add = books.add
        self._owed = books.owed
        self._prompts = prompts
        self._servers = servers
        self._stopped: dict[str, Group] = {}  # cancelled without a reason as yet: only the end of the run is one
        self._ended: dict[str, int] = {}  # samples that ran when training just went back, and their attempts
        self._unsure: Group | None = None  # its prompt was just read, and it may be over already
        self._failures = 0

    # ------------------------------------------------------------------------------------------------- a group begins

    def ask(self, command: ReadGroup) -> None:
        books, about = self._books, f"group {command.group}"
        if command.group != len(books.fates):
            self._add("group.number", about, f"the next group is {len(books.fates)}: numbers are given once, in order")
            if command.group < len(books.fates):
                return
        while len(books.fates) < command.group:  # those that were passed over
            books.fates.append(CANCELLED)
            books.steps.append(-1)
        dropped = self._prompts.ask(command)
        if dropped is not None and dropped in books.live:
            self._end(books.live[dropped], STALE)
        rules, held = books.rules, self._servers.held
        group = Group(command.group, command.position, rules.group_size, books.taken + 1, held)
        books.admit(group)
        if not held:
            self._add("admission.nowhere", about, "admitted, and no server holds weights of this branch")
        elif group.taken > (held[-1] + rules.max_staleness + 1) * rules.batch_groups:
            self._too_many(group, held[-1])
        self._check_places(about)

    def read(self, event: GroupRead) -> None:
        group = self._find(event.group)
        if group is None or not group.unread:
            return
        group.unread = False
        self._prompts.read(event, group.position)
        if group.id in self._books.perhaps_over:
            self._unsure = group
            return
        for member in range(len(group.samples)):
            name = sample_id(group.id, member)
            self._owed["start", name] = f"the prompt of group {group.id} is there"

    def data_ended(self, event: DataEnded) -> None:
        group = self._find(event.group)
        if group is not None:
            self._prompts.ended(event, group.position)
            self._end(group, CANCELLED)

    def refuse(self, event: Failed) -> None:
        """Its prompt can't be used."""
        group = self._find(int(event.id))
        if group is not None:
            self._end(group, FAILED)

    def start(self, command: StartSample) -> None:
        books, name = self._books, command.sample
        self._owed.pop(("start", name), None)
        group, sample = self._find_sample(name)
        if group is None or sample is None:
            text = f"attempt {command.attempt} is started; its group is {books.fate_of(_number(name))}"
            self._add("sample.start", f"sample {name}", text)
            return
        if sample.state not in ("waiting", "held") or group.unread:
            self._add("sample.start", f"sample {name}", f"attempt {command.attempt} is started; it is {sample.state}")
        if command.attempt != sample.attempt + 1:
            self._add(
                "sample.attempt",
                f"sample {name}",
                f"attempt {command.attempt} is started, the last one was {sample.attempt}",
            )
        if command.position != group.position:
            text = f"started with position {command.position}, its group has {group.position}"
            self._add("sample.position", f"sample {name}", text)
        self._check_floor(group, sample, command)
        if sample.state == "held":
            books.in_flight += 1
            self._check_places(f"sample {name}")
        sample.attempt = command.attempt
        sample.state = "running"

    def _check_floor(self, group: Group, sample: Sample, command: StartSample) -> None:
        floor, about = command.floor, f"sample {command.sample}"
        if group.floor is None:
            self._books.set_floor(group, floor)
            if group.id in self._books.perhaps_over:
                self._books.perhaps_over.discard(group.id)
                self._prompts.was_asked(group.position)
            if group.held and floor not in group.held:
                held = ", ".join(map(str, group.held))
                self._add(
                    "group.floor", f"group {group.id}", f"has floor {floor}; at its admission servers held {held}"
                )
            if group.taken > (floor + self._books.rules.max_staleness + 1) * self._books.rules.batch_groups:
                self._too_many(group, floor)
        elif floor != group.floor:
            self._add("group.floor", f"group {group.id}", f"started {about} at floor {floor}, before at {group.floor}")
        holds = self._servers.holds(command.server, floor)
        if not holds and (sample.state == "held" or self._servers.any_holds(floor)):
            self._add("sample.floor", about, f"started on server {command.server}, which doesn't hold version {floor}")

    # ------------------------------------------------------------------------------------------------ a sample goes on

    def done(self, event: SampleDone) -> None:
        group, sample = self._find_told(event.sample, event.attempt)
        if group is None or sample is None or sample.state != "running":
            return
        name, rules = event.sample, self._books.rules
        if event.loss_tokens and group.floor is not None and event.oldest < group.floor:
            self._owed["fail", f"sample {name}"] = (
                f"it has a token of version {event.oldest}, below its floor {group.floor}"
            )
        if event.newest < event.oldest or event.newest > max(self._servers.newest_told, event.oldest):
            self._add(
                "sample.version",
                f"sample {name}",
                f"has tokens of versions {event.oldest} to {event.newest}; no server was told to load more than"
                f" {self._servers.newest_told} on branch {self._servers.branch}",
            )
        if event.prompt_tokens + event.length > rules.max_tokens_per_microbatch:
            self._fail(group, sample, name)
            return
        self._books.in_flight -= 1
        sample.answer = answer(event)
        sample.state = "scoring"
        sample.released = False  # what was, is of an attempt that failed
        if event.reward is not None:
            self._grade(group, sample, event.reward)
        else:
            self._owed["score", name] = "it is done, and has no reward"

    def score(self, command: Score) -> None:
        self._owed.pop(("score", command.sample), None)
        _, sample = self._find_sample(command.sample)
        state = "over" if sample is None else sample.state
        if sample is None or state != "scoring" or sample.attempt != command.attempt or sample.asked:
            text = f"attempt {command.attempt} is to be checked; it is {state}" + " already" * (state == "scoring")
            self._add("sample.score", f"sample {command.sample}", text)
            return
        sample.asked = True

    def scored(self, event: Scored) -> None:
        group, sample = self._find_told(event.sample, event.attempt)
        if group is None or sample is None or sample.state == "graded" or sample.state == "failed":
            return
        if sample.state != "scoring" or not sample.asked:
            text = f"a check of attempt {event.attempt} ended; it is {sample.state}, and nobody asked for one"
            self._add("sample.score", f"sample {event.sample}", text)
        if sample.answer is not None:
            self._grade(group, sample, event.reward)

    def failed(self, event: Failed) -> None:
        group, sample = self._find_told(event.id, event.attempt)
        if group is not None and sample is not None and sample.state == "running":
            self._fail(group, sample, event.id)

    def _grade(self, group: Group, sample: Sample, reward: float | None) -> None:
        assert sample.answer is not None, "what is graded is done"
        reward = usable(reward, sample.answer.length, self._books.rules)
        sample.answer = sample.answer._replace(reward=reward)
        sample.state = "graded"
        self._settle(group)

    def _fail(self, group: Group, sample: Sample, name: str) -> None:
        rules = self._books.rules
        sample.failures += 1
        if sample.failures <= rules.retries:
            sample.state = "waiting"
            self._owed["start", name] = f"its attempt {sample.attempt} failed, and it has more"
            return
        self._books.in_flight -= 1
        sample.state = "failed"
        if sum(each.state != "failed" for each in group.samples) < rules.min_group:
            self._end(group, FAILED)
        else:
            self._settle(group)

    def _settle(self, group: Group) -> None:
        """One more member has its outcome; with the last one the group has its own."""
        group.open -= 1
        if group.open:
            return
        answers = [sample.answer for sample in group.samples if sample.answer is not None]
        if fate(answers, self._books.rules) == "filtered":
            self._end(group, FILTERED)
            return
        self._books.make_ready(group)

    # --------------------------------------------------------------------------------------------------- a group's end

    def _end(self, group: Group, fate: int) -> None:
        """Over without being trained: what of it is under way has to be stopped."""
        for member, sample in enumerate(group.samples):
            name = sample_id(group.id, member)
            self._owed.pop(("start", name), None)
            self._owed.pop(("score", name), None)
            if sample.answer is not None and not sample.released:
                self._owed["release", name] = "its group is over"
            if sample.state in ("running", "scoring"):
                self._owed["cancel", name] = f"its group is over ({self._books.fate_of(group.id)})"
        self._books.end(group, fate)
        if fate == FAILED:
            self._failures += 1
            if self._failures > self._books.rules.max_failures:
                text = f"{self._failures} groups failed, rollout.max_failures is {self._books.rules.max_failures}"
                self._owed["fail", f"group {group.id}"] = text

    def drop_late(self, step: int) -> None:
        """After a step before this one was handed over, where groups are dropped: those that no step may train now.

        The log doesn't have the floor of a group that isn't read yet. If one of those that it can have is too old and
        another one isn't, its end is told by what follows: nothing of it starts."""
        rules, books = self._books.rules, self._books
        for group in list(books.live.values()):
            if group.latest_floor + rules.max_staleness < step:
                if rules.requeue and group.id not in books.perhaps_over:
                    self._prompts.ask_again(group.position)
                self._end(group, STALE)
            elif group.floor is None and group.earliest_floor(rules) + rules.max_staleness < step:
                books.perhaps_over.add(group.id)
                if rules.requeue:
                    self._prompts.may_be_asked_again(group.position, group.id)

    def roll_back(self, *, resumed: bool) -> None:
        """Groups of which nothing is graded are over, and their prompts are asked again; of the others what ran is held
        and starts again, and after a resume what was being checked is checked again."""
        for group in list(self._books.live.values()):
            if group.ready:
                continue
            if all(sample.state != "graded" for sample in group.samples):
                if group.id in self._books.perhaps_over:
                    self._prompts.may_be_asked_again(group.position, group.id)
                else:
                    self._prompts.ask_again(group.position)
                self._end(group, CANCELLED)
                continue
            for member, sample in enumerate(group.samples):
                name = sample_id(group.id, member)
                if sample.state in ("running", "waiting"):
                    self._ended[name] = sample.attempt
                    self._books.in_flight -= 1
                    sample.state = "held"
                elif sample.state == "scoring" and resumed:
                    sample.asked = False
                    self._owed["score", name] = "its check ended with the controller"
        if resumed:  # nothing runs any more that would have to be stopped
            for key in [key for key in self._owed if key[0] == "cancel"]:
                del self._owed[key]

    def cancel(self, command: Cancel) -> None:
        name = command.sample
        if self._owed.pop(("cancel", name), None) is not None or self._ended.get(name) == command.attempt:
            return
        group, sample = self._find_sample(name)
        if group is None or sample is None or sample.attempt != command.attempt:
            text = f"attempt {command.attempt} is stopped; its group is {self._books.fate_of(_number(name))}"
            self._add("sample.cancel", f"sample {name}", text)
            return
        self._stopped[name] = group

    def finish(self, *, may_resume: bool) -> None:
        """The run ends as it should: what is not ready is over, unless a resume may go on with it; nothing runs on."""
        for group in list(self._books.live.values()):
            if group.ready:
                continue
            for member, sample in enumerate(group.samples):
                name = sample_id(group.id, member)
                self._owed.pop(("score", name), None)
                if sample.state in ("running", "scoring") and name not in self._stopped:
                    self._add("sample.left", f"sample {name}", f"the run ends; it is {sample.state}, and isn't stopped")
            if not may_resume:
                self._books.end(group, CANCELLED)
        self._stopped.clear()

    def settle(self) -> None:
        """The next event comes: whatever was stopped had a reason by now."""
        for name in self._stopped:
            self._add("sample.cancel", f"sample {name}", "it is stopped while its group lives and the run goes on")
        self._stopped.clear()
        self._ended.clear()
        if self._unsure is not None and self._unsure.floor is None and self._unsure.id in self._books.live:
            self._end(self._unsure, STALE)
        self._unsure = None

    def settle_end(self) -> None:
        """The run is over, and whatever was stopped had that reason."""
        self._stopped.clear()
        self.settle()

    def forget(self, command: Forget) -> None:
        for name in command.samples:
            group, sample = self._find_sample(name)
            number = _number(name)
            if sample is None:
                if not self._books.existed(name):
                    self._add("sample.unknown", f"sample {name}", "it is forgotten, and never was")
                elif self._books.fates[number] == HANDED and self._books.steps[number] >= self._books.version:
                    self._add("sample.forget", f"sample {name}", f"it is {self._books.fate_of(number)}, and forgotten")
            elif group is not None and not is_needless(group, sample, self._books):
                self._add("sample.forget", f"sample {name}", f"it is {sample.state}, its group lives, and forgotten")

    # ---------------------------------------------------------------------------------------------------- finding them

    def _find(self, number: GroupId) -> Group | None:
        """None where its life is over: events may come late."""
        group = self._books.live.get(number)
        if group is None and not 0 <= number < len(self._books.fates):
            self._add("group.unknown", f"group {number}", "an event tells of it, and it was never admitted")
        return group

    def _find_sample(self, name: str) -> tuple[Group | None, Sample | None]:
        group, member = self._books.find(name)
        return (group, group.samples[member]) if group is not None and member >= 0 else (None, None)

    def _find_told(self, name: str, attempt: int) -> tuple[Group | None, Sample | None]:
        """Of an event: (None, None) where it tells of what is over."""
        group, sample = self._find_sample(name)
        if sample is None:
            if not self._books.existed(name):
                self._add("sample.unknown", f"sample {name}", "an event tells of it, and there never was such a sample")
            return None, None
        if attempt > sample.attempt:
            text = f"an event tells of attempt {attempt}, which nobody started (the last one is {sample.attempt})"
            self._add("sample.unknown", f"sample {name}", text)
            return None, None
        return (group, sample) if attempt == sample.attempt else (None, None)

    def _check_places(self, about: str) -> None:
        rules = self._books.rules
        places = self._books.in_flight - len(self._books.perhaps_over) * rules.group_size
        if places > rules.max_concurrent:
            text = f"{places} samples in flight with it, rollout.max_concurrent is {rules.max_concurrent}"
            self._add("admission.places", about, text)

    def _too_many(self, group: Group, floor: int) -> None:
        rules = self._books.rules
        self._add(
            "admission.over",
            f"group {group.id}",
            f"with it {group.taken} groups are handed over or outstanding; at version {floor} Eq. 3 allows"
            f" ({floor} + {rules.max_staleness} + 1) x {rules.batch_groups} ="
            f" {(floor + rules.max_staleness + 1) * rules.batch_groups}",
        )


def is_needless(group: Group, sample: Sample, books: Books) -> bool:
    """Whether nothing asks for it any more, though its group lives: it has no reward, or is of an attempt that
    failed."""
    if sample.answer is None:
        return sample.failures > 0
    return group.ready and not is_trained(sample.answer, books.rules)


def _number(name: str) -> GroupId:
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else -1
