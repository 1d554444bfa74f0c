"""Carries out what the core says about training: starts the ranks, sends them their parts, collects their answers, and
starts them again, all of them, when one is lost.

What always holds: a step is done when all ranks have answered; the ranks of one request get the same header; what a
rank answers is never taken for another request's answer (the wire sees to it by ids), and nothing that ranks of an
earlier life say or were asked reaches the next one; the end of a life is told once (`Lost`, or the `Failed` of what
they could not do), and from then on nothing is asked of its ranks; they have ended before the next ones start.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.config import Config
from areal_async.controller import remote_ranks
from areal_async.controller.crew import Crew
from areal_async.controller.starting import TRAINER_MEMORY, explained, wait_for_start
from areal_async.errors import ArealError, LaunchError, NoAnswer, TrainerError, WireError
from areal_async.launch.child import Child, ChildSpec
from areal_async.launch.placement import gpus_here, place
from areal_async.launch.recipes import Recipes
from areal_async.messages import (
    AnyEvent,
    AnyWire,
    CheckpointSaved,
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
    Restart,
    RolledBack,
    SaveCheckpoint,
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
CHECKPOINT_TIMEOUT_S = 1800.0  # writing model and optimiser to disk
SAVE_TIMEOUT_S = 1800.0  # writing the whole model to disk
PROBE_TIMEOUT_S = 300.0
LEAVE_S = 10.0  # torchrun looks after its ranks a few times a second
LAST_WORDS_S = 0.25  # an answer that says what went wrong may have been sent before the end
STOP_GRACE_S = 1.0  # ranks have nothing to save: what they hold is in a checkpoint, or is lost

Arrays: TypeAlias = list[npt.NDArray[np.generic]]
Answers: TypeAlias = list[tuple[AnyWire, Arrays]]


@dataclass(frozen=True)
class _Start:
    """What every start of the ranks needs. stack: ends them at the latest. folder: for the file with their spec."""

    stack: AsyncExitStack
    address: str
    secret: str
    folder: Path
    stderr: Path
    spec: TrainerSpec


class _Life:
    """One life of all ranks, from their start to the loss of any.

    version: that they begin with. child: torchrun; None where they are started by hand. hellos: of those that are
    there. gathered: done when all are there (""), or when that can't be any more (why). joined: the core was told of
    it. lost: done when this life is over, with why.
    """

    def __init__(self, version: Version) -> None:
        loop = asyncio.get_running_loop()
        self.version = version
        self.child: Child | None = None
        self.hellos: dict[str, Hello] = {}
        self.gathered: asyncio.Future[str] = loop.create_future()
        self.joined = False
        self.lost: asyncio.Future[str] = loop.create_future()

    async def all_there(self) -> None:
        """Wait for all ranks. Errors: LaunchError where one was lost before the last one came."""
        why = await asyncio.shield(self.gathered)
        if why:
            raise LaunchError(why)


class Trainer:
    """The trainer ranks, as one.

    part: the arrays of a rank's part of a batch. checkpoint_folder: of the checkpoint of a version, for ranks that
    begin with it. keep: is given what each rank has sent beside its `StepDone`, before the event is told.
    """

    def __init__(
        self,
        config: Config,
        recipes: Recipes,
        router: Router,
        part: Callable[[Train, int], Arrays],
        crew: Crew,
        *,
        checkpoint_folder: Callable[[Version], Path],
        keep: Callable[[Train, Sequence[Arrays]], None],
        take: Callable[[AnyEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._recipes = recipes
        self._router = router
        self._part = part
        self._crew = crew
        self._checkpoint_folder = checkpoint_folder
        self._keep = keep
        self._take = take
        self._now = now
        self._names = [f"trainer.{rank}" for rank in range(config.train.ranks)]
        self._life: _Life | None = None
        self._lives = 0
        self._there = asyncio.Event()  # the present life has joined and is not over
        self._nonces: set[str] = set()  # of all lives: a rank that was given up must not come back
        self._parameters: tuple[ParameterInfo, ...] = ()

    @property
    def parameters(self) -> tuple[ParameterInfo, ...]:
        """What is published, in this order; known once the ranks have joined."""
        return self._parameters

    @property
    def joined(self) -> bool:
        """All ranks are there."""
        return self._there.is_set()

    @property
    def life(self) -> int | None:
        """Number of the present life of the ranks; None while they are not there."""
        return self._lives if self.joined else None

    # ------------------------------------------------------------------------------------------------ starts and ends

    async def start(
        self,
        stack: AsyncExitStack,
        address: str,
        secret: str,
        folder: Path,
        stderr: Callable[[str], Path],
        shm_prefix: str,
        version: Version = 0,
    ) -> None:
        """Start all ranks with the weights of `version`, or have them started by hand, and wait until they are there.
        Errors: LaunchError that says why they aren't."""
        spec = trainer_spec(self._config, shm_prefix)
        self._start = _Start(stack, address, secret, folder, stderr("trainer"), spec)
        await self._begin(version)
        count = sum(math.prod(parameter.shape) for parameter in self.parameters)
        logger.info("the trainer holds %s parameters in %d tensors", f"{count:,}", len(self.parameters))
        self._take(Joined(at=self._now(), peer="trainer", id="trainer", version=version))

    def restart(self, command: Restart) -> None:
        logger.warning("the trainer is started again, with version %d", command.version)
        self._crew.start(self._restart(command), "restart of the trainer")

    async def _restart(self, command: Restart) -> None:
        try:
            if self._life is not None:
                self._end(self._life, command.why)
                await self._kill(self._life)
            await self._begin(command.version)
        except (ArealError, OSError) as error:
            if self._life is not None:
                self._end(self._life, str(error))
                await self._kill(self._life)
            why = f"the trainer could not be started again: {error}"
            self._take(Lost(at=self._now(), peer="trainer", id="trainer", why=why))
            return
        self._take(RolledBack(at=self._now(), to=command.version, why=command.why))
        self._take(Joined(at=self._now(), peer="trainer", id="trainer", version=command.version))

    async def _begin(self, version: Version) -> None:
        life = self._life = _Life(version)
        self._lives += 1
        checkpoint = str(self._checkpoint_folder(version)) if version else ""
        spec = msgspec.structs.replace(self._start.spec, checkpoint=checkpoint)
        if self._config.train.listen is not None:
            await self._wait_for_hands(life, spec)
        else:
            await self._start_ranks(life, spec)
        if life.lost.done():
            raise LaunchError(life.lost.result())
        life.joined = True
        self._parameters = life.hellos[self._names[0]].parameters
        self._there.set()

    async def _wait_for_hands(self, life: _Life, spec: TrainerSpec) -> None:
        """With `train.listen`: ranks come from other hosts, the first time and after a loss."""
        root, again = self._start.stderr.parents[1], bool(self._nonces)
        (root / remote_ranks.FILE).unlink(missing_ok=True)  # of ranks that began with other weights
        path = remote_ranks.write_connection(root, self._router, self._start.secret, len(self._names), spec)
        if not again:
            self._start.stack.callback(path.unlink, missing_ok=True)
            self._start.stack.callback(remote_ranks.remove_published, spec)
        logger.warning("%s", remote_ranks.instructions(path, len(self._names), again=again))
        await remote_ranks.wait_for_ranks(
            life.all_there(),
            lambda: [name for name in self._names if name not in life.hellos],
            self._config.train.start_timeout_s,
        )

    async def _start_ranks(self, life: _Life, spec: TrainerSpec) -> None:
        start, train = self._start, self._config.train
        spec_path = start.folder / "trainer.json"
        spec_path.write_bytes(msgspec.json.encode(spec))
        gpus = place(self._config, gpus_here()).trainer
        argv, env = self._recipes.trainer(
            connect=start.address, spec=str(spec_path), ranks=train.ranks, cores=train.cores, gpus=gpus
        )
        life.child = child = await Child.start(
            ChildSpec(
                name="trainer",
                argv=tuple(argv),
                env=env | {"AREAL_ASYNC_SECRET": start.secret},
                stderr_path=start.stderr,
                shm_prefix=str(Path(spec.publish_folder) / spec.shm_prefix),
                scratch=start.folder,
            )
        )
        start.stack.push_async_callback(child.stop, STOP_GRACE_S)
        deadline = "train.start_timeout_s"
        await wait_for_start(child, life.all_there(), train.start_timeout_s, deadline, TRAINER_MEMORY)
        self._crew.start(self._watch(life, child), "watch trainer")

    def on_joined(self, hello: Hello) -> str | None:
        """A rank says Hello; answers why it isn't taken in, or None."""
        life = self._life
        if hello.name not in self._names or hello.world != len(self._names):
            return f"this run has trainer ranks {', '.join(self._names)}; {hello.name} of {hello.world} is none of them"
        if life is None or life.lost.done() or hello.nonce in self._nonces:
            return f"{hello.name} was given up, since a trainer rank was lost; all are to be started again"
        if hello.version != life.version:
            return (
                f"{hello.name} begins with version {hello.version}, but the run goes on from version {life.version}: "
                f"start it with the connection file as it is now"
            )
        self._nonces.add(hello.nonce)
        life.hellos[hello.name] = hello
        if len(life.hellos) == len(self._names) and not life.gathered.done():
            life.gathered.set_result("")
        return None

    def on_lost(self, name: str, why: str) -> None:
        """The wire hears nothing of a rank any more, or another one came in its place."""
        life = self._life
        if life is not None:
            output = f". {life.child.why()}" if life.child is not None else ""
            self._lose(life, f"{why}{output}")

    async def _watch(self, life: _Life, child: Child) -> None:
        await child.wait()
        await asyncio.sleep(LAST_WORDS_S)
        self._lose(life, explained(child, TRAINER_MEMORY))

    def _lose(self, life: _Life, why: str) -> None:
        """Tell that a life is over, unless that was told, or whoever waits for its ranks will tell."""
        if self._end(life, why) and life.joined:
            self._take(Lost(at=self._now(), peer="trainer", id="trainer", why=why))

    def _fail(self, life: _Life, event: Failed) -> None:
        """Tell of a step or a publication that failed; its life is over with it: ranks may wait for each other."""
        if self._end(life, event.why):
            self._take(event)
            self._crew.start(self._kill(life), "end of the trainer")

    def _end(self, life: _Life, why: str) -> bool:
        """Nothing more is asked of these ranks, and what they were asked has failed; False if that was known."""
        if life.lost.done():
            return False
        life.lost.set_result(why)
        if not life.gathered.done():
            life.gathered.set_result(why)
        self._there.clear()
        for name in self._names:
            self._router.goodbye(name)
        return True

    async def _kill(self, life: _Life) -> None:
        """End what is left of these ranks, as far as they are ours, and remove what they published."""
        if life.child is not None:
            await life.child.stop(STOP_GRACE_S)
        remote_ranks.remove_published(self._start.spec)

    # ---------------------------------------------------------------------------------------------- what they are asked

    def train(self, command: Train) -> None:
        self._crew.start(self._train(command), f"train step {command.step}")

    def publish(self, command: Publish) -> None:
        self._crew.start(self._publish(command), f"publish version {command.version}")

    async def _train(self, command: Train) -> None:
        life = self._life
        assert life is not None, "the core trains with ranks that have joined"
        parts = []
        for rank in range(len(self._names)):
            parts.append(self._part(command, rank))  # a copy of up to 100 MB
            await asyncio.sleep(0)  # the others' turn between two of them
        id = f"train {command.step} branch {command.branch}"
        try:
            answers = await self._ask_with_arrays(life, command, id, self._config.train.step_timeout_s, parts)
        except WireError as error:
            why = f"step {command.step}: {error}"
            if isinstance(error, NoAnswer):
                why += " (train.step_timeout_s)"
            self._fail(life, Failed(at=self._now(), of="train", id=str(command.step), why=why))
            return
        done = _expect(answers[0][0], StepDone, command)
        if not life.lost.done():  # told as lost meanwhile: the step is trained again
            self._keep(command, [arrays for _, arrays in answers])
            # the rank's clock means nothing here: the event carries the controller's
            self._take(msgspec.structs.replace(done, at=self._now()))

    async def _publish(self, command: Publish) -> None:
        life = self._life
        assert life is not None, "the core publishes with ranks that have joined"
        id = f"publish {command.version} branch {command.branch}"
        try:
            answers = await self._ask(life, command, id, PUBLISH_TIMEOUT_S)
        except WireError as error:
            why = f"version {command.version} was not published: {error}"
            self._fail(life, Failed(at=self._now(), of="publish", id=str(command.version), why=why))
            return
        done = _expect(answers[0], Published, command)
        if not life.lost.done():
            self._take(msgspec.structs.replace(done, at=self._now()))

    async def checkpoint(self, path: Path, id: str) -> int:
        """Have all ranks write their state of the present version to the folder `path`; bytes of their files. Errors:
        TrainerError; ranks that don't answer at all are told as lost, too."""
        life = self._present()
        try:
            answers = await self._ask(life, SaveCheckpoint(path=str(path)), id, CHECKPOINT_TIMEOUT_S)
        except WireError as error:
            if isinstance(error, NoAnswer):
                self._lose(life, str(error))
            raise TrainerError(f"the trainer's state was not written to {path}: {error}") from error
        nbytes = 0
        for answer in answers:
            if not isinstance(answer, CheckpointSaved):
                raise TrainerError(f"the trainer answered the checkpoint {path} with {type(answer).__name__}")
            nbytes += answer.nbytes
        return nbytes

    async def probe(self, token_ids: npt.NDArray[np.int32], id: str) -> tuple[npt.NDArray[np.float32], Version]:
        """Log-probabilities of a sequence under the trainer's present weights, float32 [n], element 0 is 0; and the
        version of these weights. While the ranks are started again it waits for them. Errors: WireError where they
        are lost in the middle."""
        await self._there.wait()
        # All of them: with ZeRO 3 no rank has the whole model.
        parts: list[Arrays] = [[token_ids] for _ in self._names]
        answers = await self._ask_with_arrays(self._present(), Probe(id=id), id, PROBE_TIMEOUT_S, parts)
        answer, arrays = answers[0]
        if not isinstance(answer, ProbeResult) or len(arrays) != 1:
            raise TrainerError(f"the trainer answered a probe with {type(answer).__name__}")
        return arrays[0].astype(np.float32), answer.version

    async def ask_rank0(self, message: AnyWire, id: str, deadline_s: float) -> AnyWire:
        """Ask rank 0 alone, beside what all ranks do. Errors: WireError."""
        ((answer, _),) = await self._until_lost(
            self._present(), self._ask_each(self._names[:1], message, id, deadline_s)
        )
        return answer

    async def save(self, folder: Path) -> None:
        """Write the model in Hugging Face form. Errors: TrainerError."""
        try:
            answers = await self._ask(self._present(), SaveModel(path=str(folder)), f"save {folder}", SAVE_TIMEOUT_S)
        except WireError as error:
            raise TrainerError(f"the model was not saved to {folder}: {error}") from error
        if not isinstance(answers[0], ModelSaved):
            raise TrainerError(f"the trainer answered the saving of {folder} with {type(answers[0]).__name__}")

    async def leave(self) -> None:
        """Have the ranks end by themselves, at the end of a run that went well; they are ended anyway after a while.
        Whatever becomes of them is no loss, and nothing is said any more to others that come under their names."""
        life = self._life
        if life is None:
            return
        self._end(life, "the ranks were told to end")
        if life.child is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(life.child.wait(), LEAVE_S)

    def _present(self) -> _Life:
        """The present life. Errors: WireError while there is none."""
        if self._life is None or not self._there.is_set():
            raise WireError("the trainer is not there: it is to be started again")
        return self._life

    async def _ask(
        self, life: _Life, message: AnyWire, id: str, deadline_s: float, parts: Sequence[Arrays] | None = None
    ) -> list[AnyWire]:
        """Send one message to all ranks; their answers in the order of the ranks. Errors: WireError, the first, or the
        loss of a rank."""
        return [answer for answer, _ in await self._ask_with_arrays(life, message, id, deadline_s, parts)]

    async def _ask_with_arrays(
        self, life: _Life, message: AnyWire, id: str, deadline_s: float, parts: Sequence[Arrays] | None = None
    ) -> Answers:
        """The same, with the arrays of each answer."""
        return await self._until_lost(life, self._ask_each(self._names, message, id, deadline_s, parts))

    async def _until_lost(self, life: _Life, asked: Coroutine[object, object, Answers]) -> Answers:
        """What these ranks answer. Errors: WireError when they are lost before that: the wire would hold what they
        were asked for the next ones, who know nothing of it."""
        asking = asyncio.ensure_future(asked)

        def give_up(_: asyncio.Future[str]) -> None:
            asking.cancel()

        life.lost.add_done_callback(give_up)
        try:
            await asyncio.wait({asking})
        finally:
            life.lost.remove_done_callback(give_up)
            if asking.cancel():
                await asyncio.wait({asking})
        if asking.cancelled():
            raise WireError(life.lost.result())
        return asking.result()

    async def _ask_each(
        self,
        names: Sequence[str],
        message: AnyWire,
        id: str,
        deadline_s: float,
        parts: Sequence[Arrays] | None = None,
    ) -> Answers:
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(
                        self._router.request(name, message, parts[rank] if parts else (), id=id, deadline_s=deadline_s),
                        name=f"{id} to {name}",
                    )
                    for rank, name in enumerate(names)
                ]
        except* WireError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asked]


Answer = TypeVar("Answer", StepDone, Published)


def _expect(answer: AnyWire, kind: type[Answer], command: Train | Publish) -> Answer:
    if not isinstance(answer, kind):
        raise TrainerError(f"the trainer answered {type(command).__name__} with {type(answer).__name__}")
    return answer
