"""Scores a model on held-out problems: a fresh server that has nothing else to do, no trainer (`areal-async eval`).

What always holds: how problems are asked, checked and added up is `examiner`'s, as in the middle of a run.
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec

from areal_async.config import Config
from areal_async.controller.checks import KeptPool
from areal_async.controller.controller import first_cause
from areal_async.controller.crew import Crew
from areal_async.controller.examiner import Answered, EvalResult, Examiner, Problems, Tally
from areal_async.controller.rewarding import check_answer
from areal_async.controller.servers import start_server
from areal_async.launch.recipes import Recipes
from areal_async.messages import Hello
from areal_async.rollout.text import Text
from areal_async.rollout.vllm_http import VllmClient
from areal_async.rollout.workflow import load_workflow
from areal_async.specs import reward_spec, server_identity
from areal_async.wire.router import Router


class ModelScore(EvalResult, frozen=True, kw_only=True):
    """An `EvalResult`, and model: the folder that was scored."""

    model: str


async def evaluate(
    config: Config, model: Path, *, progress: Callable[[int, int], None], recipes: Recipes | None = None
) -> ModelScore:
    """Score the model in the folder `model` on `data.eval`. progress(done, all) after each answer.

    Errors: ConfigError where there is nothing to evaluate on; LaunchError, HandshakeError; ServerError where an answer
    can't be had.
    """
    begun = time.monotonic()
    text = Text(str(model), config.data.chat_template)
    problems = Problems(config, text)
    tally = Tally(len(problems), config.eval.samples, config.rollout.success_above)
    with tempfile.TemporaryDirectory(prefix="areal-") as folder:
        try:
            async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
                crew = Crew(group)
                bench = _Bench(config, model, text, Path(folder), recipes or Recipes(), crew)
                client = await bench.start(stack)
                examiner = Examiner(
                    config,
                    text,
                    problems,
                    load_workflow(config.rollout.workflow, config.import_path),
                    partial(check_answer, bench.checks),
                    places=config.server.max_num_seqs,
                )

                def answered(answer: Answered) -> None:
                    tally.add(answer)
                    progress(tally.answers, examiner.answers)

                await examiner.examine(client, 0, "eval", answered)
                await crew.dismiss()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
    result = tally.result(time.monotonic() - begun)
    return ModelScore(model=str(model), **msgspec.structs.asdict(result))


class _Bench:
    """A server and reward workers."""

    def __init__(self, config: Config, model: Path, text: Text, folder: Path, recipes: Recipes, crew: Crew) -> None:
        self._config = config
        self._model = model
        self._text = text
        self._folder = folder
        self._recipes = recipes
        self._crew = crew
        self.checks: KeptPool

    async def start(self, stack: AsyncExitStack) -> VllmClient:
        """Start everything; `stack` ends it. Errors: LaunchError, HandshakeError."""
        secret = secrets.token_hex(32)
        address = f"ipc://{self._folder / 'wire.sock'}"
        router = await stack.enter_async_context(Router(address, secret, self._joined, self._lost))
        spec = msgspec.structs.replace(reward_spec(self._config, None), model_path=str(self._model))
        self.checks = KeptPool(self._config.reward, spec, self._recipes, router, self._crew)
        async with asyncio.TaskGroup() as starts:
            starts.create_task(self.checks.start(stack, address, secret, self._folder, self._stderr))
            server = starts.create_task(self._start_server(stack))
        client = server.result()
        await client.label_weights(0)  # a server tells versions only of weights that were given one
        return client

    async def _start_server(self, stack: AsyncExitStack) -> VllmClient:
        cores = self._config.server.cores
        client, _ = await start_server(
            stack,
            self._config,
            self._recipes,
            name="0",
            model=str(self._model),
            socket=self._folder / "server.sock",
            stderr=self._folder / "server.log",
            cores=cores.split("|")[0] if cores else None,
            identity=server_identity(self._config, self._text),
        )
        return client

    def _stderr(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _joined(self, hello: Hello) -> str | None:
        return self.checks.on_joined(hello)

    def _lost(self, name: str, why: str) -> None:
        self.checks.on_lost(name, why)
