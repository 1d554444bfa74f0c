"""A folder of runs to look at."""

from pathlib import Path

import pytest

from areal_async.view import run

from .folders import write_run


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log is read as soon as somebody asks."""
    monkeypatch.setattr(run, "FIRST_S", 0.0)
    monkeypatch.setattr(run, "EVERY_S", 0.02)


@pytest.fixture
def runs(tmp_path: Path, at_once: None) -> Path:
    """With one run: `first`."""
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs" / "first")
    return tmp_path / "runs"
