"""`trace`, `replay` and `audit` as strangers use them: ids that aren't there, closed pipes, other alphabets."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from areal_async import cli
from areal_async.messages import AnyRecord, SampleDone, Score, Scored, StartSample

from ..audit_lies import true_log
from ..waiting import ends_well_unread
from .written import write

WAIT = Path(__file__).parent.parent / "logs" / "wait-gone-back-resumed"
LONG = "9" * 5000


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("trace") / "run", true_log())


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--story", LONG], "group 999999999999999999…: no run has as many"),
        (["--story", f"1.{LONG}"], "no run has as many"),
        (["--story", ""], "an id is empty; name one, such as 12"),
        (["--story", "trainr"], "did you mean trainer?"),
        (["--story", "rewords.0"], "did you mean rewards.0?"),
        (["ls", "--id", "9999"], "there is no group 9999; groups are 0 to"),
        (["ls", "--id", "1", "--id", "zzz"], "there is no server zzz; the servers are server0"),
        (["ls", "--from", "nan"], "no time is between them"),
        (["ls", "--from", "9", "--to", "5"], "--from 9 --to 5: no time is between them"),
        (["--samples", "-", "--step", "999"], "there is no step 999; steps 0 to"),
        (["--samples", "-", "--step", "-1"], "--step -1: the first one is 0"),
        (["--samples", "-", "--id", "9999"], "there is no group 9999"),
        (["--samples", "-", "--id", "trainer"], "no sample is of the trainer; name a group"),
        (["--samples", ""], "--samples .: is a folder; name a file in it"),
        (["--samples", "nowhere/s.jsonl"], "there is no folder nowhere"),
        (["--perfetto", "/"], "--perfetto /: is a folder; name a file in it"),
        (["--perfetto", "nowhere/p.json"], "there is no folder nowhere"),
    ],
)
def test_what_is_not_there_is_one_clear_line(
    run_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, _, err = said(capsys, "trace", run_folder, *arguments)
    *_, last = err.splitlines()
    assert code == 2
    assert last.startswith("command line: trace: ")
    assert words in last
    assert len(last) < 400


def test_what_is_there_but_not_wanted_is_said(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "trace", run_folder, "--id", "1", "--kind", "lost") == (
        0,
        "",
        "no record is wanted by all of these filters\n",
    )


@pytest.mark.parametrize(("text", "same"), [("Step 2", "step-2"), ("GROUP 1", "1"), ("Sample 1.0", "1.0")])
def test_words_of_ids_may_be_large(run_folder: Path, capsys: pytest.CaptureFixture[str], text: str, same: str) -> None:
    told = said(capsys, "trace", run_folder, "--story", text)
    assert told == said(capsys, "trace", run_folder, "--story", same)
    assert told[0] == 0


@pytest.mark.parametrize(
    ("until", "same"),
    [
        ("id=server-server0", "id=server server0"),
        ("id=step 2", "step=2"),
        ("id=Step-2", "step=2"),
        ("id=1", "id=group 1"),
    ],
)
def test_replay_knows_the_ids_of_trace(
    run_folder: Path, capsys: pytest.CaptureFixture[str], until: str, same: str
) -> None:
    standing = []
    for text in (until, same):
        code, out, _ = said(capsys, "replay", run_folder, "--until", text, "--json")
        assert code == 0
        standing.append(json.loads(out)["standing"])
    assert standing[0] == standing[1] is not None


def test_a_bare_number_is_a_group_and_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    """In a log whose server 0 is named long before group 0 is."""
    _, out, _ = said(capsys, "replay", WAIT, "--until", "id=0", "--json")
    _, server, _ = said(capsys, "replay", WAIT, "--until", "id=server 0", "--json")
    assert json.loads(out)["standing"]["number"] > json.loads(server)["standing"]["number"]


@pytest.mark.parametrize("until", [f"step={LONG}", f"event={LONG}", f"id={LONG}", "id= "])
def test_places_that_are_none_are_one_line(run_folder: Path, capsys: pytest.CaptureFixture[str], until: str) -> None:
    code, out, err = said(capsys, "replay", run_folder, "--until", until)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert len(err) < 300


def test_a_folder_may_be_named_from_within(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run's name is known, of which what lies beside the log is found."""
    for folder, name in ((run_folder, "."), (run_folder / "log", "."), (run_folder / "log", "..")):
        monkeypatch.chdir(folder)
        assert said(capsys, "replay", name, "--until", "step=0")[0] == 0
        assert f"trace: {run_folder.resolve()}: there is no" in said(capsys, "trace", name, "--story", "zzz")[2]


# ---------------------------------------------------------------------------------------------------------- processes


def areal(*arguments: object, cwd: Path | None = None, **variables: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "areal_async", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, **variables},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["audit", "audit --json", "replay", "replay --json", "replay --until step=1", "trace", "trace --story 1"]
)
def test_whoever_reads_along_may_have_enough(run_folder: Path, command: str) -> None:
    """The exit code is that of the whole."""
    name, *options = command.split()
    with areal(name, run_folder, *options) as process:
        ends_well_unread(process)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["audit", "replay --json", "trace", "trace --samples -"])
def test_a_full_disk_behind_the_output_is_said(run_folder: Path, command: str) -> None:
    name, *options = command.split()
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "areal_async", name, run_folder, *options],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "areal-async: the standard output can't be written: No space left on device"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_any_alphabet_is_printed_somehow(run_folder: Path, tmp_path: Path) -> None:
    """The terminal's, and the file system's."""
    odd = tmp_path / os.fsdecode(b"\xff \xe6\xa8\xa1 ")
    shutil.copytree(run_folder, odd)
    for command in ("replay --until step=1", "replay --json", "audit", "trace --perfetto p.json"):
        name, *options = command.split()
        with areal(name, odd, *options, cwd=tmp_path, PYTHONIOENCODING="ascii") as process:
            out, err = process.communicate(timeout=60)
        assert (process.returncode, b"Traceback" in err) == (0, False), err
        if "--json" in options:
            json.loads(out)
    json.loads((tmp_path / "p.json").read_text())


# ------------------------------------------------------------------------------ logs that tell what can't have happened


def changed(record: AnyRecord, place: int) -> Iterator[AnyRecord]:
    """One of these ways, in which no record is broken."""
    match place % 4:
        case 0:
            yield record
            yield record
        case 1:  # left out
            return
        case 2 if isinstance(record, SampleDone | Scored | StartSample | Score):
            yield msgspec.structs.replace(record, sample="no.name")
        case 3 if isinstance(record, SampleDone | Scored | StartSample | Score):
            yield msgspec.structs.replace(record, sample="999.0")
        case _:
            yield record


COMMANDS = ("--story 2", "--story trainer", "--samples s.jsonl", "--perfetto p.json", "--anonymize copy")


@pytest.mark.slow
def test_a_log_that_was_changed_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever, and whatever is asked of it."""
    monkeypatch.chdir(tmp_path)
    records, found = true_log(), 0
    for place in range(1, len(records), 5):
        run = tmp_path / f"run-{place}"
        write(run, [*records[:place], *changed(records[place], place), *records[place + 1 :]])
        for command in COMMANDS:
            code = cli.main(["trace", str(run), *command.split()])
            last = capsys.readouterr().err.splitlines()[-1:]
            assert code in (0, 1), (place, command, last)
            found += "doesn't follow from what is before it" in str(last)
            shutil.rmtree("copy", ignore_errors=True)
    assert found
