"""The timeline's spans: the same as in a file for Perfetto, and, drawn together, the same pixels."""

import io
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_async.log.turns import Turn, read_turns
from areal_async.messages import Rules
from areal_async.trace.drawing import Drawing
from areal_async.trace.lanes import Canvas, TraceFile, Unfinished
from areal_async.trace.things import thing
from areal_async.view import api
from areal_async.view import spans as kept
from areal_async.view.span_kinds import KINDS, NEVER_HIDDEN
from areal_async.view.spans import Spans, SpanTable, in_order
from areal_async.view.timeline import MOST_SPANS, Window, look, merged

from ..audit_lies import true_log
from ..trace.written import write as write_log

LOGS = Path(__file__).resolve().parents[1] / "logs"
NAMES = ("wait-gone-back-resumed", "drop-requeue-gone-back")
READING = api.Reading(nbytes=0, of=0, events=0, samples=0, done=True)
US = 1_000_000


def read(log: Path) -> tuple[Rules, list[Turn]]:
    found = read_turns(log)
    assert found is not None
    return found.rules, list(found.turns)


def drawing_on(canvas: Canvas, rules: Rules) -> Drawing:
    return Drawing(canvas, rules, lambda sample: False, None)


def new_table() -> SpanTable:
    return SpanTable(sqlite3.connect(":memory:", isolation_level=None))


def spans_of(table: SpanTable) -> Counter[tuple[str, str, str, int, int]]:
    """Group, lane, name, begin, end."""
    parts = list(table.parts())
    rows = [row for part in parts for row in zip(*(column.tolist() for column in part), strict=True)]
    names = table.names([row[4] for row in rows])
    lanes = table.lanes
    return Counter((lanes[n].group, lanes[n].name, names[r][0], b, e) for n, _, b, e, r in rows)


# ------------------------------------------------------------------------------------------------------------ canvas


@pytest.mark.parametrize("name", NAMES)
def test_a_page_gets_the_spans_that_a_file_gets(name: str) -> None:
    rules, turns = read(LOGS / name)
    out, table = io.BytesIO(), new_table()
    file = TraceFile(out)
    for canvas in (file, table):
        drawing = drawing_on(canvas, rules)
        for turn in turns:
            drawing.take(turn)
        drawing.close()
    file.close({})
    events = json.loads(out.getvalue())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    told = Counter(
        (processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X"
    )
    assert spans_of(table) == told
    assert table.total == file.spans == told.total() > 100
    assert sorted(table.marks) == sorted((e["ts"], e["name"]) for e in events if e["ph"] == "i")


@pytest.mark.parametrize("name", NAMES)
def test_whatever_moment_it_is_the_open_spans_are_there(name: str) -> None:
    """What is drawn and what is unfinished is what would be there if the log ended here."""
    rules, turns = read(LOGS / name)
    table, growing = new_table(), 0
    drawing = drawing_on(table, rules)
    for number, turn in enumerate(turns):
        drawing.take(turn)
        if number % 7:
            continue
        lanes = table.lanes
        there = Counter((group, lane, begin) for group, lane, _, begin, _ in spans_of(table).elements())
        for span in drawing.unfinished():
            assert span.end is None or span.end > span.begin
            growing += span.end is None
            there[lanes[span.lane.tid].group, lanes[span.lane.tid].name, span.begin] += 1
        ended = new_table()
        ending = drawing_on(ended, rules)
        for before in turns[: number + 1]:
            ending.take(before)
        ending.close()
        true = Counter((group, lane, begin) for group, lane, _, begin, _ in spans_of(ended).elements())
        idle = Counter(span for span in there if span[0] == "trainer" and span[2] == drawing.now)
        assert there - idle == true - idle, "the trainer that is idle since now is drawn a moment later"
    assert growing > 100


def test_every_span_has_a_kind_and_a_thing_with_a_story() -> None:
    for name in NAMES:
        rules, turns = read(LOGS / name)
        table = new_table()
        drawing = drawing_on(table, rules)
        kinds: set[str] = set()
        for turn in turns:
            drawing.take(turn)
        drawing.close()
        for part in table.parts():
            kinds |= {KINDS[number] for number in part.kind.tolist()}
            for text, about in table.names(part.row.tolist()).values():
                assert thing(about).label, text
        assert kinds >= {"idle", "serving", "reading", "generating", "checking", "training", "swapping", "lost"}


def test_by_hand(tmp_path: Path) -> None:
    """The true log of the audit's tests: step 1 is trained from 45 to 46 s."""
    rules, turns = read(write_log(tmp_path / "run", true_log()) / "log")
    table = new_table()
    drawing = drawing_on(table, rules)
    for turn in turns:
        drawing.take(turn)
    shown = look(table, drawing, READING, 0.0, 1e12, 1000, ["server server0"])
    names = {lane.lane: (lane.group, lane.name) for lane in shown.lanes}
    spans = {(*names[lane], begin, end, shown.kinds[kind], name, about, n)
             for lane, begin, end, kind, name, about, n in shown.spans}  # fmt: skip
    assert ("trainer", "ranks", 45.0, 46.0, "training", "train step 1", "step 1", 1) in spans
    assert ("prompts", "read", 6.0, 8.0, "reading", "group 0", "0", 1) in spans
    stays = {(begin, end, kind) for _, _, begin, end, kind, _, about, _ in spans if about == "0.0"}
    assert stays == {(8.0, 14.0, "cut off"), (14.0, 26.0, "generating")}
    groups = [lane.group for lane in shown.lanes]
    assert groups[:3] == ["prompts", "trainer", "weights"]
    assert groups[-1] == "rewards"
    assert not [lane for lane in shown.lanes if lane.kind == "slot" and lane.group != "server server0"]
    assert shown.seconds == shown.end == drawing.now / US


def test_before_anything_was_read() -> None:
    shown = look(new_table(), None, READING, 0.0, 1e12, 1000)
    assert (shown.spans, shown.lanes, shown.loads, shown.seconds) == ([], [], [], 0.0)
    assert msgspec.json.encode(shown)


# ---------------------------------------------------------------------------------------------------- level of detail


def dense_spans(random: Random) -> list[tuple[int, int, int, int]]:
    """Lane, kind, begin, end; those of one lane and kind don't overlap, others lie over each other."""
    spans: list[tuple[int, int, int, int]] = []
    for lane in range(random.randint(1, 3)):
        often = [KINDS.index(name) for name in NEVER_HIDDEN] + random.sample(range(len(KINDS)), 3)
        for kind in set(random.sample(often, random.randint(1, 5))):
            at, gaps, lengths = 0, random.choice((0, 2, 15, 90)), random.choice((1, 4, 20, 60))
            while at < 700:
                begin = at + random.randint(0, gaps)
                at = begin + random.randint(1, lengths)
                spans.append((lane, kind, begin, at))
    return spans


def portions(spans: list[tuple[int, int, int, int]], n: int) -> list[Spans]:
    rows = np.array([(*span, row) for row, span in enumerate(spans)], np.int64).reshape(-1, 5)
    return [in_order(Spans(*rows[first::n].T)) for first in range(n)]


def covered(spans: Iterator[tuple[int, int, int, int]] | list[tuple[int, int, int, int]], window: Window) -> set[Any]:
    """Lane and pixel."""
    return {
        (lane, pixel)
        for lane, _, begin, end in spans
        if end > window.begin and begin < window.end
        for pixel in range(
            max(0, (begin - window.begin) // window.pixel),
            min(window.pixels - 1, (end - 1 - window.begin) // window.pixel) + 1,
        )
    }


@pytest.mark.parametrize("seed", range(60))
def test_what_is_drawn_together_covers_the_same_pixels(seed: int) -> None:
    random = Random(seed)
    spans, pixel = dense_spans(random), random.choice((1, 3, 8, 20, 45))
    begin, length = random.randint(0, 200), random.randint(1, 600)
    window = Window(begin, begin + length, pixel)
    shown, counts = merged(portions(spans, random.randint(1, 3)), window)
    rows = list(zip(*(column.tolist() for column in shown), strict=True))
    assert covered([row[:4] for row in rows], window) == covered(spans, window)
    inside = [span for span in spans if span[3] > begin and span[2] < begin + length]
    long = Counter(span for span in inside if span[3] - span[2] >= pixel)
    alone = Counter(row[:4] for row, count in zip(rows, counts.tolist(), strict=True) if count == 1)
    assert not long - alone, "what is as long as a pixel is given as it is"
    assert not alone - Counter(inside), "what stands alone is a true span"
    assert all(spans[row[4]] == row[:4] for row, count in zip(rows, counts.tolist(), strict=True) if count == 1)
    assert len(shown.lane) - long.total() <= window.pixels * len({span[0] for span in inside})
    for winner in NEVER_HIDDEN:
        kind = KINDS.index(winner)
        rank = [each for each in NEVER_HIDDEN if NEVER_HIDDEN.index(each) >= NEVER_HIDDEN.index(winner)]
        seen = covered([row[:4] for row in rows if KINDS[row[1]] in rank], window)
        assert covered([span for span in spans if span[1] == kind], window) <= seen, winner


def test_most_of_a_pixel_is_what_is_seen() -> None:
    """Training for 6 of every 10 µs, idle for 4."""
    train, idle = KINDS.index("training"), KINDS.index("idle")
    spans = [each for at in range(0, 1000, 10) for each in ((0, train, at, at + 6), (0, idle, at + 6, at + 10))]
    shown, counts = merged(portions(spans, 2), Window(0, 1000, 50))
    assert (shown.kind.tolist(), shown.begin.tolist(), shown.end.tolist()) == ([train], [0], [1000])
    assert counts.tolist() == [200]


def test_a_span_that_another_hides_at_its_beginning() -> None:
    """Its rest and the span in the next pixel are two, though only one of them begins there."""
    lost, train = KINDS.index("lost"), KINDS.index("training")
    spans = [(0, lost, 2, 5), (0, train, 8, 13), (0, train, 21, 24)]
    shown, counts = merged(portions(spans, 1), Window(0, 40, 10))
    assert list(zip(shown.kind.tolist(), shown.begin.tolist(), shown.end.tolist(), counts.tolist(), strict=True)) == [
        (lost, 0, 10, 2), (train, 10, 30, 2),
    ]  # fmt: skip


def random_table(n: int, lanes: int) -> tuple[SpanTable, Drawing]:
    random, table = Random(3), new_table()
    drawing = drawing_on(table, read(LOGS / NAMES[0])[0])
    table.process("server 0", 10)
    slots = [table.lane("server 0", f"samples {number}") for number in range(1, lanes + 1)]
    free = [0] * lanes
    for number in range(n):
        slot = number % lanes
        begin = free[slot] + random.randrange(1, 3000)
        free[slot] = end = begin + random.randrange(1, 90_000)
        table.span(slots[slot], f"{number}.0", begin, end, {"fate": "handed to training"})
    drawing.now = max(free)
    return table, drawing


def test_how_many_there_are_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_SEALED_SPANS", 300)
    table, drawing = random_table(2000, 7)
    begin, end = 0.2, 1.7
    shown = look(table, drawing, READING, begin, end, 30)
    (lane, means), = shown.loads  # fmt: skip
    assert table.lanes[lane].kind == "load"
    step = (end - begin) / 30 * US
    spans = [(b, e) for *_, b, e in spans_of(table)]
    for number, mean in enumerate(means):
        first = begin * US + number * step
        filled = sum(max(0.0, min(e, first + step) - max(b, first)) for b, e in spans)
        assert mean == pytest.approx(filled / step, abs=0.006)
    assert len(means) == 30


def test_few_enough_spans_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_SEALED_SPANS", 3000)
    table, drawing = random_table(20_000, 60)
    opened = look(table, drawing, READING, 0.0, 1e12, 4000, ["server 0"])
    assert 0 < len(opened.spans) <= MOST_SPANS + 60
    assert opened.pixel > opened.seconds / 4000
    assert opened.total >= 20_000
    kinds = opened.kinds
    assert sum(span[6] for span in opened.spans if kinds[span[3]] != "starting") == 20_000  # that is the trainer
    assert look(table, drawing, READING, 0.0, 1e12, 4000, []).spans[1:] == []  # the trainer has started
    near = look(table, drawing, READING, 1.0, 1.05, 1000, ["server 0"])
    assert {span[6] for span in near.spans} == {1}
    assert all(span[4].endswith(".0") for span in near.spans if near.kinds[span[3]] == "generating")


def test_unfinished_spans_reach_up_to_now() -> None:
    table, drawing = random_table(50, 5)
    slot = table.lane("server 0", "samples 6")
    growing = Unfinished(slot, "99.0", drawing.now - 5000, None, {})
    drawing.unfinished = lambda: iter([growing])  # type: ignore[method-assign]
    shown = look(table, drawing, READING, 0.0, 1e12, 1000, ["server 0"])
    (span,) = [span for span in shown.spans if span[4] == "99.0"]
    assert span == (slot.tid, (drawing.now - 5000) / US, drawing.now / US, KINDS.index("generating"), "99.0", "99.0", 1)
    assert shown.total == 51
