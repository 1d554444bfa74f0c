"""`areal-async trace` by its command line: what it prints, what it refuses, torn, corrupt and growing logs."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async import cli
from areal_async.log.writer import RunLog

from ..audit_lies import true_log
from .written import write


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("trace") / "run", true_log())


def trace(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["trace", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def kinds(out: str) -> set[str]:
    return {line.split(" s ", 1)[1].split()[1 if "  > " in line else 0] for line in out.splitlines()}


def test_all_records_are_listed(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = trace(capsys, run_folder)
    assert (code, len(out.splitlines())) == (0, len(true_log()))
    assert trace(capsys, run_folder / "log", "ls")[1] == out
    assert "     14      14.000 s  failed            0.0        sample: boom" in out
    assert "     14      14.000 s    > start_sample  0.0        server server0, floor 0, attempt 1" in out


def test_json_has_the_whole_record(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = trace(capsys, run_folder, "ls", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == len(true_log())
    done = next(each for each in found if each["kind"] == "sample_done")
    assert (done["of"], done["event"], done["record"]["sample"]) == ("event", 15, "0.1")
    assert done["payload"] == [1, 16, done["payload"][2]]
    train = next(each for each in found if each["kind"] == "train")
    assert (train["of"], train["record"]["step"], len(train["record"]["samples"])) == ("command", 0, 4)


@pytest.mark.parametrize("kind", ["step_done", "StepDone", "stepdone"])
def test_by_kind(run_folder: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    _, out, _ = trace(capsys, run_folder, "ls", "--kind", kind, "--kind", "rolled_back")
    assert kinds(out) == {"step_done", "rolled_back"}
    assert len(out.splitlines()) == 8


@pytest.mark.slow
def test_by_id(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = trace(capsys, run_folder, "ls", "--id", "1")
    assert kinds(out) == {
        "read_group",
        "group_read",
        "start_sample",
        "sample_done",
        "score",
        "scored",
        "forget",
        "release",
    }
    assert all(" 1 " in line or " 1.0" in line or " 1.1" in line or "group 1" in line for line in out.splitlines())
    _, one, _ = trace(capsys, run_folder, "ls", "--id", "1.0")
    assert "1.1  " not in one
    assert {line for line in one.splitlines() if "group" not in line} < set(out.splitlines())
    assert kinds(trace(capsys, run_folder, "ls", "--id", "step 2")[1]) == {"train", "step_done"}
    server = kinds(trace(capsys, run_folder, "ls", "--id", "server server0")[1])
    assert server == {"joined", "swap", "swapped", "start_sample"}
    assert kinds(trace(capsys, run_folder, "ls", "--id", "rewards.0")[1]) == {"joined"}


def test_by_time_and_number(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = trace(capsys, run_folder, "ls", "--from", 14, "--to", 15)
    assert {line[9:19].strip() for line in out.splitlines()} == {"14.000", "15.000"}
    assert trace(capsys, run_folder, "ls", "--from", 14, "--limit", 2)[1].splitlines() == out.splitlines()[:2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "--kind", "trian"], "--kind trian: no such kind of record; the nearest are train,"),
        (["ls", "--id", "sample 3"], "'sample 3' is no sample: name group and member, such as 12.3"),
        (["ls", "--id", "step six"], "'step six' is no step: its number is missing"),
        (["ls", "--limit", "0"], "--limit 0: at least 1"),
        (["ls", "--story", "3"], "ls and --story: name one of them"),
        (["--story", "3", "--kind", "train"], "--kind is no filter of --story"),
        (["ls", "--verdict", "wrong"], "--verdict is no filter of ls"),
        (["--samples", "-", "--from", "3"], "--from is no filter of --samples"),
        (
            ["--samples", "-", "--verdict", "rigth"],
            "--verdict rigth: there is no such verdict; they are bad_data, crash,",
        ),
        (["--story", "99"], "there is no group 99; groups are 0 to 14, each with samples .0 to .1"),
        (["--story", "3.2"], "there is no sample 3.2; group 3 has the samples 3.0 to 3.1"),
        (["--story", "step 6"], "there is no step 6; steps 0 to 5 were formed"),
        (["--story", "server0x"], "there is no server server0x; the servers are server0, server1"),
        (["--story", "rewards.1"], "there is no reward worker rewards.1; the reward workers are rewards.0"),
    ],
)
def test_what_is_refused(run_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, _, err = trace(capsys, run_folder, *arguments)
    assert code == 2
    assert err.startswith("command line: trace: ")
    assert said in err
    assert err.count("\n") == 1


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace(capsys, tmp_path)[::2] == (
        2,
        f"command line: trace: {tmp_path}: holds no log/decisions.log; name a run folder (runs/NAME-TIME)\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", [["ls"], ["--story", "3"], ["--samples", "-"]])
def test_torn_and_corrupt(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: list[str]) -> None:
    run_folder = write(tmp_path, true_log())
    path = run_folder / "log" / "decisions.log"
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    code, out, err = trace(capsys, run_folder, *what)
    assert (code, f"{path}: torn end: the last" in err) == (0, True)
    assert out
    path.write_bytes(data[:9000] + bytes([data[9000] ^ 1]) + data[9001:])
    code, _, err = trace(capsys, run_folder, *what)
    assert code == 1
    assert f"areal-async: {path}: corrupt record at offset" in err
    path.write_bytes(data[:20])  # nothing was recorded
    assert trace(capsys, run_folder, *what)[0] == (2 if what[0] == "--story" else 0)


@pytest.mark.slow
def test_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = list(true_log())
    with contextlib.closing(RunLog(tmp_path / "log", 1 << 20)) as run_log:
        for number, record in enumerate(log[:60]):
            run_log.append(record)
            if number in (20, 59):
                run_log.flush()
                assert len(trace(capsys, tmp_path, "ls")[1].splitlines()) == number + 1
                assert trace(capsys, tmp_path, "--story", "server server0")[0] == 0


def test_a_story_as_json(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = trace(capsys, run_folder, "--story", "0.0", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[0] == {"event": 6, "at": 6.0, "text": "asked for: position 0 of the data order"}


@pytest.mark.slow
def test_whoever_reads_may_have_enough(run_folder: Path) -> None:
    command = [sys.executable, "-m", "areal_async", "trace", str(run_folder), "ls"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
