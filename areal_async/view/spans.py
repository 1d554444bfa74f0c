"""What is drawn of a run, kept for a page: a canvas (`trace.lanes.Canvas`) whose spans can be looked through fast.

What always holds: it has the spans that a `TraceFile` has, in the same lanes; a span is there as soon as it is drawn;
the numbers of a span (40 bytes) are in memory, its name and the thing that it is about in the database; what is sealed
doesn't change any more.

Slots: lanes "samples 1 …" and "checks 1 …" are the places in which things lie that go on at a time. All slots of one
process are also one load lane, which tells how many there are at each moment.
"""

import sqlite3
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from areal_async.trace.lanes import Args, Lane, Point, Unfinished
from areal_async.view.span_kinds import KINDS, kind_of, thing_of

Int64s: TypeAlias = NDArray[np.int64]
LaneKind: TypeAlias = Literal["state", "load", "slot"]

_SEALED_SPANS: Final = 32_768  # sorting so many takes a few ms
_PENDING_NAMES: Final = 2_000  # few writes for many small rows
_NAMES_AT_ONCE: Final = 500  # variables of one SQL statement


class LaneRow(NamedTuple):
    """number: of the lane. order: of its process. group: its process. load: the load lane that a slot belongs to."""

    number: int
    order: int
    group: str
    name: str
    kind: LaneKind
    load: int = -1


class Spans(NamedTuple):
    """Columns of spans, in the order of lane, kind and begin. lane, kind: numbers. begin, end: microseconds. row: of
    its name; negative ones are of `Table.unfinished`."""

    lane: Int64s
    kind: Int64s
    begin: Int64s
    end: Int64s
    row: Int64s

    def where(self, which: NDArray[np.bool_]) -> "Spans":
        places = np.flatnonzero(which)
        return self if len(places) == len(which) else self.some(places)

    def some(self, places: Int64s) -> "Spans":
        return Spans(*(column[places] for column in self))


class SpanTable:
    """lanes: all, by number. marks: moment in microseconds, name. total: spans that are there."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        database.execute("DROP TABLE IF EXISTS span_names")  # of a log that is read anew
        database.execute("CREATE TABLE span_names (name TEXT NOT NULL, thing TEXT NOT NULL)")
        self.lanes: list[LaneRow] = []
        self.marks: list[tuple[int, str]] = []
        self.total = 0
        self._orders: dict[str, tuple[int, int]] = {}  # of a process: its number, its order
        self._numbers: dict[tuple[str, str, LaneKind], int] = {}
        self._sealed: list[Spans] = []
        self._pending = [array("q") for _ in Spans._fields]
        self._pending_sorted: Spans | None = None
        self._names: list[tuple[str, str]] = []  # that the database hasn't got yet

    # ------------------------------------------------------------------------------------------------------- canvas

    def process(self, name: str, order: int) -> int:
        return self._orders.setdefault(name, (len(self._orders) + 1, order))[0]

    def lane(self, process: str, name: str) -> Lane:
        word, _, number = name.partition(" ")
        if not number.isdecimal():
            return Lane(self._orders[process][0], self._lane(process, name, "state"))
        load = self._lane(process, word, "load")
        return Lane(self._orders[process][0], self._lane(process, name, "slot", load))

    def span(self, lane: Lane, name: str, begin: int, end: int, args: Args, colour: str = "") -> Point:
        row = self.lanes[lane.tid]
        for column, value in zip(
            self._pending, (lane.tid, kind_of(row, name, args), begin, end, self.total), strict=True
        ):
            column.append(value)
        self._names.append((name, thing_of(row, name)))
        self.total += 1
        self._pending_sorted = None
        if len(self._names) >= _PENDING_NAMES:
            self._write_names()
        if len(self._pending[0]) >= _SEALED_SPANS:
            self._sealed.append(self._unsealed())
            self._pending, self._pending_sorted = [array("q") for _ in Spans._fields], None
        return Point(lane, begin)

    def mark(self, lane: Lane, name: str, at: int, args: Args) -> None:
        self.marks.append((at, name))

    def counter(self, process: str, name: str, at: int, value: float) -> None:
        """The overview has them."""

    def arrows_along(self, kind: str, name: str, points: Sequence[Point]) -> None:
        """A story tells the way of a sample."""

    # -------------------------------------------------------------------------------------------------------- looks

    def parts(self) -> Iterable[Spans]:
        """All spans, in portions that are each in order."""
        yield from self._sealed
        if self._pending[0]:
            yield self._unsealed()

    def names(self, rows: Iterable[int]) -> dict[int, tuple[str, str]]:
        """Name and thing of spans that are there, by their rows."""
        self._write_names()
        wanted = [row + 1 for row in rows]  # SQLite counts from 1
        found: dict[int, tuple[str, str]] = {}
        for first in range(0, len(wanted), _NAMES_AT_ONCE):
            some = wanted[first : first + _NAMES_AT_ONCE]
            marks = ",".join("?" * len(some))
            for row, name, thing in self._database.execute(
                f"SELECT rowid, name, thing FROM span_names WHERE rowid IN ({marks})", some
            ):
                found[row - 1] = name, thing
        return found

    def _lane(self, process: str, name: str, kind: LaneKind, load: int = -1) -> int:
        key = (process, name, kind)
        if key not in self._numbers:
            self._numbers[key] = len(self.lanes)
            self.lanes.append(LaneRow(len(self.lanes), self._orders[process][1], process, name, kind, load))
        return self._numbers[key]

    def _unsealed(self) -> Spans:
        if self._pending_sorted is None:
            self._pending_sorted = in_order(Spans(*(np.array(column, np.int64) for column in self._pending)))
        return self._pending_sorted

    def _write_names(self) -> None:
        is_own = not self._database.in_transaction
        if is_own:
            self._database.execute("BEGIN")
        self._database.executemany("INSERT INTO span_names VALUES (?, ?)", self._names)
        if is_own:
            self._database.execute("COMMIT")
        self._names.clear()


class Unwritten:
    """The spans that are still unfinished, as columns. now: where those end that still grow. wanted: lanes (by number)
    of which names are asked for; of others only the times are."""

    def __init__(self, table: SpanTable, unfinished: Iterable[Unfinished], now: int, wanted: NDArray[np.bool_]) -> None:
        self.names: list[tuple[str, str]] = []  # of row -1, -2, …
        columns: list[tuple[int, int, int, int, int]] = []
        asked: list[bool] = wanted.tolist()
        for lane, name, begin, end, args in unfinished:
            number = lane.tid
            until = max(begin + 1, now if end is None else end)
            if not asked[number]:
                columns.append((number, 0, begin, until, 0))
                continue
            row = table.lanes[number]
            self.names.append((name, thing_of(row, name)))
            columns.append((number, kind_of(row, name, args), begin, until, -len(self.names)))
        whole = np.array(columns, np.int64).reshape(-1, len(Spans._fields))
        self.spans = in_order(Spans(*whole.T))


def in_order(spans: Spans) -> Spans:
    return spans.some(np.lexsort((spans.begin, spans.lane * len(KINDS) + spans.kind)))
