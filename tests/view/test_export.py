"""`areal-async view RUN --export` and `--png` on the command line: whole files, of every kind of run, what they say."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_async import cli_export
from areal_async.cli import main
from areal_async.controller import Controller
from areal_async.environment import environment
from areal_async.errors import ConfigError
from areal_async.testing.recipes import scripted
from areal_async.view import export
from areal_async.view.figures import FIGURES
from areal_async.view.made_with import made_with
from areal_async.view.picture import colours

from .folders import write_rows, write_run
from .test_bundle import Elements

Make = Callable[..., Any]


def data_of(file: Path) -> dict[str, Any]:
    """What the page would ask for."""
    found = Elements(file.read_text())
    ((_, text),) = [each for each in found.scripts if each[0] == "application/json"]
    data: dict[str, Any] = json.loads(text)
    return data


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with a run in `run`; what is called here doesn't change the tests' own priority."""
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "nice", lambda by: 0)
    return tmp_path


# ------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--export", "no/report.html"], "--export no/report.html: there is no folder no"),
        (["run", "--export", "run"], "--export run: is a folder; name a file"),
        (
            ["run", "--export", "x.html", "--samples", "some"],
            "--samples some: say how many, or name some: 20, or 12.3,40",
        ),
        (["run", "--export", "x.html", "--port", "1"], "--port: --export has no use of it"),
        (["run", "--png", "x.png", "--samples", "3"], "--samples: --png has no use of it"),
        (["run", "--png", "x.jpeg"], "--png x.jpeg: must end in .png or .svg"),
        (["run", "--samples", "3"], "--samples: is for --export FILE.html"),
        ([".", "--png", "x.png"], ".: holds several runs; name one of them for a report"),
    ],
)
def test_what_is_wrong_is_one_line(
    written: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["view", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not list(written.glob("*.html")) + list(written.glob(".*")) + list(written.glob("*.png"))


def test_a_picture_needs_matplotlib(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["view", "run", "--png", "x.png"]) == 2
    assert "--png: needs matplotlib, which isn't installed; pip install 'areal-async[plots]'" in capsys.readouterr().err


def test_samples_by_number_or_name() -> None:
    assert cli_export.samples("20") == 20
    assert cli_export.samples("12.3,40.0") == ["12.3", "40.0"]
    for text in ("", "12", "12.3,", "a.b", "99999", "12.3 40.0"):
        if text != "12":
            with pytest.raises(ConfigError):
                cli_export.samples(text)


# ----------------------------------------------------------------------------------------------------- what is in it


def test_numbers_of_a_row_are_as_long_as_they_are_shown() -> None:
    row = msgspec.Raw(b'{"step":3,"loss":0.123456789,"waited_for":"long","ledger":{"a":1},"l":[0.5,1e-9],"skipped":""}')
    assert export.thin(row) == {"step": 3, "loss": 0.123457, "ledger": {"a": 1}, "l": [0.5, 1e-9], "skipped": ""}


@pytest.mark.slow
async def test_all_that_the_page_asks_for(make_config: Make, tmp_path: Path) -> None:
    config = make_config("train.steps=4", "eval.every_steps=2", "eval.limit=4")
    async with Controller(config, recipes=scripted(step_s=0.02)) as run:
        folder = (await run.run()).folder
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "areal_async", "view", str(folder), "--export", str(out)]
    before = sorted(path for path in folder.rglob("*"))
    made = subprocess.run(command, capture_output=True, text=True)  # noqa: ASYNC221
    assert (made.returncode, made.stderr) == (0, "")
    assert sorted(path for path in folder.rglob("*")) == before
    data = data_of(out)
    report, base = data["/report"], f"/api/runs/{folder.name}"
    size = f"{out.stat().st_size / 1e6:.1f} MB"
    assert made.stdout == (
        f"{out}: {size}, 4 rows, 12 of {report['samples']} samples; any browser opens it, without a network\n"
    )
    assert out.stat().st_size < 6e6
    overview = data[f"{base}/overview"]
    rows = [msgspec.json.decode(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    assert [row["step"] for row in overview["rows"]] == [0, 1, 2, 3]
    for row, shown in zip(rows, overview["rows"], strict=True):
        assert {*shown, "waited_for"} == set(row)
        assert all(shown[name] == pytest.approx(row[name], rel=1e-5) for name in ("reward_mean", "step_s", "ledger"))
    assert [point["version"] for point in overview["evaluations"]] == [2, 4]
    assert overview["reading"]["done"]
    assert data["/api/figures"] == json.loads(msgspec.json.encode(FIGURES))
    assert data["/api/runs"]["single"]
    assert data[f"{base}/config"] == (folder / "config.yaml").read_text()
    assert sum(sum(tokens.values()) for _, tokens, _ in report["lags"]) == sum(row["tokens_trained"] for row in rows)
    assert (report["eta"], report["pages"]) == (2, ["overview", "samples", "config", "report"])
    for each in report["chosen"]:
        full = data[f"{base}/samples/{each['id']}"]
        assert "".join(full["tokens"]) == full["record"]["response"]
        assert len(full["record"]["logprobs"]) == len(full["record"]["versions"]) == len(full["tokens"])
        assert data[f"{base}/story?id=sample+{each['id']}"]["lines"]
    assert [row["id"] for row in report["rows"]] == [each["id"] for each in report["chosen"]]
    ((at, facts),) = [(each["at"], dict(each["facts"])) for each in report["lives"]]
    assert at == "at its beginning"
    assert facts["torch"] == dict(report["here"])["torch"] == environment()["torch"]
    assert {"Python", "areal-async", "vLLM", "DeepSpeed", "transformers", "host", "system", "processor"} <= set(facts)


@pytest.mark.slow
async def test_a_run_that_goes_on(make_config: Make, tmp_path: Path) -> None:
    """The file has what there was, and the run doesn't notice."""
    config = make_config("train.steps=16")
    out = tmp_path / "report.html"
    async with Controller(config, recipes=scripted(step_s=0.2)) as run:
        async for row in run.steps():
            if row.step == 4:
                command = [sys.executable, "-m", "areal_async", "view", str(run.folder), "--export", str(out)]
                exporting = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
                ended = asyncio.create_task(exporting.wait())
        assert await ended == 0
        result = run.result()
    data = data_of(out)
    (told,) = data["/api/runs"]["runs"]
    rows = data[f"/api/runs/{run.folder.name}/overview"]["rows"]
    assert told["state"] in ("running", "ended")
    assert 5 <= len(rows) <= len(result.rows)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert data["/report"]["chosen"]


@pytest.mark.slow
def test_a_copy_without_anything_but_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No tokenizer, no rows, no configuration, a torn end: the rest is there, and what isn't is told."""
    shutil.copytree(write_run(tmp_path / "run") / "log", tmp_path / "copy" / "log")
    log = tmp_path / "copy" / "log" / "decisions.log"
    os.truncate(log, log.stat().st_size - 3)
    os.utime(log, (1, 1))  # nobody has written it lately
    out = tmp_path / "copy.html"
    command = [sys.executable, "-m", "areal_async", "view", "copy", "--export", str(out), "--samples", "3"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")
    data = data_of(out)
    assert "config" not in data["/report"]["pages"]
    assert data["/api/runs/copy/overview"]["rows"] == []
    assert "decisions.log" in data["/api/runs/copy/overview"]["reading"]["problem"]
    assert len(data["/report"]["chosen"]) == 3
    assert "no texts" in data["/report"]["missing"]


@pytest.mark.slow
def test_damage_and_long_answers(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SAMPLES_BYTES", 9_000)
    assert main(["view", "run", "--export", "x.html"]) == 0
    said = capsys.readouterr().out
    report = data_of(written / "x.html")["/report"]
    assert f"({len(report['left_out'])} more are too long)" in said
    assert 0 < len(report["chosen"]) < 12
    names = [report["chosen"][0]["id"], report["left_out"][-1]]
    monkeypatch.setattr(export, "SAMPLES_BYTES", 1 << 20)
    assert main(["view", "run", "--export", "x.html", "--samples", ",".join(names)]) == 0
    assert [each["id"] for each in data_of(written / "x.html")["/report"]["chosen"]] == names
    assert main(["view", "run", "--export", "y.html", "--samples", "77.0"]) == 2
    assert "--samples 77.0: the log has no answer of this name" in capsys.readouterr().err
    (written / "run" / "log" / "decisions.log").write_bytes(b"nonsense" * 99)
    assert main(["view", "run", "--export", "x.html"]) == 0
    data = data_of(written / "x.html")
    assert data["/report"]["chosen"] == []
    assert "decisions.log" in data["/api/runs/run/overview"]["reading"]["problem"]
    assert len(data["/api/runs/run/overview"]["rows"]) == 3
    assert sorted(path.name for path in written.iterdir()) == ["run", "x.html"]


def test_what_it_was_made_with(tmp_path: Path) -> None:
    """Of a run of an older release, which noted less."""
    folder = write_run(tmp_path / "run")
    (folder / "stderr").mkdir()
    (folder / "stderr" / "server-0.log").write_text("(APIServer pid=1) INFO  █  version 0.32.0\n")
    told = {each.at: dict(each.facts) for each in made_with(folder, folder / "log")}
    assert told["from other files of its folder"] == {
        "vLLM": "0.32.0 (stderr/server-0.log)", "host": f"{os.uname().nodename} (status.json)",
    }  # fmt: skip
    assert made_with(tmp_path / "none", tmp_path / "none" / "log") == []


# -------------------------------------------------------------------------------------------------------- the picture


@pytest.fixture(scope="module")
def fonts() -> None:
    """matplotlib has looked for the machine's fonts; the first time that takes so long that it says so on stderr."""
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], check=True, capture_output=True)


def view(folder: Path, *arguments: str) -> str:
    """`areal-async view run …` as a process (matplotlib keeps its fonts open); what it says."""
    command = [sys.executable, "-m", "areal_async", "view", "run", *arguments]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")
    return made.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_main_curves_as_a_picture(written: Path) -> None:
    import matplotlib.image  # here: it takes half a second

    said = view(written, "--png", "x.png")
    assert said == f"x.png: {(written / 'x.png').stat().st_size / 1e3:.0f} kB\n"
    image = matplotlib.image.imread(written / "x.png")
    height, width = image.shape[:2]
    assert (width, height > 1000) == (1560, True)
    assert image[:3, :, :3].min() == 1.0  # white
    view(written, "--png", "x.svg")
    first = (written / "x.svg").read_bytes()
    view(written, "--png", "x.svg")
    assert (written / "x.svg").read_bytes() == first
    assert first.decode().count('<g id="axes_') == sum(figure.main for figure in FIGURES)
    assert colours()["series-1"] in first.decode()


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_a_picture_of_hardly_anything(written: Path) -> None:
    write_rows(written / "run", {"step": 0})
    view(written, "--png", "x.png")
    write_rows(written / "run")
    view(written, "--png", "x.png")


def test_colours_are_the_page_s() -> None:
    known = colours()
    assert known["series-1"] == "#0072b2"
    assert known["busy-both"] == known["series-3"] == "#009e73"
    assert all(value.startswith("#") for value in known.values())
