"""The training steps of a recorded run that survived, and the batches they were made of.

What always holds: a step that was trained, and from before which training went on again, is not in the history: of each
step there is at most one; steps have no gaps. A batch is put together from the payload log bit for bit as the live
trainer got it, or LogError says which sample's arrays are missing, and why.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from areal_async.controller.resuming import RESUMED, RUN
from areal_async.controller.samples import from_log, joined, of_rank
from areal_async.errors import LogError
from areal_async.log.format import PayloadRef, payload_path, payload_segments
from areal_async.log.reader import read_payload
from areal_async.log.turns import Turn, read_turns
from areal_async.messages import (
    AnyCommand,
    CheckpointDone,
    FinishReason,
    Note,
    Release,
    RolledBack,
    SampleDone,
    SampleId,
    StepDone,
    Train,
    Version,
)
from areal_async.rollout.workflow import Sample
from areal_async.wire.arrays import Array


@dataclass(frozen=True, slots=True)
class Step:
    """A step that survived. turn: number of the event after which it was sent. config: number of the configuration that
    it was trained with (`runfiles`); 0: an older log, which doesn't say. missing: a sample of it whose arrays are not
    on the disk any more, "" if all are there."""

    step: int
    branch: int
    turn: int
    ranks: int
    config: int
    missing: SampleId


@dataclass
class History:
    """about: what the run is known again by; empty where the log doesn't say. steps: from 0 on. checkpoints: that the
    surviving history has made, with their branch; they may be gone. discarded: steps that were done in vain. resumes:
    how often a new controller went on with the run."""

    about: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    checkpoints: dict[Version, int] = field(default_factory=dict)
    discarded: int = 0
    resumes: int = 0


def read_history(log: Path) -> History:
    """Of the run whose log lies in the folder `log`. Raises LogError: it is damaged, or no step of it survived."""
    recorded = read_turns(log)
    history = History()
    if recorded is not None:
        reading = _Reading(history, set(payload_segments(log)))
        reading.notes(recorded.notes)
        for turn in recorded.turns:
            reading.turn(turn)
    if not history.steps:
        raise LogError(f"{log}: no training step of the run was done (and survived): there is nothing to train again")
    return history


class _Reading:
    """segments: that are on the disk."""

    def __init__(self, history: History, segments: Container[int]) -> None:
        self._history = history
        self._segments = segments
        self._config = 0
        self._sent: dict[int, Step] = {}  # of the present branch, not answered yet
        self._places: dict[SampleId, dict[int, int]] = {}  # segment of each attempt

    def notes(self, notes: list[Note]) -> None:
        for note in notes:
            if note.what == RUN:
                self._history.about = {k: value for k, value in note.data.items() if not isinstance(value, tuple)}
            if note.what in (RUN, RESUMED):
                number = note.data.get("config")
                self._config = number if isinstance(number, int) else 0

    def turn(self, turn: Turn) -> None:
        history = self._history
        match turn.event:
            case SampleDone() as done if turn.payload is not None:
                self._places.setdefault(done.sample, {})[done.attempt] = turn.payload.segment
            case StepDone() as done:
                step = self._sent.pop(done.step, None)
                if step is not None and step.branch == done.branch:
                    history.steps.append(step)
            case CheckpointDone() as done:
                history.checkpoints[done.version] = done.branch
            case RolledBack() as back:
                self._sent.clear()
                history.discarded += max(0, len(history.steps) - back.to)
                del history.steps[back.to :]
                history.checkpoints = {v: branch for v, branch in history.checkpoints.items() if v <= back.to}
                history.resumes += back.resumed is not None
        for command in turn.commands:
            self._command(turn, command)
        self.notes(turn.notes)

    def _command(self, turn: Turn, command: AnyCommand) -> None:
        match command:
            case Train() as train:
                missing = next((s.sample for s in train.samples if not self._is_there(s.sample, s.attempt)), "")
                ranks = len(train.minibatches[0].ranks)
                self._sent[train.step] = Step(train.step, train.branch, turn.number, ranks, self._config, missing)
            case Release() as release:
                for sample in release.samples:
                    self._places.pop(sample, None)

    def _is_there(self, sample: SampleId, attempt: int) -> bool:
        return self._places.get(sample, {}).get(attempt) in self._segments


@dataclass(slots=True)
class _Place:
    payload: PayloadRef
    prompt_tokens: int
    finish: FinishReason


class Batches:
    """The arrays of a run's batches again. It is shown the run's turns in their order, and has those of the samples
    that were not released until then."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._places: dict[SampleId, dict[int, _Place]] = {}

    def seen(self, turn: Turn) -> None:
        event = turn.event
        if isinstance(event, SampleDone) and turn.payload is not None:
            place = _Place(turn.payload, event.prompt_tokens, event.finish)
            self._places.setdefault(event.sample, {})[event.attempt] = place
        for command in turn.commands:
            if isinstance(command, Release):
                for sample in command.samples:
                    self._places.pop(sample, None)

    def part(self, command: Train, rank: int) -> list[Array]:
        """What rank `rank` got beside the command. Raises LogError: arrays are missing or damaged."""
        return joined([self._sample(sample.sample, sample.attempt) for sample in of_rank(command, rank)])

    def _sample(self, sample: SampleId, attempt: int) -> Sample:
        place = self._places.get(sample, {}).get(attempt)
        if place is None:
            raise LogError(f"{self._log}: sample {sample}, attempt {attempt} is trained, but no record has its arrays")
        found = read_payload(self._log, place.payload)
        if (found.sample, found.attempt) != (sample, attempt):
            raise LogError(
                f"{payload_path(self._log, place.payload.segment)}: at offset {place.payload.offset} lies sample "
                f"{found.sample}, attempt {found.attempt}, not {sample}, attempt {attempt}; it is another run's"
            )
        return from_log(found.arrays, place.prompt_tokens, place.finish)
