"""A run's log as a timeline that ui.perfetto.dev and chrome://tracing open.

Lanes: counters of the ledger; prompts; the trainer; the swaps; each server with the samples on it; checks. An arrow
follows a sample from its prompt over the servers that wrote it and its check to the step that trained it.

What always holds: the log is read once through (and once before that, to count), what is over is written and forgotten,
so a log may be larger than memory; nothing but the file that is named is written.
"""

import contextlib
import gzip
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from areal_async.errors import ConfigError, LogError
from areal_async.log.format import Torn
from areal_async.log.reader import warn
from areal_async.log.turns import Recorded, Turn, read_turns
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Evaluate,
    EvaluationDone,
    Failed,
    Finish,
    Joined,
    Lost,
    Note,
    ReadGroup,
    Restart,
    RolledBack,
    Rules,
    SampleDone,
    SampleId,
    Score,
    StartSample,
    Swap,
    Swapped,
    Train,
    group_of,
)
from areal_async.trace.lanes import US_PER_S, Args, TraceFile, us
from areal_async.trace.lives import Lives
from areal_async.trace.peers import CUT, LEDGER, ORDER, PROMPTS, RewardLanes, ServerLanes, TrainerLane, Waves
from areal_async.trace.trails import Trails

MOST_ARROWS: Final = 20_000  # samples that arrows follow: more make viewers slow
_GZIP_LEVEL: Final = 5
_COUNTER_POINTS: Final = 2_000  # of each counter, over the whole run
_RATE_WINDOWS: Final = 200  # of tokens/s, over the whole run
_LEAST_WINDOW_S: Final = 0.05
_RATE: Final = "tokens/s of finished answers"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """samples: that were started. finished, checks, prompts, steps, swaps: answers, verdicts, prompts, trained steps
    and loaded weights that came, those in vain included. arrows: samples that arrows follow, of every `followed`-th
    group. spans, events: in the file. seconds: of the run clock. nbytes: of the file."""

    samples: int
    finished: int
    checks: int
    prompts: int
    steps: int
    swaps: int
    arrows: int
    followed: int
    spans: int
    events: int
    seconds: float
    nbytes: int


def write(
    log_folder: Path,
    path: Path,
    *,
    sample: SampleId | None = None,
    most_arrows: int = MOST_ARROWS,
    on_torn: Callable[[Torn], None] = warn,
) -> Figures:
    """Draw the log in `log_folder` into `path` (compressed where that ends in `.gz`), in place of what was there.

    sample: the only one that arrows follow; None: all of them, or those of every second, third, … group where there are
    more than `most_arrows`. Errors: LogError; ConfigError where there is no such sample; OSError where the file can't
    be written.
    """
    extent = _measure(log_folder, sample)
    stride = max(1, -(-extent.samples // most_arrows))

    def follows(name: SampleId) -> bool:
        return group_of(name) % stride == 0 if sample is None else name == sample

    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file, contextlib.ExitStack() as stack:
            out: BinaryIO = file
            if path.suffix == ".gz":
                packed = stack.enter_context(gzip.GzipFile(path.stem, "wb", _GZIP_LEVEL, file))
                out = cast(BinaryIO, packed)
            recorded = _read(log_folder, on_torn)
            drawing = _Drawing(out, recorded.rules, extent, follows)
            drawing.draw(recorded.turns, str(log_folder))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return drawing.figures(stride, path.stat().st_size)


@dataclass(frozen=True)
class _Extent:
    """How large a log is. samples: that were started."""

    samples: int
    seconds: float


def _read(log_folder: Path, on_torn: Callable[[Torn], None]) -> Recorded:
    recorded = read_turns(log_folder, on_torn)
    if recorded is None:
        raise LogError(f"{log_folder}: nothing was recorded")
    return recorded


def _measure(log_folder: Path, sample: SampleId | None) -> _Extent:
    samples, found, seconds = 0, sample is None, 0.0
    for turn in _read(log_folder, lambda torn: None).turns:  # a torn end is said when the log is drawn
        seconds = max(seconds, turn.event.at)
        for command in turn.commands:
            if isinstance(command, StartSample):
                samples += command.attempt == 0
                found = found or command.sample == sample
    if not found:
        raise ConfigError(f"command line: trace: no sample {sample} was started in {log_folder}")
    return _Extent(samples, seconds)


class _Drawing:
    """All lanes of one file."""

    def __init__(self, file: BinaryIO, rules: Rules, extent: _Extent, follows: Callable[[SampleId], bool]) -> None:
        self._extent = extent
        self._file = TraceFile(file)
        for process in (LEDGER, PROMPTS):
            self._file.process(process, ORDER[process])
        self._trainer = TrainerLane(self._file)
        self._waves = Waves(self._file)
        self._rewards = RewardLanes(self._file)
        self._servers: dict[str, ServerLanes] = {}
        self._trails = Trails(self._file, follows, self._server, self._rewards)
        self._lives = Lives(rules)
        self._counters = _Counters(self._file, extent.seconds, self._look)
        self._since = 0  # of the present controller
        self._now = 0  # of the newest thing that is known

    def draw(self, turns: Iterable[Turn], run: str) -> None:
        """run: its name, for people."""
        finished = False
        for turn in turns:
            self._turn(turn)
            finished = any(isinstance(command, Finish) for command in turn.commands)
        self._trainer.close(self._now, finished)
        self._rewards.cut(self._now, "" if finished else CUT)
        for lanes in self._servers.values():
            lanes.cut(self._now, "" if finished else CUT)
        self._waves.cut(self._now)
        for group in self._lives.rest():
            self._trails.over(group, self._now)
        self._counters.close(self._now)
        self._file.close({"run": run, "clock": "microseconds since the run began"})

    def figures(self, followed: int, nbytes: int) -> Figures:
        file, trails = self._file, self._trails
        return Figures(
            samples=self._extent.samples, finished=trails.finished, checks=trails.checks, prompts=trails.prompts,
            steps=self._trainer.steps, swaps=sum(server.swaps for server in self._servers.values()),
            arrows=trails.arrows, followed=followed, spans=file.spans,
            events=file.events, seconds=self._extent.seconds, nbytes=nbytes,
        )  # fmt: skip

    def _server(self, name: str) -> ServerLanes:
        if name not in self._servers:
            self._servers[name] = ServerLanes(self._file, name, self._since)
        return self._servers[name]

    def _look(self) -> dict[str, int]:
        states = Counter(group.state for group in self._lives.groups.values())
        return {
            "in flight, samples": self._trails.in_flight,
            "ready, groups": states["ready"],
            "outstanding, groups": states["asked"] + states["running"] + states["ready"],
        }

    def _turn(self, turn: Turn) -> None:
        at = us(turn.event.at)
        self._counters.before(at)
        if isinstance(turn.event, RolledBack) and turn.event.resumed is not None:
            self._cut(self._now)
            self._since = at
        self._now = max(self._now, at)
        self._event(turn.event, at)
        train = None
        for command in turn.commands:
            self._command(command, at)
            train = command if isinstance(command, Train) else train
        over = self._lives.take(turn)
        if train is not None:
            for group in self._lives.trained(train.step):
                self._trails.over(group, at, train, self._trainer.step(train.step))
        for group in over:
            self._trails.over(group, at)
        self._trainer.rest(at)
        self._waves.rest(at)
        self._counters.after(turn.event, at, self._waves.swapping)
        for note in turn.notes:
            self._note(note)

    def _event(self, event: AnyEvent, at: int) -> None:
        self._trails.event(event, at)
        self._trainer.event(event, at)
        self._rewards.event(event, at)
        match event:
            case Joined(peer="server"):
                self._server(event.id).joined(at, self._since)
            case Lost(peer="server"):
                self._server(event.id).lost(at, event.why)
                self._waves.ended(event.id)
                self._trails.server_lost(event.id, at)
            case Failed(of="server"):
                self._server(event.id).lost(at, event.why, "quarantined")
                self._waves.ended(event.id)
            case Swapped():
                self._server(event.server).swapped(event, at)
                self._waves.ended(event.server, event.pause_s)
            case Failed(of="swap"):
                self._server(event.id).swap_failed(event, at)
                self._waves.ended(event.id)
            case EvaluationDone():
                self._server(event.server).evaluated(event, at)
            case Failed(of="evaluation"):
                for server in self._servers.values():
                    server.evaluated(event, at)

    def _command(self, command: AnyCommand, at: int) -> None:
        match command:
            case Train():
                about = self._trails.about_step(command)
                self._trainer.train(command, at, about)
                self._counters.lag(about, at)
            case ReadGroup():
                self._trails.read(command, at)
            case StartSample():
                self._trails.start(command, at)
            case Score():
                self._trails.score(command, at)
            case Cancel():
                self._trails.cancel(command, at)
            case Swap():
                point = self._server(command.server).swap(command, at)
                self._waves.swap(command, at)
                if published := self._trainer.published.get(command.version):
                    self._file.arrows_along("weights", f"v{command.version}", [published, point])
            case Restart(peer="server"):
                self._server(command.id).started(at)
            case Restart(peer="rewards"):
                self._rewards.started(command.id, at)
            case Evaluate():
                self._server(command.server).evaluate(command, at)
            case _:
                self._trainer.command(command, at)

    def _note(self, note: Note) -> None:
        self._now = max(self._now, us(note.at))
        self._trails.note(note)
        self._trainer.note(note)

    def _cut(self, at: int) -> None:
        """The controller was killed, and all of its children with it."""
        self._trails.cut(at)
        self._trainer.cut(at)
        self._waves.cut(at)
        self._rewards.cut(at)
        for lanes in self._servers.values():
            lanes.cut(at)


class _Counters:
    """The ledger's counts, not more often than a screen could show; tokens/s in windows.

    look: gives the counts of now; it takes as long as there are groups, so it isn't asked more often than that.
    """

    def __init__(self, file: TraceFile, seconds: float, look: Callable[[], Mapping[str, int]]) -> None:
        self._file = file
        self._look = look
        self._apart = us(seconds / _COUNTER_POINTS)
        self._window = us(max(seconds / _RATE_WINDOWS, _LEAST_WINDOW_S))
        self._due = 0
        self._held: int | None = None  # since the last time something happened then, and was not told
        self._last: Mapping[str, int] = {}
        self._window_end = self._window
        self._tokens = 0
        self._last_rate = -1.0
        self._swapping = -1

    def before(self, at: int) -> None:
        """Something is about to happen: until then everything stays as it was."""
        self._rate(at)
        if self._held is not None and at >= self._due:
            self._tell(self._held)

    def after(self, event: AnyEvent, at: int, swapping: int) -> None:
        """swapping: servers that load weights; told whenever it changes, for that may be short."""
        if swapping != self._swapping:
            self._file.counter(LEDGER, "servers that swap", at, swapping)
        self._swapping = swapping
        if isinstance(event, SampleDone):
            self._tokens += event.length
        if at < self._due:
            self._held = at
            return
        self._tell(at)
        self._due = at + self._apart

    def lag(self, args: Args, at: int) -> None:
        """Of the step that begins, where it is known."""
        for name in ("lag max", "lag mean"):
            if isinstance(value := args.get(name), int | float):
                self._file.counter(LEDGER, f"{name} of the newest step", at, value)

    def close(self, at: int) -> None:
        self._rate(at + self._window)
        self._tell(at)

    def _tell(self, at: int) -> None:
        now = self._look()
        for name, value in now.items():
            if self._last.get(name) != value:
                self._file.counter(LEDGER, name, at, value)
        self._last, self._held = now, None

    def _rate(self, at: int) -> None:
        """Close the windows that are over: an answer counts in the one in which it was finished."""
        while at >= self._window_end:
            rate = round(self._tokens / (self._window / US_PER_S), 1)
            if self._last_rate != rate:
                self._file.counter(LEDGER, _RATE, self._window_end - self._window, rate)
            self._last_rate = rate
            self._tokens = 0
            self._window_end += self._window
