"""Which runs there are, and how each stands: from small files alone, also of runs that are half there."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_async.cli_why import look
from areal_async.config import Config
from areal_async.errors import ConfigError
from areal_async.view import runs as runs_module
from areal_async.view import told as told_module
from areal_async.view.api import RunRow
from areal_async.view.runs import RunFolders
from areal_async.view.told import Told, last_row

from .folders import Living, row, write_rows, write_run, write_status

Make = Callable[..., Config]


def standing(folder: Path) -> RunRow:
    return Told(folder, folder.name).row(last_row(folder))


# ---------------------------------------------------------------------------------------------------------- one run


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    found = standing(write_run(tmp_path / "first-20261130-101112"))
    assert (found.key, found.name, found.state, found.end) == (
        tmp_path.name and found.key,
        "first",
        "ended",
        "steps_done",
    )
    assert (found.version, found.steps, found.seconds, found.reward, found.problem) == (3, 9, 100.0, 0.25, "")
    assert found.began == time.mktime((2026, 11, 30, 10, 11, 12, 0, 0, -1))


def test_when_it_began_is_known_without_a_stamp(tmp_path: Path) -> None:
    write_status(write_run(tmp_path / "mine"), time=5000.0)
    assert standing(tmp_path / "mine").began == 4900.0
    (tmp_path / "mine" / "status.json").unlink()
    os.utime(tmp_path / "mine" / "config.yaml", (77, 77))
    assert standing(tmp_path / "mine").began == 77.0
    (tmp_path / "mine" / "config.yaml").unlink()
    assert standing(tmp_path / "mine").began is None


@pytest.mark.parametrize(
    ("changes", "state", "end"),
    [
        ({"ended": "stopped"}, "ended", "stopped"),
        ({"ended": ""}, "died", "no end is told: the controller was killed, after 100.0 s of its clock"),
        ({"ended": "", "host": "node7"}, "running", ""),
        ({"ended": "", "host": "node7", "time": 1.0}, "died", "no end is told: host node7 wrote last"),
        ({"host": "node7", "time": 1.0}, "ended", "steps_done"),
    ],
)
def test_how_a_run_stands_that_has_no_process_here(
    tmp_path: Path, changes: dict[str, object], state: str, end: str
) -> None:
    write_status(write_run(tmp_path / "run"), **changes)
    found = standing(tmp_path / "run")
    assert (found.state, found.end[: len(end)]) == (state, end)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"ended": ""}, "running"),
        ({"ended": "", "balance": {"admitted": 0}}, "starting"),
        ({"ended": "", "time": 1.0}, "silent"),
        ({"ended": "stopped", "pid": 1}, "starting"),  # it goes on with a run that had ended
        ({"ended": "", "pid": 1}, "starting"),
        ({"ended": "stopped"}, "ended"),  # it ends its children
    ],
)
def test_how_a_run_stands_whose_process_lives(
    make_config: Make, tmp_path: Path, changes: dict[str, object], state: str
) -> None:
    with Living(tmp_path / "run", make_config().rules):
        write_status(tmp_path / "run", **{"pid": os.getpid(), **changes})
        assert standing(tmp_path / "run").state == state
        assert look(tmp_path / "run").controller == os.getpid()  # as `areal-async why` sees it


def test_a_run_that_has_told_nothing(make_config: Make, tmp_path: Path) -> None:
    with Living(tmp_path / "run", make_config().rules):
        assert standing(tmp_path / "run").state == "starting"
    found = standing(tmp_path / "run")
    assert (found.state, found.end) == ("died", "it has told nothing: it has no status.json")


def test_rows_tell_what_a_missing_status_does_not(tmp_path: Path) -> None:
    (write_run(tmp_path / "run") / "status.json").unlink()
    found = standing(tmp_path / "run")
    assert (found.name, found.steps, found.version, found.seconds) == ("first", 9, 3, 20.0)


def test_a_status_of_another_release_is_one_problem(make_config: Make, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "status.json").write_text('{"time": "tomorrow"}')
    found = standing(tmp_path / "run")
    assert found.problem.startswith(f"{tmp_path}/run/status.json: was not written by this release")
    assert (found.state, found.version) == ("unreadable", 3)
    shutil.rmtree(tmp_path / "run" / "log")
    with Living(tmp_path / "run", make_config().rules):
        assert standing(tmp_path / "run").state == "running"


@pytest.mark.parametrize(
    "text", ["", "name: [", "- 1", "name: x", "name: x\ntrain: 3", "name: x\ntrain: {steps: y}", "\0"]
)
def test_a_strange_configuration_says_nothing(tmp_path: Path, text: str) -> None:
    (write_run(tmp_path / "run") / "status.json").unlink()
    (tmp_path / "run" / "config.yaml").write_text(text)
    found = standing(tmp_path / "run")
    assert (found.name in ("run", "x"), found.steps) == (True, 0)


def test_the_newest_whole_line_is_found_from_the_end(tmp_path: Path) -> None:
    assert last_row(tmp_path) is None
    write_rows(tmp_path, *(row(step) for step in range(200)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 200')
    newest = last_row(tmp_path)
    assert newest is not None
    assert newest.step == 199
    write_rows(tmp_path, row(7))
    alone = last_row(tmp_path)
    assert alone is not None
    assert (alone.step, alone.reward_mean) == (7, 0.875)
    (tmp_path / "metrics.jsonl").write_text("{]\n")
    assert last_row(tmp_path) is None


# -------------------------------------------------------------------------------------------------------- all of them


async def test_new_runs_appear_and_removed_ones_go(tmp_path: Path) -> None:
    write_run(tmp_path / "a-20261130-100000")
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").touch()
    folders = RunFolders(tmp_path)
    assert [each.key for each in (await folders.rows()).runs] == ["a-20261130-100000"]
    (tmp_path / "b-20261130-110000" / "log").mkdir(parents=True)
    assert len((await folders.rows()).runs) == 1
    (tmp_path / "b-20261130-110000" / "config.yaml").write_text("name: b\ntrain: {steps: 7}\n")
    seen = await folders.rows()
    assert [(each.key, each.steps) for each in seen.runs] == [("b-20261130-110000", 7), ("a-20261130-100000", 9)]
    assert folders.folder("b-20261130-110000") == tmp_path / "b-20261130-110000"
    assert folders.folder("notes") is None
    shutil.rmtree(tmp_path / "a-20261130-100000")
    assert [each.key for each in (await folders.rows()).runs] == ["b-20261130-110000"]
    shutil.rmtree(tmp_path)
    assert (await folders.rows()).runs == []


async def test_files_are_read_again_only_when_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        write_run(tmp_path / f"run-{number}")
    read: list[Path] = []
    monkeypatch.setattr(runs_module, "last_row", lambda folder: read.append(folder) or last_row(folder))
    status_read = told_module.status.read
    monkeypatch.setattr(told_module.status, "read", lambda folder: read.append(folder) or status_read(folder))
    folders = RunFolders(tmp_path)
    assert len((await folders.rows()).runs) == 8
    assert len(read) == 16
    read.clear()
    await folders.rows()
    assert read == []
    write_rows(tmp_path / "run-7", *(row(step) for step in range(9)))
    seen = {each.key: each for each in (await folders.rows()).runs}
    assert read == [tmp_path / "run-7"]
    assert seen["run-7"].reward == 1.0


async def test_a_run_that_cannot_be_read_is_a_row_of_its_own(tmp_path: Path) -> None:
    for name in ("good", "bad", "worse"):
        write_run(tmp_path / name)
    (tmp_path / "bad" / "status.json").write_bytes(b"\0" * 200)
    (tmp_path / "worse" / "status.json").unlink()
    (tmp_path / "worse" / "status.json").mkdir()
    seen = {each.key: each for each in (await RunFolders(tmp_path).rows()).runs}
    assert (seen["good"].state, seen["good"].problem) == ("ended", "")
    assert "bad/status.json: was not written by this release" in seen["bad"].problem
    assert "worse/status.json: can't be read: Is a directory" in seen["worse"].problem


@pytest.mark.parametrize("name", ["", "log", "."])
def test_a_run_by_itself(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "run")
    folders = RunFolders(tmp_path / "run" / name)
    assert (folders.single, folders.folder("run")) == (True, folders.path)
    assert folders.path.resolve() == tmp_path / "run"
    assert folders.folder("log") is None


def test_a_copy_of_the_log_folder_alone_is_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    shutil.move(tmp_path / "run" / "log", tmp_path / "copy")
    assert RunFolders(tmp_path / "copy").folder("copy") == tmp_path / "copy"
    assert told_module.log_of(tmp_path / "copy") == tmp_path / "copy"


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").mkdir()
    (tmp_path / "file").touch()
    for name, words in {
        "empty": "is empty; name a run folder",
        "nowhere": "no such folder; name a run folder",
        "other": "is no run (no log/decisions.log, metrics.jsonl or status.json), and no folder in it is one",
        "file": "is no folder",
    }.items():
        with pytest.raises(ConfigError) as error:
            RunFolders(tmp_path / name)
        assert str(error.value).startswith(f"command line: view: {tmp_path / name}: {words}")
