"""The lanes of a run's peers: the trainer's work, each server's state and swaps, the reward workers.

What always holds: a peer is in one state at a time, and its lane has no gap but the time in which nothing is known of
it. What a kill, a loss or the log's end has cut off ends there, and says so in its name.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Final

from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Checkpoint,
    CheckpointDone,
    Evaluate,
    EvaluationDone,
    Failed,
    Finish,
    Joined,
    Lost,
    Note,
    Publish,
    Published,
    Restart,
    RolledBack,
    StepDone,
    Swap,
    Swapped,
    Train,
)
from areal_async.trace.lanes import LEAST_US, Args, Canvas, Lane, Packing, Point, Unfinished, Value, us

CUT: Final = "cut off"
LEDGER, PROMPTS, TRAINER, WEIGHTS, REWARDS = "ledger", "prompts", "trainer", "weights", "rewards"
ORDER: Final = {LEDGER: 0, PROMPTS: 1, TRAINER: 2, WEIGHTS: 3, REWARDS: 1_000_000}
_FIRST_SERVER: Final = 10
_UNNUMBERED: Final = 100_000  # servers by name come after the numbered ones

_COLOURS: Final = {
    "train": "thread_state_running",  # green
    "publish": "rail_response",  # blue
    "checkpoint": "background_memory_dump",  # teal
    "idle": "white",
    "starting": "startup",  # yellow
    "serving": "cq_build_passed",  # light green
    "working": "cq_build_passed",
    "swapping": "bad",  # orange
    "lost": "terrible",  # red
    "quarantined": "terrible",
}


def on_branch(name: str, branch: int) -> str:
    return f"{name} (branch {branch})" if branch else name


class StateLane:
    """A lane that is in one state at a time, or in none."""

    def __init__(self, canvas: Canvas, process: str, name: str) -> None:
        self._canvas = canvas
        self.lane: Lane = canvas.lane(process, name)
        self._state = ""
        self._begin = 0
        self._args: dict[str, Value] = {}
        self._free = 0

    @property
    def state(self) -> str:
        return self._state

    def go(self, state: str, at: int, args: Args | None = None) -> Point:
        """The state before ends. Returns where this one begins."""
        self.end(at)
        self._state, self._begin, self._args = state, max(at, self._free), dict(args or {})
        return Point(self.lane, self._begin)

    def end(self, at: int, why: str = "", args: Args | None = None) -> int:
        """why: what cut it off. Returns where it began."""
        if not self._state:
            return at
        name = f"{self._state}, {why}" if why else self._state
        if at > self._begin or self._state != "idle":
            self._free = max(at, self._begin + LEAST_US)
            colour = _COLOURS.get(self._state.partition(" ")[0], "") if not why else "terrible"
            self._canvas.span(self.lane, name, self._begin, self._free, {**self._args, **(args or {})}, colour)
        self._state = ""
        return self._begin

    def unfinished(self) -> Iterator[Unfinished]:
        if self._state:
            yield Unfinished(self.lane, self._state, self._begin, None, self._args)


class TrainerLane:
    """The ranks, as one: what they do, one after another. published: where each version was published. steps: done.

    What is told of anything but what they do now comes too late, and changes nothing.
    """

    def __init__(self, canvas: Canvas) -> None:
        canvas.process(TRAINER, ORDER[TRAINER])
        self._canvas = canvas
        self._lane = StateLane(canvas, TRAINER, "ranks")
        self._lane.go("starting", 0)
        self.published: dict[int, Point] = {}
        self.steps = 0
        self._steps: dict[int, Point] = {}
        self._branch = 0

    def event(self, event: AnyEvent, at: int) -> None:
        match event:
            case StepDone() if self._doing == on_branch(f"train step {event.step}", event.branch):
                known: dict[str, Value] = {**event.metrics}
                if event.skipped:
                    known["update left out"] = event.skipped
                self._lane.end(at, args=known)
                self.steps += 1
            case Published() if self._doing == on_branch(f"publish v{event.version}", event.branch):
                self._lane.end(at, args={"nbytes": event.nbytes})
            case CheckpointDone() if self._doing == on_branch(f"checkpoint v{event.version}", event.branch):
                self._lane.end(at, args={"seconds": event.seconds, "nbytes": event.nbytes})
            case Failed(of="checkpoint") if self._doing.startswith("checkpoint"):
                self._lane.end(at, "failed", {"why": event.why})
            case Failed(of="train" | "publish" as what) if self._doing.startswith(what):
                self._lane.end(at, "failed", {"why": event.why})
                self._lane.go("lost", at, {"why": event.why})
            case Lost(peer="trainer"):
                self._lane.end(at, CUT if self._lane.state not in ("idle", "lost", "starting") else "")
                self._lane.go("lost", at, {"why": event.why})
            case Joined(peer="trainer"):
                self._lane.end(at)
            case RolledBack():
                self._branch += 1
                why = "resumed" if event.resumed is not None else "the trainer was lost"
                name = f"back to v{event.to} (branch {self._branch}): {why}"
                self._canvas.mark(self._lane.lane, name, at, {"why": event.why})
                if event.resumed is not None:
                    self._lane.go("starting", at)

    @property
    def _doing(self) -> str:
        return self._lane.state

    def train(self, command: Train, at: int, about: Args) -> None:
        name = on_branch(f"train step {command.step}", command.branch)
        args: dict[str, Value] = {"step": command.step, "branch": command.branch, "groups": list(command.groups)}
        point = self._lane.go(name, at, {**args, **about})
        if before := self._steps.get(command.step):
            self._canvas.arrows_along("trained again", f"step {command.step}", [before, point])
        self._steps[command.step] = point

    def command(self, command: AnyCommand, at: int) -> None:
        match command:
            case Publish():
                name = on_branch(f"publish v{command.version}", command.branch)
                self.published[command.version] = self._lane.go(name, at)
                for version in command.free:
                    self.published.pop(version, None)
            case Checkpoint():
                self._lane.go(on_branch(f"checkpoint v{command.version}", command.branch), at)
            case Restart(peer="trainer"):
                self._lane.go("starting", at, {"version": command.version})
            case Finish():
                self._lane.go(f"ending: {command.reason}", at)

    def step(self, step: int) -> Point:
        """Where the latest training of a step began."""
        return self._steps[step]

    def rest(self, at: int) -> None:
        """What isn't told to do anything is idle."""
        if not self._lane.state:
            self._lane.go("idle", at)

    def note(self, note: Note) -> None:
        if note.what == "model_saved":
            self._lane.end(us(note.at), args={"model": "saved"})

    def unfinished(self) -> Iterator[Unfinished]:
        return self._lane.unfinished()

    def cut(self, at: int) -> None:
        self._lane.end(at, CUT if self._lane.state != "idle" else "")

    def close(self, at: int, whole: bool) -> None:
        """The log ends. whole: as it should."""
        self._lane.end(at, "" if whole else CUT)


class ServerLanes:
    """One server: its state, its evaluations, and the samples on it, in as few lanes as they need. swaps: done."""

    def __init__(self, canvas: Canvas, name: str, at: int) -> None:
        """at: since when it starts."""
        self.process = f"server {name}"
        order = int(name) if name.isdecimal() else _UNNUMBERED + len(name)
        canvas.process(self.process, _FIRST_SERVER + order)
        self._canvas = canvas
        self._lane = StateLane(canvas, self.process, "state")
        self._lane.go("starting", at)
        self._evaluation: StateLane | None = None
        self._serves = ""
        self._swap: Point | None = None
        self.swaps = 0
        self.packing = Packing()

    @property
    def is_lost(self) -> bool:
        return self._lane.state in ("lost", "quarantined")

    def sample_lane(self, number: int) -> Lane:
        return self._canvas.lane(self.process, f"samples {number}")

    def joined(self, at: int, since: int) -> None:
        """since: the beginning of the present controller, which has started it then."""
        if not self._lane.state:
            self._lane.go("starting", since)
        elif self._lane.state == "lost":
            self._lane.go("starting", at)

    def started(self, at: int) -> None:
        self._lane.go("starting", at)

    def lost(self, at: int, why: str, state: str = "lost") -> None:
        self._end_swap(at, CUT)
        self._end_evaluation(at, CUT)
        self._serves = ""
        self._lane.go(state, at, {"why": why})

    def swap(self, command: Swap, at: int) -> Point:
        name = on_branch(f"swapping to v{command.version}", command.branch)
        point = self._lane.go(name, at, {"version": command.version, "branch": command.branch})
        self._swap = point
        return point

    def swapped(self, event: Swapped, at: int) -> None:
        if self._swap is None:
            return  # told again
        begin = self._lane.end(at, args={"pause_s": event.pause_s})
        self._pause(begin, max(at, begin + LEAST_US), us(event.pause_s))
        self._swap = None
        self.swaps += 1
        self._serves = on_branch(f"serving v{event.version}", event.branch)
        self._lane.go(self._serves, at, {"version": event.version, "branch": event.branch})

    def swap_failed(self, event: Failed, at: int) -> None:
        if self._swap is None:
            return
        self._end_swap(at, "failed", {"why": event.why})
        self._lane.go(self._serves or "starting", at)

    def evaluate(self, command: Evaluate, at: int) -> None:
        if self._evaluation is None:
            self._evaluation = StateLane(self._canvas, self.process, "evaluation")
        self._evaluation.go(f"evaluate v{command.version}", at)

    def evaluated(self, event: EvaluationDone | Failed, at: int) -> None:
        if self._evaluation is None:
            return
        if isinstance(event, Failed):
            self._evaluation.end(at, "failed", {"why": event.why})
        else:
            args = {"score": event.score, "n": event.n, "tokens": event.tokens, "seconds": event.seconds}
            self._evaluation.end(at, args=args)

    def unfinished(self) -> Iterator[Unfinished]:
        yield from self._lane.unfinished()
        if self._evaluation is not None:
            yield from self._evaluation.unfinished()

    def cut(self, at: int, why: str = CUT) -> None:
        """A new controller has other servers; or the log ends."""
        self._end_swap(at, why)
        self._end_evaluation(at, why)
        self._lane.end(at, why)
        self._serves = ""

    def _pause(self, begin: int, end: int, pause: int) -> None:
        """How long its answers stood still: the last thing of a swap is that they go on."""
        if pause and end - begin > LEAST_US:
            self._canvas.span(self._lane.lane, "answers stand still", max(begin, end - pause), end, {})

    def _end_swap(self, at: int, why: str, args: Args | None = None) -> None:
        if self._swap is not None:
            self._lane.end(at, why, args)
            self._swap = None

    def _end_evaluation(self, at: int, why: str) -> None:
        if self._evaluation is not None:
            self._evaluation.end(at, why)


class Waves:
    """When servers are given new weights: one after another, or several at a time."""

    def __init__(self, canvas: Canvas) -> None:
        canvas.process(WEIGHTS, ORDER[WEIGHTS])
        self._canvas = canvas
        self._lane = canvas.lane(WEIGHTS, "swaps of servers")
        self._begin = 0
        self._free = 0
        self._busy: set[str] = set()
        self._versions: list[int] = []
        self._servers: list[str] = []
        self._still_s = 0.0

    @property
    def swapping(self) -> int:
        """How many servers are being given new weights."""
        return len(self._busy)

    def swap(self, command: Swap, at: int) -> None:
        if command.version not in self._versions:
            self.rest(at)
        if not self._servers:
            self._begin, self._versions, self._servers, self._still_s = max(at, self._free), [], [], 0.0
        self._busy.add(command.server)
        if command.version not in self._versions:
            self._versions.append(command.version)
        self._servers.append(command.server)

    def ended(self, server: str, pause_s: float = 0.0) -> None:
        """A swap has ended, well or not."""
        if server not in self._busy:
            return
        self._still_s += pause_s
        self._busy.discard(server)

    def rest(self, at: int) -> None:
        """The wave is over where no server is swapped any more: after a moment's commands, or as another one begins."""
        if self._busy or not self._servers:
            return
        end = max(at, self._begin + LEAST_US)
        self._canvas.span(self._lane, self._name, self._begin, end, self._args, _COLOURS["swapping"])
        self._free, self._servers = end, []

    def unfinished(self) -> Iterator[Unfinished]:
        if self._servers:
            yield Unfinished(self._lane, self._name, self._begin, None, self._args)

    @property
    def _name(self) -> str:
        return "to " + ", ".join(f"v{version}" for version in self._versions)

    @property
    def _args(self) -> Args:
        return {"servers": ", ".join(self._servers), "pause_s": self._still_s}

    def cut(self, at: int) -> None:
        self._busy.clear()
        self.rest(at)


class RewardLanes:
    """The workers' states; the checks, in as few lanes as they need. Which worker makes a check no log tells."""

    def __init__(self, canvas: Canvas) -> None:
        canvas.process(REWARDS, ORDER[REWARDS])
        self._canvas = canvas
        self._workers: dict[str, StateLane] = {}
        self._since = 0
        self.packing = Packing()

    def check_lane(self, number: int) -> Lane:
        return self._canvas.lane(REWARDS, f"checks {number}")

    def event(self, event: AnyEvent, at: int) -> None:
        match event:
            case Joined(peer="rewards"):
                self._worker(event.id).go("working", at)
            case Lost(peer="rewards"):
                self._worker(event.id).go("lost", at, {"why": event.why})
            case RolledBack(resumed=rules) if rules is not None:
                self._since = at

    def started(self, worker: str, at: int) -> None:
        self._worker(worker).go("starting", at)

    def unfinished(self) -> Iterator[Unfinished]:
        return chain.from_iterable(lane.unfinished() for lane in self._workers.values())

    def cut(self, at: int, why: str = CUT) -> None:
        for lane in self._workers.values():
            lane.end(at, why)

    def _worker(self, name: str) -> StateLane:
        if name not in self._workers:
            self._workers[name] = StateLane(self._canvas, REWARDS, name)
        lane = self._workers[name]
        if not lane.state:
            lane.go("starting", self._since)
        return lane
