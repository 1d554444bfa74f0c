"""Trainer ranks that die, stand still or fail at any moment: whole runs with scripted peers, judged by their books."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_async.config import Config
from areal_async.controller import Controller, RunResult
from areal_async.controller import trainer as trainer_module
from areal_async.core import restarts
from areal_async.errors import LaunchError, RunFailed
from areal_async.launch.child import Child
from areal_async.log.reader import read_records
from areal_async.messages import Failed, Joined, Lost, Published, Restart, RolledBack, SampleDone, StepDone
from areal_async.testing.books import Line, read_trainer, surviving
from areal_async.testing.recipes import scripted
from areal_async.testing.trainer import Die, Fail, Silent, TrainerOrder
from areal_async.wire import beats

from ..waiting import PATIENCE_S

pytestmark = pytest.mark.slow

Make = Callable[..., Config]
STEPS = 8
RUN = (f"train.steps={STEPS}", "train.ranks=2", "checkpoint.every_steps=2", "rollout.stop_token_ids=[]")
OFTEN = (*RUN, "train.step_timeout_s=5", "train.max_restarts=20")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_RESTART_S", 0.2)
    monkeypatch.setattr(restarts, "LONGEST_RESTART_S", 0.2)
    monkeypatch.setattr(trainer_module, "CHECKPOINT_TIMEOUT_S", 5.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that will come, or end, may take as long as they need: only those that never say Hello have a deadline."""
    wait = trainer_module.wait_for_start

    async def wait_longer(child: Child, ready: Any, timeout_s: float, *words: str) -> None:
        hangs = any('"hello"' in word and '"Silent"' in word for word in child.spec.argv)
        await wait(child, ready, timeout_s if hangs else PATIENCE_S, *words)

    monkeypatch.setattr(trainer_module, "wait_for_start", wait_longer)


def messages(folder: Path, *kinds: type) -> list[Any]:
    return [record.message for record in read_records(folder / "log") if isinstance(record.message, kinds)]


def batch(book: Sequence[Line]) -> list[tuple[str, float, int]]:
    """What the ranks trained in one step: samples, their advantages and lengths."""
    return sorted(item for line in book for item in zip(line.samples, line.advantages, line.lengths, strict=True))


def check(result: RunResult, books: Path, config: Config) -> None:
    """All steps are trained, each once in the history that survived; those that were trained again had the same
    batches, and followed from the same weights; nothing that was published is left."""
    assert result.reason == "steps_done"
    assert result.model is not None
    assert (result.model / "version").read_text() == str(STEPS)
    last = surviving(read_trainer(books))
    assert sorted((line.step, line.rank) for line in last) == [(s, r) for s in range(STEPS) for r in range(2)]
    trained = [sample for line in last for sample in line.samples]
    assert len(trained) == len(set(trained)) == STEPS * config.train.batch_groups * config.rollout.group_size
    wanted = {step: batch([line for line in last if line.step == step]) for step in range(STEPS)}
    state = {line.step: line.state for line in last}
    whole = {(line.branch, line.step): 0 for line in read_trainer(books)}
    for line in read_trainer(books):
        whole[line.branch, line.step] += 1
        assert line.state == state[line.step], "another history"
    for (branch, step), ranks in whole.items():
        if ranks == 2:  # else a rank died before it could write
            book = [line for line in read_trainer(books) if (line.branch, line.step) == (branch, step)]
            assert batch(book) == wanted[step], f"step {step} of branch {branch} had another batch"
    back = messages(result.folder, RolledBack)
    assert len({line.branch for line in read_trainer(books)}) <= len(back) + 1
    for row in result.rows:
        assert row.lag_max <= config.rollout.max_staleness


async def run_all(config: Config, books: Path, orders: Sequence[Sequence[TrainerOrder]], **more: Any) -> RunResult:
    recipes = scripted(books=books, trainer_orders=orders, **({"token_s": 0.001} | more))
    async with asyncio.timeout(2 * PATIENCE_S), Controller(config, recipes=recipes) as run:  # up to nine starts
        return await run.run()


async def test_every_way_to_be_lost_one_after_another(make_config: Make, tmp_path: Path) -> None:
    """Each life of the ranks ends at another moment; the last one ends the run, as if nothing had been."""
    config, books = make_config(*OFTEN), tmp_path / "books.jsonl"
    faults = [
        ("train", 1, Die(), "ended with exit code 7"),  # no checkpoint yet: back to the model
        ("train", 1, Die(after=True), "ended with exit code 7"),
        ("publish", 0, Die(), "ended with exit code 7"),
        ("checkpoint", 2, Die(), "ended with exit code 7"),
        ("checkpoint", 2, Die(after=True), "ended with exit code 7"),
        ("train", 3, Fail("CUDA error: unspecified launch failure"), "CUDA error: unspecified launch failure"),
        ("publish", 4, Fail("No space left on device"), "version 4 was not published: trainer.1 failed at Publish"),
        ("train", 5, Silent(), r"step 5: trainer.1 did not answer Train train 5 branch 7 within 5 s"),
    ]
    orders = [[TrainerOrder(on, fault, at, None if isinstance(fault, Die) else 1)] for on, at, fault, _ in faults]  # type: ignore[arg-type]
    result = await run_all(config, books, orders)
    check(result, books, config)
    told = messages(result.folder, Lost, Failed)  # a swap may find the file gone; the core doesn't mind a late word
    losses = [loss for loss in told if getattr(loss, "of", "") not in ("checkpoint", "swap")]
    assert len(losses) == len(faults), [loss.why[:200] for loss in losses]
    for (_, _, _, words), loss in zip(faults, losses, strict=True):
        assert words in loss.why, loss.why
    assert [type(loss) for loss in losses] == [Lost] * 5 + [Failed] * 3
    assert "(train.step_timeout_s)" in losses[-1].why
    told = messages(result.folder, Restart, RolledBack, Joined)
    told = [event for event in told if getattr(event, "peer", "trainer") == "trainer"]
    assert [type(event) for event in told] == [Joined] + [Restart, RolledBack, Joined] * len(faults)
    assert [event.to for event in told if isinstance(event, RolledBack)] == [0, 0, 0, 0, 0, 2, 2, 4]
    assert [event.version for event in told if isinstance(event, Joined)] == [0, 0, 0, 0, 0, 0, 2, 2, 4]


async def test_a_checkpoint_that_fails_is_done_without_and_one_that_hangs_is_a_loss(
    make_config: Make, tmp_path: Path
) -> None:
    config, books = make_config(*OFTEN), tmp_path / "books.jsonl"
    orders = [
        [TrainerOrder("checkpoint", Fail("No space left on device"), 2), TrainerOrder("checkpoint", Silent(), 5, 0)]
    ]
    result = await run_all(config, books, orders)
    check(result, books, config)
    (lost,) = messages(result.folder, Lost)
    assert "trainer.0 did not answer SaveCheckpoint checkpoint 5 branch 0 within 5 s" in lost.why
    failed = messages(result.folder, Failed)
    assert [event.of for event in failed][:1] == ["checkpoint"]
    assert "No space left on device" in failed[0].why
    assert [event.to for event in messages(result.folder, RolledBack)] == [3]


async def test_ranks_that_are_killed_or_stopped_from_outside(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 between two steps; kill -STOP is noticed by the missing heartbeats. Rollouts go on meanwhile."""
    monkeypatch.setattr(beats, "BEAT_S", 0.8)
    monkeypatch.setattr(beats, "LOST_AFTER_S", 7.2)  # the others beat every two seconds
    for pause in ("FIRST_RESTART_S", "LONGEST_RESTART_S"):
        monkeypatch.setattr(restarts, pause, 2.5)  # longer than an answer takes
    config, books = make_config(*RUN), tmp_path / "books.jsonl"
    recipes, pids = scripted(books=books, step_s=0.05, token_s=0.02), []
    async with asyncio.timeout(PATIENCE_S), Controller(config, recipes=recipes) as run:
        async for row in run.steps():
            if run._parts._trainer._lives == 3:  # a stopped process hears no goodbye: it must have been killed
                assert not os.path.exists(f"/proc/{pids[1]}")  # noqa: ASYNC240
            if len(pids) < 2 and row.step == (2, 5)[len(pids)]:
                life = run._parts._trainer._life
                assert life is not None
                assert life.child is not None
                os.kill(life.child.pid, (signal.SIGKILL, signal.SIGSTOP)[len(pids)])
                pids.append(life.child.pid)
        result = run.result()
    check(result, books, config)
    first, second = messages(result.folder, Lost)
    assert "was ended by SIGKILL" in first.why
    assert "If nobody killed it, the machine ran out of memory" in first.why
    assert "is dead or stands still: nothing was heard for" in second.why
    away = [event.at for event in messages(result.folder, Lost, RolledBack)]
    done = [event.at for event in messages(result.folder, SampleDone)]
    assert any(away[0] < at < away[1] or away[2] < at < away[3] for at in done)


async def test_a_step_that_always_fails_ends_the_run_with_the_first_cause(make_config: Make, tmp_path: Path) -> None:
    config, books = make_config(*RUN, "train.max_restarts=2"), tmp_path / "books.jsonl"
    orders = [[TrainerOrder("train", Fail(f"CUDA error {life}"), 3, times=9)] for life in range(9)]
    with pytest.raises(RunFailed, match=r"(?s)lost once more after 2 restarts.*first loss.*CUDA error 0.*CUDA error 2"):
        await run_all(config, books, orders)
    (folder,) = (tmp_path / "runs").iterdir()
    assert [event.id for event in messages(folder, Failed) if event.of == "train"] == ["3", "3", "3"]
    assert {line.step for line in read_trainer(books)} == {0, 1, 2}


async def test_ranks_that_cannot_be_started_again(make_config: Make, tmp_path: Path, patient: None) -> None:
    """They end while they start, or never come: lost once more each time, and the cause is told."""
    config = make_config(*RUN, "train.start_timeout_s=3", "train.max_restarts=2")
    orders = [
        [TrainerOrder("train", Die(), 1)],
        [TrainerOrder("hello", Fail("torch.cuda.OutOfMemoryError: CUDA out of memory"))],
        [TrainerOrder("hello", Silent(), rank=1)],
    ]
    why = r"(?s)after 2 restarts.*first loss.*exit code 7.*train\.start_timeout_s = 3 s: trainer \(pid \d+\) is alive"
    with pytest.raises(RunFailed, match=why):
        await run_all(config, tmp_path / "books.jsonl", orders)
    (folder,) = (tmp_path / "runs").iterdir()
    _, second, _ = messages(folder, Lost)
    assert "the trainer could not be started again: it ended while it started" in second.why
    assert "It ran out of memory: use a smaller train.max_tokens_per_microbatch" in second.why
    assert not messages(folder, RolledBack)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fail("no such model"), r"(?s)ended while it started.*exit code 1.*no such model"),
        (Silent(), r"not ready after train\.start_timeout_s = 3 s: trainer \(pid \d+\) is alive"),
    ],
    ids=["ends", "hangs"],
)
async def test_the_first_start_that_fails_ends_the_run(
    make_config: Make, tmp_path: Path, patient: None, fault: Fail | Silent, why: str
) -> None:
    """Nothing is computed yet: it is an error of the configuration or the machine, and nothing is tried twice."""
    config = make_config(*RUN, "train.start_timeout_s=3")
    with pytest.raises(LaunchError, match=why):
        await run_all(config, tmp_path / "books.jsonl", [[TrainerOrder("hello", fault)]])
    (folder,) = (tmp_path / "runs").iterdir()
    assert not messages(folder, Restart, Published, StepDone)
