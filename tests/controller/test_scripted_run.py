"""Whole runs with scripted servers and trainers: real processes, wire, log and rewards."""

import asyncio
import json
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from areal_async.config import Config
from areal_async.controller import Controller, RunResult, parts
from areal_async.controller.evaluate import evaluate
from areal_async.errors import ConfigError, RunFailed
from areal_async.log.reader import read_payload, read_records
from areal_async.messages import SampleDone, group_of
from areal_async.rollout.order import order
from areal_async.rollout.session import Session, sample_seed
from areal_async.rollout.workflow import Prompt, Sample, SingleTurn
from areal_async.testing.recipes import scripted
from areal_async.testing.trainer import VOCAB_SIZE
from areal_async.testing.vllm_server import drawn_token

from ..waiting import PATIENCE_S, Straggler, until

Make = Callable[..., Config]
EOS = ord("z") - 33
GROUP_STATES = ("trained", "filtered", "stale", "failed", "cancelled", "outstanding", "training")


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_rows(result: RunResult, config: Config) -> None:
    """What holds for the metrics of any run."""
    lines = json_lines(result.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(result.steps))
    for line in lines:
        ledger = line["ledger"]
        assert ledger["admitted"] == sum(ledger[state] for state in GROUP_STATES)
        assert ledger["samples_admitted"] == sum(ledger[f"samples_{state}"] for state in GROUP_STATES)
        assert ledger["trained"] == (line["step"] + 1) * config.train.batch_groups
        assert line["lag_max"] <= config.rollout.max_staleness


async def test_a_run_ends_with_all_steps_and_a_model(make_config: Make, tmp_path: Path) -> None:
    books, config = tmp_path / "books.jsonl", make_config()
    async with Controller(config, recipes=scripted(books=books)) as run:
        result = await run.run()
    assert (result.reason, result.steps) == ("steps_done", 4)
    assert result.model is not None
    assert (result.model / "version").read_text() == "4"
    check_rows(result, config)
    trained = [sample for line in json_lines(books) for sample in line["samples"]]
    assert len(trained) == len(set(trained)) == 4 * 4 * 2
    assert not run._parts.folder.runtime.exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
async def test_synchronous_training_is_a_plain_loop(make_config: Make, tmp_path: Path, ranks: int) -> None:
    """η = 0: the same groups in the same order with the same tokens as a loop of generate, train, load."""
    books = tmp_path / "books.jsonl"
    config = make_config("rollout.max_staleness=0", "seed=7", f"train.ranks={ranks}")
    async with Controller(config, recipes=scripted(books=books)) as run:
        result = await run.run()
    lines = json_lines(books)
    for step in range(4):
        of_step = [line for line in lines if line["step"] == step]
        assert all(line["groups"] == list(range(4 * step, 4 * step + 4)) for line in of_step)
        trained = sorted(sample for line in of_step for sample in line["samples"])
        assert trained == sorted(f"{group}.{member}" for group in range(4 * step, 4 * step + 4) for member in range(2))
    rows = order(64, 7, 0)
    arrays = answers(result)
    for group in range(16):
        prompt = [ord(char) - 33 for char in f"{rows[group]}+{rows[group]}="]
        for member in range(2):
            sample = f"{group}.{member}"
            token_ids = arrays[sample][0]
            assert token_ids.tolist() == prompt + plain_answer(sample_seed(7, sample, 0, 0), version=group // 4)
    assert all(row.lag_max == 0 and row.mixed_share == 0 for row in result.rows)


def plain_answer(seed: int, version: int, limit: int = 64) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < limit and (not tokens or tokens[-1] != EOS):
        tokens.append(drawn_token(seed, version, len(tokens), VOCAB_SIZE))
    return tokens


@pytest.mark.slow
async def test_the_batch_waits_for_a_straggler_and_says_so(make_config: Make) -> None:
    workflow, config = Straggler(), make_config()
    async with Controller(config, workflow=workflow, recipes=scripted()) as run:
        rows = []
        async with asyncio.timeout(PATIENCE_S):
            async for row in run.steps():
                rows.append(row)
                if row.step == 1:  # group 0 may be trained by step 2 at the latest
                    await until(lambda: "step 2 waits for group 0 (floor 0, deadline 2)" in run.phase)
                    await asyncio.sleep(parts.LOOK_S + 0.05)  # a look later
                    assert "sample 0.0 on server 0" in run.phase
                    assert run._rows.empty(), "step 2 was trained without group 0"
                    workflow.go.set()
        result = run.result()
    assert "group 0 (floor 0, deadline 2)" in rows[2].waited_for
    check_rows(result, config)


@pytest.mark.slow
async def test_a_standstill_is_told_with_who_waits_for_whom(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parts, "WATCHDOG_S", 0.5)
    workflow = Straggler()

    def told(record: logging.LogRecord) -> bool:
        words = "waits for group 0 (floor 0, deadline 2) <- sample 0.0 on server 0"
        return "nothing has moved for" in record.getMessage() and words in record.getMessage()

    async with Controller(make_config(), workflow=workflow, recipes=scripted()) as run:
        async for row in run.steps():
            if row.step == 1:
                await until(lambda: any(map(told, caplog.records)))
                workflow.go.set()


@pytest.mark.slow
async def test_answers_live_through_swaps(make_config: Make) -> None:
    """Slow answers and quick steps: samples with tokens of several versions, never older than η."""
    config = make_config("train.steps=8", "rollout.max_staleness=3", "rollout.stop_token_ids=[]")
    async with Controller(config, recipes=scripted(token_s=0.004, step_s=0.02)) as run:
        result = await run.run()
    check_rows(result, config)
    assert sum(row.mixed_share for row in result.rows) > 0
    assert any(row.lag_max >= 2 for row in result.rows)
    done = {record.sample: record for record in records(result) if isinstance(record, SampleDone)}
    for sample, (_, mask, _, versions) in answers(result).items():
        sampled = versions[mask != 0]
        assert (sampled.min(), sampled.max()) == (done[sample].oldest, done[sample].newest)
        assert (np.diff(sampled) >= 0).all()


def records(result: RunResult) -> list[object]:
    return [record.message for record in read_records(result.folder / "log")]


def answers(result: RunResult) -> dict[str, list[Any]]:
    """The arrays of all finished samples, from the log."""
    log = result.folder / "log"
    found = [read_payload(log, record.payload) for record in read_records(log) if record.payload is not None]
    return {payload.sample: payload.arrays for payload in found}


class Broken:
    async def run(self, session: Session, prompt: Prompt) -> Sample:
        raise ZeroDivisionError("the workflow's own mistake")


@pytest.mark.slow
async def test_a_workflow_that_raises_stops_the_run_with_its_traceback(make_config: Make) -> None:
    with pytest.raises(RunFailed, match=r"(?s)group 0.*ZeroDivisionError: the workflow's own mistake"):
        async with Controller(make_config("rollout.retries=1"), workflow=Broken(), recipes=scripted()) as run:
            await run.run()


@pytest.mark.slow
async def test_a_failure_within_the_budget_is_counted_and_replaced(make_config: Make) -> None:
    class Sometimes:
        async def run(self, session: Session, prompt: Prompt) -> Sample:
            if prompt.position == 1:
                raise RuntimeError("this one never works")
            return await SingleTurn().run(session, prompt)

    config = make_config("rollout.retries=0", "rollout.max_failures=1")
    async with Controller(config, workflow=Sometimes(), recipes=scripted()) as run:
        result = await run.run()
    assert result.steps == 4
    assert result.rows[-1].ledger["failed"] == 1


@pytest.mark.slow
async def test_a_reward_that_raises_is_told_and_counted(
    make_config: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "my_reward.py").write_text("def reward(response, answer):\n    return 1 / 0\n")
    async with Controller(make_config("reward.function=my_reward:reward"), recipes=scripted()) as run:
        result = await run.run()
    assert sum(row.verdicts.get("crash", 0) for row in result.rows) >= 4 * 4 * 2
    told = [record.getMessage() for record in caplog.records if "ended as crash, reward 0" in record.getMessage()]
    assert len(told) == 3
    assert "my_reward.py" in told[0]
    assert "ZeroDivisionError" in told[0]


@pytest.mark.slow
async def test_stop_finishes_the_step_and_saves(make_config: Make) -> None:
    async with Controller(make_config("train.steps=1000"), recipes=scripted(step_s=0.05)) as run:
        async for row in run.steps():
            if row.step == 1:
                run.stop()
        result = run.result()
    assert result.reason == "stopped"
    assert 2 <= result.steps <= 4
    assert result.model is not None
    assert (result.model / "version").read_text() == str(result.steps)


@pytest.mark.slow
async def test_leaving_early_ends_everything(make_config: Make) -> None:
    async with Controller(make_config("train.steps=1000"), recipes=scripted(step_s=0.05)) as run:
        async for _ in run.steps():
            break


@pytest.mark.slow
async def test_the_data_end(make_config: Make) -> None:
    """64 rows in one epoch are 16 batches of 4; with 6 a step, 4 rows are left over."""
    config = make_config("data.epochs=1", "train.steps=100", "train.batch_groups=6")
    async with Controller(config, recipes=scripted()) as run:
        result = await run.run()
    assert (result.reason, result.steps) == ("data_ended", 10)
    assert len({group_of(r.sample) for r in records(result) if isinstance(r, SampleDone)}) >= 60


async def test_a_configuration_made_in_a_program_is_checked(make_config: Make, tmp_path: Path) -> None:
    config = make_config()
    wrong = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, minibatches=3))
    with pytest.raises(ConfigError, match=r"train\.minibatches: 3 does not divide train\.batch_groups \(4\)"):
        async with Controller(wrong, recipes=scripted()):
            pass
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
async def test_two_runs_beside_each_other(make_config: Make) -> None:
    config = make_config()

    async def one() -> RunResult:
        async with Controller(config, recipes=scripted()) as run:
            return await run.run()

    first, second = await asyncio.gather(one(), one())
    assert first.folder != second.folder
    assert first.steps == second.steps == 4


async def test_a_used_run_folder_is_refused(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        async with Controller(make_config(), run_dir=tmp_path / "used", recipes=scripted()):
            pass


@pytest.mark.slow
def test_embedding_changes_no_signal_handler(make_config: Make) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]

    async def program() -> None:
        async with Controller(make_config(), recipes=scripted()) as run:
            inside = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
            assert inside[1:] == before[1:]
            await run.run()

    uvloop.run(program())
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]


@pytest.mark.slow
async def test_evaluation_scores_each_problem(make_config: Make, model: Path) -> None:
    seen = []
    result = await evaluate(
        make_config("eval.samples=2"), model, progress=lambda done, of: seen.append((done, of)), recipes=scripted()
    )
    assert (result.n, result.samples, result.score) == (64, 2, 0.0)
    assert seen[-1] == (128, 128)
    assert sum(result.verdicts.values()) == 128
