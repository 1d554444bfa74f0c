"""What a recorded run came to, in the words of a simulated one (`figures`), so that the two can be compared.

What always holds: everything is from the log, and counted from the moment in which the first answer was asked for until
the last step was done: starting processes is nobody's prediction. Nothing is left out of that time: where a server was
lost, its time to come back is in these figures, and `disturbed` says so.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from areal_async.errors import ConfigError, LogError
from areal_async.log import payloads
from areal_async.log.format import PayloadRef, payload_path
from areal_async.log.turns import Turn, read_turns, taken
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Evaluate,
    Failed,
    Lost,
    Published,
    RolledBack,
    Rules,
    SampleDone,
    SampleId,
    StartSample,
    StepDone,
    Swap,
    Swapped,
    Train,
    Version,
)

LOSS_MASK: Final = 1  # place among a sample's arrays
VERSIONS: Final = 3


@dataclass(slots=True)
class Happened:
    """rules: the last ones. steps: of the history that survived, all others: over all of the time, steps that were
    trained again included. See `Figures`; training_s, busy_s, both_s: for how long the trainer trained or published, a
    server generated (mean over servers), both did. disturbed: what a simulation doesn't have, in words. spread: answers
    of several versions whose arrays can't be read; their tokens are taken as spread evenly over these versions."""

    rules: Rules
    steps: int = 0
    seconds: float = 0.0
    train_s: list[float] = field(default_factory=list)
    samples: int = 0
    mixed: int = 0
    length: int = 0
    tokens_generated: int = 0
    lag_tokens: Counter[int] = field(default_factory=Counter)
    trainer_wait_s: float = 0.0
    swap_pause_s: float = 0.0
    training_s: float = 0.0
    busy_s: float = 0.0
    both_s: float = 0.0
    disturbed: list[str] = field(default_factory=list)
    spread: int = 0


def happened(folder: Path) -> Happened:
    """folder: of the log. Errors: LogError; ConfigError where no step was trained."""
    recorded = read_turns(folder)
    if recorded is None:
        raise ConfigError(f"{folder}: the run recorded nothing; name a run that has trained for some steps")
    watch = _Watch(folder, recorded.rules)
    for _ in taken(folder, recorded.turns, watch.see):
        pass
    if not watch.out.steps:
        raise ConfigError(f"{folder}: the run has trained no step; name one that has trained for some steps")
    return watch.out


class _Watch:
    """Reads turn by turn. A server is busy while something is asked of it and it doesn't load weights."""

    def __init__(self, folder: Path, rules: Rules) -> None:
        self.out = Happened(rules)
        self._sums = Happened(rules)  # until now: `out` has what they were when the last step was done
        self._folder = folder
        self._began: float | None = None
        self._at = 0.0
        self._placed: dict[SampleId, str] = {}
        self._load: Counter[str] = Counter()
        self._loading: set[str] = set()
        self._busy = 0  # servers
        self._answers: dict[SampleId, tuple[int, Counter[Version]]] = {}  # length, its trained tokens by version
        self._train: tuple[float, Train] | None = None
        self._training = False
        self._waits_since: float | None = None

    def see(self, turn: Turn) -> None:
        at = turn.event.at
        passed, self._at = at - self._at, at
        if self._began is not None:
            busy = passed * self._busy / self.out.rules.servers
            self._sums.busy_s += busy
            if self._training:
                self._sums.training_s += passed
                self._sums.both_s += busy
        self._event(turn.event, turn.payload)
        for command in turn.commands:
            self._command(at, command)
        self._busy = sum(1 for name, load in self._load.items() if load > 0 and name not in self._loading)

    def _event(self, event: AnyEvent, payload: PayloadRef | None) -> None:
        match event:
            case SampleDone():
                self._unplace(event.sample)
                self._sums.tokens_generated += event.length
                self._answers[event.sample] = event.length, self._versions(event, payload)
            case Failed(of="sample"):
                self._unplace(event.id)
            case Failed(of="swap"):
                self._loading.discard(event.id)
            case Swapped():
                self._loading.discard(event.server)
                self._sums.swap_pause_s += event.pause_s
            case Published():
                self._training = False
                self._waits_since = event.at
            case StepDone():
                self._step_done(event)
            case Lost():
                self._disturbed(f"{event.peer} {event.id} was lost")
                if event.peer == "server":
                    self._load.pop(event.id, None)
                    self._loading.discard(event.id)
            case RolledBack():
                self._rolled_back(event)

    def _command(self, at: float, command: AnyCommand) -> None:
        match command:
            case StartSample():
                if self._began is None:
                    self._began = self._waits_since = at
                self._unplace(command.sample)
                self._placed[command.sample] = command.server
                self._load[command.server] += 1
            case Cancel():
                self._unplace(command.sample)
            case Swap():
                self._loading.add(command.server)
            case Train():
                self._begin(at, command)
            case Evaluate():
                self._disturbed(f"version {command.version} was evaluated")

    def _begin(self, at: float, command: Train) -> None:
        self._train, self._training = (at, command), True
        if self._waits_since is not None:
            self._sums.trainer_wait_s += at - self._waits_since
        self._waits_since = None
        for entry in command.samples:
            length, versions = self._answers[entry.sample]
            self._sums.samples += 1
            self._sums.length += length
            self._sums.mixed += len(versions) > 1
            for version, tokens in versions.items():
                if version >= command.mask_below:
                    self._sums.lag_tokens[command.step - version] += tokens

    def _step_done(self, event: StepDone) -> None:
        if self._train is None or self._began is None:
            return
        sums = self._sums
        sums.train_s.append(event.at - self._train[0])
        sums.steps += 1
        sums.seconds = event.at - self._began
        self._train = None
        self.out = deepcopy(sums)

    def _rolled_back(self, event: RolledBack) -> None:
        self._disturbed(f"training went back to version {event.to}")
        self._train, self._training = None, False
        self._waits_since = event.at
        self._sums.steps = min(self._sums.steps, event.to)
        if event.resumed is not None:
            self._sums.rules = event.resumed
            self._placed.clear()
            self._load.clear()
            self._loading.clear()

    def _disturbed(self, what: str) -> None:
        self._sums.disturbed.append(what)

    def _unplace(self, sample: SampleId) -> None:
        server = self._placed.pop(sample, None)
        if server is not None and server in self._load:
            self._load[server] -= 1

    def _versions(self, done: SampleDone, payload: PayloadRef | None) -> Counter[Version]:
        """Its trained tokens by version: from its arrays, or, where these are gone, as many of each between its oldest
        and its newest."""
        if payload is not None and payload_path(self._folder, payload.segment).exists():
            try:
                arrays = payloads.read(self._folder, payload).arrays
            except LogError:
                pass  # damaged: `areal-async audit --payloads` says how
            else:
                return Counter(np.asarray(arrays[VERSIONS])[np.asarray(arrays[LOSS_MASK]) != 0].tolist())
        span = done.newest - done.oldest + 1
        self._sums.spread += span > 1
        return Counter(done.oldest + place * span // max(done.loss_tokens, 1) for place in range(done.loss_tokens))
