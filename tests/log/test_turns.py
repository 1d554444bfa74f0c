"""A log event by event: the same records, in the same order, as record by record."""

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_async.errors import LogError
from areal_async.log import format as fmt
from areal_async.log.format import PayloadRef
from areal_async.log.reader import read_records
from areal_async.log.turns import Turn, read_turns
from areal_async.log.writer import RunLog
from areal_async.messages import AnyRecord, Command, Event, Note, ReadGroup, Rules, SampleDone, Score, Woke

RULES = Rules(
    seed=1, steps=1, batch_groups=1, group_size=1, max_staleness=0, max_concurrent=1, minibatches=1, ranks=1,
    max_tokens_per_microbatch=64, max_new_tokens=32,
)  # fmt: skip
NOTE = Note(at=0.5, what="run", data={"name": "x"})
DONE = SampleDone(
    at=1.0, sample="0.0", attempt=0, oldest=0, newest=1, prompt_tokens=3, length=5, loss_tokens=5, finish="stop"
)
RECORDS: list[AnyRecord] = [Woke(at=0.5), DONE, ReadGroup(group=3, position=4), Score(sample="0.0", attempt=0), NOTE]


def a_log(folder: Path, *records: AnyRecord) -> Path:
    with closing(RunLog(folder, 1 << 20)) as log:
        for record in (RULES, *records):
            log.append(record, PayloadRef(1, 16, 40) if isinstance(record, SampleDone) else None)
    return folder


def turns_of(folder: Path) -> list[Turn]:
    recorded = read_turns(folder, on_torn=pytest.fail)
    assert recorded is not None
    return list(recorded.turns)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(RECORDS), max_size=12))
def test_nothing_is_lost_and_nothing_changes_places(
    tmp_path_factory: pytest.TempPathFactory, records: list[AnyRecord]
) -> None:
    """Whatever follows whatever, but for commands before the first event."""
    first = next((n for n, record in enumerate(records) if isinstance(record, Event)), len(records))
    records = [r for n, r in enumerate(records) if n >= first or not isinstance(r, Command)]
    folder = a_log(tmp_path_factory.mktemp("log"), *records)
    recorded = read_turns(folder, on_torn=pytest.fail)
    assert recorded is not None
    assert recorded.rules == RULES
    turns = list(recorded.turns)
    assert [turn.number for turn in turns] == list(range(len(turns)))
    assert [turn.last for turn in turns] == [False] * (len(turns) - 1) + [True] * bool(turns)
    told: list[tuple[int, AnyRecord]] = []
    for turn in turns:
        told.append((turn.offset, turn.event))
        told += zip(turn.offsets, turn.commands, strict=True)
        assert turn.payload == (PayloadRef(1, 16, 40) if isinstance(turn.event, SampleDone) else None)
    whole = list(read_records(folder))[1:]
    assert told == [(offset, message) for message, _, offset in whole if not isinstance(message, Note)]
    notes = [*recorded.notes, *(note for turn in turns for note in turn.notes)]
    assert notes == [message for message, _, _ in whole if isinstance(message, Note)]


def test_notes_stand_where_they_were_written(tmp_path: Path) -> None:
    later = Note(at=2.0, what="repeated", data={})
    folder = a_log(tmp_path, NOTE, Woke(at=1.0), ReadGroup(group=0, position=0), later, Woke(at=3.0))
    recorded = read_turns(folder)
    assert recorded is not None
    assert recorded.notes == [NOTE]
    assert [turn.notes for turn in recorded.turns] == [[later], []]


def test_where_there_is_no_event_there_is_no_turn(tmp_path: Path) -> None:
    assert turns_of(a_log(tmp_path / "rules")) == []
    with closing(RunLog(tmp_path / "empty", 1 << 20)):
        pass
    assert read_turns(tmp_path / "empty") is None
    with pytest.raises(LogError, match=r"decisions\.log: can't be read"):
        read_turns(tmp_path / "none")


@pytest.mark.parametrize("records", [[ReadGroup(group=0, position=0)], [Woke(at=1.0), RULES]])
def test_what_follows_from_nothing_is_no_log(tmp_path: Path, records: list[AnyRecord]) -> None:
    recorded = read_turns(a_log(tmp_path, *records))
    assert recorded is not None
    with pytest.raises(LogError, match=rf"at offset \d+ is {type(records[-1]).__name__}, which follows from nothing"):
        list(recorded.turns)


def test_a_torn_end_is_said_and_the_turn_before_it_is_the_last(tmp_path: Path) -> None:
    folder = a_log(tmp_path, Woke(at=1.0), Woke(at=2.0), ReadGroup(group=0, position=0))
    path = folder / fmt.DECISIONS_NAME
    path.write_bytes(path.read_bytes()[:-3])
    torn: list[fmt.Torn] = []
    recorded = read_turns(folder, torn.append)
    assert recorded is not None
    assert [(turn.event.at, turn.commands, turn.last) for turn in recorded.turns] == [(1.0, [], False), (2.0, [], True)]
    assert len(torn) == 1


def test_turns_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    """Damage that lies behind is met there, not before."""
    folder = a_log(tmp_path, Woke(at=1.0), Woke(at=2.0), Woke(at=3.0))
    *_, (_, _, offset) = read_records(folder)
    path = folder / fmt.DECISIONS_NAME
    data = bytearray(path.read_bytes())
    data[offset + fmt.HEAD_BYTES] ^= 1
    path.write_bytes(data)
    recorded = read_turns(folder)
    assert recorded is not None
    assert next(recorded.turns).event == Woke(at=1.0)
    with pytest.raises(LogError, match=f"corrupt record at offset {offset}"):
        list(recorded.turns)
