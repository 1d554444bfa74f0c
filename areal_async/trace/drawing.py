"""Everything that a run's log tells, drawn turn by turn: which spans, marks, counters and arrows there are, and on
which lanes. Onto what they are drawn (a file, a table for a page) is a canvas's business.

Lanes: counters of the ledger; prompts; the trainer; the swaps; each server with the samples on it; checks. An arrow
follows a sample from its prompt over the servers that wrote it and its check to the step that trained it.

What always holds: any canvas gets the same spans; a span is drawn once, when all that it tells is known, and until then
it is one of `unfinished`; memory follows what is outstanding.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Final

from areal_async.log.turns import Turn
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
)
from areal_async.trace.lanes import US_PER_S, Args, Canvas, Unfinished, us
from areal_async.trace.life import GroupLife
from areal_async.trace.lives import Lives
from areal_async.trace.peers import CUT, LEDGER, ORDER, PROMPTS, RewardLanes, ServerLanes, TrainerLane, Waves
from areal_async.trace.trails import Trails

_COUNTER_POINTS: Final = 2_000  # of each counter, over the whole run
_RATE_WINDOWS: Final = 200  # of tokens/s, over the whole run
_LEAST_WINDOW_S: Final = 0.05
_RATE: Final = "tokens/s of finished answers"


class Drawing:
    """All lanes of one run. Of a run that goes on: `take` its turns as they come, and never `close`.

    follows: whether arrows follow a sample. counted_s: how long the run is, which says how far apart its counters'
    points are; None: no counters. lives: of the groups, up to the last turn that was taken; it is this one that takes
    them. now: the newest moment that is known, in microseconds.
    """

    def __init__(
        self, canvas: Canvas, rules: Rules, follows: Callable[[SampleId], bool], counted_s: float | None
    ) -> None:
        self._canvas = canvas
        for process in (LEDGER, PROMPTS):
            canvas.process(process, ORDER[process])
        self.trainer = TrainerLane(canvas)
        self._waves = Waves(canvas)
        self._rewards = RewardLanes(canvas)
        self.servers: dict[str, ServerLanes] = {}
        self.trails = Trails(canvas, follows, self._server, self._rewards)
        self.lives = Lives(rules)
        self._counters = None if counted_s is None else _Counters(canvas, counted_s, self._look)
        self._since = 0  # of the present controller
        self.now = 0
        self._finished = False  # the newest turn ends the run as it should

    def take(self, turn: Turn) -> list[GroupLife]:
        """Draw what happened. Groups whose life is over for good are given back, as `Lives.take` does."""
        at = us(turn.event.at)
        if self._counters is not None:
            self._counters.before(at)
        if isinstance(turn.event, RolledBack) and turn.event.resumed is not None:
            self._cut(self.now)
            self._since = at
        self.now = max(self.now, at)
        self._event(turn.event, at)
        train = None
        for command in turn.commands:
            self._command(command, at)
            train = command if isinstance(command, Train) else train
        self._finished = any(isinstance(command, Finish) for command in turn.commands)
        over = self.lives.take(turn)
        if train is not None:
            for group in self.lives.trained(train.step):
                self.trails.over(group, at, train, self.trainer.step(train.step))
        for group in over:
            self.trails.over(group, at)
        self.trainer.rest(at)
        self._waves.rest(at)
        if self._counters is not None:
            self._counters.after(turn.event, at, self._waves.swapping)
        for note in turn.notes:
            self._note(note)
        return over

    def unfinished(self) -> Iterator[Unfinished]:
        """The spans that aren't on the canvas yet: they still grow, or what became of their sample isn't known."""
        yield from self.trainer.unfinished()
        yield from self._waves.unfinished()
        yield from self._rewards.unfinished()
        yield from chain.from_iterable(lanes.unfinished() for lanes in self.servers.values())
        yield from self.trails.unfinished()

    def close(self) -> None:
        """The log ends here: what still grows ends with it, cut off unless the run had finished."""
        why = "" if self._finished else CUT
        self.trainer.close(self.now, self._finished)
        self._rewards.cut(self.now, why)
        for lanes in self.servers.values():
            lanes.cut(self.now, why)
        self._waves.cut(self.now)
        for group in self.lives.rest():
            self.trails.over(group, self.now)
        if self._counters is not None:
            self._counters.close(self.now)

    def _server(self, name: str) -> ServerLanes:
        if name not in self.servers:
            self.servers[name] = ServerLanes(self._canvas, name, self._since)
        return self.servers[name]

    def _look(self) -> dict[str, int]:
        states = Counter(group.state for group in self.lives.groups.values())
        return {
            "in flight, samples": self.trails.in_flight,
            "ready, groups": states["ready"],
            "outstanding, groups": states["asked"] + states["running"] + states["ready"],
        }

    def _event(self, event: AnyEvent, at: int) -> None:
        self.trails.event(event, at)
        self.trainer.event(event, at)
        self._rewards.event(event, at)
        match event:
            case Joined(peer="server"):
                self._server(event.id).joined(at, self._since)
            case Lost(peer="server"):
                self._server(event.id).lost(at, event.why)
                self._waves.ended(event.id)
                self.trails.server_lost(event.id, at)
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
                for server in self.servers.values():
                    server.evaluated(event, at)

    def _command(self, command: AnyCommand, at: int) -> None:
        match command:
            case Train():
                about = self.trails.about_step(command)
                self.trainer.train(command, at, about)
                if self._counters is not None:
                    self._counters.lag(about, at)
            case ReadGroup():
                self.trails.read(command, at)
            case StartSample():
                self.trails.start(command, at)
            case Score():
                self.trails.score(command, at)
            case Cancel():
                self.trails.cancel(command, at)
            case Swap():
                point = self._server(command.server).swap(command, at)
                self._waves.swap(command, at)
                if published := self.trainer.published.get(command.version):
                    self._canvas.arrows_along("weights", f"v{command.version}", [published, point])
            case Restart(peer="server"):
                self._server(command.id).started(at)
            case Restart(peer="rewards"):
                self._rewards.started(command.id, at)
            case Evaluate():
                self._server(command.server).evaluate(command, at)
            case _:
                self.trainer.command(command, at)

    def _note(self, note: Note) -> None:
        self.now = max(self.now, us(note.at))
        self.trails.note(note)
        self.trainer.note(note)

    def _cut(self, at: int) -> None:
        """The controller was killed, and all of its children with it."""
        self.trails.cut(at)
        self.trainer.cut(at)
        self._waves.cut(at)
        self._rewards.cut(at)
        for lanes in self.servers.values():
            lanes.cut(at)


class _Counters:
    """The ledger's counts, not more often than a screen could show; tokens/s in windows.

    look: gives the counts of now; it takes as long as there are groups, so it isn't asked more often than that.
    """

    def __init__(self, canvas: Canvas, seconds: float, look: Callable[[], Mapping[str, int]]) -> None:
        self._canvas = canvas
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
            self._canvas.counter(LEDGER, "servers that swap", at, swapping)
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
                self._canvas.counter(LEDGER, f"{name} of the newest step", at, value)

    def close(self, at: int) -> None:
        self._rate(at + self._window)
        self._tell(at)

    def _tell(self, at: int) -> None:
        now = self._look()
        for name, value in now.items():
            if self._last.get(name) != value:
                self._canvas.counter(LEDGER, name, at, value)
        self._last, self._held = now, None

    def _rate(self, at: int) -> None:
        """Close the windows that are over: an answer counts in the one in which it was finished."""
        while at >= self._window_end:
            rate = round(self._tokens / (self._window / US_PER_S), 1)
            if self._last_rate != rate:
                self._canvas.counter(LEDGER, _RATE, self._window_end - self._window, rate)
            self._last_rate = rate
            self._tokens = 0
            self._window_end += self._window
