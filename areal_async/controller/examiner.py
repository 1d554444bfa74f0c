"""Asks held-out problems of one server, has the answers checked, and adds them up: for `areal-async eval` and for
evaluations in the middle of a run.

What always holds: problems are asked in the file's order with the run's prompt rendering, workflow and reward; the seed
of an answer depends on the run's seed, the problem and the member alone, so two models are asked with the same noise;
an answer whose check gives no reward (`bad_data`, `infrastructure`) is left out of the score and counted; an answer
that can't be had after `rollout.retries` further attempts is an error, never a smaller set of problems.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from areal_async.config import Config
from areal_async.controller.rollouts import read_prompt
from areal_async.controller.samples import Kept
from areal_async.errors import ConfigError, ServerError
from areal_async.messages import SampleId, ScoreResult, Version, sample_id
from areal_async.rollout.data import Dataset
from areal_async.rollout.fleet import Fleet
from areal_async.rollout.session import Session
from areal_async.rollout.text import Text
from areal_async.rollout.types import ModelIdentity, Sampling
from areal_async.rollout.vllm_http import VllmClient
from areal_async.rollout.workflow import Prompt, Workflow
from areal_async.specs import run_sampling, server_identity

Check = Callable[[SampleId, Kept], Awaitable[ScoreResult]]

SEED_NAME: Final = "eval"  # of the samples that seeds are made from: no group of a run has such a number


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """score: mean reward over the scored answers. pass_at[k]: for k = 1, 2, 4, … up to `samples`, the chance that one
    of k answers succeeds (a reward over `rollout.success_above`); mean over the problems with at least k scored
    answers. n: problems. samples: answers per problem. unscored: answers whose check gave no reward. truncated_share,
    response_len_mean: over all answers; tokens. tokens: response tokens of all answers. verdicts: how many of each.
    seconds: wall time."""

    score: float
    pass_at: dict[int, float]
    n: int
    samples: int
    unscored: int
    truncated_share: float
    response_len_mean: float
    tokens: int
    verdicts: dict[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer to one problem, and its verdict. problem, member: from 0."""

    problem: int
    member: int
    kept: Kept
    result: ScoreResult


class Problems:
    """`data.eval`, the first `eval.limit` of it; each prompt is tokenized when it is first asked, and kept.

    Errors: ConfigError, DataError where there is nothing to evaluate on.
    """

    def __init__(self, config: Config, text: Text) -> None:
        if config.data.eval is None:
            raise ConfigError("data.eval: not set; name a file of held-out problems")
        self._dataset = Dataset.load(config.data.eval, config.data.prompt_key, config.data.answer_key)
        self._text = text
        self._prompts: list[Prompt | None] = [None] * len(range(len(self._dataset.rows))[: config.eval.limit])

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, problem: int) -> Prompt:
        """Errors: DataError with file and line."""
        prompt = self._prompts[problem]
        if prompt is None:
            prompt = self._prompts[problem] = read_prompt(self._dataset, self._text, problem, problem)
        return prompt


def eval_sampling(config: Config, text: Text) -> Sampling:
    """How an evaluation draws its tokens: the run's stop tokens, and a temperature and a limit of its own."""
    return msgspec.structs.replace(
        run_sampling(config, text),
        temperature=config.eval.temperature,
        max_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
    )


class Examiner:
    """check: has an answer checked, under the id given. places: answers that a server writes for it at a time."""

    def __init__(
        self,
        config: Config,
        text: Text,
        problems: Problems,
        workflow: Workflow,
        check: Check,
        *,
        places: int,
    ) -> None:
        self._config = config
        self._problems = problems
        self._workflow = workflow
        self._check = check
        self._sampling = eval_sampling(config, text)
        self._identity: ModelIdentity = server_identity(config, text)
        self._places = places

    @property
    def answers(self) -> int:
        """How many answers an examination has."""
        return len(self._problems) * self._config.eval.samples

    async def examine(
        self,
        client: VllmClient,
        version: Version,
        name: str,
        answered: Callable[[Answered], None],
        *,
        attempt: int = 0,
    ) -> None:
        """Ask all problems of one server; answered: called with each answer as it comes.

        version: of its weights. name: of this examination, unlike any other of the run: reward workers remember what
        they were asked by it. attempt: how often this examination was begun before. Errors: ServerError, or what the
        workflow raised, when an answer's last attempt has failed; the first such error ends all that is still asked.
        """
        work, fleet = self._all(), Fleet.only(client, version)
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(min(self._places, self.answers)):
                    group.create_task(
                        self._ask_on(work, fleet, name, answered, attempt), name=f"evaluation {name}, place {place}"
                    )
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _all(self) -> Iterator[tuple[int, int]]:
        for problem in range(len(self._problems)):
            for member in range(self._config.eval.samples):
                yield problem, member

    async def _ask_on(
        self,
        work: Iterator[tuple[int, int]],
        fleet: Fleet,
        name: str,
        answered: Callable[[Answered], None],
        attempt: int,
    ) -> None:
        """One place: an answer, its check, the next answer."""
        for problem, member in work:
            kept = await self._answer(fleet, problem, member, attempt * (self._config.rollout.retries + 1))
            answered(Answered(problem, member, kept, await self._score(f"{name}.{sample_id(problem, member)}", kept)))

    async def _answer(self, fleet: Fleet, problem: int, member: int, attempt: int) -> Kept:
        prompt = self._problems.prompt(problem)
        timeout_s = self._config.rollout.sample_timeout_s
        for left in reversed(range(self._config.rollout.retries + 1)):
            session = self._session(fleet, f"{SEED_NAME}.{sample_id(problem, member)}", attempt)
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._workflow.run(session, prompt)
                answer.check()
            except TimeoutError as error:
                if not left:
                    what = f"not done within rollout.sample_timeout_s = {timeout_s:g} s"
                    raise ServerError(f"problem {problem + 1}, answer {member + 1}: {what}") from error
            except Exception:  # a workflow is user code: whatever it raises, the attempt has failed with it
                if not left:
                    raise
            else:
                return Kept(answer, 0, prompt, answer.reward)
            attempt += 1
        raise AssertionError("the last attempt returns or raises")

    def _session(self, fleet: Fleet, sample: SampleId, attempt: int) -> Session:
        only = fleet.find("", 0)
        assert only is not None, "a fleet of one server that nobody loses"
        return Session(
            fleet,
            server=only.name,
            floor=only.version,
            sample=sample,
            attempt=attempt,
            run_seed=self._config.seed,
            sampling=self._sampling,
            context=self._identity.context_tokens,
            vocab_size=self._identity.vocab_size,
            deadline_s=self._config.rollout.sample_timeout_s,
        )

    async def _score(self, sample: SampleId, kept: Kept) -> ScoreResult:
        if kept.reward is not None:
            return ScoreResult(sample=sample, attempt=0, verdict="given", reward=kept.reward)
        result = await self._check(sample, kept)
        kept.reward = result.reward
        return result


# -------------------------------------------------------------------------------------------------------- adding it up


class Tally:
    """What the answers of one examination come to; it keeps numbers, not answers. above: a reward over it succeeded."""

    def __init__(self, n: int, samples: int, above: float) -> None:
        self._n = n
        self._samples = samples
        self._above = above
        self._scored: Counter[int] = Counter()  # by problem
        self._right: Counter[int] = Counter()
        self._rewards: list[float] = []
        self._verdicts: Counter[str] = Counter()
        self._truncated = 0
        self.answers = 0
        self.tokens = 0

    def add(self, answered: Answered) -> None:
        kept, reward = answered.kept, answered.result.reward
        self.answers += 1
        self.tokens += kept.length
        self._truncated += kept.sample.finish == "length"
        self._verdicts[answered.result.verdict] += 1
        if reward is not None:
            self._rewards.append(reward)
            self._scored[answered.problem] += 1
            self._right[answered.problem] += reward > self._above

    def result(self, seconds: float) -> EvalResult:
        count = max(self.answers, 1)
        counts = [(scored, self._right[problem]) for problem, scored in self._scored.items()]
        return EvalResult(
            score=math.fsum(self._rewards) / max(len(self._rewards), 1),
            pass_at=pass_at(counts, self._samples),
            n=self._n,
            samples=self._samples,
            unscored=self.answers - len(self._rewards),
            truncated_share=self._truncated / count,
            response_len_mean=self.tokens / count,
            tokens=self.tokens,
            verdicts=dict(self._verdicts),
            seconds=round(seconds, 1),
        )


def pass_at(counts: Sequence[tuple[int, int]], samples: int) -> dict[int, float]:
    """Mean pass@k over problems for k = 1, 2, 4, … ≤ samples. counts: of each problem (scored answers, right ones).

    A problem with fewer than k scored answers says nothing about k; a k of which no problem says anything is left out.
    """
    found: dict[int, float] = {}
    k = 1
    while k <= samples:
        chances = [pass_at_k(n, right, k) for n, right in counts if n >= k]
        if chances:
            found[k] = math.fsum(chances) / len(chances)
        k *= 2
    return found


def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k answers is right, from n answers of which `right` are:
    1 − C(n − right, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1). 1 ≤ k ≤ n."""
    if not (1 <= k <= n and 0 <= right <= n):
        raise ValueError(f"pass@{k} of {right} right answers among {n}: 1 <= k <= n and 0 <= right <= n must hold")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
