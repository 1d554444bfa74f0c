"""A recorded run's workers, played to a live controller: its answers, its verdicts, its training steps, at its pace.

    async with Controller(config, recipes=recorded(Path("runs/first"), pace=0.1)) as run: …

What always holds: an answer's tokens and log-probabilities, a check's verdict and a step's metrics are those of the
recorded run, bit for bit; the versions of tokens come from the live run's own swaps; what the record doesn't have is
refused with its name, never made up. docs/replay.md ("A recorded run's workers") says how things are found.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.cli_folder import log_folder
from areal_async.errors import LogError
from areal_async.launch.recipes import Recipes
from areal_async.log.format import PayloadRef
from areal_async.log.reader import read_payload
from areal_async.log.turns import Turn, read_turns
from areal_async.messages import (
    CheckpointDone,
    GroupId,
    Publish,
    Published,
    SampleDone,
    SampleId,
    Score,
    Scored,
    StartSample,
    StepDone,
    Train,
    Verdict,
    group_of,
)
from areal_async.testing.given import Given, NotGiven, Step
from areal_async.testing.recipes import scripted

Tokens = npt.NDArray[np.int32]
_REQUEST: Final = re.compile(r"(\d+\.\d+)-")  # request ids are sample-attempt-turn, and more
_SAMPLE: Final = re.compile(r"\d+\.\d+")


def recorded(
    run: Path,
    *,
    pace: float = 1.0,
    chunk_tokens: int = 16,
    books: Path | None = None,
    server_book: Path | None = None,
) -> Recipes:
    """Recipes for a controller whose servers, trainer and reward workers answer as those of `run` did.

    run: the run's folder, or the log folder in it. pace: by which all recorded durations are multiplied (0: no time at
    all). books, server_book: as of `scripted`. Raises ConfigError where there is no log, LogError where it can't be
    read, Released where arrays of its samples were deleted.
    """
    log = log_folder("recorded", run)
    RecordedRun(log).check()
    return scripted(chunk_tokens=chunk_tokens, books=books, server_book=server_book, recorded=log, pace=pace)


class Graded(NamedTuple):
    """seconds: of the check, its wait for a place included."""

    verdict: Verdict
    reward: float | None
    seconds: float


class _Answer(msgspec.Struct):
    """The last answer of a sample that came. seconds: from the start of its attempt."""

    done: SampleDone
    payload: PayloadRef
    seconds: float
    graded: Graded | None = None


class _Arrays(NamedTuple):
    """Of a sample: token_ids, prompt and all that followed; loss_mask and logprobs of the same length."""

    token_ids: Tokens
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]


class RecordedRun:
    """The run whose log lies in `log`, as its workers knew it. pace: by which durations are multiplied.

    Raises LogError: nothing was recorded, or it is damaged.
    """

    def __init__(self, log: Path, pace: float = 1.0) -> None:
        self.log = log
        self._pace = pace
        self._answers: dict[SampleId, _Answer] = {}
        self._steps: dict[int, Step] = {}
        self._seconds: dict[tuple[str, int], float] = {}  # of publications and checkpoints, by version
        self._begun: dict[tuple[str, int | SampleId], float] = {}
        run = read_turns(log)
        if run is None:
            raise LogError(f"{log}: nothing was recorded")
        for turn in run.turns:
            self._event(turn)
            self._commands(turn)
        self._begun.clear()

    def check(self) -> None:
        """Raises LogError, or Released, where arrays of a sample are missing."""
        segments = {answer.payload.segment: answer.payload for answer in self._answers.values()}
        for payload in segments.values():  # a segment is deleted as a whole
            read_payload(self.log, payload)

    # ---------------------------------------------------------------------------------------------------- servers

    def answer(self, request_id: str, asked: list[int]) -> Given | None:
        """What came after the tokens `asked`; None for a request that isn't for a sample (a handshake's). Raises
        NotGiven where the run has no such answer.

        The sample of the request's id, if its tokens begin with these; else the same member of the nearest group
        whose tokens do: after a rollback the same prompts have other numbers.
        """
        match = _REQUEST.match(request_id)
        if match is None:
            return None
        sample, tokens = match[1], np.asarray(asked, np.int32)
        for candidate in (sample, *self._others(sample, tokens)):
            answer = self._answers.get(candidate)
            if answer is None:
                continue
            arrays = self._read(answer)
            if len(arrays.token_ids) > len(tokens) and np.array_equal(arrays.token_ids[: len(tokens)], tokens):
                return self._given(answer, arrays, len(tokens))
        known = sample in self._answers
        why = "it goes on after other tokens there" if known else "it was not finished there"
        raise NotGiven(
            f"the recorded run {self.log} has no answer for request {request_id} ({len(asked)} tokens) of sample "
            f"{sample}: {why}, and no other group has its prompt"
        )

    def _given(self, answer: _Answer, arrays: _Arrays, begin: int) -> Given:
        """The model's own tokens from `begin` on, up to what others wrote."""
        others = np.flatnonzero(arrays.loss_mask[begin:] == 0)
        end = begin + int(others[0]) if len(others) else len(arrays.token_ids)
        whole = int(np.count_nonzero(arrays.loss_mask))
        return Given(
            arrays.token_ids[begin:end].tolist(),
            arrays.logprobs[begin:end].tolist(),
            answer.done.finish if end == len(arrays.token_ids) else "stop",
            self._pace * answer.seconds * (end - begin) / max(whole, 1),
        )

    def _others(self, sample: SampleId, tokens: Tokens) -> list[SampleId]:
        """The same member of groups whose prompt these tokens begin with, the nearest group first."""
        groups: set[GroupId] = set()
        for length, prompts in self._prompts.items():
            groups.update(prompts.get(tokens[:length].tobytes(), ()))
        group, member = group_of(sample), sample.partition(".")[2]
        return [f"{other}.{member}" for other in sorted(groups, key=lambda other: (abs(other - group), other))]

    @cached_property
    def _prompts(self) -> dict[int, dict[bytes, list[GroupId]]]:
        """By length and tokens, the groups that have the prompt. Read only where ids don't lead to it."""
        found: dict[int, dict[bytes, list[GroupId]]] = defaultdict(lambda: defaultdict(list))
        seen: set[GroupId] = set()
        for sample, answer in self._answers.items():
            group = group_of(sample)
            if group not in seen:
                seen.add(group)
                prompt = self._read(answer).token_ids[: answer.done.prompt_tokens]
                found[len(prompt)][prompt.tobytes()].append(group)
        return found

    # ---------------------------------------------------------------------------------------------------- rewards

    def graded(self, sample: SampleId, prompt: Sequence[int], response: Tokens) -> Graded:
        """What the check of this answer gave. Raises NotGiven where none of that answer to that prompt is recorded."""
        if _SAMPLE.fullmatch(sample) is None:
            raise NotGiven(f"{sample}: answers of an evaluation are in no log (eval.every_steps=0 leaves them out)")
        tokens = np.asarray(prompt, np.int32)
        answered = False
        for candidate in (sample, *self._others(sample, tokens)):
            answer = self._answers.get(candidate)
            if answer is None:
                continue
            begin, arrays = answer.done.prompt_tokens, self._read(answer).token_ids
            if np.array_equal(arrays[:begin], tokens) and np.array_equal(arrays[begin:], response):
                answered = True
                if answer.graded is not None:
                    return answer.graded._replace(seconds=self._pace * answer.graded.seconds)
        why = "its check did not end there" if answered else "it answered otherwise there"
        raise NotGiven(f"the recorded run {self.log} has no verdict for this answer of sample {sample}: {why}")

    # ---------------------------------------------------------------------------------------------------- trainer

    def step(self, step: int) -> Step:
        """Of the last branch that trained it. Raises NotGiven where the run didn't come to it."""
        if step not in self._steps:
            last = max(self._steps, default=-1)
            raise NotGiven(f"the recorded run {self.log} has not trained step {step}; its last one is {last}")
        return self._steps[step]._replace(seconds=self._pace * self._steps[step].seconds)

    def publish_s(self, version: int) -> float:
        """How long it took; 0 where it isn't recorded."""
        return self._pace * self._seconds.get(("publish", version), 0.0)

    def checkpoint_s(self, version: int) -> float:
        """How long training stood still for it; 0 where there was none."""
        return self._pace * self._seconds.get(("checkpoint", version), 0.0)

    # ---------------------------------------------------------------------------------------------------- reading

    def _event(self, turn: Turn) -> None:
        event, at = turn.event, turn.event.at
        match event:
            case SampleDone() if turn.payload is not None:
                seconds = at - self._begun.get(("sample", event.sample), at)
                self._answers[event.sample] = _Answer(event, turn.payload, seconds)
            case Scored():
                answer = self._answers.get(event.sample)
                if answer is not None and answer.done.attempt == event.attempt:
                    seconds = at - self._begun.get(("check", event.sample), at)
                    answer.graded = Graded(event.verdict, event.reward, seconds)
            case StepDone():
                seconds = at - self._begun.get(("train", event.step), at)
                self._steps[event.step] = Step(event.metrics, event.skipped, seconds)
            case Published():
                self._seconds["publish", event.version] = at - self._begun.get(("publish", event.version), at)
            case CheckpointDone():
                self._seconds["checkpoint", event.version] = event.seconds

    def _commands(self, turn: Turn) -> None:
        for command in turn.commands:
            match command:
                case StartSample():
                    self._begun["sample", command.sample] = turn.event.at
                case Score():
                    self._begun["check", command.sample] = turn.event.at
                case Train():
                    self._begun["train", command.step] = turn.event.at
                case Publish():
                    self._begun["publish", command.version] = turn.event.at

    def _read(self, answer: _Answer) -> _Arrays:
        token_ids, loss_mask, logprobs, _ = read_payload(self.log, answer.payload).arrays
        return _Arrays(
            token_ids.astype(np.int32, copy=False),
            loss_mask.astype(np.uint8, copy=False),
            logprobs.astype(np.float32, copy=False),
        )
