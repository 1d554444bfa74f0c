"""`areal-async replay`: what it says of logs that are whole, torn, corrupt, changed, another version's, or growing."""

import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from areal_async.cli import main
from areal_async.core.orchestrator import Orchestrator
from areal_async.log import format as fmt
from areal_async.log.reader import read_records
from areal_async.log.writer import RunLog
from areal_async.messages import RolledBack
from areal_async.replay.deciding import decide

from .logs import WAIT, bodies, recording, write

ROOT = Path(__file__).parent.parent.parent
WHOLE = recording(WAIT)
EVENTS, COMMANDS = len(WHOLE.turns), sum(len(turn.commands) for turn in WHOLE.turns)


class Said:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `areal-async replay`."""
        code = main(["replay", *map(str, words)])
        out, err = self._capsys.readouterr()
        return code, out, err

    def json(self, *words: object) -> tuple[int, dict[str, Any]]:
        code, out, err = self(*words, "--json")
        assert not err
        (line,) = out.splitlines()
        return code, json.loads(line)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


def damaged(folder: Path, *, flip: int | None = None, cut: int = 0) -> Path:
    """The recorded log with one byte changed, or without its last bytes."""
    data = bytearray((WAIT / fmt.DECISIONS_NAME).read_bytes())
    if flip is not None:
        data[flip] ^= 1
    (folder / fmt.DECISIONS_NAME).write_bytes(data[: len(data) - cut])
    return folder


def changed(folder: Path) -> Path:
    """The recorded log, but that sample 0.0 had no reward."""
    records = bodies(WAIT)
    next(body for body, _ in records if body["kind"] == "scored" and body["sample"] == "0.0")["reward"] = 0.0
    return write(folder, records)


def offset_of(place: int) -> int:
    return next(offset for number, (_, _, offset) in enumerate(read_records(WAIT)) if number == place)


# --------------------------------------------------------------------------------------------------------- a whole log


def test_a_run_that_is_as_it_should_be(said: Said) -> None:
    code, out, err = said(WAIT)
    assert (code, err) == (0, "")
    counted, end, verdict = out.splitlines()
    assert re.fullmatch(
        re.escape(f"{WAIT}: {EVENTS} events and {COMMANDS} commands of 5.6 s of the run, decided again in ")
        + r"\d+\.\d\d s: [\d,]+ events/s, [\d,]+ times faster than the run",
        counted,
    )
    assert (end, verdict) == ("at its end: the run is over: steps_done", "0 differences")


def test_json_has_the_same(said: Said) -> None:
    code, told = said.json(WAIT)
    assert code == 0
    assert (told["run"], told["events"], told["commands"]) == (str(WAIT), EVENTS, COMMANDS)
    assert (told["differences"], told["difference"], told["standing"], told["missing"]) == (0, None, None, [])
    assert told["events_per_s"] == pytest.approx(told["events"] / told["took_s"])
    assert told["times_faster"] == pytest.approx(told["run_s"] / told["took_s"])
    assert told["over"] == "the run is over: steps_done"


def test_a_run_folder_that_was_copied_and_has_nothing_but_its_log(said: Said, tmp_path: Path) -> None:
    shutil.copytree(WAIT, tmp_path / "elsewhere" / "log")
    assert said(tmp_path / "elsewhere")[0] == 0
    assert said(tmp_path / "elsewhere" / "log")[0] == 0
    assert [path.name for path in (tmp_path / "elsewhere" / "log").iterdir()] == [fmt.DECISIONS_NAME]


def test_a_log_in_which_nothing_happened(said: Said, tmp_path: Path) -> None:
    write(tmp_path, [])
    code, out, _ = said(tmp_path)
    assert code == 0
    assert "0 events and 0 commands" in out
    assert "nothing was recorded" in out


# ----------------------------------------------------------------------------------------------------- how far it goes


def test_until_a_step_was_formed(said: Said) -> None:
    """The first time: training went back, and it was formed twice more."""
    code, out, _ = said(WAIT, "--until", "step=2")
    assert code == 0
    turn = WHOLE.turns[WHOLE.trains(2)]
    core = Orchestrator(WHOLE.rules)
    *_, _ = decide(core, WHOLE.turns[: turn.number + 1])
    view, lines = core.view(), out.splitlines()
    where = f"event {turn.number}, at {turn.event.at:.3f} s of the run, offset {turn.offset}"
    assert lines[0] == f"{where}: {type(turn.event).__name__}"
    assert f"{len(turn.commands)} commands:" in lines
    assert any(line.startswith("  Train(step=2, branch=0, ") for line in lines)
    flow = f"{view.in_flight} samples in flight, 0 held; {view.ready} groups ready, {view.outstanding} outstanding"
    assert f"trainer training, version 2, branch 0; {flow}" in lines
    assert f"server 1 serving, version 2, {view.servers[0].load} samples" in lines
    assert f"waiting: {core.waiting(turn.event.at)}" in lines
    assert lines[-1] == "0 differences"
    assert f"{turn.number + 1} events" in lines[-2]


def test_until_an_event(said: Said) -> None:
    number = WHOLE.first(lambda turn: isinstance(turn.event, RolledBack))
    code, told = said.json(WAIT, "--until", f"event={number}")
    assert (code, told["events"], told["differences"]) == (0, number + 1, 0)
    standing = told["standing"]
    assert (standing["number"], standing["event"]["kind"], standing["commands"]) == (number, "rolled_back", [])
    assert (standing["view"]["version"], standing["view"]["branch"]) == (2, 1)
    assert "the trainer's ranks start with version 2" in standing["waiting"]
    assert standing["stories"][0].startswith("trainer\n")


def test_until_the_first_word_of_a_thing(said: Said) -> None:
    first = {"7.1": "start_sample", "sample 7.1": "start_sample", "7": "read_group", "rewards.0": "joined"}
    for id, kind in first.items():
        _, told = said.json(WAIT, "--until", f"id={id}")
        standing = told["standing"]
        assert kind in [message["kind"] for message in (standing["event"], *standing["commands"])], id
        assert standing["stories"][0].partition("\n")[0].endswith(id)
    _, out, _ = said(WAIT, "--until", "id=server 1")
    assert "server 1\n" in out
    assert "      " in out


@pytest.mark.parametrize(
    ("until", "words"),
    [
        ("step=99", "--until step=99: that step was never formed; the last one was 5"),
        (f"event={EVENTS}", f"--until event={EVENTS}: the log has {EVENTS} events, the first is 0"),
        ("id=99.9", "--until id=99.9: nothing in the log has this id; groups are 0 to 17"),
        ("step=x", "--until step=x: should be step=N, event=N or id=X"),
        ("event=-1", "--until event=-1: should be step=N, event=N or id=X"),
        ("id=", "--until id=: should be step=N, event=N or id=X"),
        ("12", "--until 12: should be step=N, event=N or id=X"),
    ],
)
def test_a_place_that_is_not_there_is_one_clear_line(said: Said, until: str, words: str) -> None:
    code, out, err = said(WAIT, "--until", until)
    assert (code, out) == (2, "")
    assert err.startswith(f"command line: replay: {words}")
    assert len(err.splitlines()) == 1


def test_where_there_is_no_log(said: Said, tmp_path: Path) -> None:
    for path, words in ((tmp_path, "holds no log/decisions.log"), (tmp_path / "none", "no such folder")):
        code, out, err = said(path)
        assert (code, out) == (2, "")
        assert err == f"command line: replay: {path}: {words}; name a run folder (runs/NAME-TIME)\n"


# ------------------------------------------------------------------------------------------------- what isn't as it was


def test_a_difference_is_a_page_and_exit_code_1(said: Said, tmp_path: Path) -> None:
    number = WHOLE.trains(0)
    code, out, _ = said(changed(tmp_path))
    assert code == 1
    lines = out.splitlines()
    turn = WHOLE.turns[number]
    where = f"event {number}, at {turn.event.at:.3f} s of the run, offset {turn.offset}: Scored"
    assert lines[0] == f"the first difference: {where}"
    assert "command 1 of 1, Train, offset" in lines[2]
    assert lines[3].split() == ["field", "expected", "(this", "core)", "recorded", "(the", "log)"]
    assert lines[4].split()[:2] == ["samples[0].advantage", "0.0"]
    assert "sample 0.0" in lines
    assert any("scored     given, reward 0.0" in line for line in lines)
    assert any(line.startswith("waiting: the trainer trains step 0, for 0.0 s; ") for line in lines)
    assert lines[-1] == f"it differs at event {number}"


def test_a_difference_in_json(said: Said, tmp_path: Path) -> None:
    code, told = said.json(changed(tmp_path))
    found = told["difference"]
    assert (code, told["differences"], found["number"]) == (1, 1, WHOLE.trains(0))
    assert [field["name"] for field in found["fields"]] == ["samples[0].advantage", "samples[1].advantage"]
    assert (found["expected"]["kind"], found["recorded"]["kind"]) == ("train", "train")


def test_a_difference_before_the_place_that_was_asked_for(said: Said, tmp_path: Path) -> None:
    code, out, _ = said(changed(tmp_path), "--until", "step=3")
    assert code == 1
    assert out.splitlines()[-1].startswith("it differs at event ")


def test_the_event_that_ended_a_run_with_an_error(said: Said, tmp_path: Path) -> None:
    """A core that can't take an event ends its run, with that event as the last of its log."""
    records = bodies(WAIT)
    place = next(n for n, (body, _) in enumerate(records) if body["kind"] == "scored" and body["sample"] == "0.0")
    records[place][0]["sample"] = "40.0"
    code, out, _ = said(write(tmp_path, records[: place + 1]))
    assert code == 1
    assert "this core can't take it: an event tells of sample 40.0, but there never was one" in out
    assert "the log ends with it: the run has most likely ended with this very error" in out
    assert "most likely" not in said(write(tmp_path, records))[1]


def test_a_torn_log_is_decided_again_up_to_the_tear(said: Said, tmp_path: Path) -> None:
    number = WHOLE.trains(3)
    torn = WHOLE.turns[number].offsets[0]
    size = (WAIT / fmt.DECISIONS_NAME).stat().st_size
    code, out, _ = said(damaged(tmp_path, cut=size - torn - 30))
    assert code == 0
    assert f"decisions.log: torn end: the last 30 bytes, from offset {torn} on, are no whole record; left out" in out
    assert "of the last event the log lacks 1 command: the controller was ended there, or is writing them" in out
    assert f"{number + 1} events and" in out
    assert out.endswith("0 differences\n")


def test_a_corrupt_log_is_refused_with_file_and_offset(said: Said, tmp_path: Path) -> None:
    offset = offset_of(100)
    code, out, err = said(damaged(tmp_path, flip=offset + fmt.HEAD_BYTES + 3))
    assert (code, out) == (1, "")
    assert f"areal-async: {tmp_path / 'decisions.log'}: corrupt record at offset {offset}" in err
    assert len(err.splitlines()) == 1


def test_a_log_of_another_version_is_one_clear_line(said: Said, tmp_path: Path) -> None:
    records = bodies(WAIT)
    records[20][0]["kind"] = "something_new"
    code, _, err = said(write(tmp_path, records))
    assert code == 1
    assert f"the record at offset {offset_of(20)} is whole but unknown to this version: " in err
    assert len(err.splitlines()) == 1
    head = b"AREALOGD" + (9).to_bytes(4, "little")
    (tmp_path / fmt.DECISIONS_NAME).write_bytes(head + zlib.crc32(head).to_bytes(4, "little"))
    code, _, err = said(tmp_path)
    assert code == 1
    assert "written in format 9, this areal-async reads 1; use the one that wrote it" in err


def test_a_log_can_be_replayed_while_it_grows(said: Said, tmp_path: Path) -> None:
    with closing(RunLog(tmp_path, 1 << 20)) as log:
        for number, (message, payload, _) in enumerate(read_records(WAIT)):
            log.append(message, payload)
            if number % 70 == 69:
                log.flush()
                code, told = said.json(tmp_path)
                assert (code, told["differences"]) == (0, 0)
                assert told["events"] + told["commands"] + len(told["missing"]) >= number // 2
    assert said.json(tmp_path)[1]["over"] == "the run is over: steps_done"


# -------------------------------------------------------------------------------------------------------- any machine


@pytest.mark.slow
def test_nothing_heavy_is_needed(tmp_path: Path) -> None:
    """Neither the model's libraries nor the peers': only what the log is read with."""
    blocked = ("torch", "vllm", "transformers", "deepspeed", "safetensors", "zmq", "aiohttp", "uvloop", "tokenizers")
    script = (
        "import sys\n"
        f"for name in {blocked}: sys.modules[name] = None\n"
        "from areal_async.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "run").mkdir()
    shutil.copytree(WAIT, tmp_path / "run" / "log")
    for more in ([], ["--until", "step=3"], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-c", script, "replay", "run", *more],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert "differences" in done.stdout


def test_a_bar_tells_how_far_a_long_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_async import cli_replay
    from areal_async.replay import replayed

    monkeypatch.setattr(cli_replay, "LONG_BYTES", 0)
    monkeypatch.setattr(replayed, "EVERY", 10)
    seen: list[int] = []
    with cli_replay._progress(WAIT, shown=True) as progress:
        replayed.replay(WAIT, progress=lambda offset: (seen.append(offset), progress(offset))[1])
    assert seen == sorted(seen)
    assert len(seen) == 14
