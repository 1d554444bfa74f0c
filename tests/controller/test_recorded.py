"""A recorded run's workers, played to a live controller."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_async.config import Config
from areal_async.controller import Controller, RunResult
from areal_async.log.reader import read_payload
from areal_async.log.turns import read_turns
from areal_async.messages import SampleDone, Scored, Train
from areal_async.testing.recipes import scripted
from areal_async.testing.recorded import recorded

Make = Callable[..., Config]
TIMES = {
    "time_s", "step_s", "trainer_wait_s", "swap_pause_s", "trainer_idle_share", "rollout_idle_share",
    "rollout_idle_by_server", "both_busy_share", "waited_for",
}  # fmt: skip


async def run(config: Config, folder: Path, **recipes: Any) -> RunResult:
    async with Controller(config, run_dir=folder, **recipes) as live:
        return await live.run()


def log_of(folder: Path) -> Any:
    found = read_turns(folder / "log")
    assert found is not None
    return found


def rows(result: RunResult) -> list[dict[str, Any]]:
    return [{k: v for k, v in msgspec.to_builtins(row).items() if k not in TIMES} for row in result.rows]


def batches(folder: Path) -> list[Train]:
    return [command for turn in log_of(folder).turns for command in turn.commands if isinstance(command, Train)]


def answers(folder: Path) -> dict[str, Any]:
    """Arrays and what was said of each sample, without versions and times."""
    found: dict[str, Any] = {}
    for turn in log_of(folder).turns:
        match turn.event:
            case SampleDone() as done:
                token_ids, mask, logprobs, _ = read_payload(folder / "log", turn.payload).arrays
                found[done.sample] = (token_ids.tolist(), mask.tolist(), logprobs.tolist(), done.finish)
            case Scored() as scored:
                found[scored.sample] += (scored.verdict, scored.reward)
    return found


async def test_a_synchronous_run_comes_out_the_same(make_config: Make, tmp_path: Path) -> None:
    config = make_config("rollout.max_staleness=0", "train.steps=3")
    first = await run(config, tmp_path / "first", recipes=scripted(token_s=0.0002, step_s=0.01))
    again = await run(config, tmp_path / "again", recipes=recorded(tmp_path / "first", pace=0.5))
    assert batches(tmp_path / "again") == batches(tmp_path / "first")
    assert rows(again) == rows(first)
    assert answers(tmp_path / "again") == answers(tmp_path / "first")
