"""The pool of reward workers: starts them and gives each check to the least busy one.

What always holds: each check ends in exactly one `ScoreResult`; a worker that can't answer gives the verdict
`infrastructure`, which is no reward at all, never a wrong one, and after which the check is made again, on another
worker where there is one, `reward.retries` times.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.config import RewardConfig
from areal_async.controller.crew import Crew
from areal_async.controller.starting import wait_for_start
from areal_async.errors import WireError
from areal_async.launch.child import Child, ChildSpec
from areal_async.launch.recipes import Recipes
from areal_async.messages import Hello, RewardSpec, ScoreResult, ScoreTask
from areal_async.wire.router import Router

logger = logging.getLogger("areal_async")

START_TIMEOUT_S: Final = 60.0  # a worker imports the user's reward function, which may import much
QUEUE_TIMEOUT_S: Final = 600.0  # how long a check may wait for a worker, beyond its own deadline

Tokens = npt.NDArray[np.int32]


class Pool:
    """The reward workers of a run, an evaluation, or `areal-async score`. lost: told of a worker that is gone, and why.

    `start` before anything else; `on_joined` is to be called by who owns the router.
    """

    def __init__(
        self,
        config: RewardConfig,
        spec: RewardSpec,
        recipes: Recipes,
        router: Router,
        crew: Crew,
        *,
        lost: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._spec = spec
        self._recipes = recipes
        self._router = router
        self._crew = crew
        self._lost = lost
        self._joined = {f"rewards.{number}": asyncio.Event() for number in range(config.workers)}
        self._children: dict[str, Child] = {}

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

    def on_joined(self, hello: Hello) -> str | None:
        """A worker says Hello; answers why it isn't taken in, or None."""
        if hello.name not in self._joined:
            return f"this run has no reward worker {hello.name}; it has {', '.join(self._joined)}"
        self._joined[hello.name].set()
        return None

    async def _watch(self, name: str, child: Child) -> None:
        await child.wait()
        self._lost(name, child.why())

    async def check(self, task: ScoreTask, tokens: Tokens) -> ScoreResult:
        """Have one answer checked. tokens: of the response, int32 [n]; empty where the task brings it as text."""
        worker = min(self._joined, key=self._router.outstanding)
        try:
            answer, _ = await self._router.request(
                worker,
                task,
                [tokens],
                id=f"score {task.sample} {task.attempt}",
                deadline_s=self._config.timeout_s + QUEUE_TIMEOUT_S,
            )
        except WireError as error:
            return ScoreResult(
                sample=task.sample, attempt=task.attempt, verdict="infrastructure", reward=None, why=str(error)
            )
        assert isinstance(answer, ScoreResult), f"{worker} answered a check with {type(answer).__name__}"
        return answer
