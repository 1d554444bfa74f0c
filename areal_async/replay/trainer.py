"""The real trainer again: started as for the run, sent the recorded batches of the history that survived, one after
another, and its answers compared with the recorded ones.

What always holds: the run's folder isn't changed; the ranks are the controller's own (`controller.trainer`), under a
guard, and get the messages that the live ones got: the recorded command, and arrays rebuilt bit for bit; what they
publish has a name of its own in shared memory and is freed when the next version is published; however this ends,
nothing of it is left.

A run that was resumed with another number of ranks, or other settings, has steps of both. Then the ranks write a
checkpoint into a private folder, and as many as the next step names, with its settings, begin with it.
"""

import asyncio
import itertools
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from areal_async.config import Config
from areal_async.config_file import load_config
from areal_async.controller import checkpoints
from areal_async.controller.controller import first_cause
from areal_async.controller.crew import Crew
from areal_async.controller.trainer import Trainer
from areal_async.errors import ConfigError, LogError, TrainerError
from areal_async.launch.recipes import Recipes
from areal_async.log.turns import Turn, read_turns
from areal_async.messages import (
    AnyEvent,
    Failed,
    Hello,
    Lost,
    Publish,
    Published,
    StepDone,
    Train,
    Version,
)
from areal_async.replay.answers import Compared
from areal_async.replay.history import Batches, History, Step, read_history
from areal_async.replay.run_files import earlier_configs, load_run_config, require_model
from areal_async.runfiles import CONFIG, config_path
from areal_async.specs import trainer_spec
from areal_async.wire.router import Router

OPTIONS: Final = ("model", "train", "weights", "rollout.temperature", "seed")  # what ranks are started with
BREATH_TURNS: Final = 256  # so many are read before the event loop has its turn: heartbeats must go out
MODEL: Final = "model"  # to begin with the run's first weights
LONGEST: Final = 18  # digits of a step's number
_PREFIX: Final = "step-"
_PLACES: Final = ("ranks", "cores", "gpus", "listen", "start_timeout_s", "step_timeout_s")  # of `train`


@dataclass(frozen=True)
class Plan:
    """What is to be done. log: folder. config: the run's newest; earlier: by their numbers, those with other settings
    of the trainer. checkpoint: that the ranks begin with; None: the model, version 0. steps: that are trained again.
    said: what people should know of it."""

    log: Path
    config: Config
    earlier: Mapping[int, Config]
    version: Version
    checkpoint: Path | None
    steps: tuple[Step, ...]
    said: tuple[str, ...]


# ----------------------------------------------------------------------------------------------------------- planning


def plan(log: Path, overrides: tuple[str, ...], begin: str | None, count: int | None) -> Plan:
    """Find out where to begin and what to send, with everything found right that can be known before a process is
    started. begin: `model`, `step-N`, or None for the earliest point from which all batches are on the disk. count: of
    steps, None for all. Raises ConfigError, LogError."""
    config, _ = load_run_config(log, overrides, OPTIONS)
    history = read_history(log)
    require_model(Path(config.model.path), history.about)
    version, checkpoint = _beginning(history, log.parent / "checkpoints", begin, count)
    steps = _until(history, version, count)
    earlier = _earlier(log, config, overrides, {step.config for step in steps})
    said = [*_other_settings(config, earlier, steps)]
    if not all(step.config for step in steps):
        said += _unknown_settings(log, config, overrides)
    if begin is None and version:
        lost = next(step for step in history.steps if step.missing)
        said.append(
            f"the arrays of earlier steps are not on the disk any more (step {lost.step}: sample {lost.missing} was "
            f"released): it begins with the checkpoint of version {version}"
        )
    if history.discarded:
        said.append(
            f"{history.discarded} step(s) were done in vain, on branches that training went back behind: left out"
        )
    ranks = [number for number, _ in itertools.groupby(step.ranks for step in steps)]
    if len(ranks) > 1:
        numbers = ", then ".join(map(str, ranks))
        said.append(f"the run was resumed with another train.ranks ({numbers}): so are the ranks here")
    alone = {number: _alone(other) for number, other in earlier.items()}
    return Plan(log, _alone(config), alone, version, checkpoint, tuple(steps), tuple(said))


def _beginning(history: History, root: Path, begin: str | None, count: int | None) -> tuple[Version, Path | None]:
    """Version and folder of what the ranks begin with; None: of the model."""
    points: dict[Version, Path | None] = {0: None}
    for version, branch in sorted(history.checkpoints.items()):
        folder = checkpoints.folder_of(root, version)
        state = checkpoints.read_state(folder) if version < len(history.steps) else None
        if state is not None and (state.version, state.branch) == (version, branch):
            points[version] = folder
    if begin is not None and _version(begin) not in points:
        there = ", ".join(MODEL if not version else f"{_PREFIX}{version}" for version in points)
        raise ConfigError(
            f"command line: --from {begin}: it is no whole checkpoint of the history that survived, with a step after "
            f"it; there are: {there}"
        )
    for version in points if begin is None else [_version(begin)]:
        lost = next((step for step in _until(history, version, count) if step.missing), None)
        if lost is None:
            return version, points[version]
    assert lost is not None, "there is at least one point"
    raise LogError(
        f"{root.parent}: step {lost.step} can't be trained again: the arrays of its sample {lost.missing} are not on "
        f"the disk any more, since no checkpoint that is kept needs them; there is no whole checkpoint after it"
        if begin is None
        else f"{root.parent}: --from {begin}: step {lost.step} can't be trained again: the arrays of its sample "
        f"{lost.missing} are not on the disk any more; without --from the earliest possible beginning is taken"
    )


def _version(begin: str) -> Version:
    number = begin.removeprefix(_PREFIX)
    if begin == MODEL:
        return 0
    if begin == number or not (number.isascii() and number.isdecimal()) or len(number) > LONGEST:
        raise ConfigError(f"command line: --from {begin[:40]}: should be {MODEL} or {_PREFIX}N, such as {_PREFIX}40")
    return int(number)


def _until(history: History, version: Version, count: int | None) -> list[Step]:
    return history.steps[version : None if count is None else version + count]


def _earlier(log: Path, config: Config, overrides: tuple[str, ...], numbers: set[int]) -> dict[int, Config]:
    """Of those that the log names, the ones that differ from `config` in what the trainer computes; where things lie,
    and how many ranks there are, as in `config`. Raises ConfigError: one isn't there any more."""
    found: dict[int, Config] = {}
    for number in sorted(numbers - {0}):
        path = config_path(log.parent, number)
        if path.name == CONFIG:
            continue
        if not path.is_file():
            raise ConfigError(
                f"{path}: missing; steps were trained with it: name the run's whole folder, or begin "
                f"behind them (--from {_PREFIX}N)"
            )
        other = _with_settings(config, load_config(path, overrides))
        if _settings(other) != _settings(config):
            found[number] = next((one for one in found.values() if _settings(one) == _settings(other)), other)
    return found


def _with_settings(config: Config, other: Config) -> Config:
    """`config` with what the ranks' arithmetic depends on as in `other`; a resume leaves model and seed as they are."""
    replace = msgspec.structs.replace
    train = replace(other.train, **{name: getattr(config.train, name) for name in _PLACES})
    return replace(config, train=train, rollout=replace(config.rollout, temperature=other.rollout.temperature))


def _other_settings(config: Config, earlier: Mapping[int, Config], steps: Sequence[Step]) -> Iterator[str]:
    """Which steps were trained with other settings, before a resume changed them."""
    for number, group in itertools.groupby(steps, key=lambda step: step.config):
        if number in earlier:
            of = [step.step for step in group]
            what = f"step {of[0]} was" if len(of) == 1 else f"steps {of[0]} to {of[-1]} were"
            other = _differences(earlier[number], config)
            yield f"{what} trained with other settings (config-{number}.yaml: {other}), and so here"


def _unknown_settings(log: Path, config: Config, overrides: tuple[str, ...]) -> Iterator[str]:
    """What an earlier controller trained with, where the log doesn't say which steps that were."""
    for path, earlier in earlier_configs(log, overrides):
        if other := _differences(earlier, config):
            yield (
                f"{path.name}: before a resume the trainer had other settings ({other}), so the steps of then differ "
                f"here: give those settings as overrides, or begin behind that resume (--from {_PREFIX}N)"
            )


def _differences(earlier: Config, config: Config) -> str:
    before, now = _settings(earlier), _settings(config)
    return ", ".join(f"{name} {before[name]!r}, now {now[name]!r}" for name in now if before[name] != now[name])


def _settings(config: Config) -> dict[str, object]:
    """What the ranks' arithmetic depends on. The number of updates counts only where the learning rate falls."""
    spec = msgspec.structs.asdict(trainer_spec(config, ""))
    if spec["lr_schedule"] == "constant":
        spec["updates"] = None
    for name in ("transport", "publish_folder", "model_path", "reference_path", "keep_prox"):
        del spec[name]
    return spec


def _alone(config: Config) -> Config:
    """The run's configuration without its servers, which nobody starts: they need no GPU, and load no weights; and
    without what is kept for people beside a step."""
    replace = msgspec.structs.replace
    weights = config.weights
    if weights.transport == "nccl":
        weights = replace(weights, transport="shm", nccl_address=None)
    train = replace(config.train, keep_prox=False)
    return replace(config, rollout=replace(config.rollout, servers=0), weights=weights, train=train)


# ------------------------------------------------------------------------------------------------------ training again


class Watch(Protocol):
    """Is told how it goes."""

    def starting(self, version: Version, ranks: int) -> None:
        """Ranks are started."""

    def step(self, compared: Compared) -> None:
        """A step was trained again."""


class Nobody:
    """Doesn't want to know."""

    def starting(self, version: Version, ranks: int) -> None:
        pass

    def step(self, compared: Compared) -> None:
        pass


async def train_again(plan: Plan, watch: Watch, recipes: Recipes | None = None) -> list[Compared]:
    """All steps of the plan. Errors: LaunchError, TrainerError, LogError: why it can't go on; the steps before were
    told to `watch`."""
    with tempfile.TemporaryDirectory(prefix="areal-", ignore_cleanup_errors=True) as folder:
        try:
            async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
                again = _Again(plan, Path(folder), Crew(group), recipes or Recipes(), watch)
                return await again.go(stack)
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None


Answer = TypeVar("Answer", StepDone, Published)


class _Again:
    """folder: a private one, for sockets, output, and a checkpoint between two numbers of ranks."""

    def __init__(self, plan: Plan, folder: Path, crew: Crew, recipes: Recipes, watch: Watch) -> None:
        self._plan = plan
        self._folder = folder
        self._crew = crew
        self._recipes = recipes
        self._watch = watch
        self._batches = Batches(plan.log)
        self._turns = {step.turn: step for step in plan.steps}
        self._left = len(plan.steps)
        self._checkpoint = plan.checkpoint
        self._version = plan.version  # that the ranks hold
        self._ranks = 0
        self._config = plan.config
        self._published: list[Version] = []
        self._answers: dict[int, StepDone] = {}
        self._compared: list[Compared] = []
        self._heard: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self._begun = time.monotonic()
        self._trainer: Trainer

    async def go(self, stack: AsyncExitStack) -> list[Compared]:
        (self._folder / "stderr").mkdir()
        self._secret = secrets.token_hex(32)
        self._router = await stack.enter_async_context(
            Router(
                f"ipc://{self._folder / 'wire.sock'}",
                self._secret,
                self._joined,
                lambda name, why: self._trainer.on_lost(name, why),
                self._plan.config.train.listen,
            )
        )
        self._stack = stack
        await self._start(self._plan.steps[0])
        recorded = read_turns(self._plan.log)
        assert recorded is not None, "the plan has read it"
        for turn in recorded.turns:
            await self._turn(turn)
            if not self._left:
                break
            if turn.number % BREATH_TURNS == 0:
                await asyncio.sleep(0)
        await self._trainer.leave()
        await self._crew.dismiss()
        return self._compared

    async def _turn(self, turn: Turn) -> None:
        self._batches.seen(turn)
        if isinstance(turn.event, StepDone):
            self._compare(turn.event)
        for command in turn.commands:
            match command:
                case Train() as train if turn.number in self._turns:
                    await self._train(train, self._turns[turn.number])
                case Publish() as publish if publish.version == self._version and self._version not in self._published:
                    await self._publish(publish)

    async def _train(self, command: Train, step: Step) -> None:
        if step.ranks != self._ranks or self._config_of(step) is not self._config:
            await self._change(step)
        self._trainer.train(command)
        self._answers[command.step] = await self._answer(StepDone)
        self._version = command.step + 1

    def _compare(self, recorded: StepDone) -> None:
        now = self._answers.get(recorded.step)
        if now is not None and now.branch == recorded.branch:
            del self._answers[recorded.step]
            self._compared.append(Compared.of(recorded, now))
            self._watch.step(self._compared[-1])
            self._left -= 1

    async def _publish(self, command: Publish) -> None:
        """Nobody loads it here, so that all that was published before is freed."""
        self._trainer.publish(msgspec.structs.replace(command, free=tuple(self._published[-1:])))
        await self._answer(Published)
        self._published.append(command.version)

    async def _answer(self, kind: type[Answer]) -> Answer:
        while True:
            match await self._heard.get():
                case Failed(why=why) | Lost(why=why):
                    raise TrainerError(f"the trainer came as far as version {self._version}: {why}")
                case event if isinstance(event, kind):
                    return event

    async def _change(self, step: Step) -> None:
        folder = self._checkpoint = self._folder / f"checkpoint-{self._version}"
        folder.mkdir()
        await self._trainer.checkpoint(folder, folder.name)
        await self._trainer.leave()
        await self._start(step)
        await asyncio.to_thread(shutil.rmtree, folder)  # as large as three models; nobody goes back to it

    def _config_of(self, step: Step) -> Config:
        return self._plan.earlier.get(step.config, self._plan.config)

    async def _start(self, step: Step) -> None:
        self._watch.starting(self._version, step.ranks)
        self._ranks, self._config, self._published = step.ranks, self._config_of(step), []
        self._heard = asyncio.Queue()  # nothing of the ranks before
        self._trainer = Trainer(
            _for(self._config, step.ranks), self._recipes, self._router, self._batches.part, self._crew,
            checkpoint_folder=lambda _: self._begin_folder(), keep=lambda train, kept: None,
            take=self._heard.put_nowait, now=lambda: time.monotonic() - self._begun,
        )  # fmt: skip
        await self._trainer.start(
            self._stack, self._router.address, self._secret, self._folder, self._stderr,
            f"areal-{secrets.token_hex(4)}", self._version,
        )  # fmt: skip

    def _begin_folder(self) -> Path:
        assert self._checkpoint is not None, "ranks begin with version 0 or a checkpoint"
        return self._checkpoint

    def _stderr(self, name: str) -> Path:
        return self._folder / "stderr" / f"{name}.log"

    def _joined(self, hello: Hello) -> str | None:
        return self._trainer.on_joined(hello)


def _for(config: Config, ranks: int) -> Config:
    """The cores that were given to another number of ranks mean nothing."""
    if config.train.ranks == ranks:
        return config
    train = msgspec.structs.replace(config.train, ranks=ranks, cores=None, gpus=None)
    return msgspec.structs.replace(config, train=train)
