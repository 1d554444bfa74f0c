"""A real run's batches to the real trainer again: the same answers; with another learning rate, others."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_async.cli import main

from .conftest import PATIENCE_S, Program

pytestmark = pytest.mark.slow

STEPS = 4


def test_a_run_is_trained_again(
    start: Callable[..., Program], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = start("run", f"train.steps={STEPS}")
    assert program.process.wait(timeout=PATIENCE_S) == 0, program.text()
    (run,) = (tmp_path / "runs").iterdir()

    def again(*options: str) -> tuple[int, dict[str, Any]]:
        code = main(["replay", str(run), "--peer", "trainer", "--json", *options])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    code, told = again()
    largest = {name: found["difference"] for name, found in told["largest"].items()}
    print(f"largest differences over {STEPS} steps: {largest}")
    assert code == 0
    assert [step["step"] for step in told["steps"]] == list(range(STEPS))
    assert {"loss", "grad_norm", "entropy", "mismatch_max", "lr", "tokens_trained"} <= set(largest)
    assert max(largest.values()) <= 1e-4
    assert (told["over"], told["not_compared"]) == (0, [])

    # the rate is seen at once; the first step's second minibatch is the first to be computed with other weights
    code, told = again("train.lr=0.0003", "--steps", "2")
    print(f"with three times the rate: {told['differences']}")
    assert code == 1
    assert [
        (found["step"], found["recorded"], found["now"]) for found in told["differences"] if found["field"] == "lr"
    ] == [(step, 1e-4, 3e-4) for step in range(2)]
    assert (1, "loss") in {(found["step"], found["field"]) for found in told["differences"]}
    ctrl_c_leaves_nothing(run, tmp_path)


def ctrl_c_leaves_nothing(run: Path, folder: Path) -> None:
    """While the ranks start; what is in the temporary folder and in shared memory, conftest and the next line look."""
    program = Program([sys.executable, "-m", "areal_async", "replay", str(run), "--peer", "trainer"], folder)
    try:
        program.wait_for(lambda: any("areal_async.engines.deepspeed.rank" in text for text in program.arguments()))
        folders = {Path(text[6:]).parent for text in program.arguments() if text.startswith("ipc://")}
        assert [path.is_dir() for path in folders] == [True]
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(timeout=20) == 130, program.text()
        assert "all processes were ended" in program.text()
        program.gone_after_s(1.0)
        assert not any(path.exists() for path in folders)
    finally:
        program.end()
