"""Real runs whose processes are killed with -9: each kind of child, one after another; the controller, then --resume.

The whole of it (90 steps and the score; ten places where the controller dies) is `tools/check_survival.py`.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

pytestmark = pytest.mark.slow

LIMIT_S = 900  # alone a minute or two


def survived(*arguments: str, runs: Path) -> dict[str, Any]:
    argv = [sys.executable, str(ROOT / "tools" / "check_survival.py"), *arguments, "--runs", str(runs), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return dict(json.loads(done.stdout))


@pytest.fixture
def a_killed_engine_leaves_its_queue() -> Iterator[None]:
    """The memory that vLLM's engine shares with its worker: once both are killed nothing tells whose it was, so nobody
    removes it (docs/children.md). Here it is what no process has mapped."""
    before = set(os.listdir("/dev/shm"))
    yield
    for name in set(os.listdir("/dev/shm")) - before:
        if name.startswith("psm_") and not is_mapped(f"/dev/shm/{name}"):
            Path("/dev/shm", name).unlink(missing_ok=True)


def is_mapped(path: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if path in maps.read_text(errors="replace"):
                return True
    return False


@pytest.mark.usefixtures("a_killed_engine_leaves_its_queue")
def test_each_kind_of_child_is_killed(tmp_path: Path) -> None:
    """Steps are trained twice after the rank's death, from the same state with the same batch: their losses agree."""
    kinds = ["engine", "rank", "reward worker", "sandbox"]
    told = survived("children", "--steps", "48", "--kinds", ",".join(kinds), runs=tmp_path)
    assert [kill["killed"] for kill in told["kills"]] == kinds
    assert told["trained_twice"] >= 1
    assert told["loss_difference"] <= 1e-5


def test_the_controller_is_killed_in_a_swap_and_goes_on(tmp_path: Path) -> None:
    told = survived("controller", "--points", "1", "--steps", "8", runs=tmp_path)
    (point,) = told["points"]
    assert point["killed_in"] == ["swap 22"]
    assert point["gone_after_s"] <= 10
    assert point["trained_twice"] >= 1
    assert point["loss_difference"] <= 1e-5
