"""The finished answers of a recorded run: what the log says of each, and its arrays where they are still there.

What always holds: answers come in the order in which they ended; of each nothing is said that isn't in the log; arrays
that were let go because nobody can ask for them again are told apart from arrays that are missing.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from areal_async.controller.samples import from_log
from areal_async.errors import LogError
from areal_async.log.format import PayloadRef, payload_path
from areal_async.log.reader import read_payload
from areal_async.log.turns import Turn, read_turns, taken
from areal_async.messages import (
    FinishReason,
    GroupId,
    GroupRead,
    Note,
    Release,
    RolledBack,
    SampleDone,
    SampleId,
    Scored,
    StepDone,
    Verdict,
    Version,
    group_of,
)
from areal_async.rollout.workflow import Sample

ABOUT: Final = "run"  # the note that a run begins with: what it is known again by


@dataclass(slots=True)
class Answer:
    """One finished answer.

    row: of its prompt in the data. oldest, newest: versions of its trained tokens. reward: of its check, or of its
    workflow (`by_workflow`: then nobody checks it). verdict: None until its check ended. lost_branch: training went
    back to before its newest version, which is the name of other weights since then. released: nobody asks for it
    again.
    """

    sample: SampleId
    attempt: int
    row: int
    payload: PayloadRef
    oldest: Version
    newest: Version
    finish: FinishReason
    prompt_tokens: int
    reward: float | None
    by_workflow: bool
    verdict: Verdict | None = None
    lost_branch: bool = False
    released: bool = False


@dataclass
class Finished:
    """about: what the run is known again by; empty where the log doesn't say. version: that its trainer came to.
    branches: on which branch each version was trained, of those that still mean the same weights."""

    answers: list[Answer] = field(default_factory=list)
    about: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    version: Version = 0
    branches: dict[Version, int] = field(default_factory=dict)


def read_finished(log: Path) -> Finished:
    """Of the run whose log lies in `log`. Raises LogError: nothing was recorded, or it is damaged."""
    recorded = read_turns(log)
    if recorded is None:
        raise LogError(f"{log}: nothing was recorded: the run ended before it began")
    reading = _Reading()
    reading.notes(recorded.notes)
    for _ in taken(log, recorded.turns, reading.turn):
        pass
    return reading.finished


def read_sample(log: Path, answer: Answer) -> Sample | None:
    """Its arrays; None where they are gone for good. Raises LogError: they are missing, or damaged."""
    if answer.released and not payload_path(log, answer.payload.segment).exists():
        return None
    found = read_payload(log, answer.payload)
    if (found.sample, found.attempt) != (answer.sample, answer.attempt):
        raise LogError(
            f"{payload_path(log, answer.payload.segment)}: at offset {answer.payload.offset} lies sample "
            f"{found.sample}, attempt {found.attempt}, where the log has sample {answer.sample}, attempt "
            f"{answer.attempt}"
        )
    return from_log(found.arrays, answer.prompt_tokens, answer.finish)


class _Reading:
    """What has been read so far."""

    def __init__(self) -> None:
        self.finished = Finished()
        self._rows: dict[GroupId, int] = {}
        self._newest: dict[SampleId, Answer] = {}

    def notes(self, notes: list[Note]) -> None:
        for note in notes:
            if note.what == ABOUT:
                self.finished.about = {k: v for k, v in note.data.items() if not isinstance(v, tuple)}

    def turn(self, turn: Turn) -> None:
        event = turn.event
        match event:
            case GroupRead():
                self._rows[event.group] = event.row
            case SampleDone() if turn.payload is not None:
                self._done(event, turn.payload)
            case Scored():
                answer = self._newest.get(event.sample)
                if answer is not None and answer.attempt == event.attempt:
                    answer.verdict, answer.reward = event.verdict, event.reward
            case StepDone():
                self.finished.version = event.step + 1
                self.finished.branches[event.step + 1] = event.branch
            case RolledBack():
                self.finished.version = event.to
                self.finished.branches = {v: b for v, b in self.finished.branches.items() if v <= event.to}
                for answer in self.finished.answers:
                    answer.lost_branch |= answer.newest > event.to
        for command in turn.commands:
            if isinstance(command, Release):
                for sample in command.samples:
                    if answer := self._newest.pop(sample, None):
                        answer.released = True
        self.notes(turn.notes)

    def _done(self, event: SampleDone, payload: PayloadRef) -> None:
        if before := self._newest.get(event.sample):
            before.released = True  # a later attempt takes its place
        answer = self._newest[event.sample] = Answer(
            event.sample,
            event.attempt,
            self._rows[group_of(event.sample)],
            payload,
            event.oldest,
            event.newest,
            event.finish,
            event.prompt_tokens,
            event.reward,
            event.reward is not None,
        )
        self.finished.answers.append(answer)
