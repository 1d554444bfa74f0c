"""A machine without room, without names, with nobody who reads: the page is shown, or one line says why."""

import getpass
import io
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal_async import cli_view
from areal_async.errors import ConfigError
from areal_async.view import tables
from areal_async.view.index import Index
from areal_async.view.place import scratch
from areal_async.view.runs import RunFolders
from areal_async.view.token import Access

from ..waiting import DEADLINE_S, wait_until
from .asking import asking
from .folders import STEPS


@pytest.mark.parametrize("pages", [1, pytest.param(11, marks=pytest.mark.slow)])
async def test_a_full_folder_for_temporary_files(runs: Path, monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    opened = tables.open_database

    def small(path: Path) -> sqlite3.Connection:
        database = opened(path)
        database.execute(f"PRAGMA max_page_count = {pages}")
        return database

    monkeypatch.setattr(tables, "open_database", small)
    async with asking(runs) as asked:
        seen = await asked.read("first")
        assert "place: database or disk is full; make room there, or set TMPDIR" in seen.reading.problem
        assert len(seen.rows) == STEPS
        for path in ("samples", "samples?text=a", "samples/1.0", "lags", "timeline"):
            assert await asked.error(f"/api/runs/first/{path}", 500) == seen.reading.problem
        for path in ("peers", "config"):
            assert (await asked.get(f"/api/runs/first/{path}")).status == 200


async def test_room_that_ends_in_the_middle(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(index: Index, seconds: float) -> bool:
        index.database.execute("BEGIN")
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Index, "read_some", full)
    async with asking(runs) as asked:
        seen = await asked.read("first")
        for path in ("samples", "timeline"):
            assert await asked.error(f"/api/runs/first/{path}", 500) == seen.reading.problem


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(prefix: str) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", nowhere)
    with pytest.raises(ConfigError, match=r"none can be written \(No usable .*\); set TMPDIR to one"), scratch():
        pass


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_an_address_that_can_not_be_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", _Full())
    cli_view.say("the run x: http://localhost:1/\nmore")
    assert capsys.readouterr().err == (
        "view: No space left on device on standard output: the run x: http://localhost:1/\n"
    )


@pytest.mark.parametrize("error", [KeyError("uid not found: 12345"), OSError("no such user")])
def test_a_user_without_a_name(runs: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def nobody() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", nobody)
    told = cli_view.told(RunFolders(runs), Access("127.0.0.1", ""), 7)
    assert f"ssh -N -L 7:127.0.0.1:7 USER@{socket.gethostname()}\n" in told


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_it_leaves_nothing_behind(runs: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Also one that was stopped for a while, and whose terminal was closed."""
    place = tmp_path / "tmp"
    place.mkdir()
    viewer = subprocess.Popen(
        [sys.executable, "-m", "areal_async", "view", str(runs), "--port", "0"],
        stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(place)}, start_new_session=True,
    )  # fmt: skip
    assert viewer.stdout is not None
    try:
        assert b"http://127.0.0.1:" in viewer.stdout.readline()
        assert len(list(place.iterdir())) == 1
        viewer.send_signal(signal.SIGSTOP)
        wait_until(lambda: " T " in Path(f"/proc/{viewer.pid}/stat").read_text(), DEADLINE_S)
        viewer.send_signal(signal.SIGCONT)
        viewer.send_signal(number)
        assert viewer.wait(DEADLINE_S) == 0
        assert list(place.iterdir()) == []
    finally:
        viewer.stdout.close()
        viewer.kill()
        viewer.wait()
