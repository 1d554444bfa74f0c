"""Scores a model on held-out problems: a fresh server, the run's workflow and reward, no trainer.

What always holds: problems are asked in the file's order with the run's prompt rendering and reward; an answer whose
check gives no reward (`bad_data`, `infrastructure`) is left out of the score and counted.
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from areal_async.config import Config
from areal_async.controller.controller import first_cause
from areal_async.controller.crew import Crew
from areal_async.controller.rewarding import Rewards
from areal_async.controller.rollouts import read_prompt
from areal_async.controller.samples import Kept, Samples
from areal_async.controller.servers import start_server
from areal_async.errors import ConfigError
from areal_async.launch.recipes import Recipes
from areal_async.messages import AnyEvent, Hello, ScoreResult, sample_id
from areal_async.rollout.data import Dataset
from areal_async.rollout.session import Session
from areal_async.rollout.text import Text
from areal_async.rollout.types import ModelIdentity, Sampling
from areal_async.rollout.vllm_http import VllmClient
from areal_async.rollout.workflow import Prompt, load_workflow
from areal_async.specs import reward_spec, run_sampling, server_identity
from areal_async.wire.router import Router


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """score: mean reward over the scored answers. n: problems. samples: answers per problem. unscored: answers whose
    check gave no reward. truncated_share, response_len_mean: over all answers; tokens. verdicts: how many of each."""

    score: float
    n: int
    samples: int
    unscored: int
    truncated_share: float
    response_len_mean: float
    verdicts: dict[str, int]
    seconds: float
    model: str


async def evaluate(
    config: Config, model: Path, *, progress: Callable[[int, int], None], recipes: Recipes | None = None
) -> EvalResult:
    """Score the model in the folder `model` on `data.eval`. progress(done, all) after each answer.

    Errors: ConfigError where there is nothing to evaluate on; LaunchError, HandshakeError.
    """
    begun = time.monotonic()
    prompts, text = _problems(config, model)
    with tempfile.TemporaryDirectory(prefix="areal-") as folder:
        try:
            async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
                crew = Crew(group)
                bench = await _Bench.start(stack, crew, config, model, text, Path(folder), recipes or Recipes())
                answers = await bench.answers(prompts, progress)
                await crew.dismiss()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
    return _result(config, model, len(prompts), answers, time.monotonic() - begun)


def _problems(config: Config, model: Path) -> tuple[list[Prompt], Text]:
    if config.data.eval is None:
        raise ConfigError("data.eval: not set; name a JSONL file of held-out problems")
    dataset = Dataset.load(config.data.eval, config.data.prompt_key, config.data.answer_key)
    text = Text(str(model), config.data.chat_template)
    rows = range(len(dataset.rows))[: config.eval.limit]
    return [read_prompt(dataset, text, row, row) for row in rows], text


class _Bench:
    """A server, reward workers, and what an answer needs."""

    def __init__(
        self, config: Config, client: VllmClient, rewards: Rewards, sampling: Sampling, identity: ModelIdentity
    ) -> None:
        self._config = config
        self._client = client
        self._rewards = rewards
        self._sampling = sampling
        self._identity = identity
        self._workflow = load_workflow(config.rollout.workflow, config.import_path)

    @classmethod
    async def start(
        cls, stack: AsyncExitStack, crew: Crew, config: Config, model: Path, text: Text, folder: Path, recipes: Recipes
    ) -> "_Bench":
        secret = secrets.token_hex(32)
        address = f"ipc://{folder / 'wire.sock'}"
        rewards: Rewards | None = None

        def joined(hello: Hello) -> str | None:
            return rewards.on_joined(hello) if rewards else "not yet"

        def lost(name: str, why: str) -> None:
            crew.start(_raise(ConfigError(f"{name}: {why}")), f"loss of {name}")

        router = await stack.enter_async_context(Router(address, secret, joined, lost))
        spec = msgspec.structs.replace(reward_spec(config, None), model_path=str(model))
        rewards = Rewards(config.reward, spec, recipes, router, Samples(), crew, take=_drop, now=time.monotonic)
        identity = server_identity(config, text)
        cores = config.server.cores
        async with asyncio.TaskGroup() as starts:
            starts.create_task(rewards.start(stack, address, secret, folder, lambda name: folder / f"{name}.log"))
            server = starts.create_task(
                start_server(
                    stack,
                    config,
                    recipes,
                    name="0",
                    model=str(model),
                    socket=folder / "server.sock",
                    stderr=folder / "server.log",
                    cores=cores.split("|")[0] if cores else None,
                    identity=identity,
                )
            )
        client, _ = server.result()
        await client.label_weights(0)  # a server tells versions only of weights that were given one
        longest = config.eval.max_new_tokens or config.rollout.max_new_tokens
        sampling = msgspec.structs.replace(
            run_sampling(config, text), temperature=config.eval.temperature, max_tokens=longest
        )
        return cls(config, client, rewards, sampling, identity)

    async def answers(
        self, prompts: list[Prompt], progress: Callable[[int, int], None]
    ) -> list[tuple[Kept, ScoreResult]]:
        """All answers with their verdicts, `eval.samples` of each prompt."""
        done: list[tuple[Kept, ScoreResult]] = []
        places = asyncio.Semaphore(self._config.server.max_num_seqs)
        whole = len(prompts) * self._config.eval.samples

        async def answer(number: int, member: int, prompt: Prompt) -> None:
            async with places:
                done.append(await self._answer(sample_id(number, member), prompt))
                progress(len(done), whole)

        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts):
                for member in range(self._config.eval.samples):
                    group.create_task(answer(number, member, prompt), name=f"evaluation {number}.{member}")
        return done

    async def _answer(self, sample: str, prompt: Prompt) -> tuple[Kept, ScoreResult]:
        timeout_s = self._config.rollout.sample_timeout_s
        session = Session(
            self._client,
            sample=sample,
            attempt=0,
            run_seed=self._config.seed,
            sampling=self._sampling,
            context=self._identity.context_tokens,
            vocab_size=self._identity.vocab_size,
            deadline_s=timeout_s,
        )
        async with asyncio.timeout(timeout_s):
            answer = await self._workflow.run(session, prompt)
        kept = Kept(answer, 0, prompt, answer.reward)
        if answer.reward is not None:
            return kept, ScoreResult(sample=sample, attempt=0, verdict="given", reward=answer.reward)
        return kept, await self._rewards.check(sample, kept)


def _drop(event: AnyEvent) -> None:
    """An evaluation has no core: nobody is told of joined workers."""


async def _raise(error: Exception) -> None:
    raise error


def _result(config: Config, model: Path, n: int, answers: list[tuple[Kept, ScoreResult]], seconds: float) -> EvalResult:
    rewards = [result.reward for _, result in answers if result.reward is not None]
    verdicts: dict[str, int] = {}
    for _, result in answers:
        verdicts[result.verdict] = verdicts.get(result.verdict, 0) + 1
    count = max(len(answers), 1)
    return EvalResult(
        score=sum(rewards) / max(len(rewards), 1),
        n=n,
        samples=config.eval.samples,
        unscored=len(answers) - len(rewards),
        truncated_share=sum(kept.sample.finish == "length" for kept, _ in answers) / count,
        response_len_mean=sum(kept.length for kept, _ in answers) / count,
        verdicts=verdicts,
        seconds=round(seconds, 1),
        model=str(model),
    )
