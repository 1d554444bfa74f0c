"""Whole runs whose reward workers are killed, stand still, or die again and again: no sample is lost, none is trained
twice, no process is left (every test looks for that), and the run goes on, or ends with the first cause."""

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from areal_async import process_tree
from areal_async.config import Config
from areal_async.controller import Controller, RunResult
from areal_async.controller.evaluate import evaluate
from areal_async.core import restarts
from areal_async.errors import RunFailed
from areal_async.log.reader import read_records
from areal_async.messages import Joined, Lost, Restart, Score, Scored, ScoreResult, ScoreTask
from areal_async.rollout.session import Session
from areal_async.rollout.workflow import Prompt, Sample
from areal_async.testing.recipes import scripted
from areal_async.wire import beats

from ..waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

Make = Callable[..., Config]
LONG = ("train.steps=1000", "rollout.max_staleness=3", "rollout.retries=0")
GROUP_STATES = ("trained", "filtered", "stale", "failed", "cancelled", "outstanding", "training")
SLOW_REWARD = """
import time

def reward(response):
    time.sleep(0.05)
    return 1.0
"""


@pytest.fixture
def slow_reward(tmp_path: Path) -> str:
    """So that a worker has checks at any time."""
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    return "reward.function=slow_reward:reward"


def records(result: RunResult) -> list[object]:
    return [record.message for record in read_records(result.folder / "log")]


def of_workers(result: RunResult) -> list[tuple[type, str]]:
    return [
        (type(found), found.id)
        for found in records(result)
        if isinstance(found, Joined | Lost | Restart) and found.peer == "rewards"
    ]


def assert_nothing_is_lost(result: RunResult, books: Path) -> None:
    for row in result.rows:
        for prefix in ("", "samples_"):
            assert row.ledger[f"{prefix}admitted"] == sum(row.ledger[f"{prefix}{state}"] for state in GROUP_STATES)
        assert row.ledger["samples_failed"] == row.ledger["failed"] == row.ledger["cancelled"] == 0
        assert row.ledger["samples_filtered"] == 0
    trained = [sample for line in books.read_text().splitlines() for sample in json.loads(line)["samples"]]
    assert len(trained) == len(set(trained)) == result.steps * 8
    found = records(result)
    asked = Counter(record.sample for record in found if isinstance(record, Score))
    answered = Counter(record.sample for record in found if isinstance(record, Scored))
    assert max(asked.values()) == 1
    assert max(answered.values()) == 1
    assert set(trained) <= set(answered) <= set(asked)


def has_checks(run: Controller, name: str) -> bool:
    return bool(run._parts._checks._lives[name].asking)


async def all_are_there(run: Controller) -> None:
    """One may take longer to start than the first steps."""
    for life in run._parts._checks._lives.values():
        await life.there.wait()


async def stop_busy(run: Controller, name: str) -> int:
    """Have this worker stand still while it has checks that it has not answered; its pid. An answer may be under way:
    a check that is asked now, or places that are all taken, show that there are others."""
    life = run._parts._checks._lives[name]
    os.kill(life.child.pid, signal.SIGSTOP)
    had = set(life.asking)
    await until(lambda: set(life.asking) - had or len(life.asking) == life.places)
    return life.child.pid


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_worker_killed_in_the_middle_of_its_checks(
    make_config: Make, tmp_path: Path, slow_reward: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checks are made by the other, or wait until it is there again."""
    books = tmp_path / "books.jsonl"
    config = make_config(*LONG, slow_reward, f"reward.workers={workers}")
    async with Controller(config, recipes=scripted(step_s=0.05, books=books)) as run:
        restarted, back_at = 0, -1
        async with asyncio.timeout(PATIENCE_S):
            async for row in run.steps():
                restarted += row.reward_restarts
                if row.step == 2:
                    await all_are_there(run)
                    os.kill(await stop_busy(run, "rewards.0"), signal.SIGKILL)
                # that it has checks says nothing until its death was noticed: it had some
                elif restarted and back_at < 0 and has_checks(run, "rewards.0"):
                    back_at = row.step
                elif 0 <= back_at < row.step - 2:
                    run.stop()
        result = run.result()
    assert result.reason == "stopped"
    assert_nothing_is_lost(result, books)
    joined = [(Joined, f"rewards.{number}") for number in range(workers)]
    assert sorted(of_workers(result)[:workers], key=str) == joined
    assert of_workers(result)[workers:] == [(Lost, "rewards.0"), (Restart, "rewards.0"), (Joined, "rewards.0")]
    (lost,) = (found for found in records(result) if isinstance(found, Lost))
    assert "was ended by SIGKILL" in lost.why
    assert sum(row.reward_restarts for row in result.rows) == 1
    assert sum(row.checks_again for row in result.rows) >= 1
    assert sum(row.verdicts.get("infrastructure", 0) for row in result.rows) == 0
    assert any("reward worker rewards.0 is lost" in record.getMessage() for record in caplog.records)


async def test_a_worker_that_stands_still_is_replaced(
    make_config: Make, tmp_path: Path, slow_reward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.5)  # here: it beats every two seconds
    monkeypatch.setattr(beats, "LOST_AFTER_S", 6.0)
    books = tmp_path / "books.jsonl"
    config = make_config(*LONG, slow_reward, "reward.workers=2")
    async with Controller(config, recipes=scripted(step_s=0.05, books=books)) as run:
        stopped = False
        async with asyncio.timeout(PATIENCE_S):
            async for row in run.steps():
                if row.step == 2:
                    await all_are_there(run)
                    await stop_busy(run, "rewards.1")
                    stopped = True
                elif stopped and row.reward_restarts:
                    run.stop()
        result = run.result()
    assert_nothing_is_lost(result, books)
    assert of_workers(result)[2:4] == [(Lost, "rewards.1"), (Restart, "rewards.1")]
    (lost,) = (found for found in records(result) if isinstance(found, Lost))
    assert "dead or stands still: nothing was heard for" in lost.why


async def test_a_worker_that_is_lost_too_often_ends_the_run_with_the_first_cause(
    make_config: Make, slow_reward: str
) -> None:
    config = make_config(*LONG, slow_reward, "reward.workers=2", "reward.max_restarts=1")

    async def kill_again_and_again() -> None:
        async with Controller(config, recipes=scripted(step_s=0.05)) as run:
            async for _ in run.steps():
                if (life := run._parts._checks._lives["rewards.1"]).works and life.child.is_running:
                    os.kill(life.child.pid, signal.SIGKILL)

    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RunFailed) as error:
            await kill_again_and_again()
    why = str(error.value)
    assert "reward worker rewards.1 was lost once more after 1 restarts (reward.max_restarts)" in why
    assert "The first loss of a reward worker: reward worker rewards.1 at" in why
    assert "was ended by SIGKILL; the last lines of" in why


async def test_the_run_says_that_its_checks_wait_for_a_worker(
    make_config: Make, slow_reward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_RESTART_S", 600.0)  # not before it was said
    words = (
        "reward worker rewards.0 is lost (rewards.0 (pid", ") and starts again in", "samples wait for a reward worker",
        "checks wait for a place in 0 of 1 reward workers",
    )  # fmt: skip
    async with Controller(make_config(*LONG, slow_reward), recipes=scripted(step_s=0.05)) as run:
        async with asyncio.timeout(PATIENCE_S):
            async for row in run.steps():
                if row.step == 1:
                    os.kill(await stop_busy(run, "rewards.0"), signal.SIGKILL)
                    await until(lambda: all(word in run.phase for word in words))
                    run.stop()
        assert run.result().reason == "stopped"


HANGING_REWARD = """
import time

def reward(response):
    kind = int(response) % 4
    while kind == 1:
        pass
    if kind == 3:
        time.sleep(3600)
    return float(kind)
"""


async def test_while_half_of_the_checks_hang_all_get_their_verdicts_and_the_run_goes_on(
    make_config: Make, tmp_path: Path
) -> None:
    """tools/bench/rewards_lag.py is this with more checks, and measures the loop."""
    (tmp_path / "hanging.py").write_text(HANGING_REWARD)

    class Rewarded:
        async def run(self, session: Session, prompt: Prompt) -> Sample:
            return Sample.single(prompt.token_ids, await session.generate(prompt.token_ids), reward=0.5)

    config = make_config(
        *LONG, "reward.function=hanging:reward", "reward.workers=2", "reward.concurrent=2", "reward.timeout_s=1.5"
    )
    async with Controller(config, workflow=Rewarded(), recipes=scripted(step_s=0.02)) as run:
        beside, asked = 0, list[asyncio.Task[ScoreResult]]()

        async def check(number: int) -> ScoreResult:
            task = ScoreTask(
                sample=f"check {number}", attempt=0, prompt="", answer=None, finish="stop", columns={},
                response=str(number),
            )  # fmt: skip
            return await run._parts._checks.check(task, np.zeros(0, np.int32))

        async with asyncio.timeout(PATIENCE_S):
            async for _ in run.steps():
                hangs = any(not each.done() for each in asked[1::2])
                beside += hangs
                if not hangs and beside <= 10:
                    asked += [asyncio.create_task(check(number)) for number in range(len(asked), len(asked) + 32)]
                elif all(each.done() for each in asked):
                    run.stop()
        results = await asyncio.gather(*asked)
    for number, result in enumerate(results):
        assert (result.verdict, result.reward) == (("timeout", 0.0) if number % 2 else ("given", float(number % 4)))
        assert result.seconds < 20
    assert beside > 10
    assert run._parts._checks.repeated == 0


def workers_of_this_process() -> list[int]:
    """Pids of all reward workers that run under it, with their guards and their checks."""
    found = []
    for pid in process_tree.walk(os.getpid()):
        with contextlib.suppress(OSError):  # a check that has just ended
            if b"areal_async.rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


async def test_an_evaluation_without_a_run_replaces_a_worker_too(
    make_config: Make, model: Path, slow_reward: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    killed: list[int] = []

    def progress(done: int, of: int) -> None:
        if done >= 8 and not killed:
            killed.extend(workers_of_this_process())
            process_tree.signal_all(killed, signal.SIGKILL)

    async with asyncio.timeout(PATIENCE_S):
        config = make_config(slow_reward, "eval.samples=1")
        result = await evaluate(config, model, progress=progress, recipes=scripted())
    assert killed
    assert (result.n, result.score, result.unscored) == (64, 1.0, 0)
    assert any("is lost" in record.getMessage() for record in caplog.records)
