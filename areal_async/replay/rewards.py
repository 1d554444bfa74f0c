"""The recorded answers graded again, by the reward workers that a run would have.

What always holds: each answer that the run had checked is graded once, on the token ids, the prompt and the data row
that the run had, with the configuration that is given; what can't be graded (arrays that are gone, a reward that came
from the workflow) is counted, and never said to be the same. What comes out keeps the order of the log.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from areal_async.config import Config
from areal_async.controller.rollouts import read_prompt
from areal_async.controller.scoring import Scored, score
from areal_async.errors import DataError
from areal_async.launch.recipes import Recipes
from areal_async.messages import RewardSpec, SampleId, ScoreTask, Verdict
from areal_async.replay.finished import Answer, Finished, read_sample
from areal_async.rollout.completions import Record
from areal_async.rollout.training_data import TrainingData
from areal_async.rollout.types import Tokens
from areal_async.rollout.workflow import Prompt, Sample

EXCERPT: Final = 160  # characters of an answer that are told: its end, where what is graded usually stands
KEPT_PROMPTS: Final = 256  # a group's members end at about the same time


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A sample whose verdict or reward is another now. where: its data row. extracted, reason: of the check now.
    answer: the end of the response, special tokens left out."""

    sample: SampleId
    attempt: int
    where: str
    recorded_verdict: Verdict
    recorded_reward: float | None
    verdict: Verdict
    reward: float | None
    extracted: str
    reason: str
    answer: str


class Regraded(msgspec.Struct, kw_only=True):
    """graded: answers that were graded again. counts: recorded verdict -> verdict now -> how many. released: left out,
    their arrays are gone. by_workflow: left out, their workflow rewarded them. unchecked: left out, the run ended, or
    gave them up, before their check did. left: left out by the limit. recorded_mean, mean: of the rewards there are."""

    graded: int = 0
    changed: int = 0
    counts: dict[Verdict, dict[Verdict, int]] = {}
    changes: list[Change] = []
    released: int = 0
    by_workflow: int = 0
    unchecked: int = 0
    left: int = 0
    recorded_mean: float | None = None
    mean: float | None = None
    seconds: float = 0.0


async def grade_again(
    log: Path,
    finished: Finished,
    config: Config,
    spec: RewardSpec,
    data: TrainingData,
    *,
    limit: int | None = None,
    progress: Callable[[int, int], None] = lambda done, whole: None,
    recipes: Recipes | None = None,
) -> Regraded:
    """Grade all answers again that the run had checked, or the first `limit` of them. progress(done, all).

    Errors: LaunchError where the workers don't start or are lost for good; LogError where arrays are missing.
    """
    begun = time.monotonic()
    checked = [answer for answer in finished.answers if answer.verdict is not None]
    asked = checked[:limit]
    again = _Again(log, asked, data, progress)
    again.result.left = len(checked) - len(asked)
    again.result.by_workflow = sum(answer.by_workflow for answer in finished.answers)
    again.result.unchecked = len(finished.answers) - len(checked) - again.result.by_workflow
    await score(config.reward, spec, again.records(), again.take, started=lambda: None, recipes=recipes)
    again.result.seconds = round(time.monotonic() - begun, 1)
    return again.result


class _Again:
    """answers: to grade, in order."""

    def __init__(
        self, log: Path, answers: Sequence[Answer], data: TrainingData, progress: Callable[[int, int], None]
    ) -> None:
        self._log = log
        self._answers = answers
        self._data = data
        self._progress = progress
        self._prompt = lru_cache(maxsize=KEPT_PROMPTS)(self._read_prompt)
        self._before: list[float] = []
        self._now: list[float] = []
        self.result = Regraded()

    async def records(self) -> AsyncIterator[Record]:
        """What is to be checked. A record's `line` is the answer's place in the list."""
        for number, answer in enumerate(self._answers):
            sample = read_sample(self._log, answer)
            if sample is None:
                self.result.released += 1
                continue
            prompt = self._prompt(answer.row)
            task = ScoreTask(
                sample=answer.sample,
                attempt=answer.attempt,
                prompt=prompt.text,
                answer=prompt.answer,
                finish=answer.finish,
                columns=prompt.columns,
            )
            size = sample.token_ids.nbytes + len(prompt.text) + sum(len(bytes(raw)) for raw in prompt.columns.values())
            yield Record(number, msgspec.Raw(b""), size, task, tokens=_response(sample))

    def _read_prompt(self, row: int) -> Prompt:
        dataset = self._data.dataset
        if row >= len(dataset):
            raise DataError(f"data.train: has {len(dataset)} rows, and the run asked row {row + 1}: not its data")
        return self._data.fitted(read_prompt(dataset, self._data.text, row, position=0))

    async def take(self, batch: Sequence[Scored]) -> None:
        """Results, in order."""
        result = self.result
        for scored in batch:
            answer = self._answers[scored.record.line]
            assert answer.verdict is not None
            result.graded += 1
            now = result.counts.setdefault(answer.verdict, {})
            now[scored.result.verdict] = now.get(scored.result.verdict, 0) + 1
            if answer.reward is not None:
                self._before.append(answer.reward)
            if scored.result.reward is not None:
                self._now.append(scored.result.reward)
            if (answer.verdict, answer.reward) != (scored.result.verdict, scored.result.reward):
                result.changed += 1
                result.changes.append(self._change(answer, answer.verdict, scored))
        result.recorded_mean, result.mean = _mean(self._before), _mean(self._now)
        self._progress(result.graded + result.released, len(self._answers))

    def _change(self, answer: Answer, recorded: Verdict, scored: Scored) -> Change:
        sample = read_sample(self._log, answer)
        text = self._data.text.decode(_response(sample).tolist()) if sample is not None else ""
        return Change(
            sample=answer.sample,
            attempt=answer.attempt,
            where=self._data.dataset.where(answer.row),
            recorded_verdict=recorded,
            recorded_reward=answer.reward,
            verdict=scored.result.verdict,
            reward=scored.result.reward,
            extracted=scored.result.extracted,
            reason=scored.result.why,
            answer=text if len(text) <= EXCERPT else f"…{text[-EXCERPT:]}",
        )


def _response(sample: Sample) -> Tokens:
    return sample.token_ids[sample.prompt_tokens :]


def _mean(rewards: Sequence[float]) -> float | None:
    return sum(rewards) / len(rewards) if rewards else None
