"""`areal-async view` on the command line: what it says, where it listens, and that it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_async.cli import main
from areal_async.cli_view import told
from areal_async.view.runs import RunFolders
from areal_async.view.serving import holder
from areal_async.view.token import Access

from ..waiting import wait_until
from .folders import write_run

TOKEN = "a-long-enough-token"
PATIENCE_S = 120.0  # for what never comes; the program has a low priority, so other work makes it very slow
LEAVES_S = 30.0  # aiohttp's own way is to wait a minute for a connection that somebody keeps


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["view", "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "areal-async view runs/first --export report.html" in said
    assert "--host 0.0.0.0 --token auto" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "command line: view: nowhere: no such folder; name a run folder"),
        ([], "command line: view: runs: no such folder"),
        (["run", "--port", "70000"], "command line: view: --port 70000: 0 … 65535"),
        (["run", "--host", "0.0.0.0"], "--host 0.0.0.0: other machines could read the run; add `--token auto`"),
        (["run", "--token", "short"], "command line: view: --token: 5 characters can be guessed"),
        (
            ["run", "--host", "203.0.113.9", "--token", "auto"],
            "--host 203.0.113.9: can't be listened on: Cannot assign requested address; leave it out",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "nice", lambda by: 0)
    assert main(["view", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_port_in_use_is_told_with_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "nice", lambda by: 0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["view", str(write_run(tmp_path / "run")), "--port", str(port)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"command line: view: --port {port}: is in use by pid {os.getpid()} (")
        assert line.endswith("`--port 0` takes any that is free")
    assert holder(port) == ""


def test_a_name_that_is_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(*arguments: object, **options: object) -> None:
        raise OSError(-2, "Name or service not known (while attempting to bind on address ('x', 0))")

    monkeypatch.setattr(os, "nice", lambda by: 0)
    monkeypatch.setattr(socket, "create_server", unknown)
    assert main(["view", str(write_run(tmp_path / "run")), "--host", "x", "--token", "auto"]) == 2
    assert "--host x: can't be listened on: Name or service not known; leave it out" in capsys.readouterr().err


def test_what_it_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    folders = RunFolders(write_run(tmp_path / "first"))
    first, tunnel, there, last = told(folders, Access("127.0.0.1", ""), 8420).splitlines()
    assert first == f"the run {tmp_path}/first: http://127.0.0.1:8420/"
    assert tunnel == "from another machine: ssh -N -L 8420:127.0.0.1:8420 ada@node7"
    assert there == "  and there http://localhost:8420/"
    assert last == "Ctrl-C ends it; the run isn't touched"
    assert f"http://[::1]:9/?token={TOKEN}\n" in told(folders, Access("::1", TOKEN), 9)
    open_to_all = told(RunFolders(tmp_path), Access("0.0.0.0", TOKEN), 9)
    assert open_to_all.splitlines()[0] == f"all runs in {tmp_path}: http://node7:9/?token={TOKEN}"
    assert "it isn't encrypted" in open_to_all
    assert "ssh -N" not in open_to_all


class Program:
    """`areal-async view` as a process; its temporary files have a folder of their own."""

    def __init__(self, folder: Path, *arguments: str, scratch: Path, **environment: str) -> None:
        self.temporary = scratch
        scratch.mkdir()
        self.said = scratch.with_suffix(".txt")
        with self.said.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "areal_async", "view", str(folder), *arguments],
                stdout=file, stderr=subprocess.STDOUT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                env={**os.environ, "TMPDIR": str(scratch), **environment},
            )  # fmt: skip

    def address(self) -> str:
        wait_until(lambda: "Ctrl-C ends it" in self.said.read_text() or self.process.poll() is not None, PATIENCE_S)
        return next(word for word in self.said.read_text().split() if word.startswith("http://"))

    def get(self, path: str, **headers: str) -> bytes:
        port = self.address().split(":")[2].split("/")[0]
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            data: bytes = answer.read()
        return data

    def ended(self, number: int) -> int:
        """Exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    try:
        yield started
    finally:
        for program in started:
            if program.process.poll() is None:
                program.process.kill()
            program.process.wait()


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    """Two look at one run; a third wants the port of the first; each ends as it is told to, and leaves nothing."""
    run = write_run(tmp_path / "first")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with programs() as started:
        one = Program(run, "--port", "0", scratch=tmp_path / "one")
        two = Program(run, "--port", "0", scratch=tmp_path / "two", AREAL_ASYNC_TOKEN=TOKEN)
        started += [one, two]
        port = one.address().split(":")[2].rstrip("/")
        third = Program(run, "--port", port, scratch=tmp_path / "three")
        started.append(third)

        def overview() -> dict[str, dict[str, object]]:
            seen: dict[str, dict[str, object]] = json.loads(one.get("/api/runs/first/overview"))
            return seen

        assert b"<!doctype html>" in one.get("/")
        wait_until(lambda: bool(overview()["reading"]["done"]), PATIENCE_S)
        assert overview()["run"]["state"] == "ended"
        assert two.address().endswith(f"/?token={TOKEN}")
        assert json.loads(two.get("/api/runs", Authorization=f"Bearer {TOKEN}"))["single"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            two.get("/api/runs")
        assert third.process.wait(PATIENCE_S) == 2
        assert f"--port {port}: is in use by pid {one.process.pid} (" in third.said.read_text()
        assert os.getpriority(os.PRIO_PROCESS, one.process.pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)

        keeps_connection = socket.create_connection(("127.0.0.1", int(port)))
        with socket.create_connection(("127.0.0.1", int(port))) as other:
            other.sendall(b"GET / HTTP/1.1\r\n\r\n")  # no Host: no HTTP
            assert b" 400 " in other.recv(100)
        begun = time.monotonic()
        assert one.ended(signal.SIGINT) == 0
        assert time.monotonic() - begun < LEAVES_S
        keeps_connection.close()
        assert two.ended(signal.SIGTERM) == 0
        for program in started:
            assert list(program.temporary.iterdir()) == []
            assert "Traceback" not in program.said.read_text()
        assert one.said.read_text().count("\n") == 4
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.slow
def test_a_kill_leaves_no_data_behind(tmp_path: Path) -> None:
    with programs() as started:
        one = Program(write_run(tmp_path / "first"), "--port", "0", scratch=tmp_path / "one")
        started.append(one)
        one.get("/api/runs/first/samples")
        assert one.ended(signal.SIGKILL) == -signal.SIGKILL
        assert [path for path in one.temporary.rglob("*") if path.is_file()] == []
