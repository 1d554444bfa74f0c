"""A world for the core: it carries out commands in whatever order a test wants, and keeps books of its own.

What always holds: the books are made from commands and events alone, never from the core's state (but for the floor of
a group that isn't read yet, which only its story tells; it is checked when its samples start), and every rule that must
hold whatever the order is checked while they are made; a broken one raises `Broken`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from msgspec.structs import replace

from areal_async.core.orchestrator import Orchestrator
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Checkpoint,
    CheckpointDone,
    Evaluate,
    Fail,
    Finish,
    Forget,
    Joined,
    Lost,
    Publish,
    ReadGroup,
    Release,
    Restart,
    RolledBack,
    Rules,
    SampleDone,
    Score,
    StartSample,
    StepDone,
    StopRequested,
    Swap,
    Train,
    Woke,
    group_of,
    sample_id,
)

from . import expected, promises
from .answers import event_of
from .checkpoints import CheckpointBook, TrainerBook
from .servers import Book, EvaluationBook, ServerBook, check_swap
from .world_books import GroupBook, Notes
from .world_checks import Broken, Checks, hold, make_rules

__all__ = ["Broken", "GroupBook", "World", "hold", "make_rules"]

Key: TypeAlias = tuple[str, ...]


class World(Checks, Notes):
    """Holds what the core has asked for (`pending`) until the test has it answered."""

    def __init__(self, rules: Rules, *, servers: int = 1, workers: int = 1, prompts: int | None = None) -> None:
        self.rules = self.first_rules = rules
        self.core = Orchestrator(rules)
        self.prompts = prompts
        self.pending: dict[Key, AnyCommand] = {}
        self.told: list[AnyEvent] = []  # to be told again
        self.late: list[AnyEvent] = []  # events of what was cancelled or rolled back
        self.commands: list[AnyCommand] = []
        self.end: Finish | Fail | None = None
        self.groups: dict[int, GroupBook] = {}
        self._fates: Counter[str] = Counter()
        self._alive: dict[int, int] = {}  # position -> its latest group
        self._again: set[int] = set()  # positions that must get another group before any new one
        self._left: list[int] = []  # groups whose life ended in this event
        self._stale_samples = 0
        self._kept: set[str] = set()  # answers that must still be in memory
        self.done: dict[str, SampleDone] = {}
        self.oldest: dict[tuple[str, int], int] = {}
        self.servers: dict[str, ServerBook] = {}
        self.workers: dict[str, Book] = {}
        self.evaluations = EvaluationBook(rules, hold)
        self.placed: dict[tuple[str, int], tuple[str, int]] = {}  # sample, attempt -> server, which of its lives
        self.published: tuple[int, int] | None = None  # newest complete (branch, version)
        self.history: list[Train] = []  # steps of the surviving history, done or under way
        self.formed: dict[int, Train] = {}
        self._split: dict[int, tuple[int, int]] = {}  # step -> ranks and tokens a micro-batch
        self.branch = 0
        self.trained = 0  # steps done in the surviving history
        self.first = 0
        self.clock = 0.0
        self.pace_s = 1.0  # between two events
        self.stopping = False
        self.trainer = TrainerBook(rules.max_trainer_restarts)
        self.checkpoints = CheckpointBook(rules, hold)
        self.instant_checkpoints = True  # they are complete in the moment in which they are asked for
        self.came: set[str] = set()  # samples that have arrays
        self.failures: Counter[str] = Counter()  # attempts of samples
        self.held: set[str] = set()  # samples that ran when training went back, and have to start again
        self.step_of: dict[int, int] = {}  # group -> the step that trains it
        self._due: bool | None = None  # whether a checkpoint is, at a publication
        self.log: list[tuple[AnyEvent, list[AnyCommand]]] = []
        self.send(Woke(at=0.0))
        self._servers = [f"server{i}" for i in range(servers)]
        self._workers = [f"rewards.{i}" for i in range(workers)]

    # ------------------------------------------------------------------------------------------- what a test does

    def start(self, version: int = 0) -> "World":
        self.first = self.trained = self.checkpoints.first = self.checkpoints.oldest = version
        self.checkpoints.last_at = self.trainer.works_since = self.tick()
        self.send(Joined(at=self.clock, peer="trainer", id="trainer", version=version))
        for name in self._workers:
            self.workers[name] = Book(self.rules.max_worker_restarts)
            self.send(Joined(at=self.tick(), peer="rewards", id=name))
            self.workers[name].works_since = self.clock
        for name in self._servers:
            self.servers[name] = ServerBook(self.rules.max_restarts)
            self.send(Joined(at=self.tick(), peer="server", id=name))
        return self

    def tick(self) -> float:
        self.clock += self.pace_s
        return self.clock

    def send(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.core.handle(event)
        self.log.append((event, commands))
        self.stopping = self.stopping or isinstance(event, StopRequested)
        self._settle_end(commands)
        hold(self.end is None or not commands, f"commands after the end: {commands}")
        for command in commands:
            self.commands.append(command)
            self._carry_out(command)
        self.check_balance()
        self._check_left()
        self._check_going_on()
        self._check_due(event.at)
        if isinstance(event, StepDone | CheckpointDone) or len(self.log) % 64 == 0:  # it looks at every sample
            self._check_released()
        self._check_held()
        if self._due is not None:
            asked = any(isinstance(command, Checkpoint) for command in commands)
            hold(asked == self._due or self.end is not None, f"checkpoint of {self.trained}: {asked}, due: {self._due}")
            self._due = None
        if self.instant_checkpoints and self.end is None:
            self.settle("checkpoint")
        return commands

    def answer(self, key: Key, outcome: float | str | None = 1.0) -> list[AnyCommand]:
        """Answer a pending command. outcome: the reward; "given" (the workflow rewards 1.0 itself); "mixed"
        (0 and 1 within a group); "failed". A sample that no server can take meets its deadline; a check whose worker
        was lost, while no other is there, was made for the last time."""
        if not self.can_be_done(key):
            outcome = "failed" if key[0] == "sample" else None
        if key == ("restart", "trainer") and outcome != "failed":
            return self.go_back(max(self.checkpoints.points))
        if key[0] == "joining" and key[1] != "trainer":
            outcome = 1.0  # a run that can't be started is no matter of the core
        event = self._event(self.pending.pop(key), outcome)
        self._note(event)
        self.told.append(event)
        return self.send(event)

    def find(self, kind: str, *rest: str) -> list[Key]:
        return [key for key in self.pending if key[0] == kind and key[1 : 1 + len(rest)] == rest]

    def settle(self, *kinds: str, outcome: float | str | None = 1.0) -> "World":
        """Answer everything of these kinds, and what follows of these kinds, the oldest first."""
        while self.end is None and (keys := [key for key in self.pending if key[0] in kinds]):
            self.answer(keys[0], outcome)
        return self

    def roll_back(self, to: int) -> list[AnyCommand]:
        """The trainer dies and begins again with `to`, or with the next one before that to which it can go back."""
        if self.trainer.may_be_lost and not self.find("restart", "trainer"):
            self.lose_trainer()
        while not self.find("restart", "trainer"):
            self.wake()
        points = self.checkpoints.points
        commands = self.go_back(max((version for version in points if version <= to), default=points[0]))
        return [*commands, *self.answer(("joining", "trainer"))]

    def lose_trainer(self, why: str = "exit code -9") -> list[AnyCommand]:
        """Whatever it does at the moment."""
        for key in [*self.find("train"), *self.find("publish"), *self.find("checkpoint")]:
            self.late.append(self._event(self.pending.pop(key), 1.0))
        for kind in ("restart", "joining"):
            self.pending.pop((kind, "trainer"), None)
        event = Lost(at=self.tick(), peer="trainer", id="trainer", why=why)
        self._note(event)
        self.told.append(event)
        return self.send(event)

    def go_back(self, to: int) -> list[AnyCommand]:
        """The trainer, which was told to start again, begins with `to`."""
        restart = self.pending.pop(("restart", "trainer"))
        self._books_go_back(to)
        event = RolledBack(at=self.tick(), to=to, why="the trainer died")
        self.told.append(event)
        commands = self.send(event)
        hold(not any(self.find("sample", name) for name in self.held), "goes on below its floor")
        self.pending["joining", "trainer"] = restart
        return commands

    def resume(self, **changes: object) -> list[AnyCommand]:
        """The controller is killed; a new one comes to where the log ends, by these changes of the rules goes back to
        the newest checkpoint, and starts everything anew."""
        core = Orchestrator(self.first_rules)
        for number, (event, commands) in enumerate(self.log):
            hold(core.handle(event) == commands, f"event {number} of the log is not decided as before: {event}")
        self.core, self.end, self.stopping = core, None, False
        for books in (self.pending, self.told, self.late, self.servers, self.workers):
            books.clear()  # what was told of them is over
        self.rules = rules = replace(self.rules, **changes)
        self.checkpoints.rules = rules
        self.trainer = TrainerBook(rules.max_trainer_restarts)
        self.evaluations.resume(rules)
        back = max(self.checkpoints.points)
        self._books_go_back(back)
        commands = self.send(RolledBack(at=self.tick(), to=back, why="the controller was killed", resumed=rules))
        hold(not any(isinstance(command, Cancel | StartSample) for command in commands), "nobody is there")
        names = [("trainer", "trainer"), *(("rewards", name) for name in self._workers)]
        names += [("server", name) for name in self._servers[: rules.servers]]
        for peer, name in names:
            self.pending["joining", name] = Restart(peer=peer, id=name, why="")  # type: ignore[arg-type]
        unchecked = {name for name in self.done if self._is_open(name)} - {key[1] for key in self.find("score")}
        hold(not unchecked, f"nobody checks {unchecked}")
        return commands

    def _is_open(self, name: str) -> bool:
        book = self.groups[group_of(name)]
        return book.fate == "open" and int(name.partition(".")[2]) not in book.outcomes

    def _settle_end(self, commands: Sequence[AnyCommand]) -> None:
        """A run that is over cancels what isn't ready, unless it was stopped and can go on."""
        last = commands[-1] if commands else None
        if isinstance(last, Finish) and not (last.reason == "stopped" and self.checkpoints.points):
            for number, book in self.groups.items():
                if book.fate == "open":
                    self._settle_fate(number, "cancelled")

    def _books_go_back(self, to: int) -> None:
        for key in self.find("read"):
            self.late.append(self._event(self.pending.pop(key), 1.0))
        for number, book in self.groups.items():
            if book.fate != "open":
                continue
            if any(outcome != "failed" for outcome in book.outcomes.values()):  # nothing of it is generated again
                names = {sample_id(number, member) for member in range(self.rules.group_size)}
                known = {sample_id(number, member) for member in book.outcomes}
                self.held |= names - known - self.done.keys()
            else:
                self._again.add(book.position)
                self._settle_fate(number, "cancelled")
        self.branch += 1
        self.trained = to
        self.published = None
        self.checkpoints.go_back(to)
        self.evaluations.roll_back(to, [c for c in self.pending.values() if isinstance(c, Evaluate)])

    def run_out(self, order: int = 0, outcome: float | str | None = 1.0) -> Finish | Fail:
        """Answer whatever is pending until the end. order: picks which comes next. outcome: of samples and checks."""
        for count in range(100_000):
            if self.end is not None:
                return self.end
            keys = [key for key in self.pending if self.can_be_done(key)]
            if keys:
                key = keys[(order * (count + 1)) % len(keys)]
                self.answer(key, outcome if key[0] in ("sample", "score") else 1.0)
            else:
                hold(self.core.next_wakeup() is not None, f"nothing can happen: {self.core.waiting(self.clock)}")
                self.wake()
        raise Broken(f"no end: {self.core.waiting(self.clock)}")

    def lose(self, name: str, why: str = "exit code -9") -> list[AnyCommand]:
        """A server or a reward worker dies, whatever it does at the moment; what ran on it is carried on elsewhere, or
        waits."""
        for key in [*self.find("swap", name), *self.find("evaluate", name)]:
            self.late.append(self._event(self.pending.pop(key), 1.0))
            if key[0] == "evaluate":
                self.evaluations.failed()
        self.pending.pop(("restart", name), None)
        event = Lost(at=self.tick(), peer="server" if name in self.servers else "rewards", id=name, why=why)
        self._note(event)
        self.told.append(event)
        return self.send(event)

    def wake(self) -> list[AnyCommand]:
        """Let the time pass until the core wants to be woken."""
        due = self.core.next_wakeup()
        assert due is not None
        self.clock = max(self.clock, due)
        commands = self.send(Woke(at=self.clock))
        after = self.core.next_wakeup()
        hold(after is None or after > self.clock, f"woken at {self.clock}, and wants to be woken at {after}")
        return commands

    def holders(self, floor: int) -> list[str]:
        """Servers that hold this version of the present branch, or a newer one."""
        branch = self.branch
        return [name for name, book in self.servers.items() if book.holds[0] == branch and book.holds[1] >= floor]

    def can_be_done(self, key: Key) -> bool:
        """Whether what is pending doesn't wait for a server or a reward worker."""
        command = self.pending[key]
        if isinstance(command, Score):
            return any(book.works_since is not None for book in self.workers.values())
        return not isinstance(command, StartSample) or bool(self.holders(command.floor))

    @property
    def peers(self) -> dict[str, Book]:
        """Whatever is started again after it was lost."""
        return {**self.servers, **self.workers}

    @property
    def stranded(self) -> bool:
        """Whether no server will ever serve again."""
        return bool(self.servers) and all(book.gone for book in self.servers.values())

    @property
    def unchecked(self) -> bool:
        """Whether a reward worker was lost too often."""
        return any(book.gone for book in self.workers.values())

    # ------------------------------------------------------------------------------------------------- the books

    def fates(self, *names: str) -> int:
        return sum(self._fates[name] for name in names)

    def _settle_fate(self, number: int, fate: str) -> None:
        self._fates[self.groups[number].fate] -= 1
        self._fates[fate] += 1
        self.groups[number].fate = fate
        if fate == "ready":
            self.groups[number].ready = self.first + self.fates("handed") // self.rules.batch_groups
        if fate not in ("open", "ready", "handed"):
            self._left.append(number)

    @property
    def outstanding(self) -> int:
        return self.fates("open", "ready")

    @property
    def in_flight(self) -> int:
        size = self.rules.group_size
        return sum(
            size - sum(sample_id(number, member) in self.done or member in book.outcomes for member in range(size))
            for number, book in self.groups.items()
            if book.fate == "open"
        ) - len(self.held)

    def _carry_out(self, command: AnyCommand) -> None:
        hold(self.end is None, f"{command} after the end")
        match command:
            case ReadGroup():
                self._admit(command)
            case StartSample():
                self._start(command)
            case Score():
                hold(command.sample in self.done, "scores what isn't done")
                hold(command.sample not in self.checkpoints.released, "scores what was released")
                self.pending["score", command.sample, str(command.attempt)] = command
            case Train():
                self._train(command)
            case Publish():
                self._publish(command)
            case Swap():
                wrong = check_swap(
                    command,
                    self.published,
                    len(self.find("swap")),
                    bool(self.find("evaluate", command.server)),
                    self.rules,
                )
                hold(not wrong, wrong)
                hold(not self.find("swap", command.server), "two swaps at once")
                self.pending["swap", command.server] = command
            case Restart():
                book = self.peers.get(command.id, self.trainer)
                kinds = {**dict.fromkeys(self.servers, "server"), **dict.fromkeys(self.workers, "rewards")}
                hold(command.peer == kinds.get(command.id, "trainer"), f"{command}")
                back = max(self.checkpoints.points) if command.peer == "trainer" else 0
                hold(command.version == back, f"{command}, but training goes back to {back}")
                hold(book.due is not None and book.due <= self.clock, f"{command} at {self.clock}, due at {book.due}")
                book.due = None
                self.pending["restart", command.id] = command
            case Evaluate():
                hold(not self.find("evaluate"), "two evaluations at once")
                ends = self.prompts is not None
                held = self.servers[command.server].holds
                self.evaluations.begin(command, held, self.branch, trained=self.trained, ends=ends)
                self.pending["evaluate", command.server] = command
            case Cancel():
                self._cancel(command)
            case Finish():
                self._finish(command)
            case Fail():
                self.end = command
            case Checkpoint():
                hold(not self.find("train") and not self.find("publish"), "the trainer does one thing at a time")
                hold(not self.find("checkpoint"), "two checkpoints at once")
                self.checkpoints.begin(command, self.branch, self.trained)
                self.pending["checkpoint", str(command.version)] = command
            case Release():
                hold(not self._kept & set(command.samples), "releases what wasn't forgotten")
                hold(self.came >= set(command.samples), "releases what never came")
                self.checkpoints.release(command.samples, self._may_be_asked_for)
            case Forget():
                hold(all(name in self.came for name in command.samples), "forgets what never came")
                hold(len(set(command.samples)) == len(command.samples), "forgets twice")
                self._kept.difference_update(command.samples)

    def _finish(self, command: Finish) -> None:
        last = self.stopping or not self.rules.eval_every or self.stranded
        hold(last or self.evaluations.evaluated == self.trained, "the last version was not evaluated")
        safe = self.trainer.works_since is None or not self.checkpoints.is_due(self.trained, self.clock, stops=True)
        hold(command.reason != "stopped" or safe, "stops without a checkpoint")
        self.end = command

    def _admit(self, command: ReadGroup) -> None:
        hold(command.group == len(self.groups), "group ids are a running number")
        before = self._alive.get(command.position)
        hold(before is None or command.position in self._again, f"position {command.position} is in two groups")
        hold(command.position == min(self._again, default=command.position), f"{self._again} have to come first")
        self._again.discard(command.position)
        self._alive[command.position] = command.group
        book = self.groups[command.group] = GroupBook(command.position)
        self._fates["open"] += 1
        held = [book.holds[1] for book in self.servers.values() if book.holds[0] == self.branch]
        hold(bool(held), "admitted although no server holds weights of this branch")
        newest = max(held)
        rules = self.rules
        if rules.when_older == "drop":
            book.floor = int(self.core.story(str(command.group)).partition("floor ")[2].partition(",")[0])
            hold(book.floor in held, f"no server holds version {book.floor}")
        taken = self.first * rules.batch_groups + self.fates("handed") + self.outstanding
        limit = (newest + rules.max_staleness + 1) * rules.batch_groups
        hold(taken <= limit, f"Eq. 3: {taken} groups, {limit} allowed")
        self.pending["read", str(command.group)] = command
        if len(self.groups) % 16 == 0:  # it looks at every group
            hold(self.in_flight <= self.rules.max_concurrent, f"{self.in_flight} samples in flight")

    def _start(self, command: StartSample) -> None:
        server = self.servers[command.server]
        branch, version = server.holds
        book = self.groups[group_of(command.sample)]
        hold(command.sample not in self.done, f"{command.sample} is generated again")
        if command.sample in self.held:
            self.held.discard(command.sample)
            hold(self.in_flight <= self.rules.max_concurrent, f"{self.in_flight} samples in flight")
        if self.holders(command.floor):
            hold(branch != -1, "placed on a server that was lost, another is there")
            hold(branch == self.branch, "placed on a server of an older branch")
            hold(version >= command.floor, f"placed below its floor {command.floor}: {version}")
            self.oldest[command.sample, command.attempt] = version
        else:
            hold(server.lives > 0, "placed on a server that never held its floor")
        self.placed[command.sample, command.attempt] = command.server, server.lives
        hold(book.floor in (None, command.floor), "the floor of a group changed")
        hold(book.position == command.position, "position")
        book.floor = command.floor
        self.pending["sample", command.sample, str(command.attempt)] = command

    def _train(self, command: Train) -> None:
        rules = self.rules
        busy = [*self.find("train"), *self.find("publish"), *self.find("checkpoint"), *self.find("joining", "trainer")]
        hold(not busy and self.trainer.works_since is not None, "the trainer does one thing at a time")
        hold(command.step == self.trained and command.branch == self.branch, f"step {command.step} out of order")
        hold(len(command.groups) == rules.batch_groups, f"{len(command.groups)} groups in a step")
        before = self.formed.get(command.step)
        split = rules.ranks, rules.max_tokens_per_microbatch
        if before is not None:  # after a rollback: the same batch
            hold(_content(before) == _content(command), "another batch at a replay")
            same = self._split[command.step] != split or before.minibatches == command.minibatches
            hold(same, "a batch is split in another way, although nothing changed")
        else:
            hold(all(self.groups[number].fate == "ready" for number in command.groups), "trains what isn't ready")
            self.history.append(command)
            self._check_turn(command)
        self.formed[command.step] = command
        self._split[command.step] = split
        for number in command.groups:
            self._settle_fate(number, "handed")
            self.step_of[number] = command.step
        members = [sample_id(number, member) for number in command.groups for member in self._trained(number)]
        hold([sample.sample for sample in command.samples] == members, f"trains {command.samples}, not {members}")
        for sample in command.samples:
            hold(sample.attempt == self.done[sample.sample].attempt, "trains an attempt that isn't the finished one")
            hold(sample.sample in self._kept or before is not None, f"{sample.sample} is in memory no longer")
            hold(sample.sample not in self.checkpoints.released, f"{sample.sample} was released")
        floors = {name: self.groups[group_of(name)].floor or 0 for name in members}
        broken = [*promises.age(command, self.done, floors, rules), *promises.split(command, self.done, rules)]
        hold(not broken, "; ".join(broken))
        if rules.when_older == "drop" and before is None:
            self._drop(command.step + 1)
        self.pending["train", str(command.step)] = command

    def _drop(self, step: int) -> None:
        """Groups that can't be trained in `step` or later without a token over the bound."""
        for number, book in self.groups.items():
            if book.fate not in ("open", "ready") or (book.floor or 0) + self.rules.max_staleness >= step:
                continue
            failed = sum(outcome == "failed" for outcome in book.outcomes.values())
            had_fate = self.rules.group_size - len(self._trained(number)) if book.fate == "ready" else failed
            self._stale_samples += self.rules.group_size - had_fate
            if self.rules.requeue:
                self._again.add(book.position)
            read = self.pending.pop(("read", str(number)), None)
            if read is not None:
                self.late.append(self._event(read, 1.0))
            self._settle_fate(number, "stale")

    def _answers(self, number: int) -> dict[int, SampleDone]:
        names = {member: sample_id(number, member) for member in range(self.rules.group_size)}
        return {member: self.done[name] for member, name in names.items() if name in self.done}

    def _trained(self, number: int) -> list[int]:
        return expected.trained(self.rules, self.groups[number].outcomes, self._answers(number))

    def _publish(self, command: Publish) -> None:
        hold(command.version == self.trained and command.branch == self.branch, "publishes what isn't there")
        loading = [swap.version for key, swap in self.pending.items() if isinstance(swap, Swap)]
        hold(not set(command.free) & set(loading), "frees what a server loads")
        hold(self.published is None or self.published[1] not in command.free, "frees the newest version")
        self.pending["publish", str(command.version)] = command

    def _cancel(self, command: Cancel) -> None:
        keys = [
            key
            for key in self.pending
            if key[0] in ("sample", "score") and key[1:] == (command.sample, str(command.attempt))
        ]
        hold(len(keys) == 1, f"cancels {command.sample}, which isn't under way")
        self.late.append(self._event(self.pending.pop(keys[0]), 1.0))

    def _event(self, command: AnyCommand, outcome: float | str | None) -> AnyEvent:
        versions = (self.trained, 0)
        if isinstance(command, StartSample):
            held = [self.servers[name].holds[1] for name in self.holders(command.floor)] or [command.floor]
            versions = self.oldest.get((command.sample, command.attempt), min(held)), max(held)
        return event_of(command, outcome, at=self.tick(), prompts=self.prompts, versions=versions)


def _content(train: Train) -> tuple[object, ...]:
    return train.groups, train.samples, train.mask_below
