"""What was read of a log, in whatever slices and while it grew: the table says what `trace` says of its samples."""

import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace

from areal_async.log.format import DECISIONS_NAME, HEAD_BYTES, Torn
from areal_async.log.reader import read_records, scan
from areal_async.log.writer import RunLog
from areal_async.messages import (
    AnyRecord,
    Failed,
    GroupRead,
    Lost,
    RolledBack,
    SampleDone,
    Scored,
    StartSample,
    StepDone,
    WhenOlder,
    Woke,
)
from areal_async.trace.samples import SampleRecord, Wanted, read_samples
from areal_async.view import tables
from areal_async.view.api import SampleQuery, SampleRow
from areal_async.view.index import Index
from areal_async.view.samples import MOST_ROWS, Samples, search

from ..audit_lies import records as records_of
from ..audit_lies import true_log
from ..core.test_any_order import AnyOrder
from ..core.test_going_back import GoingBack
from ..replay.logs import BOTH
from ..trace.written import arrays, write

LONG_AGO = 1e9  # when the log was written last: it is quiet


@contextmanager
def opened(run: Path, log: Path | None = None, **options: Any) -> Iterator[tuple[Index, Samples]]:
    number = len(list(run.glob("*.sqlite")))
    folder = log or run / "log"
    with (
        closing(tables.open_database(run / f"{number}.sqlite")) as database,
        closing(Index(folder, database, options.get("decode"))) as index,
    ):
        yield index, Samples(run, folder, index, options.get("decode"), options.get("missing", "no model"))


def quiet(run: Path) -> Path:
    os.utime(run / "log" / DECISIONS_NAME, (LONG_AGO, LONG_AGO))
    return run


def read_all(index: Index, seconds: float = 0.0) -> int:
    """Slices of one turn each; somebody asks after each."""
    slices = 1
    while index.read_some(seconds):
        index.write()
        slices += 1
    return slices


def told(log: Path) -> dict[str, SampleRecord]:
    found = read_samples(log, Wanted(), None, lambda torn: None, lambda nbytes: None)
    return {record.id: replace(record, reward=_stored(record.reward)) for record in found}


def _stored(reward: float | None) -> float | None:
    """No number is none, for SQLite as for JSON."""
    return None if reward is None or math.isnan(reward) else reward


def tabled(index: Index, samples: Samples) -> dict[str, SampleRecord]:
    index.write()
    names = [name for (name,) in index.database.execute("SELECT id FROM samples ORDER BY key").fetchall()]
    found = {}
    for name in names:
        full = samples.full(name)
        assert full is not None
        found[name] = full.record
    return found


def check(log: Path, index: Index, samples: Samples) -> None:
    wanted = told(log)
    assert tabled(index, samples) == wanted
    assert index.reading().samples == len(wanted)
    total, rows = search(index.database, SampleQuery(limit=MOST_ROWS))
    assert (total, len(rows)) == (len(wanted), min(len(wanted), MOST_ROWS))
    for row in rows:
        check_row(row, wanted[row.id])
    lags: Counter[int] = Counter()
    for each in wanted.values():
        if each.outcome == "trained" and each.advantage is not None and each.versions and each.loss_mask:
            assert each.step is not None
            lags.update(each.step - v for v, mask in zip(each.versions, each.loss_mask, strict=True) if mask)
    if index.lives is not None and not any(each.missing for each in wanted.values()):
        below = index.lives.rules.max_staleness if index.lives.rules.when_older == "mask" else None
        assert index.lags(0, 1 << 40) == ({k: v for k, v in lags.items() if below is None or k <= below}, 0)


def check_row(row: SampleRow, record: SampleRecord) -> None:
    for field in ("group", "outcome", "step", "verdict", "reward", "advantage", "lag", "prompt_tokens", "server"):
        assert getattr(row, field) == getattr(record, field)
    assert (row.oldest, row.newest, row.length) == (record.oldest, record.newest, record.response_tokens)
    assert (row.at, row.truncated) == (record.times.answered, record.finish == "length")
    if record.versions and record.loss_mask:
        trained = {version for version, mask in zip(record.versions, record.loss_mask, strict=True) if mask}
        assert row.versions == len(trained)


def check_growing(run: Path, cuts: int, seed: int) -> None:
    """At some moments of its growth, and at its end, the tables are right."""
    path = run / "log" / DECISIONS_NAME
    whole = path.read_bytes()
    ends = [item[0] + HEAD_BYTES + len(item[1]) for item in scan(path, "decisions") if not isinstance(item, Torn)]
    draw = random.Random(seed)
    with opened(run) as (index, samples):
        for end in [*sorted(draw.choices(ends, k=cuts)), len(whole)]:
            torn = whole[:end] + whole[end : end + draw.randrange(HEAD_BYTES)]
            path.write_bytes(torn)
            quiet(run)
            read_all(index)
            if torn == whole[:end]:  # then the newest turn was given, too
                check(run / "log", index, samples)
        assert index.reading().done
        assert index.reading().problem == ""
        check(run / "log", index, samples)


def test_the_table_is_what_trace_tells(tmp_path: Path) -> None:
    run = write(tmp_path, true_log())
    with opened(run) as (index, samples):
        assert not index.reading().done
        slices = read_all(index)
        assert slices >= index.reading().events / 4  # a slice ends after one turn where there is no time
        assert index.reading().events == len(true_log())
        check(run / "log", index, samples)
    with opened(run) as (index, samples):
        assert read_all(index, 10.0) == 1
        check(run / "log", index, samples)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_log_that_grows(tmp_path: Path, seed: int) -> None:
    check_growing(write(tmp_path, true_log()), cuts=12, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("log", BOTH)
def test_logs_of_real_controllers(tmp_path: Path, log: Path) -> None:
    """Killed, gone back, resumed; what they refer to as arrays isn't there, and is said."""
    records = [record.message for record in read_records(log)]
    check_growing(write(tmp_path, records), cuts=6, seed=1)
    with opened(tmp_path, log) as (index, samples):
        read_all(index)
        check(log, index, samples)


class Walk(AnyOrder):
    folder: Path

    def teardown(self) -> None:
        super().teardown()
        check_walk(self)


class WalkBack(GoingBack):
    folder: Path

    def teardown(self) -> None:
        super().teardown()
        check_walk(self)


def check_walk(walk: Walk | WalkBack) -> None:
    if hasattr(walk, "world"):
        number = len(list(walk.folder.iterdir()))
        check_growing(write(walk.folder / str(number), records_of(walk.world)), cuts=3, seed=number)


WALKS = settings(
    max_examples=4, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(WhenOlder))
@pytest.mark.parametrize("walk", [Walk, WalkBack])
def test_whatever_happened(tmp_path: Path, walk: type[Walk | WalkBack], policy: WhenOlder) -> None:
    made = type(f"{walk.__name__}{policy}", (walk,), {"policy": policy, "folder": tmp_path})
    run_state_machine_as_test(made, settings=WALKS)


def test_what_a_step_back_takes_away(tmp_path: Path) -> None:
    """Between the two trainings of a step it is not a trained one, and has no lags."""
    log = list(true_log())
    back = next(number for number, record in enumerate(log) if isinstance(record, RolledBack))
    run = quiet(write(tmp_path, log[: back + 1]))
    with opened(run) as (index, samples):
        read_all(index)
        assert index.lags(2, 3) == ({}, 0)
        assert index.lags(0, 2)[0]
        check(run / "log", index, samples)


def test_a_log_whose_newest_event_gets_its_commands_late(tmp_path: Path) -> None:
    """A kill came between them; the index reads it again, and is right."""
    log = true_log()
    cut = next(number for number, record in enumerate(log) if isinstance(record, GroupRead)) + 1
    run = quiet(write(tmp_path, log[:cut]))  # a prompt that nobody is started for has come too late
    with opened(run) as (index, samples):
        read_all(index)
        assert index.lives is not None
        assert index.lives.admitted > len(index.lives.groups)
        write(tmp_path, log[cut:])
        read_all(index)
        assert index.reading().events == len(log)
        check(run / "log", index, samples)


def test_an_answer_that_is_too_long_leaves_with_its_attempt(tmp_path: Path) -> None:
    """Until the next attempt starts it is the sample's answer."""
    log = list(true_log())
    place = next(number for number, record in enumerate(log) if isinstance(record, SampleDone))
    done = log[place]
    assert isinstance(done, SampleDone)
    log = [*log[:place], replace(done, length=10_000, loss_tokens=10_000), Woke(at=done.at)]
    again = StartSample(sample=done.sample, attempt=1, position=0, server="server0", floor=0)
    run = quiet(write(tmp_path, log))
    with opened(run) as (index, samples):
        read_all(index)
        assert index.reading().samples == 1
        check(run / "log", index, samples)
        write(tmp_path, [Woke(at=done.at), again, Woke(at=done.at)])
        read_all(index)
        assert index.reading().samples == 0
        check(run / "log", index, samples)


def test_tokens_that_others_wrote_have_no_lag(tmp_path: Path) -> None:
    """A tool's answer in a sample of two turns: mask 0, version -1."""
    path = tmp_path / "log"
    with closing(RunLog(path, 1 << 20)) as run_log:
        for record in true_log():
            if isinstance(record, SampleDone):
                assert record.prompt_tokens
                ids, mask, logprobs, versions = arrays(record)
                mask[-1], versions[-1] = 0, -1
                record = replace(record, loss_tokens=record.length - 1, newest=record.oldest + 1)
                versions[record.prompt_tokens : -1] = record.oldest
                versions[record.prompt_tokens] += len(versions) > record.prompt_tokens + 2
                run_log.append(record, run_log.put(record.sample, record.attempt, [ids, mask, logprobs, versions]))
            else:
                run_log.append(record)
    with opened(quiet(tmp_path)) as (index, samples):
        read_all(index, 10.0)
        check(path, index, samples)


def test_what_went_wrong(tmp_path: Path) -> None:
    with opened(write(tmp_path, true_log())) as (index, _):
        read_all(index, 10.0)
        found = {(each.what, each.thing): each for each in index.troubles(100)}
        assert {("failed", "0.0"), ("rolled_back", "trainer")} <= found.keys()
        assert found["failed", "0.0"].text.startswith("sample 0.0, attempt 0 failed: ")
        assert [each.at for each in index.troubles(100)] == sorted(each.at for each in index.troubles(100))
        assert index.troubles(1) == index.troubles(100)[-1:]


def test_troubles_that_come_by_the_thousands_share_a_line(tmp_path: Path) -> None:
    log = [record for record in true_log() if not isinstance(record, Failed | Lost | RolledBack)]
    at = max(record.at for record in log if isinstance(record, StepDone))
    many: list[AnyRecord] = []
    for number in range(40):
        sample = f"{number}.0"
        many += [
            Scored(at=at + number, sample=sample, attempt=9, verdict="timeout", reward=0.0),
            Failed(at=at + number, of="sample", id=sample, why="no room", attempt=9),
        ]
    many += [
        Lost(at=at + 50, peer="server", id="server0", why="exit code -9"),
        Lost(at=at + 51, peer="server", id="server0", why="exit code -9"),
        Lost(at=at + 52, peer="rewards", id="rewards.0", why="killed\ntail"),
        Failed(at=at + 53, of="server", id="server1", why="other numbers"),
        Failed(at=at + 54, of="checkpoint", id="4", why="disk full"),
    ]
    with opened(quiet(write(tmp_path, [*log, *many]))) as (index, _):
        read_all(index, 10.0)
        assert [(each.what, each.thing, each.text) for each in index.troubles(100)] == [
            ("timeout", "0.0", "a check ends with timeout, first that of sample 0.0; 40 times by now"),
            ("failed", "0.0", "sample 0.0, attempt 9 failed: no room; 40 times by now"),
            ("lost", "server server0", "server server0 is lost: exit code -9"),
            ("lost", "server server0", "server server0 is lost: exit code -9"),
            ("lost", "rewards.0", "reward worker rewards.0 is lost: killed …"),
            ("quarantined", "server server1", "server server1 is left alone for good: other numbers"),
            ("failed", "trainer", "checkpoint of version 4 failed: disk full"),
        ]


def test_damaged_arrays_are_told_and_the_rest_is_read(tmp_path: Path) -> None:
    run = write(tmp_path, true_log())
    path = run / "log" / "payload-000002.seg"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with opened(run) as (index, samples):
        read_all(index, 10.0)
        assert index.reading().samples == 26
        damage = next(each for each in index.troubles(100) if each.what == "damage")
        assert f"{path}: corrupt record at offset" in damage.text
        full = samples.full(damage.thing)
        assert full is not None
        assert any(f"{path}: corrupt record at offset" in line for line in full.missing)
        assert (full.record.response_ids, full.tokens) == (None, None)
        assert full.record.outcome != ""


def test_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    with opened(tmp_path) as (index, samples):
        assert not index.read_some(1.0)
        assert "can't be read: No such file or directory" in index.reading().problem
        assert (index.reading().samples, samples.full("0.0"), index.lags(0, 9)) == (0, None, ({}, 0))
        write(tmp_path, true_log())
        read_all(index, 10.0)
        assert index.reading().problem == ""
        check(tmp_path / "log", index, samples)
