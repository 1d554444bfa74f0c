"""Carries out what the core says about training: starts the ranks, sends them their parts, collects their answers.

What always holds: a step is done when all ranks have answered; the ranks of one request get the same header; what a
rank answers is never taken for another request's answer (the wire sees to it by ids).
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.config import Config
from areal_async.controller import remote_ranks
from areal_async.controller.crew import Crew
from areal_async.controller.samples import Samples
from areal_async.controller.starting import wait_for_start
from areal_async.errors import TrainerError, WireError
from areal_async.launch.child import Child, ChildSpec
from areal_async.launch.placement import gpus_here, place
from areal_async.launch.recipes import Recipes
from areal_async.messages import (
    AnyEvent,
    AnyWire,
    Failed,
    Hello,
    Joined,
    Lost,
    ModelSaved,
    ParameterInfo,
    Probe,
    ProbeResult,
    Publish,
    Published,
    SaveModel,
    StepDone,
    Train,
    TrainerSpec,
    Version,
)
from areal_async.specs import trainer_spec
from areal_async.wire.router import Router

logger = logging.getLogger("areal_async")

PUBLISH_TIMEOUT_S = 600.0  # writing the whole model to memory
SAVE_TIMEOUT_S = 1800.0  # writing the whole model to disk
PROBE_TIMEOUT_S = 300.0
LEAVE_S = 10.0  # torchrun looks after its ranks a few times a second


class Trainer:
    """The trainer ranks, as one."""

    def __init__(
        self,
        config: Config,
        recipes: Recipes,
        router: Router,
        samples: Samples,
        crew: Crew,
        *,
        take: Callable[[AnyEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._recipes = recipes
        self._router = router
        self._samples = samples
        self._crew = crew
        self._take = take
        self._now = now
        self._names = [f"trainer.{rank}" for rank in range(config.train.ranks)]
        self._hellos: dict[str, Hello] = {}
        self._complete = asyncio.Event()
        self._child: Child | None = None

    @property
    def parameters(self) -> tuple[ParameterInfo, ...]:
        """What is published, in this order; known once the ranks have joined."""
        return self._hellos[self._names[0]].parameters

    async def ask_rank0(self, message: AnyWire, id: str, deadline_s: float) -> AnyWire:
        """Ask rank 0 alone, beside what all ranks do. Errors: WireError."""
        answer, _ = await self._router.request(self._names[0], message, id=id, deadline_s=deadline_s)
        return answer

    @property
    def joined(self) -> bool:
        """All ranks are there."""
        return self._complete.is_set()

    async def start(
        self,
        stack: AsyncExitStack,
        address: str,
        secret: str,
        folder: Path,
        stderr: Callable[[str], Path],
        shm_prefix: str,
    ) -> None:
        """Start all ranks, or have them started by hand, and wait until they are there. Errors: LaunchError that says
        why they aren't."""
        spec = trainer_spec(self._config, shm_prefix)
        if self._config.train.listen is not None:
            await self._wait_for_hands(stack, stderr("trainer").parents[1], secret, spec)
        else:
            await self._start_ranks(stack, address, secret, folder, stderr("trainer"), spec)
        count = sum(math.prod(parameter.shape) for parameter in self.parameters)
        logger.info("the trainer holds %s parameters in %d tensors", f"{count:,}", len(self.parameters))
        self._take(Joined(at=self._now(), peer="trainer", id="trainer", version=0))

    async def _wait_for_hands(self, stack: AsyncExitStack, root: Path, secret: str, spec: TrainerSpec) -> None:
        """With `train.listen`: ranks come from other hosts. root: the run folder."""
        path = remote_ranks.write_connection(root, self._router, secret, len(self._names), spec)
        stack.callback(path.unlink, missing_ok=True)
        stack.callback(remote_ranks.remove_published, spec)
        logger.warning("%s", remote_ranks.instructions(path, len(self._names)))
        await remote_ranks.wait_for_ranks(
            self._complete,
            lambda: [name for name in self._names if name not in self._hellos],
            self._config.train.start_timeout_s,
        )

    async def _start_ranks(
        self, stack: AsyncExitStack, address: str, secret: str, folder: Path, stderr_path: Path, spec: TrainerSpec
    ) -> None:
        spec_path = folder / "trainer.json"
        spec_path.write_bytes(msgspec.json.encode(spec))
        train, gpus = self._config.train, place(self._config, gpus_here()).trainer
        argv, env = self._recipes.trainer(
            connect=address, spec=str(spec_path), ranks=train.ranks, cores=train.cores, gpus=gpus
        )
        child = await Child.start(
            ChildSpec(
                name="trainer",
                argv=tuple(argv),
                env=env | {"AREAL_ASYNC_SECRET": secret},
                stderr_path=stderr_path,
                shm_prefix=str(Path(spec.publish_folder) / spec.shm_prefix),
                scratch=folder,
            )
        )
        stack.push_async_callback(child.stop, 1.0)
        self._child = child
        await wait_for_start(child, self._complete.wait(), train.start_timeout_s)
        self._crew.start(self._watch(child), "watch trainer")

    def on_joined(self, hello: Hello) -> str | None:
        """A rank says Hello; answers why it isn't taken in, or None."""
        if hello.name not in self._names or hello.world != len(self._names):
            return f"this run has trainer ranks {', '.join(self._names)}; {hello.name} of {hello.world} is none of them"
        self._hellos[hello.name] = hello
        if len(self._hellos) == len(self._names):
            self._complete.set()
        return None

    async def _watch(self, child: Child) -> None:
        await child.wait()
        self._take(Lost(at=self._now(), peer="trainer", id="trainer", why=child.why()))

    def train(self, command: Train) -> None:
        self._crew.start(self._train(command), f"train step {command.step}")

    def publish(self, command: Publish) -> None:
        self._crew.start(self._publish(command), f"publish version {command.version}")

    async def _train(self, command: Train) -> None:
        parts = []
        for rank in range(len(self._names)):
            parts.append(self._samples.part(command, rank))  # a copy of up to 100 MB
            await asyncio.sleep(0)  # the others' turn between two of them
        id = f"train {command.step} branch {command.branch}"
        try:
            answers = await self._ask(command, id, self._config.train.step_timeout_s, parts)
        except WireError as error:
            self._take(Failed(at=self._now(), of="train", id=str(command.step), why=f"step {command.step}: {error}"))
            return
        done = _expect(answers[0], StepDone, command)
        # the rank's clock means nothing here: the event carries the controller's
        self._take(msgspec.structs.replace(done, at=self._now()))

    async def _publish(self, command: Publish) -> None:
        id = f"publish {command.version} branch {command.branch}"
        try:
            answers = await self._ask(command, id, PUBLISH_TIMEOUT_S)
        except WireError as error:
            why = f"version {command.version} was not published: {error}"
            self._take(Failed(at=self._now(), of="publish", id=str(command.version), why=why))
            return
        done = _expect(answers[0], Published, command)
        self._take(msgspec.structs.replace(done, at=self._now()))

    async def probe(self, token_ids: npt.NDArray[np.int32], id: str) -> tuple[npt.NDArray[np.float32], Version]:
        """Log-probabilities of a sequence under the trainer's present weights, float32 [n], element 0 is 0; and the
        version of these weights."""
        # All of them: with ZeRO 3 no rank has the whole model.
        parts: list[list[npt.NDArray[np.generic]]] = [[token_ids] for _ in self._names]
        answers = await self._ask_with_arrays(Probe(id=id), id, PROBE_TIMEOUT_S, parts)
        answer, arrays = answers[0]
        if not isinstance(answer, ProbeResult) or len(arrays) != 1:
            raise TrainerError(f"the trainer answered a probe with {type(answer).__name__}")
        return arrays[0].astype(np.float32), answer.version

    async def save(self, folder: Path) -> None:
        """Write the model in Hugging Face form. Errors: TrainerError."""
        try:
            answers = await self._ask(SaveModel(path=str(folder)), f"save {folder}", SAVE_TIMEOUT_S)
        except WireError as error:
            raise TrainerError(f"the model was not saved to {folder}: {error}") from error
        if not isinstance(answers[0], ModelSaved):
            raise TrainerError(f"the trainer answered the saving of {folder} with {type(answers[0]).__name__}")

    async def leave(self) -> None:
        """Have the ranks end by themselves, at the end of a run that went well; they are ended anyway after a while."""
        for name in self._names:
            self._router.goodbye(name)
        if self._child is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._child.wait(), LEAVE_S)

    async def _ask(
        self,
        message: AnyWire,
        id: str,
        deadline_s: float,
        parts: Sequence[list[npt.NDArray[np.generic]]] | None = None,
    ) -> list[AnyWire]:
        """Send one message to all ranks; their answers in the order of the ranks. Errors: WireError, the first."""
        return [answer for answer, _ in await self._ask_with_arrays(message, id, deadline_s, parts)]

    async def _ask_with_arrays(
        self,
        message: AnyWire,
        id: str,
        deadline_s: float,
        parts: Sequence[list[npt.NDArray[np.generic]]] | None = None,
    ) -> list[tuple[AnyWire, list[npt.NDArray[np.generic]]]]:
        """The same, with the arrays of each answer."""
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(
                        self._router.request(name, message, parts[rank] if parts else (), id=id, deadline_s=deadline_s),
                        name=f"{id} to {name}",
                    )
                    for rank, name in enumerate(self._names)
                ]
        except* WireError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asked]


Answer = TypeVar("Answer", StepDone, Published)


def _expect(answer: AnyWire, kind: type[Answer], command: Train | Publish) -> Answer:
    if not isinstance(answer, kind):
        raise TrainerError(f"the trainer answered {type(command).__name__} with {type(answer).__name__}")
    return answer
