"""What the page's timeline shows of a stretch of a run: few enough spans for a screen, however many there are.

What always holds: a span that is as long as a pixel or longer is given as it is. Of shorter ones those of neighbouring
pixels are given as one, of the kind that fills most of a pixel; but what was lost, cut off or swapped is never hidden
by others. So what is given covers exactly the pixels that the true spans cover, lane by lane.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from areal_async.trace.drawing import Drawing
from areal_async.trace.lanes import US_PER_S, us
from areal_async.view import api
from areal_async.view.span_kinds import KINDS, NEVER_HIDDEN
from areal_async.view.spans import Int64s, LaneRow, Spans, SpanTable, Unwritten

MOST_SPANS: Final = 8_000  # of all state lanes, and of all slots: a page draws so many smoothly
MOST_CELLS: Final = 4 * MOST_SPANS  # pixels of all lanes, from so many spans on
MOST_LOADS: Final = 60_000  # numbers of all load lanes of an answer
FEW_SLOTS: Final = 48  # so many are shown without being asked for

_LONGEST_S: Final = 1e9  # of any run
_ORDER: Final = {"state": 0, "load": 1, "slot": 2}
_RANK: Final = np.array([1 + NEVER_HIDDEN.index(kind) if kind in NEVER_HIDDEN else 0 for kind in KINDS])
_RANK_US: Final = 1 << 44  # above any time in a pixel

Bools: TypeAlias = NDArray[np.bool_]
Row: TypeAlias = tuple[int, float, float, int, str, str, int]


class Window(NamedTuple):
    """A stretch of a run in microseconds. pixel: how long one is."""

    begin: int
    end: int
    pixel: int

    @property
    def pixels(self) -> int:
        return -(-(self.end - self.begin) // self.pixel)


class Shown(NamedTuple):
    """Spans as they are given. stands_for: how many each of them is."""

    spans: Spans
    stands_for: Int64s


def look(
    table: SpanTable,
    drawing: Drawing | None,
    reading: api.Reading,
    begin: float,
    end: float,
    width: int,
    opened: Collection[str] | None = None,
) -> api.Timeline:
    """begin, end: seconds of the run clock; what lies beyond the run is left out. width: pixels. opened: groups whose
    slots are wanted; None: all, where they are few. drawing: None before anything was read."""
    now, width = 0 if drawing is None else drawing.now, max(1, width)
    last = max(1, min(us(min(end, _LONGEST_S)), now))
    first = min(us(max(begin, 0.0)), last - 1)
    lanes, wanted = _lanes(table, opened)
    unwritten = Unwritten(table, () if drawing is None else drawing.unfinished(), now, wanted)
    parts = [*table.parts(), unwritten.spans]
    is_slot = np.array([lane.kind == "slot" for lane in table.lanes], np.bool_)
    states, pixel = _few_enough(parts, ~is_slot, first, last, width)
    slots, coarsest = _few_enough(parts, wanted & is_slot, first, last, width)
    return api.Timeline(
        begin=first / US_PER_S,
        end=last / US_PER_S,
        seconds=now / US_PER_S,
        total=table.total + len(unwritten.spans.lane),
        lanes=lanes,
        kinds=list(KINDS),
        spans=[*_rows(table, unwritten, states), *_rows(table, unwritten, slots)],
        loads=_loads(table, parts, first, last, width),
        pixel=max(pixel, coarsest) / US_PER_S,
        marks=[(at / US_PER_S, name) for at, name in table.marks],
        reading=reading,
    )


def _lanes(table: SpanTable, opened: Collection[str] | None) -> tuple[list[api.Lane], Bools]:
    """Those that are shown, in their order; and which ones that are, by number."""
    slots = Counter(lane.load for lane in table.lanes if lane.kind == "slot")
    few = slots.total() <= FEW_SLOTS

    def is_shown(lane: LaneRow) -> bool:
        return lane.kind != "slot" or (few if opened is None else lane.group in opened)

    rows = [lane for lane in table.lanes if is_shown(lane)]
    wanted = np.zeros(len(table.lanes), np.bool_)
    wanted[[lane.number for lane in rows]] = True
    rows.sort(
        key=lambda lane: (lane.order, _ORDER[lane.kind], _number(lane) if lane.kind == "slot" else 0, lane.number)
    )
    lanes = [
        api.Lane(lane=lane.number, group=lane.group, name=lane.name, kind=lane.kind, slots=slots[lane.number])
        for lane in rows
    ]
    return lanes, wanted


def _number(lane: LaneRow) -> int:
    return int(lane.name.rpartition(" ")[2])


def _rows(table: SpanTable, unwritten: Unwritten, shown: Shown) -> list[Row]:
    spans, count = shown
    alone = count == 1
    names = table.names(spans.row[alone & (spans.row >= 0)].tolist())
    rows: list[Row] = []
    columns = [column.tolist() for column in (*spans, count)]
    for lane, kind, begin, end, row, of in zip(*columns, strict=True):
        name, thing = ("", "") if of > 1 else unwritten.names[-1 - row] if row < 0 else names[row]
        rows.append((lane, begin / US_PER_S, end / US_PER_S, kind, name, thing, of))
    return rows


# ------------------------------------------------------------------------------------------------------ level of detail


def _few_enough(parts: Sequence[Spans], lanes: Bools, begin: int, end: int, width: int) -> tuple[Shown, int]:
    """Also how long its pixels are, in microseconds. lanes: those that are wanted."""
    inside = [part.where(lanes[part.lane] & (part.end > begin) & (part.begin < end)) for part in parts]
    pixel = max(1, -(-(end - begin) // width))
    if sum(len(part.lane) for part in inside) > MOST_CELLS:  # or else the fine pixels cost most of the time, in vain
        pixel = max(pixel, (end - begin) * int(np.count_nonzero(lanes)) // MOST_CELLS)
    while True:
        window = Window(begin, end, pixel)
        shown = merged(inside, window)
        too_many = len(shown.stands_for) / MOST_SPANS
        if too_many <= 1 or window.pixels == 1:
            return shown, pixel
        pixel *= 1 << max(1, round(math.log2(too_many)))


def merged(parts: Sequence[Spans], window: Window) -> Shown:
    """The spans of a window, with those below a pixel put together. parts: each in the order of lane, kind, begin."""
    inside = [part.where((part.end > window.begin) & (part.begin < window.end)) for part in parts]
    small = [part.end - part.begin < window.pixel for part in inside]
    long = [part.where(~which) for part, which in zip(inside, small, strict=True)]
    cells = [each for part, which in zip(inside, small, strict=True) for each in _cells(part.where(which), window)]
    regions = _regions(_joined(cells, window), window)
    spans = Spans(*(np.concatenate(columns) for columns in zip(*long, regions.spans, strict=True)))
    ones = np.ones(sum(len(part.lane) for part in long), np.int64)
    order = np.lexsort((spans.begin, spans.lane))
    return Shown(spans.some(order), np.concatenate([ones, regions.stands_for])[order])


class _Cells(NamedTuple):
    """What is in a pixel of a lane, of one kind. span: the first of it. last: the row of the last. time: microseconds
    that they fill. begun: spans that begin in it, or before the window."""

    span: Spans
    pixel: Int64s
    last: Int64s
    time: Int64s
    begun: Int64s

    def some(self, which: Int64s) -> "_Cells":
        return _Cells(self.span.some(which), *(column[which] for column in self[1:]))


def _cells(small: Spans, window: Window) -> Iterable[_Cells]:
    """A span that is shorter than a pixel lies in one or in two."""
    begin = np.maximum(small.begin, window.begin)
    end = np.minimum(small.end, window.end)
    first = (begin - window.begin) // window.pixel
    last = (end - 1 - window.begin) // window.pixel
    border = window.begin + (first + 1) * window.pixel
    yield _summed(_Cells(small, first, small.row, np.minimum(end, border) - begin, np.ones_like(first)), window)
    two = np.flatnonzero(last > first)
    rest = small.some(two)
    yield _summed(_Cells(rest, last[two], rest.row, (end - border)[two], np.zeros_like(two)), window)


def _summed(cells: _Cells, window: Window) -> _Cells:
    """Those of the same lane, kind and pixel, which follow one another, as one."""
    span = cells.span
    begins = _changes((span.lane * len(KINDS) + span.kind) * window.pixels + cells.pixel)
    if not len(begins):
        return cells
    return _Cells(
        Spans(span.lane[begins], span.kind[begins], span.begin[begins], span.end[begins],
              np.minimum.reduceat(span.row, begins)),
        cells.pixel[begins], np.maximum.reduceat(cells.last, begins),
        np.add.reduceat(cells.time, begins), np.add.reduceat(cells.begun, begins),
    )  # fmt: skip


def _joined(cells: Sequence[_Cells], window: Window) -> _Cells:
    """Of all parts: one for each lane, pixel and kind, in this order."""
    spans = Spans(*(np.concatenate(columns) for columns in zip(*(each.span for each in cells), strict=True)))
    whole = _Cells(spans, *(np.concatenate(columns) for columns in zip(*(each[1:] for each in cells), strict=True)))
    order = np.lexsort((whole.span.begin, whole.span.kind, whole.span.lane * window.pixels + whole.pixel))
    return _summed(whole.some(order), window)


def _regions(cells: _Cells, window: Window) -> Shown:
    """Each pixel gets the kind that wins in it; neighbours of the same kind are one."""
    place = cells.span.lane * (window.pixels + 1) + cells.pixel  # the last of a lane has no neighbour in the next lane
    begins = _changes(place)
    if not len(begins):
        return Shown(cells.span, cells.begun)
    order = np.lexsort((cells.time + _RANK[cells.span.kind] * _RANK_US, place))
    winners = cells.some(order[np.append(begins[1:], len(place)) - 1])
    counts = np.add.reduceat(cells.begun, begins)
    here = place[begins]
    parted = (np.diff(here) != 1) | (np.diff(winners.span.kind) != 0)
    first = np.flatnonzero(np.append(True, parted))
    last = np.append(first[1:], len(here)) - 1
    row = np.minimum.reduceat(winners.span.row, first)
    count = np.add.reduceat(counts, first)
    is_one = (row == np.maximum.reduceat(winners.last, first)) & (count <= 1)
    span = winners.span.some(first)
    begin = np.where(is_one, span.begin, window.begin + winners.pixel[first] * window.pixel)
    end = np.where(is_one, span.end, window.begin + (winners.pixel[last] + 1) * window.pixel)
    return Shown(Spans(span.lane, span.kind, begin, end, row), np.where(is_one, 1, np.maximum(count, 2)))


def _changes(codes: Int64s) -> Int64s:
    """Where a run of equal codes begins."""
    return np.flatnonzero(np.append(True, np.diff(codes) != 0)) if len(codes) else np.zeros(0, np.int64)


# -------------------------------------------------------------------------------------------------------------- loads


def _loads(table: SpanTable, parts: Iterable[Spans], begin: int, end: int, width: int) -> list[tuple[int, list[float]]]:
    """How many slots were taken, on average over each of equal parts of the time.

    The time that a span fills up to a moment t is max(0, t - begin) - max(0, t - end). So each end of a span changes
    the mean of the part it lies in by what is left of this part, and that of all later parts by one.
    """
    lanes = [lane.number for lane in table.lanes if lane.kind == "load"]
    if not lanes:
        return []
    steps = max(1, min(width, MOST_LOADS // len(lanes)))
    line = np.array([lanes.index(lane.load) if lane.load >= 0 else -1 for lane in table.lanes])
    size, stride = (end - begin) / steps, steps + 2
    change = np.zeros(len(lanes) * stride)
    for part in parts:
        part = part.where((part.end > begin) & (part.begin < end) & (line[part.lane] >= 0))
        at = line[part.lane] * stride
        for moments, sign in ((np.maximum(part.begin, begin), 1.0), (np.minimum(part.end, end), -1.0)):
            place = (moments - begin) / size
            whole = np.minimum(place.astype(np.int64), steps)
            later = place - whole
            change += sign * np.bincount(at + whole, 1.0 - later, len(change))
            change += sign * np.bincount(at + whole + 1, later, len(change))
    means = np.cumsum(change.reshape(len(lanes), stride), axis=1)[:, :steps].round(2)
    return list(zip(lanes, np.maximum(means, 0.0).tolist(), strict=True))
