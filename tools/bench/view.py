"""What looking at a run costs: the page of a very long log, and the run that goes on beside it.

    python tools/bench/view.py                    # a log of 1,000,000 records and 100,000 samples (300 characters each)
    python tools/bench/view.py --tokens 660       # answers of 4,000 characters
    python tools/bench/view.py --live             # and the quickstart's throughput with and without somebody who looks

The log is made by the real core in virtual time (large_run.py). `areal-async view` is a process of its own, asked over
HTTP as its page asks it. Live: the viewer is asked as by two people who look, and is halted in every second window of
one and the same run, so that what the run does by itself falls on both kinds.
"""

import http.client
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import figures
import large_run

from areal_async.log.follow import Follower
from areal_async.messages import SampleDone

FIRST_PAGE_S: Final = 2.0  # the budgets
SEARCH_S: Final = 0.5
MEMORY_MB: Final = 500.0
SLOWER_PERCENT: Final = 5.0
STEPS: Final = 782  # × 16 × 8 samples: 100,096
RECORDS: Final = 1_000_000
ROUNDS: Final = 20  # of each search
STARTS: Final = 3
BEGUN_TOKENS: Final = 40_000  # of the live run's first steps
ASIDE_S: Final = 0.25  # between two looks while the log is read
PAGE: Final = ("theme.js", "app.js", "common.js", "style.css", "samples.css", "plotly.min.js")
SEARCHES: Final[dict[str, dict[str, object]]] = {
    "newest": {},
    "text in most answers": {"text": "himu"},
    "two words, any case": {"text": "HOSURU himu"},
    "text in none": {"text": "there is no such text"},
    "text in one step": {"text": "himu", "step": 300},
    "verdict, length and lag, by length": {"verdict": "right", "length_min": 60, "lag_max": 3, "sort": "length"},
    "all by reward": {"sort": "reward"},
    "all by text, page 1801": {"sort": "start", "offset": 90_000},
}


class Viewer:
    """`areal-async view` of a run, at a port of its own."""

    def __init__(self, run: Path) -> None:
        self.begun = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "areal_async", "view", str(run), "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._host = line.rsplit("http://", 1)[1].strip().rstrip("/")
        self._key = quote(run.name)

    def get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(self._host, timeout=60)
        try:
            connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status}: {body[:300]!r}")
            return body
        finally:
            connection.close()

    def ask(self, what: str, fields: Mapping[str, object]) -> tuple[Any, float]:
        """What `/api/runs/RUN/what` says, and how long that took."""
        begun = time.perf_counter()
        connection = http.client.HTTPConnection(self._host, timeout=60)
        try:
            connection.request("GET", f"/api/runs/{self._key}/{what}?{urlencode(fields)}")
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        taken = time.perf_counter() - begun
        if answer.status != 200:
            raise RuntimeError(f"{what}: {answer.status}: {body[:300]!r}")
        return json.loads(body), taken

    def first_page(self) -> float:
        """Seconds from the start of the process until the page and all that it shows first are there."""
        self.get("/")
        for name in PAGE:
            self.get(f"/static/{name}")
        self.get("/api/runs")
        self.get("/api/figures")
        self.ask("overview", {"since": 0})
        return time.perf_counter() - self.begun

    def memory_mb(self) -> tuple[float, float]:
        """Resident now, and at most so far."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines())
        now, most = (int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
        return now, most

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def halt(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.go_on()
        self._process.send_signal(signal.SIGINT)
        self._process.wait(30)


@contextmanager
def viewing(run: Path) -> Iterator[Viewer]:
    viewer = Viewer(run)
    try:
        yield viewer
    finally:
        viewer.end()


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of 16 groups of 8 samples")
    parser.add_argument("--tokens", type=int, default=50, help="of an answer, about 6 characters each")
    parser.add_argument("--notes", type=int, default=6, help="in the log, of a sample")
    parser.add_argument("--live", action="store_true", help="also a run of the quickstart beside it")
    parser.add_argument("--live-only", action="store_true")
    parser.add_argument("--windows", type=int, default=40, help="of the live run, in turns nobody or two look")
    parser.add_argument("--window", type=float, default=6.0, metavar="S")
    options = parser.parse_args()
    report = figures.Report("view")
    if not options.live_only:
        with tempfile.TemporaryDirectory(prefix="areal-view-") as folder:
            run = Path(folder) / "large"
            large_run.write(run, steps=options.steps, tokens=options.tokens, notes=options.notes)
            large(report, run)
    if options.live or options.live_only:
        with tempfile.TemporaryDirectory(prefix="areal-view-") as folder:
            live(report, Path(folder) / "run", options.windows, options.window)
    report.finish(options.json)


# ------------------------------------------------------------------------------------------------------ a large log


def large(report: figures.Report, run: Path) -> None:
    starts = []
    for _ in range(STARTS - 1):
        with viewing(run) as viewer:
            starts.append(viewer.first_page())
    with viewing(run) as viewer:
        starts.append(viewer.first_page())
        reading, beside = read_to_the_end(viewer)
        took = time.perf_counter() - viewer.begun
        records, samples = reading["events"], reading["samples"]
        title = f"A log of {records:,} records, {samples:,} samples, {reading['of'] / 1e6:,.0f} MB"
        rows = [(name, *middle_and_last(times)) for name, times in beside.items()]
        report.table(f"{title}: answers while it is read ({took:.1f} s)", ("", "ms", "p99, ms", "at most, ms"), rows)
        found = {name: search(viewer, fields) for name, fields in SEARCHES.items()}
        searched = [(name, total, *middle_and_last(times)) for name, (total, times) in found.items()]
        report.table(f"{title}: searches", ("", "found", "ms", "p99, ms", "at most, ms"), searched)
        now, most = viewer.memory_mb()
        cpu = viewer.cpu_s()
    report.note(f"read in {took:.1f} s ({records / took:,.0f} records/s) and {cpu:.1f} s of CPU, all answers included")
    slowest = max(middle_and_last(times)[1] for _, times in found.values())
    report.budget("view: first page, from the start of its process", max(starts), at_most=FIRST_PAGE_S, unit="s")
    report.budget("view: sample search, p99 of the slowest kind", slowest / 1000, at_most=SEARCH_S, unit="s")
    report.budget(f"view: memory (at the end {now:.0f} MB)", most, at_most=MEMORY_MB, unit="MB")


def read_to_the_end(viewer: Viewer) -> tuple[Any, dict[str, list[float]]]:
    """The state of reading at its end, and how long answers took meanwhile."""
    times: dict[str, list[float]] = {"overview": [], "newest samples": [], "timeline": []}
    while True:
        overview, taken = viewer.ask("overview", {"since": 0})
        times["overview"].append(taken)
        if overview["reading"]["done"]:
            return overview["reading"], times
        times["newest samples"].append(viewer.ask("samples", {})[1])
        times["timeline"].append(viewer.ask("timeline", {"width": 1200})[1])
        time.sleep(ASIDE_S)


def search(viewer: Viewer, fields: Mapping[str, object]) -> tuple[int, list[float]]:
    answers = [viewer.ask("samples", fields) for _ in range(ROUNDS)]
    return answers[-1][0]["total"], [taken for _, taken in answers]


def middle_and_last(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, 99th percentile (of the next higher rank) and maximum, in ms."""
    ordered = sorted(times)
    rank = min(len(ordered) - 1, int(0.99 * len(ordered)))
    return statistics.median(ordered) * 1000, ordered[rank] * 1000, ordered[-1] * 1000


# ------------------------------------------------------------------------------------------------------- a live run


def live(report: figures.Report, run: Path, windows: int, window_s: float) -> None:
    config = figures.ROOT / "configs" / "quickstart.yaml"
    command = [sys.executable, "-m", "areal_async", "run", str(config), "train.steps=1000", "--run-dir", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        tokens = counter(run / "log")
        while tokens() < BEGUN_TOKENS:
            time.sleep(1.0)
            if process.poll() is not None:
                raise RuntimeError(f"the run has ended with {process.returncode}: {' '.join(command)}")
        rates: dict[str, list[float]] = {"nobody looks": [], "two look": []}
        with viewing(run) as viewer:
            viewer.first_page()
            before = viewer.cpu_s()
            for name in itertools.islice(itertools.cycle(rates), windows):
                rates[name].append(window(viewer, tokens, window_s, looks=name == "two look"))
            cpu = viewer.cpu_s() - before
    finally:
        process.send_signal(signal.SIGINT)  # it finishes its step
        process.wait(120)
    means = {name: statistics.fmean(values) for name, values in rates.items()}
    rows = [(name, means[name], min(values), max(values)) for name, values in rates.items()]
    title = f"The quickstart, {windows} windows of {window_s:g} s in one run: tokens/s of finished answers"
    report.table(title, ("", "tokens/s", "least", "most"), rows)
    report.note(f"the viewer took {cpu / (windows * window_s / 2):.1%} of a core while it was asked")
    spread = statistics.stdev(rates["nobody looks"]) / means["nobody looks"]
    report.budget(
        "view: a live run's throughput, lost while two look",
        (1 - means["two look"] / means["nobody looks"]) * 100,
        at_most=SLOWER_PERCENT,
        unit="%",
        bound_by=f"windows in which nobody looks differ by {spread:.0%} (standard deviation)",
    )


def counter(log: Path) -> Callable[[], int]:
    """Tokens of all answers so far."""
    follower, total = Follower(log), [0]

    def count() -> int:
        for turn in follower.turns(time.time()):
            if isinstance(turn.event, SampleDone):
                total[0] += turn.event.length
        return total[0]

    return count


def window(viewer: Viewer, tokens: Callable[[], int], seconds: float, *, looks: bool) -> float:
    """Tokens a second in a window. Who looks asks for all that the pages ask for, every two seconds."""
    if looks:
        viewer.go_on()
    else:
        viewer.halt()
    begun, first = time.perf_counter(), tokens()
    while (left := begun + seconds - time.perf_counter()) > 0:
        if looks:
            for what, fields in (("overview", {"since": 0}), ("samples", {}), ("timeline", {"width": 1200})) * 2:
                viewer.ask(what, fields)
            viewer.ask("peers", {})
        time.sleep(min(2.0, max(left, 0.0)))
    taken = time.perf_counter() - begun
    return (tokens() - first) / taken


if __name__ == "__main__":
    main()
