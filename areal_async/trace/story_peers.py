"""The stories of who works for a run: a server, a reward worker, the trainer.

What always holds: what a server did between two swaps is counted, not listed (`ls --id` lists it); an answer counts for
the server on which it was placed, wherever it was ended.
"""

from collections import Counter
from collections.abc import Iterator

from areal_async.log.turns import Turn
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Checkpoint,
    CheckpointDone,
    Evaluate,
    EvaluationDone,
    Fail,
    Failed,
    Finish,
    Joined,
    Lost,
    Note,
    Published,
    Restart,
    RolledBack,
    Rules,
    SampleDone,
    StartSample,
    StepDone,
    Swap,
    Swapped,
    Train,
    Version,
)
from areal_async.trace.lives import Lives
from areal_async.trace.things import nearest
from areal_async.trace.words import count, first_line, long, number, tail


class ServerStory:
    def __init__(self, name: str, rules: Rules) -> None:
        self._name = name
        self._lives = Lives(rules)
        self._names: set[str] = set()
        self._version: Version = -1
        self._since = 0.0
        self._done: Counter[str] = Counter()
        self._running = 0
        self._asked_at: float | None = None

    @property
    def known(self) -> str:
        names = nearest(self._name, self._names)
        return (
            f"the servers are {names} (a bare number is a group: write server {names[0]})" if names else "none joined"
        )

    def take(self, turn: Turn) -> Iterator[tuple[float, str]]:
        event = turn.event
        self._count(event)
        yield from ((event.at, text) for text in self._happened(event))
        for command in turn.commands:
            yield from ((event.at, text) for text in self._commanded(command, event.at))
        for note in turn.notes:
            self._noted(note)
        self._lives.take(turn)
        if turn.last:
            yield from ((event.at, text) for text in self._did(event.at, "the log ends"))

    def _count(self, event: AnyEvent) -> None:
        match event:
            case SampleDone():
                _, sample = self._lives.find(event.sample)
                if sample is not None and sample.server == self._name and sample.attempt == event.attempt:
                    self._done["answers"] += 1
                    self._done["tokens"] += event.length
                    self._running -= 1
            case Failed(of="sample"):
                _, sample = self._lives.find(event.id)
                if sample is not None and sample.server == self._name and sample.attempt == event.attempt:
                    self._done["failed"] += 1
                    self._running -= 1
            case Joined(peer="server"):
                self._names.add(event.id)

    def _happened(self, event: AnyEvent) -> Iterator[str]:
        match event:
            case Joined(peer="server", id=name) if name == self._name:
                self._since = event.at
                yield "joins; it holds no weights of the run yet"
            case Lost(peer="server", id=name) if name == self._name:
                yield from self._did(event.at, "")
                yield from _loss(event)
                self._version = -1
                if self._running > 0:
                    running = count(self._running, "sample")
                    yield f"  {running} that ran on it go on elsewhere, from the tokens that came"
                self._running = 0
            case Swapped(server=name) if name == self._name:
                yield from self._did(event.at, "")
                took = "" if self._asked_at is None else f" {long(event.at - self._asked_at)} after it was told to"
                self._version = event.version
                pause = f"pause {long(event.pause_s)}"
                yield f"answers with version {event.version}, branch {event.branch},{took}; {pause}"
            case Failed(of="swap", id=name) if name == self._name:
                yield f"the swap fails, and it goes on with what it has: {first_line(event.why)}"
            case Failed(of="server", id=name) if name == self._name:
                yield from self._did(event.at, "")
                yield f"is left alone for good: {first_line(event.why)}"
            case EvaluationDone(server=name) if name == self._name:
                score = f"score {number(event.score)} of {event.n} problems, {event.tokens:,} tokens"
                yield f"has evaluated version {event.version}: {score} in {long(event.seconds)}"
            case RolledBack():
                yield from self._back(event)

    def _back(self, event: RolledBack) -> Iterator[str]:
        if self._name not in self._names:
            return
        if event.resumed is not None:
            yield from self._did(event.at, "")
            yield "the run is resumed by a new controller: it is started anew"
            self._running, self._version = 0, -1
        else:
            yield f"training goes back to version {event.to}: nothing is placed on it until it has that"

    def _commanded(self, command: AnyCommand, at: float) -> Iterator[str]:
        match command:
            case StartSample(server=name) if name == self._name:
                self._done["placed"] += 1
                self._running += 1
            case Cancel():
                _, sample = self._lives.find(command.sample)
                if sample is not None and sample.state == "running" and sample.server == self._name:
                    self._done["stopped"] += 1
                    self._running -= 1
            case Swap(server=name) if name == self._name:
                self._asked_at = at
                yield f"is told to load version {command.version}, branch {command.branch}"
            case Restart(peer="server", id=name) if name == self._name:
                yield "is started again"
            case Evaluate(server=name) if name == self._name:
                yield f"is to evaluate version {command.version}; it gets no other until then"

    def _noted(self, note: Note) -> None:
        if note.data.get("from") == note.data.get("to"):
            return
        if note.data.get("from") == self._name:
            self._done["left"] += 1
        elif note.data.get("to") == self._name:
            self._done["came"] += 1

    def _did(self, at: float, end: str) -> Iterator[str]:
        """What it did since the last such line."""
        done, self._done = self._done, Counter()
        since, self._since = self._since, at
        if not done:
            return
        texts = [f"{count(done['placed'], 'sample')} placed", f"{count(done['answers'], 'answer')} of"]
        texts[1] += f" {count(done['tokens'], 'token')}"
        for key, words in _COUNTED.items():
            if done[key]:
                texts.append(f"{done[key]} {words}")
        holding = f"with version {self._version}" if self._version >= 0 else "without weights"
        yield f"  in {long(at - since)} {holding}: {', '.join(texts)}" + (f"; {end}" if end else "")


_COUNTED = {
    "failed": "failed",
    "stopped": "stopped",
    "left": "moved to other servers",
    "came": "moved here from others",
}


class WorkerStory:
    """Which worker makes a check isn't in the log: it is the pool's choice, and the core hears the result alone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._names: set[str] = set()

    @property
    def known(self) -> str:
        return f"the reward workers are {nearest(self._name, self._names) or 'none'}"

    def take(self, turn: Turn) -> Iterator[tuple[float, str]]:
        event = turn.event
        match event:
            case Joined(peer="rewards"):
                self._names.add(event.id)
                if event.id == self._name:
                    yield event.at, "joins: checks are given to it"
            case Lost(peer="rewards", id=name) if name == self._name:
                yield from ((event.at, text) for text in _loss(event))
                yield event.at, "  the checks that it had are made by others, or wait"
            case RolledBack() if event.resumed is not None and self._name in self._names:
                yield event.at, "the run is resumed by a new controller: it is started anew"
        for command in turn.commands:
            if isinstance(command, Restart) and (command.peer, command.id) == ("rewards", self._name):
                yield event.at, "is started again"


class TrainerStory:
    def __init__(self, rules: Rules) -> None:
        self._lives = Lives(rules)
        self._asked_at = 0.0
        self._idle_since: float | None = None
        self.known = "it never joined"

    def take(self, turn: Turn) -> Iterator[tuple[float, str]]:
        before = self._lives.version
        self._lives.take(turn)
        at = turn.event.at
        yield from ((at, text) for text in self._happened(turn.event, before))
        for command in turn.commands:
            yield from ((at, text) for text in self._commanded(command, at))

    def _happened(self, event: AnyEvent, before: Version) -> Iterator[str]:
        match event:
            case Joined(peer="trainer"):
                yield f"joins with version {event.version}"
            case StepDone():
                named = [name for name in ("loss", "grad_norm", "entropy") if name in event.metrics]
                told = "".join(f", {name} {number(event.metrics[name])}" for name in named)
                left_out = f"; the update was left out: {first_line(event.skipped)}" if event.skipped else ""
                yield f"step {event.step} is done after {long(event.at - self._asked_at)}{told}{left_out}"
                self._asked_at = event.at
            case Published():
                self._idle_since = event.at
                yield f"version {event.version}, branch {event.branch}, is published: {count(event.nbytes, 'byte')}"
            case CheckpointDone():
                self._idle_since = event.at
                size = f"{count(event.nbytes, 'byte')} in {long(event.seconds)}"
                yield f"the checkpoint of version {event.version} is complete: {size}"
            case Failed(of="train" | "publish" | "checkpoint"):
                yield f"{event.of} {event.id} failed: {first_line(event.why)}"
            case Lost(peer="trainer"):
                yield from _loss(event)
            case RolledBack():
                who = "the run is resumed" if event.resumed is not None else "after its loss"
                yield f"goes back from version {before} to {event.to}, branch {self._lives.branch} ({who})"

    def _commanded(self, command: AnyCommand, at: float) -> Iterator[str]:
        match command:
            case Train():
                waited = "" if self._idle_since is None else f", after {long(at - self._idle_since)} without work"
                self._asked_at, self._idle_since = at, None
                groups, samples = count(len(command.groups), "group"), count(len(command.samples), "sample")
                yield f"trains step {command.step}, branch {command.branch}: {groups}, {samples}{waited}"
            case Checkpoint():
                yield f"is to write the checkpoint of version {command.version}"
            case Restart(peer="trainer"):
                yield f"is started again, with version {command.version}"
            case Finish():
                yield f"the run ends ({command.reason})"
            case Fail():
                yield f"the run fails: {first_line(command.why)}"


def _loss(event: Lost) -> Iterator[str]:
    yield f"lost: {first_line(event.why)}"
    yield from (f"    {line}" for line in tail(event.why))
