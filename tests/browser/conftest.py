"""The fixtures of the tests in a browser: one Chromium for all of them, viewers as processes, and runs to look at."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from .viewing import Viewer, viewers
from .watching import Tabs, chromium, watched

ROOT = Path(__file__).resolve().parents[2]
RECORDED_S = 300  # seconds alone: 5


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Of the package, not of the session: while it lives no other event loop can run in this thread."""
    with chromium() as one:
        yield one


@pytest.fixture
def tabs(browser: Browser, view: Callable[..., Viewer]) -> Iterator[Tabs]:
    """view: its servers end after the tabs that ask them again and again."""
    with watched(browser) as opened:
        yield opened


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that `recording.py` makes; nobody writes in it."""
    folder = tmp_path_factory.mktemp("r")
    command = [sys.executable, "-m", "tests.browser.recording", str(folder)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RECORDED_S)
    assert made.returncode == 0, made.stderr
    return folder / "runs"


@pytest.fixture(scope="package")
def viewer(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    """One viewer of `runs` for all tests that only look. It has read their logs: what a page shows doesn't depend on
    how early it asks."""
    with viewers(tmp_path_factory.mktemp("viewer")) as start:
        one = start(runs)
        one.has_read("odd", "plain")
        yield one


@pytest.fixture
def view(tmp_path: Path) -> Iterator[Callable[..., Viewer]]:
    """view(RUN, "--token", "T"): a viewer on a free port. After the test nothing of it is left."""
    with viewers(tmp_path) as start:
        yield start
