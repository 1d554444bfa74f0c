"""The spans of samples: their prompt, each stay at a server, their check; and the arrow that follows one to its step.

What always holds: every attempt that was started, and every check that was asked for, has a span; a stay ends where the
answer came, its server was lost, the request was sent elsewhere, or it was cancelled. A sample's spans are written when
its fate is known, since they tell it, so memory holds what is outstanding, and no more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from areal_async.messages import (
    AnyEvent,
    Cancel,
    DataEnded,
    Failed,
    GroupId,
    GroupRead,
    Note,
    ReadGroup,
    SampleDone,
    SampleId,
    Score,
    Scored,
    StartSample,
    Train,
    group_of,
)
from areal_async.trace.lanes import LEAST_US, Canvas, Lane, Packing, Point, Unfinished, Value, us
from areal_async.trace.life import GroupLife
from areal_async.trace.peers import CUT, PROMPTS, RewardLanes, ServerLanes

_SENT_AGAIN: Final = ("continued", "moved", "repeated")  # notes of a request that follows one that broke off
# green, blue, tan, mauve: of lag 0, 1, 2 and more
_LAG_COLOURS: Final = (
    "thread_state_running",
    "thread_state_runnable",
    "thread_state_unknown",
    "thread_state_uninterruptible",
)
_VERDICT_COLOURS: Final = {"right": "cq_build_passed", "given": "rail_response", "wrong": "bad", "no_answer": "yellow"}


@dataclass(slots=True)
class _Part:
    """A span of a sample. end: None while it grows. packing, number: the lane that it holds meanwhile."""

    lane: Lane
    name: str
    begin: int
    packing: Packing
    number: int
    args: dict[str, Value]
    server: str = ""  # of a stay; "" of a check
    end: int | None = None
    colour: str = ""


@dataclass(slots=True)
class _Trail:
    parts: list[_Part] = field(default_factory=list)

    @property
    def open(self) -> _Part | None:
        return self.parts[-1] if self.parts and self.parts[-1].end is None else None


class Trails:
    """follows: whether arrows follow a sample. in_flight: samples that a server writes now. finished, checks, prompts:
    answers, verdicts and prompts that came. arrows: samples that they follow."""

    def __init__(
        self,
        canvas: Canvas,
        follows: Callable[[SampleId], bool],
        server: Callable[[str], ServerLanes],
        rewards: RewardLanes,
    ) -> None:
        self._canvas = canvas
        self._follows = follows
        self._server = server
        self._rewards = rewards
        self._prompts = canvas.lane(PROMPTS, "read")
        self._prompts_free = 0
        self._asked: dict[GroupId, tuple[int, int]] = {}  # position, when
        self._read: dict[GroupId, Point] = {}
        self._trails: dict[SampleId, _Trail] = {}
        self._done: dict[SampleId, SampleDone] = {}
        self.in_flight = 0
        self.finished = 0
        self.checks = 0
        self.prompts = 0
        self.arrows = 0

    # ---------------------------------------------------------------------------------------------- as it happens

    def event(self, event: AnyEvent, at: int) -> None:
        match event:
            case GroupRead() if event.group in self._asked:
                self._prompt(event.group, at, f"group {event.group}", {"row": event.row, "tokens": event.prompt_tokens})
                self.prompts += 1
            case DataEnded():
                self._prompt(event.group, at, f"group {event.group}: the data have ended", {})
            case Failed(of="group"):
                self._prompt(int(event.id), at, f"group {event.id} failed", {"why": event.why})
            case SampleDone():
                self._answered(event, at)
            case Scored():
                if part := self._checked(event.sample, event.attempt):
                    part.name = f"{part.name} {event.verdict}"
                    part.colour = _VERDICT_COLOURS.get(event.verdict, "terrible")
                    part.args |= {"verdict": event.verdict, "reward": event.reward}
                    self._close(part, at)
                    self.checks += 1
            case Failed(of="sample"):
                if part := self._staying(event.id, event.attempt):
                    part.args["why"] = event.why
                    self._close(part, at, "failed")

    def read(self, command: ReadGroup, at: int) -> None:
        self._asked[command.group] = command.position, at

    def start(self, command: StartSample, at: int) -> None:
        args: dict[str, Value] = {"group": group_of(command.sample), "position": command.position}
        args |= {"attempt": command.attempt, "floor": command.floor}
        self._stay(command.sample, command.server, at, args)

    def score(self, command: Score, at: int) -> None:
        trail = self._trails.setdefault(command.sample, _Trail())
        packing = self._rewards.packing
        number = packing.take(at)
        args: dict[str, Value] = {"attempt": command.attempt}
        lane = self._rewards.check_lane(number)
        trail.parts.append(_Part(lane, command.sample, at, packing, number, args))

    def cancel(self, command: Cancel, at: int) -> None:
        trail = self._trails.get(command.sample)
        if trail is not None and (part := trail.open):
            self._close(part, at, "cancelled")

    def note(self, note: Note) -> None:
        """A request broke off, and the next one goes to the same server, or to another."""
        sample = note.data.get("sample")
        if note.what not in _SENT_AGAIN or not isinstance(sample, str) or sample not in self._trails:
            return
        at, why = us(note.at), str(note.data["why"])
        part = self._trails[sample].parts[-1]
        if part.end is None:
            part.args["why"] = why
            self._close(part, at, note.what)
        args: dict[str, Value] = {name: part.args[name] for name in ("group", "position", "attempt", "floor")}
        self._stay(sample, str(note.data["to"]), at, {**args, "tokens kept": _number(note.data["tokens"])})

    def server_lost(self, server: str, at: int) -> None:
        """What it wrote breaks off; the sessions ask another one, or wait for one."""
        for trail in self._trails.values():
            part = trail.open
            if part is not None and part.server == server:
                self._close(part, at, "its server was lost")

    def cut(self, at: int) -> None:
        """Nothing of what ran goes on."""
        for trail in self._trails.values():
            if part := trail.open:
                self._close(part, at, CUT)

    def unfinished(self) -> Iterator[Unfinished]:
        """Stays and checks of samples whose fate isn't known yet."""
        for trail in self._trails.values():
            for part in trail.parts:
                yield Unfinished(part.lane, part.name, part.begin, part.end, part.args)

    # ------------------------------------------------------------------------------------------ when a fate is known

    def about_step(self, command: Train) -> dict[str, Value]:
        """What is known of a batch; of one that is trained again only how large it is."""
        done = [self._done[sample] for sample, _, _ in _names(command) if sample in self._done]
        args: dict[str, Value] = {"samples": len(command.samples)}
        if done:
            lags = [command.step - each.oldest for each in done]
            args |= {"tokens": sum(each.loss_tokens for each in done), "lag max": max(lags)}
            args["lag mean"] = round(sum(lags) / len(lags), 3)
        return args

    def over(self, group: GroupLife, at: int, train: Train | None = None, step: Point | None = None) -> None:
        """Write what a group's samples have gone through. train, step: that trains them."""
        advantages = {name: advantage for name, _, advantage in _names(train)} if train is not None else {}
        read = self._read.pop(group.id, None)
        self._asked.pop(group.id, None)
        for sample in group.samples:
            trail, done = self._trails.pop(sample.id, None), self._done.pop(sample.id, None)
            if trail is None:
                continue
            outcome = group.outcome(sample)
            if part := trail.open:
                self._close(part, at, CUT if outcome == "outstanding" else outcome)
            told: dict[str, Value] = {"fate": outcome}
            if group.why:
                told["because"] = group.why
            points = [read] if read is not None else []
            points += [Point(part.lane, part.begin) for part in trail.parts]
            if train is not None and sample.id in advantages and step is not None:
                told |= {"fate": "handed to training", "step": train.step, "advantage": advantages[sample.id]}
                told["lag"] = train.step - done.oldest if done is not None else None
                points.append(step)
            self._write(sample.id, trail, told, points)

    def _write(self, sample: SampleId, trail: _Trail, told: dict[str, Value], points: list[Point]) -> None:
        verdict = next((part.args for part in reversed(trail.parts) if "verdict" in part.args), {})
        for part in trail.parts:
            assert part.end is not None, "it was closed"
            if part.server and "finish" in part.args:
                part.args |= {name: verdict[name] for name in ("verdict", "reward") if name in verdict}
                lag = told.get("lag")
                part.colour = _LAG_COLOURS[min(lag, len(_LAG_COLOURS) - 1)] if isinstance(lag, int) else "grey"
            self._canvas.span(part.lane, part.name, part.begin, part.end, {**part.args, **told}, part.colour)
        if self._follows(sample) and len(points) > 1:
            self._canvas.arrows_along("samples", sample, points)
            self.arrows += 1

    # ------------------------------------------------------------------------------------------------------------

    def _prompt(self, group: GroupId, at: int, name: str, args: dict[str, Value]) -> None:
        """Prompts are read one after another, however many are asked for at once."""
        position, asked = self._asked.pop(group, (-1, at))
        begin = min(at, max(asked, self._prompts_free))  # of one microsecond with the one before: drawn in it
        self._prompts_free = end = max(at, begin + LEAST_US)
        point = self._canvas.span(self._prompts, name, begin, end, {"position": position, **args})
        self._read[group] = point

    def _stay(self, sample: SampleId, server: str, at: int, args: dict[str, Value]) -> None:
        lanes = self._server(server)
        number = lanes.packing.take(at)
        args |= {"server": server}
        if lanes.is_lost:
            args["waits"] = "its server is lost: for another that holds its floor, or for this one's return"
        part = _Part(lanes.sample_lane(number), sample, at, lanes.packing, number, args, server)
        trail = self._trails.setdefault(sample, _Trail())
        if before := trail.open:
            self._close(before, at, "given up")
        trail.parts.append(part)
        self.in_flight += 1

    def _close(self, part: _Part, at: int, why: str = "") -> None:
        """why: what cut it off."""
        part.end = max(at, part.begin + LEAST_US)
        part.packing.leave(part.number, part.end)
        self.in_flight -= part.server != ""
        if why:
            part.name, part.colour = f"{part.name} {why}", "terrible"

    def _answered(self, event: SampleDone, at: int) -> None:
        """It may have been whole when its server was lost, and only its end was missing."""
        trail = self._trails.get(event.sample)
        part = trail.parts[-1] if trail is not None else None
        if part is None or not part.server or part.args["attempt"] != event.attempt or "finish" in part.args:
            return  # it comes too late, and is ignored by all
        if part.end is None:
            self._close(part, at)
        part.args |= _answer(event)
        self._done[event.sample] = event
        self.finished += 1

    def _staying(self, sample: SampleId, attempt: int) -> _Part | None:
        """The stay of this attempt; None: what is told of it comes too late, and is ignored by all."""
        part = self._growing(sample, attempt)
        return part if part is not None and part.server else None

    def _checked(self, sample: SampleId, attempt: int) -> _Part | None:
        part = self._growing(sample, attempt)
        return None if part is None or part.server else part

    def _growing(self, sample: SampleId, attempt: int) -> _Part | None:
        trail = self._trails.get(sample)
        part = trail.open if trail is not None else None
        return part if part is not None and part.args["attempt"] == attempt else None


def _names(train: Train) -> list[tuple[SampleId, int, float]]:
    return [(each.sample, each.attempt, each.advantage) for each in train.samples]


def _answer(done: SampleDone) -> dict[str, Value]:
    versions = f"{done.oldest}" if done.oldest == done.newest else f"{done.oldest} to {done.newest}"
    args: dict[str, Value] = {"prompt tokens": done.prompt_tokens, "length": done.length, "finish": done.finish}
    args |= {"versions": versions}
    if done.reward is not None:
        args["reward"] = done.reward
    return args


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
