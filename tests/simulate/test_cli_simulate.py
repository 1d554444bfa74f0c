"""`areal-async simulate`: what it prints, what it says where the plan is wrong, and that it is the same every time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.cli import main
from areal_async.errors import ConfigError
from areal_async.simulate import table
from areal_async.simulate.plan_file import load_rows
from areal_async.simulate.sweep import Result, compared, prepare, simulate_rows

ROOT = Path(__file__).resolve().parents[2]
PLANS = sorted((ROOT / "configs" / "plans").glob("*.yaml"))

PLAN = """\
title: tiny
seed: 3
model: {name: r1-distill-qwen-1.5b}
gpu: {name: H800}
cluster: {gpus: 8}
rollout: {group_size: 2, max_new_tokens: 2000}
train: {steps: 4, batch_groups: 4, max_tokens_per_microbatch: 4096}
answers: {mean_tokens: 300}
"""
SWEEP = PLAN + "sweep:\n  rollout.max_staleness: [0, 2]\n  trainer.gpus: [2, 4]\n"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("plan.yaml").write_text(text)
        return "plan.yaml"

    return write


def printed(capsys, *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_one_row_is_a_page(plan, capsys):
    text = printed(capsys, plan(PLAN))
    assert "│ system       │ async, η = 4" in text
    assert "8: 6 servers, 2 trainer ranks" in text
    assert "steps done, 4 steps in" in text


def test_a_sweep_is_a_table(plan, capsys):
    title, head, _, *lines = printed(capsys, plan(SWEEP)).strip().split("\n")
    assert title.strip() == "tiny"
    assert [name.strip() for name in head.split("┃")][:4] == ["max_staleness", "gpus", "GPUs", "s/step"]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    assert [line[:3] for line in cells] == [["0", "2", "8"], ["0", "4", "8"], ["2", "2", "8"], ["2", "4", "8"]]
    assert cells[0][-1] == "1.00"


def test_json_has_all_of_it(plan, capsys):
    told = json.loads(printed(capsys, plan(SWEEP), "--json", "baseline=[rollout.max_staleness=0]"))
    assert told["title"] == "tiny"
    rows = told["rows"]
    assert [row["values"] for row in rows] == [
        {"rollout.max_staleness": eta, "trainer.gpus": gpus} for eta in ("0", "2") for gpus in ("2", "4")
    ]
    assert [row["against"] for row in rows] == [0, 1, 0, 1]
    for row in rows:
        figures = row["figures"]
        assert row["speed_up"] == pytest.approx(row["steps_per_s"] / rows[row["against"]]["steps_per_s"])
        assert row["steps_per_s"] == pytest.approx(figures["steps"] / sum(figures["step_s"]))
        assert row["tokens_per_s"] == pytest.approx(figures["tokens_trained"] / sum(figures["step_s"]))
        assert figures["gpu_hours"] == pytest.approx(8 * figures["seconds"] / 3600)
        assert row["servers"] + row["trainer_ranks"] == 8
        assert figures["lag_max"] <= row["max_staleness"]


def test_a_seed_is_an_option(plan, capsys):
    path = plan(PLAN)
    one, other, again = (printed(capsys, path, "--json", *more) for more in ((), ("--seed", "9"), ("seed=3",)))
    assert one == again != other


def test_three_systems_train_the_same_samples(plan, capsys):
    told = json.loads(printed(capsys, plan(PLAN), "--json", "sweep.system=[async,sync,colocated]"))
    figures = [row["figures"] for row in told["rows"]]
    assert [row["system"] for row in told["rows"]] == ["async", "sync", "colocated"]
    assert [row["gpus"] for row in told["rows"]] == [8, 8, 8]
    assert figures[1]["tokens_trained"] == figures[2]["tokens_trained"]
    assert figures[1]["lag_max"] == figures[2]["lag_max"] == 0


def test_warm_up_leaves_steps_out(plan):
    rows = load_rows(plan(PLAN), ["train.steps=8", "warm_up=2", "rollout.max_staleness=1"])
    (result,) = simulate_rows(prepare(rows, no_run))
    assert result.step_s == pytest.approx(sum(result.figures.step_s[2:6]) / 4)


def no_run(run: Path):
    raise AssertionError(run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout.max_stalenes=2"], "rollout.max_stalenes: no such key; did you mean rollout.max_staleness?"),
        (["baseline=[system=sync]"], "baseline: 'system=sync' is no value of the sweep"),
        (["--plot", "here.pdf"], "--plot: here.pdf must end in .png or .svg"),
        (["--plot", "no/where.svg"], "--plot no/where.svg: there is no folder no"),
        (["--seed", "-1"], "seed: must be a whole number ≥ 0, not the number -1; the nearest is 0"),
        (["from_run=nowhere"], "nowhere: no such folder; name a run folder (runs/NAME-TIME)"),
        (["from_run=."], "holds no log/decisions.log; name a run folder"),
    ],
)
def test_what_is_wrong_is_known_before_anything_is_simulated(plan, capsys, arguments, message):
    text = "from_run: RUN\n" if arguments[0].startswith("from_run") else SWEEP
    assert main(["simulate", plan(text), *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""


def test_without_matplotlib_a_plot_is_refused(plan, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", plan(PLAN), "--plot", "a.png"]) == 2
    assert "needs matplotlib, which isn't installed; pip install 'areal-async[plots]'" in capsys.readouterr().err


def test_a_row_that_fails_is_told_and_the_others_go_on(plan, capsys):
    """All rewards are equal, and groups with equal rewards are filtered: the core ends that run."""
    path = plan(PLAN.replace("mean_tokens: 300", "mean_tokens: 300, success_rate: 1"))
    assert main(["simulate", path, "rollout.max_filtered=3", "sweep.rollout.drop_equal=[false,true]"]) == 1
    told = capsys.readouterr()
    assert "│ failed │" in told.out
    assert told.err.startswith("areal-async: row 2 (rollout.drop_equal=true): ")


def test_names_are_short_where_that_says_which():
    assert table.names(["rollout.max_staleness", "seed"]) == {"rollout.max_staleness": "max_staleness", "seed": "seed"}
    assert table.names(["servers.gpus", "trainer.gpus"]) == {key: key for key in ("servers.gpus", "trainer.gpus")}


def test_compared_with_a_row_that_failed():
    rows = load_rows(ROOT / "configs" / "plans" / "small.yaml", ["sweep.rollout.max_staleness=[0,1]"])
    common = {"system": "async", "max_staleness": 0, "servers": 1, "trainer_ranks": 1, "gpus": 2}
    results = [Result(values=row.values, **common) for row in rows]
    assert [result.speed_up for result in compared(rows, results)] == [None, None]


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_the_plans_of_this_repository_are_right(file):
    rows = load_rows(file)
    if any(row.plan.from_run or row.plan.validate for row in rows):
        pytest.skip("needs a run")
    assert prepare(rows, no_run)


@pytest.mark.slow
def test_pictures(tmp_path):
    """In a process of its own: matplotlib keeps its fonts' files open."""
    texts = {"run": PLAN, "sweep": SWEEP, "bars": PLAN + "sweep: {system: [async, colocated]}\n"}
    calls = []
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        calls += [[f"{name}.yaml", "--plot", f"{name}{end}"] for end in (".png", ".svg", "-again.svg")]
    code = f"from areal_async.cli import main\nfor call in {calls}:\n    assert main(['simulate', *call]) == 0\n"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    for name in texts:
        picture = (tmp_path / f"{name}.svg").read_bytes()
        assert picture == (tmp_path / f"{name}-again.svg").read_bytes()
        assert picture.startswith(b"<?xml")
        assert len(picture) > 5000
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_same_under_any_hash_seed(plan):
    told = [
        subprocess.run(
            [sys.executable, "-m", "areal_async", "simulate", plan(SWEEP), "--json", "failures.server_hours=0.02",
             "rollout.when_older=drop", "answers.group_correlation=0.4"],
            env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert told[0] == told[1]
    assert json.loads(told[0])["rows"]


@pytest.mark.slow
def test_the_example(capsys):
    """configs/plans/small.yaml is what docs/simulate.md shows: more lag, less waiting."""
    told = json.loads(printed(capsys, str(ROOT / "configs" / "plans" / "small.yaml"), "--json", "train.steps=12"))
    speed = [row["tokens_per_s"] for row in told["rows"]]
    assert speed == sorted(speed)


def test_a_plan_that_can_not_be_read(capsys):
    assert main(["simulate", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err == "nowhere.yaml: can't be read: No such file or directory\n"


def test_prepare_names_all_rows_that_are_wrong(plan):
    with pytest.raises(ConfigError, match="5 does not divide") as caught:
        prepare(load_rows(plan(PLAN), ["sweep.train.minibatches=[3,5]"]), no_run)
    assert "3 does not divide" in str(caught.value)
