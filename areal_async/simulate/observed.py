"""What a recorded run has measured: when each answer, step, check, swap and checkpoint began and ended.

What always holds: only what nothing disturbed is told. A server's `Life` begins when it serves after its start and ends
at its loss, at an evaluation (whose answers the log doesn't have) or at a resume; answers and swaps count where they
began and ended in one life, without a request that had to be sent again; steps, where the trainer wasn't lost between
`Train` and `StepDone`. All times are on the run clock, in seconds.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from areal_async.errors import ConfigError
from areal_async.log.turns import Turn, read_turns, taken
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Checkpoint,
    CheckpointDone,
    Evaluate,
    Failed,
    GroupId,
    GroupRead,
    Lost,
    Publish,
    Published,
    RolledBack,
    Rules,
    SampleDone,
    SampleId,
    Score,
    Scored,
    StartSample,
    StepDone,
    Swapped,
    Train,
    group_of,
)

AGAIN: Final = ("continued", "repeated")  # notes: a request of this sample was sent again


@dataclass(slots=True, eq=False)
class Seen:
    """An answer. prompt: tokens. began: it was asked for. ended: it came, or was given up. done: what came, None where
    it didn't. usable: nothing disturbed it. reward: None where it has none (yet)."""

    sample: SampleId
    prompt: int
    began: float
    ended: float = math.inf
    done: SampleDone | None = None
    usable: bool = True
    reward: float | None = None


@dataclass(slots=True)
class Pause:
    """A server stood still for new weights from `began` on, until `ended`. running: answers that were stopped."""

    began: float
    ended: float
    running: int


@dataclass(slots=True)
class Life:
    """One server, from its first weights until it was disturbed. answers: all that ran on it in that time."""

    server: str
    began: float
    ended: float = 0.0
    answers: list[Seen] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """microbatches[m][r]: rank r's micro-batches in minibatch m, each the lengths of its sequences (prompt and response
    tokens)."""

    step: int
    began: float
    ended: float
    microbatches: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]


@dataclass(slots=True)
class Observed:
    """began: when all had joined, so that work could begin. ended: when the last step was done. publish, checkpoints:
    how long each took. checks: when each was asked for and ended. groups: answers of each group, in the order of
    admission, of groups of which all came."""

    rules: Rules
    began: float
    ended: float
    lives: list[Life]
    steps: list[Step]
    publish: list[float]
    checkpoints: list[float]
    checks: list[tuple[float, float]]
    groups: list[list[Seen]]


def observe(folder: Path) -> Observed:
    """folder: of the log. Errors: LogError; ConfigError where nothing was recorded that could be measured."""
    recorded = read_turns(folder)
    if recorded is None:
        raise ConfigError(f"{folder}: the run recorded nothing; name a run that has trained for some steps")
    watch = _Watch(recorded.rules)
    for _ in taken(folder, recorded.turns, watch.see):
        pass
    return watch.told(folder)


class _Watch:
    """Reads turn by turn."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._now = 0.0
        self._first_at: float | None = None  # the first answer was asked for
        self._prompts: dict[GroupId, int] = {}  # tokens
        self._lives: dict[str, Life] = {}  # of servers that serve undisturbed
        self._over: list[Life] = []
        self._running: dict[SampleId, tuple[str, Seen]] = {}
        self._done: dict[SampleId, Seen] = {}
        self._checks: dict[SampleId, float] = {}
        self._train: tuple[float, Train] | None = None
        self._publish: float | None = None
        self._checkpoint: float | None = None
        self._out = Observed(rules, 0.0, 0.0, [], [], [], [], [], [])

    def see(self, turn: Turn) -> None:
        self._now = turn.event.at
        self._event(turn.event)
        for command in turn.commands:
            self._command(command)
        for note in turn.notes:
            if note.what in AGAIN:
                self._again(str(note.data["sample"]), str(note.data["to"]))

    def told(self, folder: Path) -> Observed:
        out = self._out
        if self._first_at is None or not out.steps or not self._done:
            raise ConfigError(f"{folder}: the run has trained no step; name one that has trained for some steps")
        for server in list(self._lives):
            self._disturbed(server)
        out.began, out.lives = self._first_at, self._over
        size = self._rules.group_size
        groups: dict[GroupId, list[Seen]] = {}
        for sample, seen in self._done.items():
            groups.setdefault(group_of(sample), []).append(seen)
        out.groups = [_in_order(groups[group]) for group in sorted(groups) if len(groups[group]) == size]
        return out

    def _event(self, event: AnyEvent) -> None:
        match event:
            case Swapped():
                self._swapped(event)
            case GroupRead():
                self._prompts[event.group] = event.prompt_tokens
            case SampleDone():
                self._sample_done(event)
            case Failed(of="sample"):
                self._stop(event.id)
            case Failed(of="train"):
                self._train = None
            case Failed(of="server"):
                self._disturbed(event.id)
            case Scored():
                if (asked := self._checks.pop(event.sample, None)) is not None:
                    self._out.checks.append((asked, event.at))
                if (seen := self._done.get(event.sample)) is not None:
                    seen.reward = event.reward
            case StepDone():
                self._step_done(event)
            case Published():
                if self._publish is not None:
                    self._out.publish.append(event.at - self._publish)
                self._publish = None
            case CheckpointDone():
                if self._checkpoint is not None:
                    self._out.checkpoints.append(event.at - self._checkpoint)
                self._checkpoint = None
            case Lost(peer="server"):
                self._disturbed(event.id)
            case Lost(peer="trainer"):
                self._train = self._publish = self._checkpoint = None
            case Lost(peer="rewards"):
                self._checks.clear()
            case RolledBack():
                self._rolled_back(event)

    def _command(self, command: AnyCommand) -> None:
        match command:
            case StartSample():
                if self._first_at is None:
                    self._first_at = self._now
                self._stop(command.sample)
                life = self._lives.get(command.server)
                prompt = self._prompts[group_of(command.sample)]
                seen = Seen(command.sample, prompt, self._now, usable=life is not None)
                self._running[command.sample] = command.server, seen
                if life is not None:
                    life.answers.append(seen)
            case Cancel():
                self._stop(command.sample)
                self._checks.pop(command.sample, None)
            case Score():
                self._checks[command.sample] = self._now
            case Train():
                self._train = self._now, command
            case Publish():
                self._publish = self._now
            case Checkpoint():
                self._checkpoint = self._now
            case Evaluate():
                self._disturbed(command.server)

    def _swapped(self, event: Swapped) -> None:
        life = self._lives.get(event.server)
        if life is None:
            load = [seen for place, seen in self._running.values() if place == event.server]
            self._lives[event.server] = Life(event.server, event.at, answers=load)
        else:
            began = max(event.at - event.pause_s, life.began)
            running = sum(1 for place, seen in self._running.values() if place == event.server and seen.began < began)
            life.pauses.append(Pause(began, event.at, running))

    def _sample_done(self, event: SampleDone) -> None:
        unplaced = "", Seen(event.sample, event.prompt_tokens, event.at, usable=False)
        _, seen = self._running.pop(event.sample, unplaced)
        seen.done, seen.ended, seen.reward = event, event.at, event.reward
        self._done[event.sample] = seen

    def _again(self, sample: SampleId, server: str) -> None:
        """A request was sent again, to this server."""
        if (running := self._running.get(sample)) is None:
            return
        place, seen = running
        seen.usable = False
        if place != server:
            self._running[sample] = server, seen
            if (life := self._lives.get(server)) is not None:
                life.answers.append(seen)

    def _stop(self, sample: SampleId) -> None:
        _, seen = self._running.pop(sample, ("", None))
        if seen is not None:
            seen.ended, seen.usable = self._now, False

    def _disturbed(self, server: str) -> None:
        life = self._lives.pop(server, None)
        if life is None:
            return
        life.ended = self._now
        self._over.append(life)

    def _step_done(self, event: StepDone) -> None:
        if self._train is None or self._train[1].step != event.step:
            return
        began, train = self._train
        self._train = None
        self._out.ended = event.at
        lengths = [self._length(entry.sample) for entry in train.samples]
        microbatches = tuple(
            tuple(tuple(tuple(lengths[i] for i in micro) for micro in rank) for rank in minibatch.ranks)
            for minibatch in train.minibatches
        )
        self._out.steps.append(Step(event.step, began, event.at, microbatches))

    def _length(self, sample: SampleId) -> int:
        done = self._done[sample].done
        assert done is not None, f"sample {sample} is trained, and never came"
        return done.prompt_tokens + done.length

    def _rolled_back(self, event: RolledBack) -> None:
        self._train = self._publish = self._checkpoint = None
        if event.resumed is not None:
            self._rules = event.resumed
            for server in list(self._lives):
                self._disturbed(server)
            self._running.clear()
            self._checks.clear()


def _in_order(group: list[Seen]) -> list[Seen]:
    return sorted(group, key=lambda seen: int(seen.sample.partition(".")[2]))


def usable(life: Life) -> Iterator[tuple[Seen, SampleDone]]:
    """Answers that came, from beginning to end in this life."""
    for seen in life.answers:
        if seen.usable and seen.done is not None and life.began <= seen.began and seen.ended <= life.ended:
            yield seen, seen.done
