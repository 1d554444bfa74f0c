"""The recorded answers graded again: what is asked of the workers, what is told of what they say, what is left out."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async import process_tree
from areal_async.cli import main
from areal_async.cli_replay_rewards import _reward, _said_before
from areal_async.config_file import load_config
from areal_async.controller.scoring import Scored as Result
from areal_async.errors import ConfigError, LogError
from areal_async.log.format import payload_path
from areal_async.messages import Release, RolledBack, Scored, ScoreResult, StepDone, Verdict
from areal_async.replay.finished import read_finished, read_sample
from areal_async.replay.rewards import Regraded, _Again
from areal_async.replay.run_files import load_run_config, load_run_data
from areal_async.rollout.completions import Record
from areal_async.testing.small_run import write_small_run

from ..waiting import wait_until
from .written import Said, write_log

RIGHT = tuple(ord(c) - 33 for c in "2")  # the answer of row 1, as tokens of the small run's model
LONG = tuple(ord(c) - 33 for c in "x" * 300 + "2")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_run(tmp_path_factory.mktemp("small"))


def again(log: Path, config: Path) -> _Again:
    finished = read_finished(log)
    data = load_run_data(load_config(config), finished.about)
    checked = [answer for answer in finished.answers if answer.verdict is not None]
    return _Again(log, checked, data, lambda done, whole: None)


@pytest.fixture(scope="module")
def twelve(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[_Again, list[Record]]:
    log = write_log(config, tmp_path_factory.mktemp("twelve") / "run", [Said(f"1.{n}", RIGHT) for n in range(12)])
    asked = again(log, config)
    return asked, records(asked)


def records(asked: _Again) -> list[Record]:
    async def all_of() -> list[Record]:
        return [record async for record in asked.records()]

    return asyncio.run(all_of())


def answered(record: Record, verdict: Verdict, reward: float | None) -> Result:
    assert record.task is not None
    return Result(record, ScoreResult(sample=record.task.sample, attempt=0, verdict=verdict, reward=reward, why="so"))


# ------------------------------------------------------------------------------------------------- what the log says


def test_what_the_log_says_of_each_answer(config: Path, tmp_path: Path) -> None:
    log = write_log(
        config,
        tmp_path / "run",
        [
            Said("3.0", RIGHT, ("wrong", 0.0)),
            Said("3.1", RIGHT, None),
            Said("4.0", RIGHT, None, reward=0.25),
            Said("3.1", RIGHT, ("infrastructure", None), attempt=1),
            Scored(at=0.5, sample="3.1", attempt=0, verdict="right", reward=1.0),
            StepDone(at=1.0, step=0, branch=0, metrics={}),
            StepDone(at=1.0, step=1, branch=0, metrics={}),
            Said("5.0", (*RIGHT, *RIGHT), versions=(1, 2)),
            Said("5.1", RIGHT, versions=(1,)),
            RolledBack(at=2.0, to=1, why="a rank died"),
            StepDone(at=3.0, step=1, branch=1, metrics={}),
            Said("6.0", RIGHT, versions=(2,)),
            Release(samples=("3.0",)),
        ],
    )
    finished = read_finished(log)
    said = [(a.sample, a.attempt, a.row, a.verdict, a.reward, a.by_workflow) for a in finished.answers]
    assert said == [
        ("3.0", 0, 3, "wrong", 0.0, False),
        ("3.1", 0, 3, None, None, False),
        ("4.0", 0, 4, None, 0.25, True),
        ("3.1", 1, 3, "infrastructure", None, False),
        ("5.0", 0, 5, "right", 1.0, False),
        ("5.1", 0, 5, "right", 1.0, False),
        ("6.0", 0, 6, "right", 1.0, False),
    ]
    assert [a.sample for a in finished.answers if a.lost_branch] == ["5.0"]
    assert [(a.sample, a.attempt) for a in finished.answers if a.released] == [("3.0", 0), ("3.1", 0)]
    assert (finished.version, finished.branches) == (2, {1: 0, 2: 1})


def test_arrays_that_were_let_go_are_not_arrays_that_are_missing(config: Path, tmp_path: Path) -> None:
    log = write_log(
        config, tmp_path / "run", [Said("1.0", RIGHT), Said("2.0", RIGHT), Release(samples=("1.0",))], segment_bytes=1
    )
    gone, missing = read_finished(log).answers
    assert read_sample(log, gone) is not None
    payload_path(log, gone.payload.segment).unlink()
    payload_path(log, missing.payload.segment).unlink()
    assert read_sample(log, gone) is None
    with pytest.raises(LogError, match=r"segment \d+ can't be read"):
        read_sample(log, missing)


# --------------------------------------------------------------------------------------------------- what is asked


def test_a_check_is_asked_with_what_the_run_had(config: Path, tmp_path: Path) -> None:
    log = write_log(config, tmp_path / "run", [Said("7.1", (*RIGHT, 89), ("crash", 0.0), attempt=2)])
    [record] = records(again(log, config))
    assert record.task is not None
    task = record.task
    assert (task.sample, task.attempt, task.prompt, task.answer) == ("7.1", 2, "7+7=", "14")
    assert (task.finish, task.response, task.columns) == ("stop", None, {})
    assert record.tokens.tolist() == [*RIGHT, 89]


Outcome = tuple[Verdict, float | None]
outcomes = st.tuples(st.sampled_from(get_args(Verdict)), st.sampled_from([None, 0.0, 0.5, 1.0]))


@settings(max_examples=10, derandomize=True, deadline=None)
@given(pairs=st.lists(st.tuples(outcomes, outcomes), max_size=12), cut=st.integers(0, 12))
def test_exactly_what_differs_is_told(
    pairs: list[tuple[Outcome, Outcome]], cut: int, twelve: tuple[_Again, list[Record]]
) -> None:
    written, asked_for = twelve
    answers = zip(written._answers, pairs, strict=False)
    before = [replace(answer, verdict=verdict, reward=reward) for answer, ((verdict, reward), _) in answers]
    asked = _Again(written._log, before, written._data, lambda done, whole: None)
    results = [answered(record, *now) for record, (_, now) in zip(asked_for, pairs, strict=False)]
    for batch in (results[:cut], results[cut:]):
        asyncio.run(asked.take(batch))
    regraded: Regraded = asked.result
    differ = [f"1.{n}" for n, (before, now) in enumerate(pairs) if before != now]
    assert [change.sample for change in regraded.changes] == differ
    assert (regraded.graded, regraded.changed) == (len(pairs), len(differ))
    table: dict[Verdict, dict[Verdict, int]] = {}
    for (before, _), (now, _) in pairs:
        table.setdefault(before, {})[now] = table.get(before, {}).get(now, 0) + 1
    assert regraded.counts == table


def test_a_change_is_told_with_its_row_and_the_end_of_its_answer(config: Path, tmp_path: Path) -> None:
    log = write_log(config, tmp_path / "run", [Said("1.0", LONG)])
    asked = again(log, config)
    asyncio.run(asked.take([answered(records(asked)[0], "timeout", None)]))
    [change] = asked.result.changes
    assert change.where.endswith("train.jsonl:2")
    assert (change.recorded_verdict, change.recorded_reward) == ("right", 1.0)
    assert (change.verdict, change.reward, change.reason) == ("timeout", None, "so")
    assert change.answer == "…" + " x" * 79 + " 2"


# --------------------------------------------------------------------------------------------------- what is refused


def test_another_model_or_other_data_are_refused(config: Path, tmp_path: Path) -> None:
    about = read_finished(write_log(config, tmp_path / "run", [Said("1.0", RIGHT)])).about
    settings = load_config(config)
    data = Path(settings.data.train[0])
    other = tmp_path / "other.jsonl"
    other.write_text(data.read_text().replace('"2"', '"3"', 1))
    changed = msgspec.structs.replace(settings, data=msgspec.structs.replace(settings.data, train=(str(other),)))
    with pytest.raises(ConfigError, match=r"other.jsonl: not what the run was trained on \(64 rows .*data.train=PATH"):
        load_run_data(changed, about)
    moved = tmp_path / "moved.jsonl"
    moved.write_text(data.read_text())
    load_run_data(
        msgspec.structs.replace(settings, data=msgspec.structs.replace(settings.data, train=(str(moved),))), about
    )
    with pytest.raises(ConfigError, match="not the model that the run began with"):
        load_run_data(settings, {**about, "model.path": "another"})


def test_an_option_that_changes_nothing_is_refused(config: Path, tmp_path: Path) -> None:
    log = write_log(config, tmp_path / "run", [Said("1.0", RIGHT)])
    with pytest.raises(ConfigError, match=r"train.lr: changes nothing of what is asked here; only options of reward, "):
        load_run_config(log, ["reward.timeout_s=3", "train.lr=1"], ("reward", "data.train"))
    changed, _ = load_run_config(log, ["reward.timeout_s=3"], ("reward",))
    assert changed.reward.timeout_s == 3
    (log.parent / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="name its whole folder"):
        load_run_config(log, [], ())


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--limit", "0", "--peer", "rewards"], "--limit 0: must be at least 1"),
        (["--limit", "3"], "--limit: has a meaning only with --peer"),
        (["reward.timeout_s=1"], "reward.timeout_s=1: has a meaning only with --peer"),
        (["--peer", "rewards", "reward.function=maht"], "'maht' is no reward"),
        (["--peer", "rewards", "reward.regex.pattern=a"], "is only read by `regex`"),
    ],
)
def test_a_wrong_command_line(
    words: Sequence[str], what: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(config, tmp_path / "run", [Said("1.0", RIGHT)])
    assert main(["replay", str(log.parent), *words]) == 2
    assert what in capsys.readouterr().err


def test_options_of_the_run_that_another_reward_does_not_read_are_left_out(config: Path, tmp_path: Path) -> None:
    """And a reward that the run had before a resume is told."""
    log = write_log(config, tmp_path / "run", [Said("1.0", RIGHT)])
    mine = log.parent / "config.yaml"
    mine.write_text(config.read_text().replace("reward: {", "reward: {function: exact, exact_after: '>', "))
    (log.parent / "config-1.yaml").write_text(config.read_text().replace("reward: {", "reward: {function: math, "))
    (log.parent / "config-2.yaml").write_text(mine.read_text().replace("workers: 1", "workers: 2"))
    for overrides, after in (([], ">"), (["reward.function=math"], None)):
        settings, sources = load_run_config(log, overrides, ("reward",))
        settings, spec = _reward(settings, sources, overrides)
        assert (settings.reward.exact_after, spec.exact_after) == (after, after)
        said = [line.partition(":")[0] for line in _said_before(log, settings)]
        assert said == ["config-1.yaml"]


# ------------------------------------------------------------------------------------------------------ real workers


@pytest.mark.slow
def test_real_workers_say_what_the_run_was_told_and_what_an_option_changes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row n has the answer 2n."""
    wrong = [Said(f"2.{member}", RIGHT, ("wrong", 0.0)) for member in range(10)]
    right = [Said(f"3.{member}", [ord("6") - 33]) for member in range(10)]
    lost = [Said("1.7", RIGHT, ("crash", 0.0)), Said("1.8", RIGHT, None), Said("1.9", RIGHT, None, reward=3.0)]
    run = str(write_log(config, tmp_path / "run", [*wrong, *right]).parent)
    assert main(["replay", run, "--peer", "rewards"]) == 0
    assert "20 answers graded again" in (shown := capsys.readouterr().out)
    assert shown.endswith(": 0 changed\n")

    run = str(write_log(config, tmp_path / "second", [*wrong, *lost, *right]).parent)
    assert main(["replay", run, "--peer", "rewards", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [change["sample"] for change in told["changes"]] == ["1.7"]
    assert (told["by_workflow"], told["unchecked"], told["graded"]) == (1, 1, 21)
    assert told["counts"] == {"wrong": {"wrong": 10}, "crash": {"right": 1}, "right": {"right": 10}}

    words = ["--peer", "rewards", "--json", "reward.values.wrong=-0.5", "--limit", "12"]
    assert main(["replay", run, *words]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [change["sample"] for change in told["changes"]] == [*(said.sample for said in wrong), "1.7"]
    assert all(change["reward"] == -0.5 for change in told["changes"][:-1])
    assert (told["graded"], told["left"]) == (12, 9)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_one_that_was_interrupted(number: signal.Signals, config: Path, tmp_path: Path) -> None:
    begun, left = tmp_path / "begun", tmp_path / "t"
    left.mkdir()
    sleeps = (
        f"import pathlib, time\n\ndef reward(response):\n    pathlib.Path({str(begun)!r}).touch(); time.sleep(600)\n"
    )
    (tmp_path / "sleeps.py").write_text(sleeps)
    run = write_log(config, tmp_path / "run", [Said("1.0", RIGHT)]).parent
    words = ["replay", str(run), "--peer", "rewards", "reward.function=sleeps:reward", f"import_path={tmp_path}"]
    environment = os.environ | {"TMPDIR": str(left)}
    command = [sys.executable, "-m", "areal_async", *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(begun.exists, 120)
        process.send_signal(number)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert process.stderr.read().decode().endswith("areal-async: interrupted; all processes were ended\n")
    assert list(left.iterdir()) == []
    assert [pid for pid in process_tree.marked("TMPDIR", str(left)) if pid != os.getpid()] == []
