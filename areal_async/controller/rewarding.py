"""Carries out checks: starts the reward workers, gives each finished answer to the least busy one, reports verdicts.

What always holds: each `Score` ends in exactly one `Scored` unless it is cancelled; a worker that can't answer gives
the verdict `infrastructure`, which is no reward at all, never a wrong one.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec

from areal_async.config import RewardConfig
from areal_async.controller.crew import Crew
from areal_async.controller.samples import Kept, Samples
from areal_async.controller.starting import wait_for_start
from areal_async.errors import WireError
from areal_async.launch.child import Child, ChildSpec
from areal_async.launch.recipes import Recipes
from areal_async.messages import (
    AnyEvent,
    Cancel,
    Hello,
    Joined,
    Lost,
    RewardSpec,
    SampleId,
    Score,
    Scored,
    ScoreResult,
    ScoreTask,
    Verdict,
)
from areal_async.wire.router import Router

logger = logging.getLogger("areal_async")

START_TIMEOUT_S = 60.0  # a worker imports the user's reward function, which may import much
TOLD = 3  # checks of one bad verdict that are told in full; the rest is in the counts of metrics.jsonl
BAD: Final[frozenset[Verdict]] = frozenset({"bad_data", "timeout", "crash", "infrastructure"})
QUEUE_TIMEOUT_S = 600.0  # how long a check may wait for a worker, beyond its own deadline


class Rewards:
    """The pool of reward workers."""

    def __init__(
        self,
        config: RewardConfig,
        spec: RewardSpec,
        recipes: Recipes,
        router: Router,
        samples: Samples,
        crew: Crew,
        *,
        take: Callable[[AnyEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._spec = spec
        self._recipes = recipes
        self._router = router
        self._samples = samples
        self._crew = crew
        self._take = take
        self._now = now
        self._joined = {f"rewards.{number}": asyncio.Event() for number in range(config.workers)}
        self._children: dict[str, Child] = {}
        self._told: Counter[Verdict] = Counter()
        self._checks: dict[tuple[SampleId, int], asyncio.Task[None]] = {}

    async def start(
        self, stack: AsyncExitStack, address: str, secret: str, folder: Path, stderr: Callable[[str], Path]
    ) -> None:
        """Start all workers and wait until they are there. Errors: LaunchError with the tail of a worker's stderr."""
        spec_path = folder / "rewards.json"
        spec_path.write_bytes(msgspec.json.encode(self._spec))
        for name in self._joined:
            argv, env = self._recipes.rewards(connect=address, spec=str(spec_path), name=name)
            child = await Child.start(
                ChildSpec(
                    name=name, argv=tuple(argv), env=env | {"AREAL_ASYNC_SECRET": secret}, stderr_path=stderr(name)
                )
            )
            stack.push_async_callback(child.stop, 1.0)
            self._children[name] = child
        for name, joined in self._joined.items():
            await wait_for_start(self._children[name], joined.wait(), START_TIMEOUT_S)
        for name, child in self._children.items():
            self._crew.start(self._watch(name, child), f"watch {name}")
        self._take(Joined(at=self._now(), peer="rewards", id="rewards"))

    def on_joined(self, hello: Hello) -> str | None:
        """A worker says Hello; answers why it isn't taken in, or None."""
        if hello.name not in self._joined:
            return f"this run has no reward worker {hello.name}; it has {', '.join(self._joined)}"
        self._joined[hello.name].set()
        return None

    async def _watch(self, name: str, child: Child) -> None:
        await child.wait()
        self._take(Lost(at=self._now(), peer="rewards", id=name, why=child.why()))

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
        result = await self.check(command.sample, kept)
        kept.reward = result.reward
        self._tell(result, kept)
        self._take(
            Scored(
                at=self._now(),
                sample=command.sample,
                attempt=command.attempt,
                verdict=result.verdict,
                reward=result.reward,
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
                result.sample, kept.prompt.row + 1, self._spec.function, result.verdict, given, result.why,
            )  # fmt: skip

    async def check(self, sample: SampleId, kept: Kept) -> ScoreResult:
        """Have one answer checked by the least busy worker."""
        prompt = kept.prompt
        task = ScoreTask(
            sample=sample,
            attempt=kept.attempt,
            prompt=prompt.text,
            answer=prompt.answer,
            finish=kept.sample.finish,
            columns=prompt.columns,
        )
        worker = min(self._joined, key=self._router.outstanding)
        try:
            answer, _ = await self._router.request(
                worker,
                task,
                [kept.sample.token_ids[kept.sample.prompt_tokens :]],
                id=f"score {sample} {kept.attempt}",
                deadline_s=self._config.timeout_s + QUEUE_TIMEOUT_S,
            )
        except WireError as error:
            return ScoreResult(
                sample=sample, attempt=kept.attempt, verdict="infrastructure", reward=None, why=str(error)
            )
        assert isinstance(answer, ScoreResult), f"{worker} answered a check with {type(answer).__name__}"
        return answer
