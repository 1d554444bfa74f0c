"""What holds for every file of trace events, whatever wrote it: the Trace Event Format, as viewers read it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
NEEDED = {
    "M": {"pid", "tid", "name", "args"},
    "X": {"pid", "tid", "ts", "dur", "name", "cat", "args"},
    "i": {"pid", "tid", "ts", "name", "s"},
    "C": {"pid", "ts", "name", "args"},
    **{phase: {"pid", "tid", "ts", "name", "cat", "id"} for phase in "stf"},
}


class Trace:
    """A file that was read, and looked at. spans, arrows: by lane, by id. lanes: name -> its spans."""

    def __init__(self, path: Path) -> None:
        whole = json.loads(path.read_bytes())
        assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
        self.events: list[Event] = whole["traceEvents"]
        for event in self.events:
            assert NEEDED[event["ph"]] <= set(event), event
            assert isinstance(event.get("ts", 0), int), event
            assert event.get("ts", 0) >= 0, event
        self.processes = self._names("process_name", "pid")
        self.threads = self._names("thread_name", "pid", "tid")
        self.spans: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.of("X"):
            self.spans[self.lane(event)].append(event)
        self.arrows: dict[int, list[Event]] = defaultdict(list)
        for event in self.of("s", "t", "f"):
            self.arrows[event["id"]].append(event)
        self._spans_nest()
        self._counters_go_forward()
        self._arrows_are_whole()

    def of(self, *phases: str) -> list[Event]:
        return [event for event in self.events if event["ph"] in phases]

    def lane(self, event: Event) -> tuple[str, str]:
        return self.processes[event["pid"],][0], self.threads[event["pid"], event["tid"]][0]

    def in_process(self, name: str) -> list[Event]:
        """Spans of all processes whose names begin like this."""
        return [span for (process, _), spans in self.spans.items() if process.startswith(name) for span in spans]

    def _names(self, what: str, *keys: str) -> dict[tuple[int, ...], list[str]]:
        found: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for event in self.of("M"):
            if event["name"] == what:
                found[tuple(event[key] for key in keys)].append(event["args"]["name"])
        assert all(len(names) == 1 for names in found.values()), "named once"
        return found

    def _spans_nest(self) -> None:
        """Of two spans of a lane one lies in the other, or they have nothing in common."""
        for lane, spans in self.spans.items():
            ends: list[int] = []
            for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
                assert span["dur"] >= 1, span
                while ends and ends[-1] <= span["ts"]:
                    ends.pop()
                end = span["ts"] + span["dur"]
                assert not ends or end <= ends[-1], (lane, span)
                ends.append(end)

    def _counters_go_forward(self) -> None:
        last: dict[tuple[int, str], int] = {}
        for event in self.of("C"):
            key = event["pid"], event["name"]
            assert event["ts"] >= last.get(key, 0), event
            assert set(event["args"]) == {"value"}
            last[key] = event["ts"]

    def _arrows_are_whole(self) -> None:
        """They begin, go on and end inside of spans, forward in time, each in the order of the file."""
        held: dict[tuple[int, int], set[int]] = defaultdict(set)
        ends: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for span in self.of("X"):
            held[span["pid"], span["tid"]].add(span["ts"])
            ends[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
        for points in self.arrows.values():
            assert "".join(point["ph"] for point in points) == "s" + "t" * (len(points) - 2) + "f", points
            assert len({(point["name"], point["cat"]) for point in points}) == 1, points
            assert [point["ts"] for point in points] == sorted(point["ts"] for point in points), points
            assert points[-1]["bp"] == "e", "it binds to the span that it ends in"
            for point in points:
                lane = point["pid"], point["tid"]
                assert point["ts"] in held[lane] or any(a <= point["ts"] < b for a, b in ends[lane]), point
