"""`areal-async replay RUN --peer trainer`: its options, what it prints, its exit codes; nothing is started."""

import asyncio
import json
import os
import signal
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from areal_async.cli import main
from areal_async.replay import trainer
from areal_async.replay.answers import Compared
from areal_async.replay.trainer import Plan, Watch

from .steps import make_run_folder, record

RECORDED = {"loss": -0.25, "grad_norm": 2.0, "entropy": 0.1, "train_s": 1.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps."""
    folder = make_run_folder(tmp_path)
    log = record(folder)
    with closing(log.log):
        for step in range(3):
            log.sample(step)
            log.sent(step)
            log.done(step)
        log.log.flush()
    return folder


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, float]]:
    """What the ranks answer otherwise than the recorded ones, by step."""
    other: dict[int, dict[str, float]] = {}

    async def train_again(plan: Plan, watch: Watch) -> list[Compared]:
        watch.starting(plan.version, 1)
        steps = [
            Compared(step.step, 0, RECORDED, {**RECORDED, **other.get(step.step, {})}, "", "") for step in plan.steps
        ]
        for compared in steps:
            watch.step(compared)
        return steps

    monkeypatch.setattr(trainer, "train_again", train_again)
    return other


def again(run: Path, *options: str) -> int:
    return main(["replay", str(run), "--peer", "trainer", *options])


@pytest.mark.usefixtures("answers")
def test_the_same_answers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert again(run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}: steps 0 to 2, from the run's first weights"
    assert lines[1] == "starting the trainer: version 0, 1 rank(s)"
    assert lines[3].split() == ["0", "-0.25", "-0.25", "0.0e+00", "2", "2", "0.0e+00"]
    assert lines[-1] == "every answer is within its tolerance"
    assert lines[-2].endswith("4.5 s of them the steps themselves (in the run: 4.5 s)")


def test_other_answers(run: Path, answers: dict[int, dict[str, float]], capsys: pytest.CaptureFixture[str]) -> None:
    answers.update({1: {"loss": -0.2502}, 2: {"loss": -0.26, "grad_norm": 2.001}})
    assert again(run) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].endswith("over: loss")
    assert lines[5].endswith("over: loss, grad_norm")
    assert [line.split() for line in lines if line.startswith("loss ")] == [["loss", "1.0e-02", "2", "0.0001", "2"]]
    assert lines[-2] == (
        "the first difference over its tolerance: step 1: loss: recorded -0.25, now -0.2502: they differ by 0.0002, "
        "allowed is 0.0001"
    )
    assert lines[-1] == "in all 3 in 2 of the 3 steps"
    assert again(run, "--tolerance", "loss=0.1", "--tolerance", "grad_norm=1e-3") == 0
    assert again(run, "--steps", "1") == 0
    capsys.readouterr()
    assert again(run, "--json") == 1
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["over"], told["version"], told["checkpoint"]) == (3, 0, "")
    assert [(found["step"], found["field"]) for found in told["differences"]] == [
        (1, "loss"), (2, "loss"), (2, "grad_norm"),
    ]  # fmt: skip
    assert told["largest"]["loss"] == {"difference": pytest.approx(0.01), "step": 2, "allowed": 1e-4, "over": 2}
    assert msgspec.convert(told["steps"], list[Compared])[2].now["loss"] == -0.26


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--from", "model"], "--from: has a meaning only with --peer trainer"),
        (["--peer", "trainer", "--steps", "0"], "--steps 0: must be at least 1"),
        (["--peer", "trainer", "--limit", "3"], "--limit: has no meaning with --peer trainer; --steps N has"),
        (["--peer", "trainer", "--tolerance", "los=1"], "--tolerance los=1: no such field; did you mean loss?"),
        (["--peer", "trainer", "--from", f"step-{'9' * 5000}"], "should be model or step-N, such as step-40"),
        (["--peer", "trainer", "--from", "step-2"], "--from step-2: it is no whole checkpoint"),
        (["--peer", "trainer", "--until", "step=1"], "--until has no meaning with --peer trainer"),
    ],
)
def test_what_makes_no_sense(run: Path, options: list[str], wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), *options]) == 2
    told = capsys.readouterr()
    assert wrong in told.err
    assert len(told.err.splitlines()) == 1
    assert not told.out


def test_a_log_without_its_configuration(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").unlink()
    assert again(run) == 2
    assert "config.yaml: missing" in capsys.readouterr().err


def test_sigterm_ends_it_in_order(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does: what was begun is ended."""
    ended = []

    async def train_again(plan: Plan, watch: Watch) -> list[Compared]:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return []

    monkeypatch.setattr(trainer, "train_again", train_again)
    assert again(run) == 130
    assert ended == [True]
