"""What a run is drawn on: a canvas of lanes, and the one that is a file of Chrome trace events, which ui.perfetto.dev,
chrome://tracing and Perfetto's tools open.

The format: "Trace Event Format" (Google, 2016), its JSON object form. A lane is a named thread of a named process.

What always holds: an event is written as soon as it is known, so memory doesn't grow with the file; times are whole
microseconds of the run clock; a span lasts at least one of them, so that an arrow can begin and end inside of it; spans
of one lane follow one another, or lie inside of each other.
"""

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import BinaryIO, Final, NamedTuple, Protocol, TypeAlias

import msgspec

Value: TypeAlias = str | int | float | list[int] | None
Args: TypeAlias = Mapping[str, Value]

US_PER_S: Final = 1e6
LEAST_US: Final = 1
_BUFFER_EVENTS: Final = 1000  # few writes for many small events


def us(seconds: float) -> int:
    return round(seconds * US_PER_S)


class Lane(NamedTuple):
    """A thread of a process."""

    pid: int
    tid: int


class Point(NamedTuple):
    """A moment inside of a span: what an arrow begins or ends at."""

    lane: Lane
    at: int


class Unfinished(NamedTuple):
    """A span that isn't on the canvas yet. end: None while it grows; else only its args and colour may still change."""

    lane: Lane
    name: str
    begin: int
    end: int | None
    args: Args


class Canvas(Protocol):
    """Times are microseconds of the run clock."""

    def process(self, name: str, order: int) -> int:
        """The number of a process, which is listed by its `order`."""

    def lane(self, process: str, name: str) -> Lane:
        """A lane of a process that there is; lanes are listed in the order in which they were asked for."""

    def span(self, lane: Lane, name: str, begin: int, end: int, args: Args, colour: str = "") -> Point:
        """end: at least `LEAST_US` after `begin`. colour: a name of chrome://tracing's. Returns where it begins."""

    def mark(self, lane: Lane, name: str, at: int, args: Args) -> None:
        """A line over all lanes at one moment."""

    def counter(self, process: str, name: str, at: int, value: float) -> None:
        """A value of a process's, from this moment on."""

    def arrows_along(self, kind: str, name: str, points: Sequence[Point]) -> None:
        """Arrows from each of these points, which lie in spans, to the next. kind: that viewers show or hide."""


class TraceFile:
    """A canvas. Writes to `file`, which stays open. spans, arrows, events: how many were written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder().encode
        self._pending: list[bytes] = []
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._processes: dict[str, int] = {}
        self._threads: dict[int, int] = {}
        self._arrow = 0
        self.spans = 0
        self.arrows = 0
        self.events = 0
        self._file.write(b'{"traceEvents":[')

    def process(self, name: str, order: int) -> int:
        if name not in self._processes:
            pid = self._processes[name] = len(self._processes) + 1
            self._meta("process_name", pid, 0, {"name": name})
            self._meta("process_sort_index", pid, 0, {"sort_index": order})
        return self._processes[name]

    def lane(self, process: str, name: str) -> Lane:
        key = (process, name)
        if key not in self._lanes:
            pid = self._processes[process]
            tid = self._threads[pid] = self._threads.get(pid, 0) + 1
            self._lanes[key] = Lane(pid, tid)
            self._meta("thread_name", pid, tid, {"name": name})
            self._meta("thread_sort_index", pid, tid, {"sort_index": tid})
        return self._lanes[key]

    def span(self, lane: Lane, name: str, begin: int, end: int, args: Args, colour: str = "") -> Point:
        """colour: Perfetto ignores it, and colours by the words of the name."""
        event: dict[str, object] = {
            "ph": "X", "pid": lane.pid, "tid": lane.tid, "ts": begin, "dur": end - begin, "name": name,
            "cat": "run", "args": args,
        }  # fmt: skip
        if colour:
            event["cname"] = colour
        self._write(event)
        self.spans += 1
        return Point(lane, begin)

    def mark(self, lane: Lane, name: str, at: int, args: Args) -> None:
        self._write(
            {"ph": "i", "s": "g", "pid": lane.pid, "tid": lane.tid, "ts": at, "name": name, "cat": "run", "args": args}
        )

    def counter(self, process: str, name: str, at: int, value: float) -> None:
        self._write({"ph": "C", "pid": self._processes[process], "ts": at, "name": name, "args": {"value": value}})

    def arrows_along(self, kind: str, name: str, points: Sequence[Point]) -> None:
        if len(points) < 2 or any(before.at > after.at for before, after in pairwise(points)):
            return  # things of one microsecond are drawn one after another: an arrow may not lead back
        self._arrow += 1
        for number, (lane, at) in enumerate(points):
            phase = "s" if number == 0 else "f" if number == len(points) - 1 else "t"
            event: dict[str, object] = {
                "ph": phase, "pid": lane.pid, "tid": lane.tid, "ts": at, "name": name, "cat": kind, "id": self._arrow,
            }  # fmt: skip
            if phase == "f":
                event["bp"] = "e"  # it ends at the span that it lies in, not at the next one
            self._write(event)
        self.arrows += 1

    def close(self, about: Mapping[str, Value]) -> None:
        """about: what viewers show as information on the file."""
        self._flush()
        self._file.write(b'\n],\n"displayTimeUnit":"ms",\n"otherData":' + self._encode(about) + b"}\n")

    def _meta(self, name: str, pid: int, tid: int, args: Args) -> None:
        self._write({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args})

    def _write(self, event: Mapping[str, object]) -> None:
        self._pending.append((b",\n" if self.events else b"\n") + self._encode(event))
        self.events += 1
        if len(self._pending) >= _BUFFER_EVENTS:
            self._flush()

    def _flush(self) -> None:
        self._file.write(b"".join(self._pending))
        self._pending.clear()


class Packing:
    """As few numbered lanes as are needed for spans of which several run at a time: each begins on the first that is
    free, from 1 on."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # lane, the moment from which it is free
        self._count = 0

    def take(self, begin: int) -> int:
        """Spans are begun in the order of their time."""
        busy = []
        while self._free:
            number, since = heapq.heappop(self._free)
            if since <= begin:
                break
            busy.append((number, since))
        else:
            self._count += 1
            number = self._count
        for item in busy:
            heapq.heappush(self._free, item)
        return number

    def leave(self, number: int, end: int) -> None:
        heapq.heappush(self._free, (number, end))
