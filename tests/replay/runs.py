"""Runs with scripted peers in which everything happens that the core decides about, each with a log to replay.

What always holds: a kind says in words what its log must have, and `make` fails where it hasn't, so that a test that
replays it has replayed just that.
"""

import asyncio
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import uvloop

from areal_async.audit.auditor import audit
from areal_async.config_file import load_config
from areal_async.controller import Controller
from areal_async.log.reader import read_records
from areal_async.messages import Failed, Lost, ReadGroup, RolledBack, Rules, SampleDone, Scored, StepDone, Train
from areal_async.rollout.session import Session
from areal_async.rollout.workflow import Prompt, Sample, SingleTurn
from areal_async.testing.crash import Life, Point
from areal_async.testing.lives import live
from areal_async.testing.recipes import scripted
from areal_async.testing.small_run import write_small_run
from areal_async.testing.trainer import Die, Skip, TrainerOrder

LOOPS: Final[Mapping[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
STEP_S: Final = 0.02
REWARD: Final = '''"""Rewards of all sorts; some are no number."""

import zlib


def score(response: str) -> float:
    number = zlib.crc32(response.encode())
    return float("nan") if number % 5 == 0 else float(number % 2)
'''
OPTIONS: Final = ("rollout.stop_token_ids=[]", "rollout.max_staleness=1", "reward.function=own:score")


class Odd(SingleTurn):
    """held: answers of the first prompt wait until `go`, so that they get old. flaky: some first attempts fail. It
    rewards the third prompt's answers itself, with a NaN. noticed: nothing more is asked for until then."""

    def __init__(self, *, held: bool, flaky: bool) -> None:
        self._held, self._flaky = held, flaky
        self.go = asyncio.Event()
        self.noticed = asyncio.Event()
        self.noticed.set()

    async def run(self, session: Session, prompt: Prompt) -> Sample:
        if self._flaky and session.attempt == 0 and prompt.position % 3 == 1:
            raise RuntimeError(f"the tool did not answer at position {prompt.position}")
        await self.noticed.wait()
        sample = await super().run(session, prompt)
        if self._held and prompt.position == 0:
            await self.go.wait()
        return replace(sample, reward=math.nan) if prompt.position == 2 else sample


@dataclass(frozen=True)
class Kind:
    """One run. options: differences from `small_run`. has: what its log must have, by name (`found`). held, flaky: of
    `Odd`. kill_server: server 1 is killed after step 3. killed: where a first controller dies; the run is resumed."""

    options: Sequence[str]
    has: Sequence[str]
    trainer_orders: Sequence[Sequence[TrainerOrder]] = ()
    held: bool = False
    flaky: bool = False
    kill_server: bool = False
    killed: Point | None = None


KINDS: Final[dict[str, Kind]] = {
    "wait, filtered, skipped": Kind(
        ("rollout.drop_equal=true", "rollout.success_min=0.1", "train.nan_budget=2"),
        ("filtered", "no number", "NaN", "skipped"),
        [[TrainerOrder("train", Skip(), 2)]],
    ),
    "mask": Kind(("rollout.when_older=mask", "train.steps=8"), ("masked", "no number", "NaN"), held=True),
    "train, tried again": Kind(
        ("rollout.when_older=train", "rollout.retries=2", "train.steps=8"), ("old", "tried again"), held=True,
        flaky=True,
    ),
    "drop, a server killed": Kind(
        ("rollout.when_older=drop", "train.steps=10"), ("stale", "server lost"), held=True, kill_server=True
    ),
    "drop and requeue, gone back": Kind(
        ("rollout.when_older=drop", "rollout.requeue=true"), ("stale", "asked again", "gone back"),
        [[TrainerOrder("train", Die(), 4)]], held=True,
    ),
    "wait, gone back and resumed": Kind(
        ("rollout.retries=2",), ("gone back", "resumed"), [[TrainerOrder("train", Die(), 3)]], killed=Point("sent", 6)
    ),
}  # fmt: skip


def make(names: Sequence[str], folder: Path, loop: str) -> dict[str, Path]:
    """Have runs of these kinds, all at the same time; their log folders. loop: of `LOOPS`."""
    logs = {}
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        for name, run in zip(names, runner.run(_all(names, folder)), strict=True):
            missing = set(KINDS[name].has) - (had := set(found(run / "log")))
            assert not missing, f"{name}: the run had no such thing as: {missing}; it had {had}"
            logs[name] = run / "log"
    return logs


async def _all(names: Sequence[str], folder: Path) -> list[Path]:
    return await asyncio.gather(*(_run(KINDS[name], folder / f"r{number}") for number, name in enumerate(names)))


def _prepare(kind: Kind, folder: Path) -> Path:
    """What the run reads; the path of its configuration."""
    folder.mkdir()
    (folder / "own.py").write_text(REWARD)
    return write_small_run(folder, *OPTIONS, *kind.options)


async def _run(kind: Kind, folder: Path) -> Path:
    """The run folder."""
    config, run_dir = _prepare(kind, folder), folder / "run"
    orders = kind.trainer_orders
    if kind.killed is not None:
        life = Life(
            config=str(config), run_dir=str(run_dir), point=kind.killed, books=str(folder / "books"),
            server_book=str(folder / "server-book"), trainer_orders=[list(one) for one in orders], step_s=STEP_S,
        )  # fmt: skip
        ended = await asyncio.to_thread(live, life)
        assert ended.code == -signal.SIGKILL, ended.said
        orders = ()
    workflow = Odd(held=kind.held, flaky=kind.flaky)
    recipes = scripted(token_s=0.001, step_s=STEP_S, trainer_orders=orders)
    resume = kind.killed is not None
    controller = Controller(load_config(config), run_dir=run_dir, resume=resume, recipes=recipes, workflow=workflow)
    async with asyncio.timeout(400), controller as run:
        async for row in run.steps():
            if row.step == 3:
                workflow.go.set()
                if kind.kill_server:
                    life = run._parts._servers._lives["1"]
                    assert life.child is not None
                    workflow.noticed = life.live.gone  # or the run may be over first
                    os.kill(life.child.pid, signal.SIGKILL)
    return run_dir


def found(log: Path) -> Iterator[str]:
    """What has happened in a run, by its log."""
    messages: list[Any] = [record.message for record in read_records(log)]
    rules, asked, oldest = messages[0], set[int](), dict[str, int]()
    assert isinstance(rules, Rules)
    for message in messages:
        match message:
            case ReadGroup(position=position):
                if position in asked:
                    yield "asked again"
                asked.add(position)
            case SampleDone(reward=reward):
                if reward is not None and math.isnan(reward):
                    yield "NaN"
                oldest[message.sample] = message.oldest
            case Scored(reward=None):
                yield "no number"
            case StepDone() if message.skipped:
                yield "skipped"
            case Train():
                ages = [message.step - oldest[part.sample] for part in message.samples]
                if message.mask_below and max(ages) > rules.max_staleness:
                    yield "masked"
                if max(ages) > rules.max_staleness:
                    yield "old"
            case Failed(of="sample"):
                yield "tried again"
            case Lost(peer="server"):
                yield "server lost"
            case RolledBack():
                yield "gone back" if message.resumed is None else "resumed"
    groups = audit(log).groups
    yield from (end for end in ("filtered", "stale") if groups[end])
