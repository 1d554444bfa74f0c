"""Plans that nobody means, files that can't be written, logs without their arrays: it is said, and nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.cli import main
from areal_async.log import format as fmt
from areal_async.log import payloads
from areal_async.log.turns import read_turns
from areal_async.messages import SampleDone
from areal_async.simulate import happened as happening
from areal_async.simulate.happened import happened

from ..waiting import ends_well_unread
from .test_cli_simulate import PLAN
from .test_plan import wrong

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "tests" / "logs" / "wait-gone-back-resumed"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN)
    return "plan.yaml"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.steps=1000000000", "train.steps: 1,000,000,000 × 8 samples would take days; at most"),
        (
            "train.batch_groups=1000000000",
            "1,000,000,000 × rollout.group_size (2) are 2,000,000,000",
        ),
        ("cluster.gpus=1000000000", "servers.count: 750,000,000 servers; at most 100,000 are simulated"),
        (
            "trainer.microbatches=fixed trainer.fixed_microbatches=1000000000",
            "trainer.fixed_microbatches: 1,000,000,000, but a rank's part of a minibatch has at most 4 samples; try 4",
        ),
        (
            "model.name=null model.layers=1 model.hidden=3 model.heads=4 model.vocabulary=9 model.parameters=1e9",
            "model.hidden: 3 is less than model.heads (4)",
        ),
        ("model.parameters=1e12", "beside the weights, and the longest sample has 2256; try 28"),
    ],
)
def test_slips_of_the_pen_are_found_before_anything_is_simulated(
    plan: str, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    assert main(["simulate", plan, *option.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


def test_the_gpus_that_a_model_is_said_to_need_do(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And one less doesn't."""
    big = ["simulate", plan, "model.parameters=1e12", "servers.count=1", "trainer.gpus=1", "cluster.gpus=null"]
    assert main([*big, "servers.gpus=27"]) == 2
    assert main([*big, "servers.gpus=28", "train.steps=1"]) == 0


@pytest.mark.parametrize("option", ["gpu.tflops=1e-308", "reward.check_s=1e308", "cluster.start_s=1.7e308"])
def test_times_that_no_number_holds_are_no_figures(plan: str, capsys: pytest.CaptureFixture[str], option: str) -> None:
    if option.startswith("cluster"):  # a large number, but one
        assert main(["simulate", plan, option, "train.steps=1"]) == 0
        assert "nan" not in capsys.readouterr().out
        return
    assert main(["simulate", plan, option]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "takes longer than any number of seconds; some option is much too large or too small" in err
    assert "nan" not in out
    assert main(["simulate", plan, option, "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["figures"] is None


@pytest.mark.parametrize("more", [[], ["sweep.seed=[1,2]"]])
@pytest.mark.parametrize("title", ["[/bold] x [red]y", "$x_{$ \\frac", "模型 ünï"])
def test_a_title_is_what_was_written(
    capsys: pytest.CaptureFixture[str], plan: str, title: str, more: list[str]
) -> None:
    Path(plan).write_text(PLAN.replace("title: tiny", f"title: '{title}'"), encoding="utf-8")
    assert main(["simulate", plan, *more]) == 0
    assert capsys.readouterr().out.split("\n")[0].strip() == title


@pytest.mark.slow
@pytest.mark.parametrize("title", ["$x_{$ \\frac", "模型 ünï"])
def test_so_is_that_of_a_picture(plan: str, title: str) -> None:
    """In a process of its own: matplotlib keeps the files of fonts open."""
    pytest.importorskip("matplotlib")
    Path(plan).write_text(PLAN.replace("title: tiny", f"title: '{title}'"), encoding="utf-8")
    command = [sys.executable, "-m", "areal_async", "simulate", plan, "--plot", "new.svg"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert title in Path("new.svg").read_text(encoding="utf-8")  # as a comment beside the letters' shapes


@pytest.mark.slow
def test_a_picture_that_can_not_be_written_costs_no_figures(
    plan: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    Path("there.svg").mkdir()
    assert main(["simulate", plan, "--plot", "there.svg"]) == 2
    assert capsys.readouterr() == ("", "command line: --plot there.svg: is a folder; name a file in it\n")
    monkeypatch.setattr("areal_async.simulate.plot.output_file.secrets.token_hex", lambda count: "x" * 300)
    assert main(["simulate", plan, "--plot", "new.svg"]) == 1
    out, err = capsys.readouterr()
    assert "steps done, 4 steps in" in out
    assert err == "areal-async: new.svg: can't be written: File name too long\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("weights.wave=5", "weights.wave: 5 is more than there are servers (1); try 1"),
        ("trainer.gpus=3 trainer.gpus_per_rank=2", "trainer.gpus: 3 GPUs don't make whole ranks of"),
        ("trainer.gpus=1 trainer.gpus_per_rank=2", "trainer.gpus: 1 GPUs don't make whole ranks of"),
    ],
)
def test_beside_a_run_nothing_is_taken_for_something_else(plan: str, options: str, message: str) -> None:
    Path(plan).write_text("from_run: RUN\n")
    assert [line.startswith(f"command line: {message}") for line in wrong(plan, *options.split())] == [True]


# ------------------------------------------------------------------------------------------------ without its arrays


def test_lags_that_are_spread_are_said(tmp_path: Path) -> None:
    """A log whose payload segments are gone: whose versions weren't read."""
    shutil.copy(LOG / fmt.DECISIONS_NAME, tmp_path)
    recorded = read_turns(tmp_path)
    assert recorded is not None
    done = [turn for turn in recorded.turns if isinstance(turn.event, SampleDone)]
    several = [turn for turn in done if turn.event.newest > turn.event.oldest]  # type: ignore[union-attr]
    assert 0 < happened(tmp_path).spread <= len(several)


def test_a_log_without_its_arrays_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once more for each sample."""
    shutil.copy(LOG / fmt.DECISIONS_NAME, tmp_path)
    reads: list[Path] = []
    before = happening.read_turns
    monkeypatch.setattr(happening, "read_turns", lambda folder: reads.append(folder) or before(folder))
    monkeypatch.setattr(payloads, "read", lambda *_: pytest.fail("there are none"))
    happened(tmp_path)
    assert reads == [tmp_path]
    assert not hasattr(happening, "reader")


# ---------------------------------------------------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--json"], []])
def test_whoever_reads_along_may_have_enough(plan: str, options: list[str]) -> None:
    command = [sys.executable, "-m", "areal_async", "simulate", plan, "sweep.seed=[1,2]", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        ends_well_unread(process)


@pytest.mark.slow
def test_ctrl_c_in_the_middle_is_one_line(plan: str) -> None:
    command = [sys.executable, "-m", "areal_async", "simulate", plan, "train.steps=10000000", "--plot", "new.svg"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "PYTHONVERBOSE": "1"}) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if b"areal_async.core.orchestrator" in line:  # it is there: what follows is the simulation
                break
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(60) == 130
    assert b"Traceback" not in said
    assert [path.name for path in Path().iterdir()] == ["plan.yaml"]
