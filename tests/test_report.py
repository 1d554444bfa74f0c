"""What a run prints: names as they are, also where they look like rich's markup; and that it doesn't need to."""

import errno
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from areal_async.controller.result import RunResult
from areal_async.report import _LiveTable, outlasting, summary
from areal_async.testing.small_run import write_small_run

ODD = Path("/runs/a[bold]b[/]/[/x]")


def printed(shown: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    shown(console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_folder_with_brackets_is_printed_as_it_is() -> None:
    result = RunResult(
        reason="stopped", steps=0, folder=ODD, model=ODD / "model", seconds=1.0, both_busy_share=0.0,
        trainer_idle_share=1.0, rollout_idle_share=1.0, rows=(), evaluations=(),
    )  # fmt: skip
    text = printed(lambda console: summary(result, console))
    assert f" {ODD} " in text
    assert f" {ODD}/model " in text
    run: Any = SimpleNamespace(folder=ODD, phase="starting", config=SimpleNamespace(train=SimpleNamespace(steps=3)))
    assert str(ODD) in printed(lambda console: console.print(_LiveTable(run).render()))


# ------------------------------------------------------------------------------------ output that nobody takes any more


class Disk(io.StringIO):
    """Full while `full`."""

    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_what_a_full_disk_does_not_take_is_left_out_and_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    disk = Disk()
    with outlasting(disk) as output:
        for number in range(6):
            disk.full = number in (1, 2, 4)
            print(number, file=output)
            output.flush()
    assert disk.getvalue().split() == ["0", "3", "5"]
    assert capsys.readouterr().err == (
        "areal-async: output can't be written: No space left on device; the run goes on\n"
    )


@pytest.mark.slow
def test_nothing_waits_in_a_closed_pipe_for_the_end_of_the_program() -> None:
    code = (
        "import sys; from areal_async.report import outlasting\n"
        "with outlasting(sys.stdout) as output: print('x' * 100_000, file=output, flush=True)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        done = subprocess.run([sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "areal-async: output can't be written: Broken pipe; the run goes on\n")


RUN = """
import sys
from areal_async.cli import main
from areal_async.controller import controller
from areal_async.testing.recipes import scripted

recipes = scripted()
controller.Recipes = lambda: recipes
sys.exit(main(["run", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("output", ["| head -n 1", "> /dev/full", ">&-", "<&- >&- 2>&-"])
def test_a_run_goes_on_without_its_output(tmp_path: Path, output: str) -> None:
    config, run = write_small_run(tmp_path / "r", "train.steps=3"), tmp_path / "run"
    program = shlex.join([sys.executable, "-c", RUN, str(config), "--run-dir", str(run)])
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {program} {output}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert (run / "model").is_dir()
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "why"])
def test_commands_that_print_once_say_in_a_line_that_the_disk_is_full(tmp_path: Path, command: str) -> None:
    config = write_small_run(tmp_path)
    (tmp_path / "log").mkdir()
    argument = {"check": config, "why": tmp_path}[command]
    with open("/dev/full", "wb") as full:
        argv = [sys.executable, "-m", "areal_async", command, str(argument)]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True)
    said = "areal-async: the standard output can't be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
