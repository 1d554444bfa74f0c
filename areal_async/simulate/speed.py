"""How fast servers wrote: the times of a `ServerModel` from when answers were asked for, came, and stood still.

What always holds: a function of what was observed. An answer takes a decoding step a token, and each step the time that
the model says for what ran at that moment. So

    elapsed - pauses = Σ over its tokens (overhead_s + max(context_s · context, sequence_s · running)) · slower
                       + prefill_s · (tokens of prompts and cleared caches that were computed meanwhile) · slower
                       + request_s

where `slower` is beside_training while the trainer trained, else 1. That is linear in the unknown times, once it is
known how many steps fall between any two changes of what runs, which follows from the answers' tokens, and how much
slower it was. So they are fitted again and again, until nothing changes. None may be negative. The log tells
`weights_s` and `overhead_s` apart only where arithmetic limits some steps and memory others; `weights_s` is always 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from areal_async.errors import ConfigError
from areal_async.messages import GroupId, group_of
from areal_async.simulate.observed import Life, Seen, usable

Array = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

LEAST: Final = 50  # answers from which a speed is fitted: fewer tell more of chance than of the server
ROUNDS: Final = 20
SAME: Final = 1e-4  # of each time; another round would change nothing
REQUEST_ROUNDS: Final = 6
REQUEST_S: Final = 0.001  # less isn't looked for
MOST_SLOWER: Final = 2.0  # times: of two that share something each gets half at the least
SHORTEST_S: Final = 1e-9  # of a decoding step: in place of 0
MEMORY_FIRST: Final = (0.01, 1e-6, 0.0, 0.0, 0.0)  # where the search begins: overhead_s, context_s, sequence_s, ...
ARITHMETIC_FIRST: Final = (0.01, 0.0, 1e-4, 0.0, 0.0)
CORRECTIONS: Final = 5
AT_ONCE: Final = 2.0  # times as many steps, or as few, by one correction
WITHOUT: Final = 1e12  # more than any cost: what is needed is left out only where nothing else is possible
HARDLY: Final = 0.5  # of the squares that a single time leaves
DECODING: Final = (0, 1, 2)  # places of the times of a decoding step
EXACT: Final = 1e-6  # of the values: what is left is no more than rounding


@dataclass(frozen=True, slots=True)
class Speed:
    """See `ServerModel`. error: of an answer's time, root of the mean square, as a share of the mean time. answers: how
    many it rests on. most: answers that one server had at a time."""

    overhead_s: float
    context_s: float
    sequence_s: float
    prefill_s: float
    request_s: float
    beside_training: float
    error: float
    answers: int
    most: int


def fit_speed(lives: Sequence[Life], training: Sequence[tuple[float, float]]) -> Speed:
    """training: from when till when the trainer trained. Errors: ConfigError where too few answers came undisturbed.

    That answers took longer beside training counts only if it explains more than chance would (Schwarz 1978), with as
    many comparisons as there were steps: what the machine did during one of them it did to all answers of that time.
    """
    found = sum(1 for life in lives for _ in usable(life))
    if found < LEAST:
        raise ConfigError(
            f"only {found} answers came from servers that nothing disturbed, and {LEAST} are needed to fit how fast a"
            " server is; name a longer run"
        )
    alone, beside = (
        min((_fit(lives, training, np.array(start), most) for start in (MEMORY_FIRST, ARITHMETIC_FIRST)), key=_squares)
        for most in (1.0, MOST_SLOWER)
    )
    gain = len(training) * np.log(_squares(alone) / _squares(beside))
    return beside[0] if gain > np.log(max(len(training), 2)) else alone[0]


def generating(lives: Sequence[Life], servers: int, spans: Sequence[tuple[float, float]]) -> Array:
    """Share of each of these times in which a server generated, mean over servers."""
    whole = np.array(spans).reshape(-1, 2)
    busy_s = np.zeros(len(whole))
    for life in lives:
        line = _Timeline(life, (), 0.0)
        done = _sums(line.generating_s)
        busy_s += np.interp(whole[:, 1], line.moments, done) - np.interp(whole[:, 0], line.moments, done)
    share: Array = busy_s / servers / np.maximum(whole[:, 1] - whole[:, 0], SHORTEST_S)
    return share


def least_squares(columns: Array, values: Array, needed: int | None = None) -> Array:
    """Coefficients >= 0 with the least sum of squares, of as few columns as will do: one more counts only if the
    squares fall by more than noise alone would make them (Schwarz 1978: N · log(mean square) + K · log(N) is least).

    columns [N, K] with few K: each subset of them is tried. One that is a multiple or a sum of others gets 0, where it
    comes after them. needed: the place of one that isn't left out, unless it would be negative.
    """
    size = columns.shape[1]
    best, least = np.zeros(size), np.inf
    for count in range(1, size + 1):
        for chosen in map(list, combinations(range(size), count)):
            found, squares = _solved(columns, values, chosen)
            cost = len(values) * np.log(squares) + count * np.log(len(values))
            if needed is not None and needed not in chosen:
                cost = WITHOUT + cost
            if cost < least:
                best, least = found, cost
    return best


def fewest(columns: Array, values: Array, alone: Sequence[int]) -> Array:
    """As `least_squares`, but a single one of the columns `alone`, the best, where all together don't halve the squares
    that it leaves.

    Schwarz's rule takes values that don't depend on each other. Answers that ran at the same time have waited for the
    same things, so thousands of them tell what tens would; and of a run in which about as much runs all the time, a
    fixed time that explains a little more is found by chance, and is all the more wrong for a run in which less does.
    """
    single, left = min((_solved(columns, values, [place]) for place in alone), key=lambda solved: solved[1])
    several = least_squares(columns, values, alone[0] if len(alone) == 1 else None)
    rest = columns @ several - values
    return several if float(np.mean(rest * rest)) < HARDLY * left else single


def _solved(columns: Array, values: Array, chosen: list[int]) -> tuple[Array, float]:
    """Coefficients with these columns alone, and the mean square that they leave; that is infinite where one would be
    negative, or a column is a multiple or a sum of others."""
    scale = np.maximum(np.abs(columns[:, chosen]).max(axis=0), 1e-300)
    part = columns[:, chosen] / scale
    found, _, rank, _ = np.linalg.lstsq(part, values, rcond=1e-9)
    all_of = np.zeros(columns.shape[1])
    if rank < len(chosen) or (found < 0).any():
        return all_of, np.inf
    all_of[chosen] = found / scale
    rest = part @ found - values
    exact = EXACT * EXACT * float(values @ values)
    return all_of, max(max(float(rest @ rest), exact) / len(values), 1e-300)


def _squares(fitted: tuple[Speed, float]) -> float:
    return fitted[1]


def _fit(
    lives: Sequence[Life], training: Sequence[tuple[float, float]], start: Array, most_slower: float
) -> tuple[Speed, float]:
    """The speed, and the mean square of what it leaves. most_slower: of `beside_training`.

    request_s stands at the end of an answer, where nothing runs for it at the server any more: so each estimate of it
    changes what ran, and is followed by another one.
    """
    request_s, slower = 0.0, 1.0
    times = start
    for _ in range(REQUEST_ROUNDS):
        lines = [_Timeline(life, training, request_s) for life in lives]
        times, slower, columns, elapsed = _converged(lines, times, slower, most_slower)
        more_s = float(times[-1])
        request_s += more_s
        if more_s < REQUEST_S:
            break
    squares = max(float(np.mean((columns @ times - elapsed) ** 2)), (EXACT * float(np.mean(elapsed))) ** 2)
    overhead_s, context_s, sequence_s, prefill_s, _ = (float(time) for time in times)
    speed = Speed(
        overhead_s=overhead_s,
        context_s=context_s,
        sequence_s=sequence_s,
        prefill_s=prefill_s,
        request_s=request_s,
        beside_training=slower,
        error=float(np.sqrt(squares) / np.mean(elapsed)),
        answers=len(elapsed),
        most=max(line.most for line in lines),
    )
    return speed, squares


def _converged(
    lines: Sequence["_Timeline"], times: Array, slower: float, most_slower: float
) -> tuple[Array, float, Array, Array]:
    """times, slower, columns and elapsed times."""
    elapsed = np.concatenate([line.elapsed for line in lines])
    for _ in range(ROUNDS):
        parts = [line.columns(times, slower) for line in lines]
        quiet, busy = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
        before = np.append(times, slower)
        times = fewest(quiet + slower * busy, elapsed, DECODING)
        beside = busy @ times  # seconds of each answer beside training, had that not made them longer
        if beside.any():  # both at once: one after the other would take hundreds of rounds
            some = (quiet + slower * busy)[:, times > 0]
            found, *_ = np.linalg.lstsq(np.column_stack([some, beside]), elapsed, rcond=None)
            slower = min(max(1.0, slower + float(found[-1])), most_slower)
        if np.allclose(np.append(times, slower), before, rtol=SAME, atol=0):
            break
    return times, slower, quiet + slower * busy, elapsed


class _Timeline:
    """A life, cut at P moments at which anything changed, with P - 1 stretches between them; of A answers that count.

    moments [P]. generating_s [P - 1]: seconds of each stretch in which an answer ran. elapsed [A]: times of answers,
    without pauses. length [A]: their tokens. most: answers that ran at a time.
    """

    def __init__(self, life: Life, training: Sequence[tuple[float, float]], request_s: float) -> None:
        answers = life.answers
        begins = np.array([max(seen.began, life.began) for seen in answers])
        ends = np.maximum([min(seen.ended - request_s, life.ended) for seen in answers], begins)
        pauses = np.array([(pause.began, pause.ended) for pause in life.pauses]).reshape(-1, 2)
        steps = np.clip(np.array(training).reshape(-1, 2), life.began, life.ended)
        known = [begins, ends, pauses.ravel(), steps.ravel(), [life.began, life.ended]]
        moments = np.unique(np.concatenate(known))
        self.moments = moments
        self._size = len(moments)
        self._began, self._ended = np.searchsorted(moments, begins), np.searchsorted(moments, ends)
        stops, goes = np.searchsorted(moments, pauses[:, 0]), np.searchsorted(moments, pauses[:, 1])
        self._free = np.diff(moments) * (self._level(stops, goes) == 0)  # seconds of each stretch without pauses
        starts, stops_of = np.searchsorted(moments, steps[:, 0]), np.searchsorted(moments, steps[:, 1])
        self._training = self._level(starts, stops_of)  # 1 or 0
        self._swaps = goes
        self._running = self._level(self._began, self._ended)
        self.generating_s = self._free * (self._running > 0)
        self.most = int(self._running.max(initial=0.0))
        self._prompts = self._level(self._began, self._ended, np.array([float(seen.prompt) for seen in answers]))
        heads, ends_of, tokens = _groups(answers, self._began, self._ended)
        self._shared = self._level(heads, ends_of, tokens)  # prompt tokens of running groups
        asked = np.bincount(heads, weights=tokens, minlength=self._size)
        self._asked: Array = asked.astype(np.float64)  # prompt tokens from each moment on
        counted = dict(usable(life))
        mine = [place for place, seen in enumerate(answers) if seen in counted and begins[place] < ends[place]]
        self._first, self._last = self._began[mine], self._ended[mine]
        self.length = np.array([float(counted[answers[place]].length) for place in mine])
        self.elapsed = self._within(self._free)

    def columns(self, times: Array, slower: float) -> tuple[Array, Array]:
        """What overhead_s, context_s, sequence_s, prefill_s and request_s are multiplied by, if they are about `times`:
        [A, 5] beside nothing, and [A, 5] beside training."""
        overhead_s, context_s, sequence_s, prefill_s, _ = times
        context, computed = self._prompts, self._asked
        slow = np.where(self._training > 0, slower, 1.0)
        for _ in range(2):  # the steps follow from the context, which follows from the steps
            memory = context_s * context >= sequence_s * self._running
            step_s = (overhead_s + np.where(memory, context_s * context, sequence_s * self._running)) * slow
            free = self._decoding(np.append(computed[:-1] * slow, 0.0) * prefill_s)
            steps = np.where(self._running > 0, free / np.maximum(step_s, SHORTEST_S), 0.0)
            steps = self._as_many_as_tokens(steps)
            clock = _sums(steps)
            begun = self._level(self._began, self._ended, clock[self._began])
            context = self._prompts + self._running * (clock[1:] + clock[:-1]) / 2 - begun
            held = self._shared + self._running * clock[1:] - begun  # tokens in the cache at the end of each stretch
            computed = self._asked.copy()
            np.add.at(computed, self._swaps, held[self._swaps - 1])  # a swap ends a stretch: that of its pause
        share = self.length / np.maximum(self._within(steps), SHORTEST_S)

        def of(where: Array) -> Array:
            amounts = steps * where
            return np.stack(
                [
                    self._within(amounts) * share,
                    self._within(np.where(memory, amounts * context, 0.0)) * share,
                    self._within(np.where(memory, 0.0, amounts * self._running)) * share,
                    self._within(computed[:-1] * where),
                ],
                axis=1,
            )

        beside = np.minimum(self._training, 1.0)
        ones, noughts = np.ones((len(self.length), 1)), np.zeros((len(self.length), 1))
        return np.hstack([of(1 - beside), ones]), np.hstack([of(beside), noughts])

    def _as_many_as_tokens(self, steps: Array) -> Array:
        """Steps of each stretch so that each answer comes to as many as it has tokens, as nearly as can be: where those
        that ran have too few, there are more. (Without it a context could be too small because its cost is too large.)
        """
        counted = np.maximum(self._level(self._first, self._last), 1e-9)
        for _ in range(CORRECTIONS):
            share = np.clip(self.length / np.maximum(self._within(steps), SHORTEST_S), 1 / AT_ONCE, AT_ONCE)
            mean = self._level(self._first, self._last, share) / counted
            steps = steps * np.where(counted > SAME, mean, 1.0)
        return steps

    def _decoding(self, stalls: Array) -> Array:
        """Seconds of each stretch that are left for decoding. stalls [P]: seconds of computing that begin at each
        moment; what doesn't fit into a stretch is done in the next ones."""
        due = _sums(stalls[:-1] - self._free)
        left = due - np.minimum.accumulate(due)  # seconds of stalls that are still to be done at each moment
        rest: Array = self._free - (stalls[:-1] + left[:-1] - left[1:])
        return rest

    def _within(self, amounts: Array) -> Array:
        """Of each answer that counts: the sum over its stretches."""
        total = _sums(amounts)
        within: Array = total[self._last] - total[self._first]
        return within

    def _level(self, begins: Places, ends: Places, amounts: Array | None = None) -> Array:
        """In each stretch: the sum of what began and hasn't ended."""
        up = np.bincount(begins, weights=amounts, minlength=self._size)
        down = np.bincount(ends, weights=amounts, minlength=self._size)
        level: Array = np.cumsum(up - down)[:-1].astype(np.float64)
        return level


def _groups(answers: Sequence[Seen], begins: Places, ends: Places) -> tuple[Places, Places, Array]:
    """Where each group's first answer begins and its last one ends, and the tokens of its prompt, which its answers
    share."""
    groups: dict[GroupId, tuple[int, int, float]] = {}
    for seen, begin, end in zip(answers, begins.tolist(), ends.tolist(), strict=True):
        group = group_of(seen.sample)
        known = groups.get(group, (begin, end, 0.0))
        groups[group] = min(known[0], begin), max(known[1], end), float(seen.prompt)
    firsts, lasts, tokens = zip(*groups.values(), strict=True) if groups else ((), (), ())
    return np.array(firsts, dtype=np.intp), np.array(lasts, dtype=np.intp), np.array(tokens, dtype=np.float64)


def _sums(amounts: Array) -> Array:
    """One more than amounts: the sums up to each place."""
    return np.concatenate([[0.0], np.cumsum(amounts)])
