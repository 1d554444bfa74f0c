"""What tools/gpu/swap_nccl.py must print, on a machine with two GPUs; and the script itself without one, by a file."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "gpu" / "swap_nccl.py"
LINES = ("join", "version 0", "step 0", "version 1", "after the swap", "beside a step")


def swap(*arguments: str) -> str:
    ended = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), marks=pytest.mark.gpu, id="nccl"),
        pytest.param(("--transport", "shm", "--cpu"), marks=pytest.mark.slow, id="file, no GPU"),
    ],
)
def test_a_swap_in_the_middle_of_answers(arguments: tuple[str, ...], tmp_path: Path) -> None:
    lines = swap(*arguments, "--output", str(tmp_path)).splitlines()
    assert [line[3:19].strip() for line in lines if line[:1].isdecimal()] == list(LINES)
    assert lines[-1] == "all good"
