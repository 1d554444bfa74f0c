"""Carries out the core's checks of finished answers, and reports their verdicts.

What always holds: each `Score` ends in exactly one `Scored` unless it is cancelled (`checks.Pool` makes them).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from areal_async.controller.check_file import CheckFile
from areal_async.controller.checks import Half, Pool
from areal_async.controller.crew import Crew
from areal_async.controller.samples import Kept, Samples
from areal_async.messages import AnyEvent, Cancel, SampleId, Score, Scored, ScoreResult, ScoreTask, Verdict
from areal_async.runfiles import Check

logger = logging.getLogger("areal_async")

TOLD: Final = 3  # checks of one bad verdict that are told in full; the rest is in the counts of metrics.jsonl
BAD: Final[frozenset[Verdict]] = frozenset({"bad_data", "timeout", "crash", "infrastructure"})


class Rewards:
    """function: of the configuration, for messages. file: has a line for each check that ended."""

    def __init__(
        self,
        pool: Pool,
        function: str,
        samples: Samples,
        crew: Crew,
        file: CheckFile,
        *,
        take: Callable[[AnyEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._function = function
        self._samples = samples
        self._crew = crew
        self._file = file
        self._take = take
        self._now = now
        self._told: Counter[Verdict] = Counter()
        self._checks: dict[tuple[SampleId, int], asyncio.Task[None]] = {}

    def score(self, command: Score) -> None:
        task = self._crew.start(self._score(command), f"check of sample {command.sample}")
        key = (command.sample, command.attempt)
        self._checks[key] = task
        task.add_done_callback(lambda _: self._checks.pop(key, None))

    def cancel(self, command: Cancel) -> None:
        if task := self._checks.get((command.sample, command.attempt)):
            task.cancel()

    async def _score(self, command: Score) -> None:
        kept = self._samples[command.sample]
        result = await check_answer(self._pool, command.sample, kept)
        kept.reward = result.reward
        self._tell(result, kept)
        at = self._now()
        self._take(
            Scored(
                at=at,
                sample=command.sample,
                attempt=command.attempt,
                verdict=result.verdict,
                reward=result.reward,
            )
        )
        self._file.add(
            Check(
                sample=command.sample,
                attempt=command.attempt,
                at=at,
                verdict=result.verdict,
                reward=result.reward,
                why=result.why,
                extracted=result.extracted,
                seconds=result.seconds,
            )
        )

    def _tell(self, result: ScoreResult, kept: Kept) -> None:
        """Say what went wrong with a check, the first few times."""
        if result.verdict not in BAD:
            return
        self._told[result.verdict] += 1
        if self._told[result.verdict] <= TOLD:
            given = "no reward" if result.reward is None else f"reward {result.reward:g}"
            logger.warning(
                "the check of sample %s (data row %d) by %s ended as %s, %s: %s",
                result.sample, kept.prompt.row + 1, self._function, result.verdict, given, result.why,
            )  # fmt: skip


async def check_answer(pool: Pool | Half, sample: SampleId, kept: Kept) -> ScoreResult:
    """Have one answer checked."""
    prompt = kept.prompt
    task = ScoreTask(
        sample=sample,
        attempt=kept.attempt,
        prompt=prompt.text,
        answer=prompt.answer,
        finish=kept.sample.finish,
        columns=prompt.columns,
    )
    return await pool.check(task, kept.sample.token_ids[kept.sample.prompt_tokens :])
