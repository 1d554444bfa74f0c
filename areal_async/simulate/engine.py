"""A run in virtual time: the core decides, as in a real one, and models answer it instead of workers.

    figures = simulate(rules, cluster)

What always holds: every command of the core is answered by the event that its docstring names, at the time that a model
says, and time passes in no other way, so the same rules, cluster and seed give the same figures on any machine; what
happens at the same time is handled in the order in which it was brought about. A lost server's answers go on elsewhere
by the rule of real ones (`core.routing`), from the tokens that had arrived.

Happenings lie in one heap by their time. A server has one in it, the end of its next answer; whatever changes its pace
voids that one and puts in another, once all that happens at this time is known.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Final, TypeAlias

from msgspec.structs import replace

from areal_async.core.orchestrator import Orchestrator
from areal_async.core.routing import least_loaded
from areal_async.errors import RunFailed
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Checkpoint,
    CheckpointDone,
    Evaluate,
    EvaluationDone,
    Fail,
    Finish,
    Forget,
    GroupRead,
    Joined,
    Lost,
    Publish,
    Published,
    ReadGroup,
    Release,
    Restart,
    Rules,
    SampleDone,
    SampleId,
    Score,
    Scored,
    StartSample,
    StepDone,
    Swap,
    Swapped,
    Train,
    Verdict,
    Woke,
)
from areal_async.simulate.figures import Figures, Tally
from areal_async.simulate.models import Cluster, ServerModel, slowed
from areal_async.simulate.servers import Answering, Server
from areal_async.simulate.trainers import Work, train_s

HOUR_S: Final = 3600.0
FREQUENT: Final = (SampleDone, Scored, GroupRead)  # events after which nobody wants to be woken at another time

Progress: TypeAlias = Callable[[int, float], None]
"""Told of each step that is done: how many are, and the virtual time in seconds."""


def simulate(rules: Rules, cluster: Cluster, seed: int = 0, progress: Progress | None = None) -> Figures:
    """A whole run by these rules. `rules.servers` is taken from the cluster. seed: of failures.

    Raises ValueError for rules that no run could follow, and RunFailed where the core ends the run with `Fail`.
    """
    engine = _Engine(replace(rules, servers=cluster.servers), cluster, seed, progress)
    with _without_garbage_collection():
        return engine.run()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """It would look at all that is in flight, again and again (a third of a large simulation's time), and find nothing:
    what a sample needs ends with it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Engine:
    def __init__(self, rules: Rules, cluster: Cluster, seed: int, progress: Progress | None) -> None:
        self._rules = rules
        self._cluster = cluster
        self._seed = seed
        self._progress = progress
        self._core = Orchestrator(rules)
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []  # what happens, by time, then in this order
        self._order = self._turn = 0  # of the latest that was put in, and of the present one
        self._inbox: deque[AnyEvent] = deque()  # of this very time
        self._end = ""
        self._alarm: float | None = None
        self._servers = [Server(str(number), cluster.server, cluster.swap) for number in range(cluster.servers)]
        self._by_name = {server.name: server for server in self._servers}
        self._live: dict[str, Server] = {}  # in the order in which they joined
        self._changed: list[Server] = []
        self._when_ended = {server.name: partial(self._answers_end, server) for server in self._servers}
        self._lost_at: dict[str, float] = {}
        self._swaps: dict[str, Swap] = {}  # under way, by server
        self._answers: dict[SampleId, Answering] = {}  # until they are trained, or not wanted any more
        self._looking: list[Answering] = []  # for a server that holds their floor
        self._workers_free: deque[float] = deque(maxlen=cluster.rewards.workers)  # when each is, the earliest first
        self._checks: deque[Scored] = deque()  # all checks take as long, so they end in the order in which they began
        self._stale = False  # what is stopped or forgotten now is, for its age
        self._generating = 0  # servers
        self._work: Work | None = None  # the step that is being trained
        self._slowed = slowed(cluster.server)
        self._tally = Tally(rules, cluster)
        self._carry_out: dict[type[AnyCommand], Callable[..., None]] = {
            ReadGroup: self._read,
            StartSample: self._start,
            Score: self._score,
            Train: self._train,
            Publish: self._publish,
            Swap: self._swap,
            Restart: self._restart,
            Evaluate: self._evaluate,
            Checkpoint: self._checkpoint,
            Cancel: self._cancel,
            Forget: self._forget,
            Release: self._release,
            Finish: self._finish,
            Fail: self._fail,
        }

    def run(self) -> Figures:
        start_s = self._cluster.start_s
        self._tell(start_s, Joined(at=start_s, peer="trainer", id="trainer"))
        self._tell(start_s, Joined(at=start_s, peer="rewards", id="rewards.0"))
        for server in self._servers:
            self._at(start_s, partial(self._join, server))
        inbox, heap, checks = self._inbox, self._heap, self._checks
        while not self._end:
            if inbox:
                self._handle(inbox.popleft())
                continue
            if self._changed:
                self._look_again()
            if checks and (not heap or checks[0].at <= heap[0][0]):
                self._now = checks[0].at
                self._handle(checks.popleft())
            elif heap:
                self._now, self._turn, act = heappop(heap)
                act()
            else:
                raise RunFailed(f"nothing can happen any more at {self._now:g} s: {self._core.waiting(self._now)}")
        left = sum(answer.length for answer in self._answers.values())
        return self._tally.figures(self._now, self._end, self._servers, left, self._core.balance())

    def _handle(self, event: AnyEvent) -> None:
        self._tally.events += 1
        commands = self._core.handle(event)
        self._stale = False
        for command in commands:
            self._carry_out[type(command)](command)
        if not isinstance(event, FREQUENT):
            self._set_alarm()

    def _at(self, at: float, act: Callable[[], None]) -> int:
        self._order += 1
        heappush(self._heap, (at, self._order, act))
        return self._order

    def _tell(self, at: float, event: AnyEvent) -> None:
        """The core hears of it then."""
        if at <= self._now:
            self._inbox.append(event)
        else:
            self._at(at, partial(self._inbox.append, event))

    def _set_alarm(self) -> None:
        wakeup = self._core.next_wakeup()
        if wakeup is not None and wakeup != self._alarm:
            self._at(max(wakeup, self._now), partial(self._wake, wakeup))
        self._alarm = wakeup

    def _wake(self, wakeup: float) -> None:
        if wakeup == self._alarm:
            self._alarm = None
            self._inbox.append(Woke(at=self._now))

    # ----------------------------------------------------------------------------------------------- groups and samples

    def _read(self, command: ReadGroup) -> None:
        prompt = self._cluster.answers.answer(command.group, 0, 0).prompt_tokens
        self._inbox.append(GroupRead(at=self._now, group=command.group, row=command.position, prompt_tokens=prompt))

    def _start(self, command: StartSample) -> None:
        group, _, member = command.sample.partition(".")
        what = self._cluster.answers.answer(int(group), int(member), command.attempt)
        self._order += 1
        answer = self._answers[command.sample] = Answering(
            command.sample, command.attempt, int(group), command.floor, what, self._order
        )
        self._ask(answer, command.server)

    def _ask(self, answer: Answering, preferred: str) -> None:
        """The server where it was placed, if that is there and holds the floor; else as sessions of real runs choose;
        else it waits for one. (As `rollout.fleet.Fleet.find` does.)"""
        server = self._live.get(preferred)
        if server is None or server.version < answer.floor:
            server = least_loaded(self._live.values(), answer.floor)
        if server is None:
            self._looking.append(answer)
            return
        server.ask(answer, self._now)
        self._note(server)

    def _answers_end(self, server: Server) -> None:
        if server.due != self._turn:
            return  # its pace has changed meanwhile
        for answer in server.end(self._now):
            answer.past = server.spans(answer)
            self._tally.finished(answer)
            oldest, newest = answer.versions()
            heard_at = self._now + self._cluster.server.request_s
            self._tell(
                heard_at,
                SampleDone(
                    at=heard_at,
                    sample=answer.sample,
                    attempt=answer.attempt,
                    oldest=oldest,
                    newest=newest,
                    prompt_tokens=answer.prompt,
                    length=answer.length,
                    loss_tokens=answer.length,
                    finish="length" if answer.truncated else "stop",
                ),
            )
        server.begin(self._now)
        self._note(server)

    def _score(self, command: Score) -> None:
        rewards, free = self._cluster.rewards, self._workers_free
        begins = max(self._now, free[0]) if len(free) == rewards.workers else self._now
        ends = begins + rewards.check_s
        free.append(ends)  # the worker that gets this check falls out
        reward = self._answers[command.sample].reward
        verdict: Verdict = "infrastructure" if reward is None else "right" if reward > 0 else "wrong"
        self._checks.append(
            Scored(at=ends, sample=command.sample, attempt=command.attempt, verdict=verdict, reward=reward)
        )

    def _cancel(self, command: Cancel) -> None:
        """(A check goes on: the time of a worker, for what nobody waits for.)"""
        answer = self._answers[command.sample]
        if answer.ended:
            return  # it is being checked
        del self._answers[command.sample]
        if answer.server is None:
            self._looking.remove(answer)
            tokens = answer.kept
        else:
            tokens = answer.server.stop(answer, self._now)
            self._note(answer.server)
        self._tally.unfinished += tokens
        if self._stale:
            self._tally.dropped(tokens, finished=False)

    def _forget(self, command: Forget) -> None:
        for sample in command.samples:
            answer = self._answers.pop(sample, None)
            if answer is None:
                continue  # it was trained
            if self._stale:
                self._tally.dropped(answer.length, finished=True)
            else:
                self._tally.discarded += answer.length

    def _release(self, command: Release) -> None:
        """There is no disk."""

    # ------------------------------------------------------------------------------------------------------ the trainer

    def _train(self, command: Train) -> None:
        batch = [self._answers.pop(entry.sample) for entry in command.samples]
        self._tally.train(self._now, command, batch)
        self._stale = self._rules.when_older == "drop"
        lengths = [answer.prompt + answer.length for answer in batch]
        trainer = self._cluster.trainer
        seconds = train_s(trainer, command.minibatches, lengths)
        self._work = Work(command, seconds, trainer.beside_generation, self._now)
        self._look_when_trained(self._work)
        self._slow_servers(self._slowed)

    def _look_when_trained(self, work: Work) -> None:
        """When the step that is under way ends, by how many servers generate from now on."""
        ends_at = work.end(self._now, self._generating / len(self._servers))
        work.due = self._at(ends_at, partial(self._step_done, work))

    def _slow_servers(self, model: ServerModel) -> None:
        """The trainer has begun or ended a step, beside which they are slower."""
        if self._slowed is not self._cluster.server:
            for server in self._servers:
                server.use(model, self._now)
                self._note(server)

    def _step_done(self, work: Work) -> None:
        if work.due != self._turn:
            return  # it has become slower or faster meanwhile
        command, self._work = work.command, None
        self._slow_servers(self._cluster.server)
        self._tally.step_done(self._now)
        self._inbox.append(StepDone(at=self._now, step=command.step, branch=command.branch, metrics={}))
        if self._progress is not None:
            self._progress(command.step + 1, self._now)

    def _publish(self, command: Publish) -> None:
        self._at(self._now + self._cluster.trainer.publish_s, partial(self._published, command))

    def _published(self, command: Publish) -> None:
        self._tally.published(self._now)
        version, branch = command.version, command.branch
        self._inbox.append(Published(at=self._now, version=version, branch=branch, location="", nbytes=0))

    def _checkpoint(self, command: Checkpoint) -> None:
        seconds = self._cluster.trainer.checkpoint_s
        at = self._now + seconds
        self._tell(at, CheckpointDone(at=at, version=command.version, branch=command.branch, seconds=seconds, nbytes=0))

    def _evaluate(self, command: Evaluate) -> None:
        """Takes no time: a simulation tells of training alone."""
        self._inbox.append(
            EvaluationDone(
                at=self._now, version=command.version, server=command.server, score=0.0, n=0, tokens=0, seconds=0.0
            )
        )

    # ---------------------------------------------------------------------------------------------------------- servers

    def _join(self, server: Server) -> None:
        server.join(self._now)
        self._live[server.name] = server
        self._inbox.append(Joined(at=self._now, peer="server", id=server.name))
        hours = self._cluster.failures.server_hours
        if hours > 0:
            lasts_s = Random(f"{self._seed}/{server.name}/{server.life}").expovariate(1 / (hours * HOUR_S))
            self._at(self._now + lasts_s, partial(self._lose, server))

    def _lose(self, server: Server) -> None:
        del self._live[server.name]
        self._lost_at[server.name] = self._now
        orphans = server.lose(self._now)
        self._note(server)
        self._handle(Lost(at=self._now, peer="server", id=server.name, why="a failure of the plan"))
        for answer in orphans:
            if not answer.over:
                self._tally.inferred += answer.arrived
                self._tally.continued += 1
                answer.server = None
                self._ask(answer, server.name)

    def _restart(self, command: Restart) -> None:
        assert command.peer == "server", f"a simulation loses servers alone, and {command.peer} is to start again"
        self._tally.restarts += 1
        joins_at = max(self._now, self._lost_at[command.id] + self._cluster.failures.restart_s)
        self._at(joins_at, partial(self._join, self._by_name[command.id]))

    def _swap(self, command: Swap) -> None:
        server = self._by_name[command.server]
        self._swaps[command.server] = command
        loaded_at = server.swap(command.version, self._now)
        if loaded_at is not None:
            self._at(loaded_at, partial(self._swapped, server, server.life))
        self._note(server)

    def _swapped(self, server: Server, life: int) -> None:
        if server.life != life:
            return  # it was lost meanwhile
        pause_s = self._cluster.swap.pause_s(server.running)
        server.swapped(self._now)
        command = self._swaps.pop(server.name)
        self._tally.swaps += 1
        self._tally.swap_pause_s += pause_s
        self._note(server)
        self._inbox.append(
            Swapped(at=self._now, server=server.name, version=command.version, branch=command.branch, pause_s=pause_s)
        )
        looking, self._looking = self._looking, []
        for answer in looking:
            self._ask(answer, "")

    def _note(self, server: Server) -> None:
        """What runs there may have changed; its next end is looked up before time passes."""
        if server.changed and not server.noted:
            server.noted = True
            self._changed.append(server)

    def _look_again(self) -> None:
        generating = self._generating
        for server in self._changed:
            server.changed = server.noted = False
            busy = server.is_busy
            if busy != server.was_busy:
                server.was_busy = busy
                self._generating += 1 if busy else -1
                self._tally.busy(self._now, 1 if busy else -1)
            loaded_at = server.drained(self._now)
            if loaded_at is not None:
                self._at(loaded_at, partial(self._swapped, server, server.life))
            at = server.next_end()
            server.due = -1 if at is None else self._at(at, self._when_ended[server.name])
        self._changed.clear()
        slower = self._cluster.trainer.beside_generation != 1
        if slower and self._work is not None and self._generating != generating:
            self._look_when_trained(self._work)

    # --------------------------------------------------------------------------------------------------------- the end

    def _finish(self, command: Finish) -> None:
        self._end = command.reason

    def _fail(self, command: Fail) -> None:
        raise RunFailed(f"at {self._now:g} s of the simulated run: {command.why}")
