"""`areal-async why`: of runs that go on, hang, have ended and were killed; each looked at from outside."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from areal_async import cli_why
from areal_async.cli import main
from areal_async.cli_why import Found, look, told
from areal_async.config import Config
from areal_async.controller import Controller, status
from areal_async.controller.status import Status
from areal_async.core.orchestrator import Orchestrator
from areal_async.core.view import PeerView, ServerView
from areal_async.log.writer import RunLog
from areal_async.messages import AnyRecord, Fail, Finish, Woke
from areal_async.testing.recipes import scripted

from .waiting import Straggler, until, wait_until

Make = Callable[..., Config]

STATUS = Status(
    time=0.0, pid=1, host="here", name="x", at=100.0, ended="", phase="", waits=("step 2 waits for group 0",),
    last_event=97.0, loop_lag_s=0.004, steps=4, version=2, branch=0, in_flight=3, ready=1,
    outstanding=2, balance={"admitted": 6, "trained": 4, "outstanding": 2, "samples_admitted": 12},
    peers=(
        PeerView("trainer", "idle", 90.0),
        PeerView("server 0", "serving", 80.0),
        PeerView("server 1", "lost", 99.0, 103.0, 2, "server 1 (pid 7) was ended by SIGKILL; the last lines\nof it"),
    ),
    servers=(ServerView("0", "serving", 2, 3), ServerView("1", "lost", -1, 0)),
)  # fmt: skip


def found(run: Path | str = "r", **changes: object) -> Found:
    values = {"run": str(run), "controller": 1, "elsewhere": "", "age_s": 1.0, "end": "", "status": STATUS,
              "children": (), "checkpoint": None, **changes}  # fmt: skip
    return Found(**values)  # type: ignore[arg-type]


def text(found: Found) -> str:
    return "\n".join(f"{key}: {words}" for key, words in told(found))


# ------------------------------------------------------------------------------------------------- what is made of it


def test_times_count_up_to_now_and_not_to_the_last_writing(tmp_path: Path) -> None:
    words = text(found(age_s=2.0))
    assert "waits: step 2 waits for group 0\n" in words
    assert "last event: 5.0 s ago" in words
    assert "trainer: idle for 12.0 s" in words
    assert "server 0: serving for 22.0 s; version 2, 3 samples" in words
    assert "server 1: lost for 3.0 s; no weights; starts again in 1.0 s; restart 2" in words
    assert "it was lost: server 1 (pid 7) was ended by SIGKILL; the last lines\n" in words
    assert "6 groups admitted: 4 trained, 2 outstanding" in words


def test_the_last_words_of_a_lost_child_are_told(tmp_path: Path) -> None:
    (tmp_path / "stderr").mkdir()
    (tmp_path / "stderr" / "server-1.log").write_text("one\ntwo\nthree\nout of memory\n")
    (tmp_path / "stderr" / "server-0.log").write_text("all is well\n")
    words = text(found(tmp_path))
    assert "server-1.log: two\n: server-1.log: three\n: server-1.log: out of memory" in words
    assert "one\n" not in words
    assert "all is well" not in words


def test_a_loop_that_stands_still_is_told() -> None:
    assert "its status is 47 s old: its loop stands still; py-spy dump --pid 1 shows where" in text(found(age_s=47.0))
    assert "stands still" not in text(found(age_s=3.0))


def test_what_the_controller_before_told_is_not_taken_for_this_ones() -> None:
    words = text(found(controller=2, status=msgspec.structs.replace(STATUS, ended="stopped")))
    assert words == "run: r: 2 of 4 steps; 100.0 s on its clock\ncontroller: pid 2 is starting: it has told nothing yet"


def test_a_run_on_another_host_is_not_taken_for_dead() -> None:
    words = text(found(controller=None, elsewhere="node7", age_s=3.0))
    assert "on host node7" in words
    assert "waits: step 2" in words
    assert "not running" not in words


def test_another_process_with_the_controllers_old_pid_is_not_taken_for_it(make_config: Make, tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log", make_config().log.segment_bytes)
    assert look(tmp_path).controller == os.getpid()
    log.close()
    assert (tmp_path / "log" / "lock").read_text().strip() == str(os.getpid())
    assert look(tmp_path).controller is None


def test_a_full_disk_leaves_the_last_status_and_the_run_alone(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1.0
    file = status.StatusFile(
        tmp_path, "x", 4, Orchestrator(make_config().rules),
        phase=lambda: "", waits=lambda: [], addresses=dict, now=lambda: now, last_event=lambda: 0.0,
    )  # fmt: skip
    file.write()

    def half(path: Path, data: bytes) -> int:
        path.write_text(data[: len(data) // 2].decode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", half)
        now = 2.0
        file.write()
        file.write()
    before = status.read(tmp_path)
    assert before is not None
    assert before.at == 1.0
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    file.write()
    after = status.read(tmp_path)
    assert after is not None
    assert after.at == 2.0


def test_a_run_on_another_host_may_live_whoever_has_its_pid_here(make_config: Make, tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log", make_config().log.segment_bytes)
    (tmp_path / "status.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(STATUS, host="node7", pid=os.getpid(), time=time.time()))
    )
    here = look(tmp_path)
    log.close()
    for seen in (here, look(tmp_path)):
        assert (seen.controller, seen.elsewhere, seen.end) == (None, "node7", "")


def log_of(folder: Path, config: Config, *records: AnyRecord) -> None:
    log = RunLog(folder / "log", config.log.segment_bytes)
    for record in (config.rules, *records):
        log.append(record)
    log.flush()
    log.close()


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ((Woke(at=7.0),), "not running; no end is told: the controller was killed, after 7.0 s of its clock"),
        ((Woke(at=7.0), Finish(reason="steps_done")), "it was over (steps_done), and was killed before the model was"),
        ((Woke(at=7.0), Fail(why="too many lost")), "not running; it failed: too many lost"),
        ((Fail(why="the disk"), Woke(at=9.0)), "no end is told: the controller was killed, after 9.0 s"),
    ],
)
def test_the_end_is_in_the_log_where_nobody_told_it(
    make_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], records: tuple[AnyRecord, ...], words: str
) -> None:
    run = tmp_path / "run"
    log_of(run, make_config(), *records)
    (run / "status.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(STATUS, host=os.uname().nodename, time=time.time()))
    )
    for step in (1, 2):
        (run / "checkpoints" / f"step-{step}").mkdir(parents=True)
    for number, name in enumerate(("step-1/COMPLETE", "step-2/rank-0")):  # the second is not complete
        (run / "checkpoints" / name).touch()
        os.utime(run / "checkpoints" / name, (number, number))
    assert main(["why", str(run)]) == 0
    said = capsys.readouterr().out
    assert words in said
    assert "--resume (from checkpoints/step-1)" in said


def test_no_such_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make_config: Make
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["why", "nowhere"]) == 2
    assert "nowhere is no run folder: it has no log/" in capsys.readouterr().err
    assert main(["why"]) == 2
    assert "there is no run under runs/; name a run folder" in capsys.readouterr().err
    for number, name in enumerate(("b", "a")):  # the newest is the one that was begun last
        log_of(tmp_path / "runs" / name, make_config(), Woke(at=float(number)))
        (tmp_path / "runs" / name / "config.yaml").touch()
        os.utime(tmp_path / "runs" / name / "config.yaml", (number, number))
    assert main(["why", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "runs/a"
    (tmp_path / "runs" / "a" / "status.json").write_text('{"time": 1}')
    assert main(["why"]) == 2
    assert "runs/a/status.json: was not written by this release" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- whole runs


@contextlib.asynccontextmanager
async def standing(make: Make, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Controller, Straggler]]:
    """A run whose step 2 waits for group 0."""
    monkeypatch.setattr(status, "EVERY_S", 0.1)
    workflow = Straggler()
    async with Controller(make(), workflow=workflow, recipes=scripted()) as run:
        assert run.phase == "starting"  # before anything of it has had a turn
        await until(lambda: "waits: step 2 waits for group 0" in text(look(run.folder)))
        yield run, workflow


async def until_told(run: Controller, part: str) -> str:
    """All that was told when this was."""
    found: list[str] = []

    def told_now() -> bool:
        found.append(text(look(run.folder)))
        return part in found[-1]

    await until(told_now)
    return found[-1]


@pytest.mark.slow
async def test_a_run_that_waits_and_then_ends(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with standing(make_config, monkeypatch) as (run, workflow):
        begun = time.monotonic()
        while time.monotonic() < begun + 0.5:
            seen = look(run.folder)
            assert seen.status is not None
            assert seen.controller == os.getpid() == seen.status.pid
            assert seen.age_s < 5
            await asyncio.sleep(0.01)
        words = text(seen)
        assert "waits: step 2 waits for group 0 (floor 0, deadline 2) <- sample 0.0 on server 0, for " in words
        assert {child.name for child in seen.children} == {"server-0", "trainer", "rewards.0"}
        assert all(child.resident > 1e6 and child.processes >= 1 for child in seen.children)
        workflow.go.set()
        await run.run()
        folder = run.folder
    seen = look(folder)
    assert (seen.controller, seen.children, seen.end) == (None, (), "")
    assert "controller: not running; steps_done" in text(seen)
    assert "4 of 4 steps" in text(seen)


@pytest.mark.slow
async def test_a_lost_server_is_told_with_its_cause(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with standing(make_config, monkeypatch) as (run, workflow):
        (server,) = (child.pid for child in look(run.folder).children if child.name == "server-0")
        os.kill(server, signal.SIGKILL)
        words = await until_told(run, "server 0: lost for")
        assert "starts again in" in words
        assert f"it was lost: server 0 (pid {server}) was ended by SIGKILL" in words
        await until_told(run, "server 0: serving for")
        workflow.go.set()
        await run.run()


PROGRAM = """
import asyncio, sys
from areal_async.config_file import load_config
from areal_async.controller import Controller, status
from areal_async.testing.recipes import scripted

async def main():
    status.EVERY_S = 0.2
    async with Controller(load_config(sys.argv[1], ["train.steps=1000"]), recipes=scripted(step_s=0.05)) as run:
        async for row in run.steps():
            if row.step == 1:
                print(run.folder, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def program(make_config: Make, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run in a process of its own, and its folder."""
    make_config()
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path / "config.yaml")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.slow
def test_a_controller_that_is_stopped_and_then_killed(
    program: tuple[subprocess.Popen[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, folder = program
    monkeypatch.setattr(cli_why, "OLD_S", 1.0)

    def lives() -> bool:
        return f"controller: pid {process.pid} lives; the longest stop of its loop" in text(look(folder))

    wait_until(lives, 60)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    assert f"its loop stands still; py-spy dump --pid {process.pid} shows where" in text(look(folder))
    process.send_signal(signal.SIGCONT)
    wait_until(lives, 60)
    process.kill()
    process.wait()
    assert "controller: not running; no end is told: the controller was killed, after" in text(look(folder))
