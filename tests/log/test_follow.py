"""A log that grows while it is read: the same turns as of one that is over, whatever way its bytes came."""

import os
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_async.log import format as fmt
from areal_async.log import reader
from areal_async.log.follow import QUIET_S, Follower
from areal_async.log.format import DECISIONS_NAME, HEADER_BYTES, Torn
from areal_async.log.turns import Turn, read_turns
from areal_async.log.writer import RunLog
from areal_async.messages import AnyRecord, Command, Event, Finish, ReadGroup, Score, Woke

from .test_turns import NOTE, RECORDS, RULES, a_log

NOW = 1e9  # when the file was written last, in these tests
LATER = NOW + QUIET_S


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.utime(path, (NOW, NOW))


def grown(folder: Path, *records: AnyRecord) -> None:
    with closing(RunLog(folder, 1 << 20)) as log:
        for record in records:
            log.append(record)
    os.utime(folder / DECISIONS_NAME, (NOW, NOW))


def started(folder: Path, *records: AnyRecord) -> Follower:
    a_log(folder, *records)
    os.utime(folder / DECISIONS_NAME, (NOW, NOW))
    return Follower(folder)


def events(turns: list[Turn]) -> list[float]:
    return [turn.event.at for turn in turns]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(RECORDS), max_size=10), st.lists(st.floats(0, 1), max_size=5), st.integers(1, 4))
def test_the_same_turns_however_it_grows(
    tmp_path_factory: pytest.TempPathFactory, records: list[AnyRecord], cuts: list[float], at_once: int
) -> None:
    first = next((n for n, record in enumerate(records) if isinstance(record, Event)), len(records))
    records = [r for n, r in enumerate(records) if n >= first or not isinstance(r, Command)]
    folder = a_log(tmp_path_factory.mktemp("log"), *records)
    path = folder / DECISIONS_NAME
    data, recorded = path.read_bytes(), read_turns(folder)
    assert recorded is not None
    follower, found = Follower(folder), list[Turn]()
    for end in [*sorted(int(cut * len(data)) for cut in cuts), len(data)]:
        put(path, data[:end])
        follower._file = path.stat().st_ino  # written anew here, appended to in a run
        for _ in range(len(records) + 1):
            for number, turn in enumerate(follower.turns(NOW), 1):
                found.append(turn)
                if number == at_once:
                    break
        assert (follower.problem, follower.outdated) == ("", False)
    wanted = list(recorded.turns)
    assert found == wanted[:-1]
    assert [*found, *follower.turns(LATER)] == wanted
    assert (follower.rules, follower.notes) == (recorded.rules, recorded.notes)
    assert (follower.records, follower.offset) == (len(records) + 1, len(data))
    assert list(follower.turns(LATER)) == []


def test_the_newest_turn_is_given_when_it_is_whole(tmp_path: Path) -> None:
    follower = started(tmp_path, Woke(at=1.0), ReadGroup(group=0, position=0))
    assert list(follower.turns(NOW + 0.9)) == []
    grown(tmp_path, Woke(at=2.0))
    assert [(turn.event.at, len(turn.commands)) for turn in follower.turns(NOW)] == [(1.0, 1)]
    assert events(list(follower.turns(LATER))) == [2.0]
    grown(tmp_path, Woke(at=3.0), Finish(reason="stopped"))
    assert events(list(follower.turns(NOW))) == [3.0]  # nothing follows the end of a run


def test_a_note_that_comes_late_has_a_turn_of_its_own(tmp_path: Path) -> None:
    follower = started(tmp_path, Woke(at=1.0))
    assert [turn.notes for turn in follower.turns(LATER)] == [[]]
    grown(tmp_path, NOTE, Woke(at=2.0))
    assert [(turn.number, turn.event, turn.notes) for turn in follower.turns(NOW)] == [(0, Woke(at=1.0), [NOTE])]
    assert [(turn.number, turn.event.at) for turn in follower.turns(LATER)] == [(1, 2.0)]


def test_a_command_that_comes_late_says_that_what_was_given_is_wrong(tmp_path: Path) -> None:
    """As a resume writes it, where a kill came between an event and its commands."""
    follower = started(tmp_path, Woke(at=1.0))
    assert len(list(follower.turns(LATER))) == 1
    grown(tmp_path, ReadGroup(group=0, position=0), Woke(at=2.0))
    assert list(follower.turns(LATER)) == []
    assert follower.outdated
    assert [len(turn.commands) for turn in Follower(tmp_path).turns(LATER)] == [1, 0]


def test_a_torn_end_is_told_and_survives_a_resume(tmp_path: Path) -> None:
    follower = started(tmp_path, Woke(at=1.0), Woke(at=2.0), Score(sample="0.0", attempt=0))
    path = tmp_path / DECISIONS_NAME
    whole = path.read_bytes()
    put(path, whole[:-3])
    follower = Follower(tmp_path)
    assert events(list(follower.turns(NOW))) == [1.0]
    assert follower.problem == ""  # it may be written in this moment
    assert list(follower.turns(LATER)) == []  # what is torn may be a command of the newest turn
    assert "torn end: the last" in follower.problem
    assert str(path) in follower.problem
    grown(tmp_path, Woke(at=3.0))  # cuts it
    assert events(list(follower.turns(LATER))) == [2.0, 3.0]
    assert follower.problem == ""


def test_what_was_cut_in_the_middle_of_a_slice(tmp_path: Path) -> None:
    """The reader has the torn end in its buffer, and the file goes on otherwise."""
    follower = started(tmp_path, Woke(at=1.0), Woke(at=2.0), Woke(at=3.0))
    path = tmp_path / DECISIONS_NAME
    put(path, path.read_bytes()[:-3])
    follower = Follower(tmp_path)
    assert next(follower.turns(NOW)).event.at == 1.0
    grown(tmp_path, *(Woke(at=float(at)) for at in range(4, 9)))
    assert events(list(follower.turns(LATER))) == [2.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert follower.problem == ""


def test_what_was_cut_while_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what the reader had was from before: the file itself says what is there."""
    follower = started(tmp_path, Woke(at=1.0), Woke(at=2.0), Finish(reason="stopped"))
    scans = iter([*[lambda *of: iter([(770, b"half of two records")])], reader.scan])
    monkeypatch.setattr("areal_async.log.follow.scan", lambda *of: next(scans)(*of))
    assert events(list(follower.turns(LATER))) == [1.0, 2.0]
    assert follower.problem == ""


def test_damage_is_told_and_what_was_read_stays(tmp_path: Path) -> None:
    follower = started(tmp_path, Woke(at=1.0), Woke(at=2.0), Woke(at=3.0))
    *_, (_, _, offset) = reader.read_records(tmp_path)
    path = tmp_path / DECISIONS_NAME
    data = bytearray(path.read_bytes())
    data[offset + fmt.HEAD_BYTES] ^= 1
    put(path, bytes(data))
    assert events(list(follower.turns(LATER))) == [1.0]
    assert f"{path}: corrupt record at offset {offset}" in follower.problem
    assert list(follower.turns(LATER)) == []
    assert f"{path}: corrupt record at offset {offset}" in follower.problem
    assert follower.offset == offset


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([{"kind": "of_tomorrow"}], "is whole but unknown to this version"),
        ([msgspec.to_builtins(RULES)], "Rules, which follows from nothing"),
    ],
)
def test_records_of_another_version_are_told(tmp_path: Path, records: list[object], problem: str) -> None:
    follower = started(tmp_path, Woke(at=1.0), Woke(at=2.0))
    path = tmp_path / DECISIONS_NAME
    bodies = [msgspec.msgpack.encode([record, None]) for record in records]
    put(path, path.read_bytes() + b"".join(fmt.record_head([body]) + body for body in bodies))
    assert events(list(follower.turns(LATER))) == [1.0]
    assert problem in follower.problem


def test_what_is_no_log(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert list(follower.turns(LATER)) == []
    assert "can't be read: No such file or directory" in follower.problem
    put(tmp_path / DECISIONS_NAME, b"")
    assert list(follower.turns(LATER)) == []
    assert (follower.problem, follower.rules) == ("", None)
    put(tmp_path / DECISIONS_NAME, b"a text that is no log of anything")
    assert list(follower.turns(LATER)) == []
    assert "not a decisions file of areal-async" in follower.problem


def test_another_log_in_its_place(tmp_path: Path) -> None:
    follower = started(tmp_path / "log", Woke(at=1.0), Woke(at=2.0))
    assert len(list(follower.turns(LATER))) == 2
    a_log(tmp_path / "other", Woke(at=1.0), Woke(at=2.0), Woke(at=3.0))
    (tmp_path / "other" / DECISIONS_NAME).replace(tmp_path / "log" / DECISIONS_NAME)
    assert list(follower.turns(LATER)) == []
    assert follower.outdated


def test_a_scan_from_a_record_on(tmp_path: Path) -> None:
    path = a_log(tmp_path, Woke(at=1.0), Woke(at=2.0)) / DECISIONS_NAME
    whole = list(reader.scan(path, "decisions"))
    for number, item in enumerate(whole):
        assert not isinstance(item, Torn)
        assert list(reader.scan(path, "decisions", item[0])) == whole[number:]
    assert whole[0][0] == HEADER_BYTES  # type: ignore[index]
