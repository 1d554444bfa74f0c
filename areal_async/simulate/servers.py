"""One rollout server in virtual time: its running answers share it, each gets one token a decoding step.

What always holds: a token is decoded once, by one version; an answer ends when it has its length; between two changes
of what runs, the time of so many steps is exact: `step_s` is linear in the context but for one kink, and each step
makes the context a token longer for each running answer, so the sum over whole steps is a formula (`pace_of`), without
steps and without error (but in the one step of the kink, by an eighth of a step's growth). Steps aren't waited for: an
answer that comes in the middle of one is decoded from that moment on, and the one that was under way goes on at the new
pace; that is all that differs from a loop over steps.

The server's clock counts **tokens per running answer**. An answer that begins at clock c ends at c + length, whatever
the pace is meanwhile, so a heap of such marks says who ends next.
"""

from bisect import bisect_right
from collections import deque
from heapq import heappop, heappush
from math import floor, inf, sqrt
from typing import Final, TypeAlias

from areal_async.messages import SampleId, Version
from areal_async.simulate.models import Answer, ServerModel, SwapModel

SAME: Final = 1e-6  # tokens: times are sums of many floats, so a mark is reached when no more than this is missing


Span: TypeAlias = tuple[Version, int]
"""So many tokens of an answer, one after another, are of this version."""


class Answering:
    """An answer on its way. floor: the lowest version that may draw it. order: in which answers were asked for. asked:
    version of its server when it was asked there. kept: tokens of earlier servers, which were lost; arrived: of the
    last of them. past: their versions, and those of all tokens once it has ended. begun, mark: the server's clock
    before its first and after its last token. ended: it has its length. over: it was cancelled."""

    __slots__ = (
        "arrived", "asked", "attempt", "begun", "ended", "floor", "group", "kept", "length", "mark", "order", "over",
        "past", "prompt", "reward", "running", "sample", "server", "truncated",
    )  # fmt: skip

    def __init__(self, sample: SampleId, attempt: int, group: int, lowest: Version, what: Answer, order: int) -> None:
        self.sample = sample
        self.attempt = attempt
        self.group = group
        self.floor = lowest
        self.prompt = what.prompt_tokens
        self.length = what.length
        self.truncated = what.truncated
        self.reward = what.reward
        self.order = order
        self.past: tuple[Span, ...] = ()
        self.kept = self.arrived = 0
        self.asked: Version = -1
        self.begun = self.mark = 0.0
        self.running = self.ended = self.over = False
        self.server: Server | None = None

    def versions(self) -> tuple[Version, Version]:
        """The oldest and the newest of its tokens; it has ended."""
        past = self.past
        if not self.kept:  # of one server, whose versions only grow
            return past[0][0], past[-1][0]
        versions = [version for version, _ in past]
        return min(versions), max(versions)


Pace: TypeAlias = tuple[float, float, float]
"""Times of decoding steps while the same answers run: of a step now, had it no part of one more token, in seconds; by
how many seconds a step is longer than the one before, once memory traffic is what limits it; and after how many tokens
of each answer it is (0: now; inf: never)."""


def pace_of(model: ServerModel, running: int, context: float) -> Pace:
    """context: tokens now. The half token each makes the integral over whole steps the sum of their times."""
    slope = model.context_s * running
    memory = model.overhead_s + model.weights_s + model.context_s * context - slope / 2
    arithmetic = model.overhead_s + model.sequence_s * running
    if memory >= arithmetic:
        return memory, slope, 0.0
    return arithmetic, slope, (arithmetic - memory) / slope if slope > 0 else inf


def seconds_of(pace: Pace, tokens: float) -> float:
    """How long so many tokens of each answer take."""
    base, slope, flat = pace
    rising = tokens - flat
    return base * tokens + (slope * rising * rising / 2 if rising > 0 else 0.0)


def tokens_in(pace: Pace, seconds: float) -> float:
    """How many each answer gets in this time: the inverse of `seconds_of`."""
    base, slope, flat = pace
    before = base * flat if flat else 0.0
    if seconds <= before:
        return seconds / base if base > 0 else inf
    rest = seconds - before
    divisor = base + sqrt(base * base + 2 * slope * rest)
    return flat + (2 * rest / divisor if divisor > 0 else inf)


class Server:
    """version: of the weights that it answers with, -1 before the first. load: answers that are asked of it. running:
    those of them that have a place. stands: it loads weights, nothing is decoded. due: number of the happening at which
    its next answer ends; older ones are void. changed: that has to be looked up again; noted: somebody will. life: how
    often it was lost. decoded: tokens, of all answers, also of those that were stopped. recomputed: tokens whose cache
    was computed again after swaps. stalled_s: for how long prompts and such contexts were computed."""

    __slots__ = (
        "_at", "_clock", "_ends", "_held", "_model", "_prompts", "_responses", "_shared", "_swap", "_swapped_at",
        "_used", "_waiting", "changed", "decoded", "due", "is_live", "life", "load", "loading", "name", "noted",
        "recomputed", "running", "stalled_s", "stands", "version", "was_busy",
    )  # fmt: skip

    def __init__(self, name: str, model: ServerModel, swap: SwapModel) -> None:
        self.name = name
        self.life = 0
        self.due = -1
        self.decoded = self.recomputed = self.stalled_s = 0.0
        self.changed = self.noted = self.was_busy = False
        self._model = model
        self._swap = swap
        self._empty(0.0)

    def _empty(self, now: float) -> None:
        self.version: Version = -1
        self.load = self.running = 0
        self.is_live = self.stands = False
        self.loading: Version | None = None
        self._at = now  # time at which the clock is right: later than now while prompts are computed
        self._clock = 0.0
        self._ends: list[tuple[float, int, Answering]] = []  # marks, order: a heap; may hold some that are over
        self._waiting: deque[Answering] = deque()
        self._responses = 0.0  # tokens of running answers
        self._shared = 0  # prompt tokens of running answers
        self._prompts: dict[int, list[int]] = {}  # group -> its running answers, tokens of its prompt
        self._used = 0  # whole lengths of running answers: what is set aside in the cache
        self._swapped_at: list[float] = []  # clock at each swap but the first
        self._held: list[Version] = []  # the version before each of these

    @property
    def context(self) -> float:
        """Prompt and response tokens of all running answers."""
        return self._shared + self._responses

    @property
    def is_busy(self) -> bool:
        return self.running > 0 and not self.stands

    # ------------------------------------------------------------------------------------------------ what it is asked

    def join(self, now: float) -> None:
        """It is there, without weights."""
        self._empty(now)
        self.is_live = True

    def ask(self, answer: Answering, now: float) -> None:
        """Begin it, or have it wait for a place."""
        answer.server = self
        answer.asked = self.version
        self.load += 1
        self._waiting.append(answer)
        self.begin(now)

    def begin(self, now: float) -> None:
        """Those that wait, in their order, as far as there is room; none while new weights are wanted."""
        waiting = self._waiting
        if not waiting or self.loading is not None:
            return
        self._advance(now)
        while waiting and self._has_room(waiting[0]):
            answer = waiting.popleft()
            prompt = self._prompts.get(answer.group)
            if prompt is None:
                self._prompts[answer.group] = [1, answer.prompt]
                self._stall(answer.prompt + answer.kept)
            else:
                prompt[0] += 1
                self._stall(answer.kept)
            answer.begun = self._clock
            answer.mark = self._clock + answer.length - answer.kept
            answer.running = True
            heappush(self._ends, (answer.mark, answer.order, answer))
            self.running += 1
            self._shared += answer.prompt
            self._responses += answer.kept
            self._used += answer.prompt + answer.length
            self.changed = True

    def next_end(self) -> float | None:
        """When the next answer ends, if nothing else comes; None if none runs, or weights are loaded."""
        if not self.running or self.stands:
            return None
        pace = pace_of(self._model, self.running, self._shared + self._responses)
        return self._at + seconds_of(pace, max(0.0, self._next() - self._clock))

    def end(self, now: float) -> list[Answering]:
        """Those that end now, at the time that `next_end` gave. Others may wait for their places."""
        self._forward(self._next() - self._clock)
        self._at = now
        ended: list[Answering] = []
        ends, reached = self._ends, self._clock + SAME
        while ends and (ends[0][0] <= reached or ends[0][2].over):
            answer = heappop(ends)[2]
            if not answer.over:
                self._leave(answer, answer.length)
                answer.ended = True
                ended.append(answer)
        self.changed = True
        return ended

    def spans(self, answer: Answering) -> tuple[Span, ...]:
        """The versions of the tokens of an answer that has just ended, those of an earlier server first."""
        tokens, swapped_at = answer.length - answer.kept, self._swapped_at
        place, count = bisect_right(swapped_at, answer.begun), len(swapped_at)
        if place == count:
            return (*answer.past, (self.version, tokens))
        spans = list(answer.past)
        before, begun = 0, answer.begun - SAME
        while place < count:
            until = min(int(swapped_at[place] - begun), tokens)
            if until > before:
                spans.append((self._held[place], until - before))
                before = until
            place += 1
        if tokens > before or not spans:
            spans.append((self.version, tokens - before))
        return tuple(spans)

    # ------------------------------------------------------------------------------------------------- stops and losses

    def stop(self, answer: Answering, now: float) -> int:
        """It isn't wanted any more; how many tokens it has."""
        tokens = self.tokens_of(answer, now)
        if answer.running:
            self._leave(answer, answer.kept + self._clock - answer.begun)
        else:
            self._waiting.remove(answer)
            self.load -= 1
        answer.over = True
        self.begin(now)
        self.changed = True
        return tokens

    def tokens_of(self, answer: Answering, now: float) -> int:
        """So far."""
        if not answer.running:
            return answer.kept
        self._advance(now)
        return min(answer.kept + floor(self._clock - answer.begun + SAME), answer.length)

    def lose(self, now: float) -> list[Answering]:
        """It is gone; what was asked of it, in that order, with the tokens that had arrived. Nobody has told the
        versions of these: they count as those of the oldest weights that can have drawn them."""
        orphans = [answer for _, _, answer in self._ends if not answer.over]
        for answer in orphans:
            answer.arrived = self.tokens_of(answer, now) - answer.kept
            if answer.arrived:
                answer.past = (*answer.past, (answer.asked, answer.arrived))
                answer.kept += answer.arrived
            answer.running = False
        orphans += self._waiting
        self._empty(now)
        self.life += 1
        self.changed = True
        return sorted(orphans, key=_order)

    # ------------------------------------------------------------------------------------------------------------ swaps

    def swap(self, version: Version, now: float) -> float | None:
        """Begin to bring it to `version`: when that is loaded, or None if its running answers have to end first."""
        self._advance(now)
        self.loading = version
        self.changed = True
        if self.running and not self._swap.interruptible:
            return None
        self.stalled_s -= max(0.0, self._at - now)  # what is half computed is computed again under the new weights
        self._at = now
        self.stands = True
        return now + self._swap.pause_s(self.running)

    def drained(self, now: float) -> float | None:
        """When its new weights are loaded, if it waited only for its last answer to end, and that has."""
        if self.loading is None or self.stands or self.running:
            return None
        self.stands = True
        return now + self._swap.pause_s(self.running)

    def swapped(self, now: float) -> None:
        """The new weights are there; the cache of all running answers is computed again, then they go on."""
        assert self.loading is not None, f"server {self.name} has loaded nothing"
        if not self.running:
            self._swapped_at.clear()
            self._held.clear()
        elif self.version >= 0:
            self._swapped_at.append(self._clock)
            self._held.append(self.version)
        self.version, self.loading, self.stands = self.loading, None, False
        self._at = now
        again = self._responses + sum(tokens for _, tokens in self._prompts.values())
        self.recomputed += again
        self._stall(again)
        self.begin(now)
        self.changed = True

    # ------------------------------------------------------------------------------------------------------------ clock

    def use(self, model: ServerModel, now: float) -> None:
        """From now on it is as fast as this model says."""
        self._advance(now)
        self._model = model
        self.changed = True

    def _has_room(self, answer: Answering) -> bool:
        """An answer that is longer than the whole cache runs alone."""
        fits = self._used + answer.prompt + answer.length <= self._model.cache
        return self.running == 0 or (self.running < self._model.max_running and fits)

    def _stall(self, tokens: float) -> None:
        """Nothing is decoded while so many tokens are computed."""
        seconds = tokens * self._model.prefill_s
        self._at += seconds
        self.stalled_s += seconds

    def _next(self) -> float:
        """Where the next answer ends; one runs."""
        ends = self._ends
        while ends[0][2].over:
            heappop(ends)
        return ends[0][0]

    def _advance(self, now: float) -> None:
        """Bring the clock to this time."""
        if now <= self._at:
            return
        if self.running and not self.stands:
            pace = pace_of(self._model, self.running, self._shared + self._responses)
            self._forward(min(tokens_in(pace, now - self._at), self._next() - self._clock))
        self._at = now

    def _forward(self, tokens: float) -> None:
        self._clock += tokens
        grown = tokens * self.running
        self._responses += grown
        self.decoded += grown

    def _leave(self, answer: Answering, tokens: float) -> None:
        """It runs no longer, and has so many tokens."""
        answer.running = False
        self.load -= 1
        self.running -= 1
        self._shared -= answer.prompt
        self._responses = self._responses - tokens if self.running else 0.0
        self._used -= answer.prompt + answer.length
        prompt = self._prompts[answer.group]
        prompt[0] -= 1
        if not prompt[0]:
            del self._prompts[answer.group]


def _order(answer: Answering) -> int:
    return answer.order
