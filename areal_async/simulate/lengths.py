"""What the model of a simulated run answers: lengths, rewards and prompts, drawn from distributions.

What always holds: an answer is a function of (seed, group, member, attempt) alone, on any machine and in any order, and
nothing is kept but 64 groups' draws: a run of millions of samples costs no memory here. Draws are SplitMix64 hashes of
these numbers, turned into normal numbers by the inverse of their distribution; so one distribution serves all kinds: a
length is the quantile of its draw (a Gaussian copula: members of a group may be alike).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from math import exp, inf, log, sqrt
from statistics import NormalDist
from typing import Final, NamedTuple, Protocol

from areal_async.simulate.models import Answer

_NORMAL: Final = NormalDist()
_inverse: Final = _NORMAL.inv_cdf  # of its distribution
_MASK: Final = (1 << 64) - 1
_TOP: Final = 1 << 53  # a float's whole numbers end here: the draws are (k + 1/2) / 2^53, never 0 or 1
_Z95: Final = _NORMAL.inv_cdf(0.95)
_POINTS: Final = 2000  # of the numerical means below: the error is under a thousandth of them


class Lengths(Protocol):
    """A distribution of answers' lengths in tokens, before anything cuts them."""

    def at(self, normal: float) -> float:
        """The length that belongs to this normal number: its quantile, growing with it."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(mu + sigma · normal)."""

    mu: float
    sigma: float

    @classmethod
    def of_mean(cls, mean: float, sigma: float, measured_at: int | None = None) -> "LogNormal":
        """The one with this mean; where `measured_at`, the mean of its lengths after they were cut there.

        E[min(X, c)] = exp(mu + sigma²/2) · Φ((ln c − mu − sigma²) / sigma) + c · (1 − Φ((ln c − mu) / sigma)) grows
        with mu, which is found by halving. Raises ValueError where no log-normal has it: a mean at the limit or above.
        """
        if measured_at is None:
            return cls(log(mean) - sigma * sigma / 2, sigma)
        if mean >= measured_at:
            raise ValueError(f"answers that were cut at {measured_at} tokens can't have {mean:g} in the mean")
        low, high = log(mean) - sigma * sigma / 2, log(measured_at) + 40 * (sigma + 0.01)
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, sigma).mean_cut(measured_at) < mean else (low, middle)
        return cls((low + high) / 2, sigma)

    @classmethod
    def of_percentiles(cls, median: float, p95: float) -> "LogNormal":
        """Raises ValueError where they stand in the wrong order."""
        if p95 < median:
            raise ValueError(f"the 95th percentile ({p95:g}) is below the median ({median:g})")
        return cls(log(median), log(p95 / median) / _Z95)

    def mean_cut(self, limit: float) -> float:
        """E[min(X, limit)]."""
        if not self.sigma:
            return min(exp(self.mu), limit)
        z = (log(limit) - self.mu) / self.sigma
        # exp(mu + sigma²/2) may be too large for a float where next to nothing of it is below the limit
        below = _NORMAL.cdf(z - self.sigma)
        whole = exp(min(self.mu + self.sigma * self.sigma / 2, 700.0)) * below if below else 0.0
        return whole + limit * (1 - _NORMAL.cdf(z))

    def at(self, normal: float) -> float:
        return exp(min(self.mu + self.sigma * normal, 700.0))


class Empirical:
    """Lengths that were seen, each as likely as any other."""

    def __init__(self, lengths: Sequence[int]) -> None:
        if not lengths:
            raise ValueError("no lengths to draw from")
        self._lengths = sorted(lengths)

    def at(self, normal: float) -> float:
        count = len(self._lengths)
        return self._lengths[min(int(_NORMAL.cdf(normal) * count), count - 1)]


class Histogram:
    """Shares of bins; within a bin every length is as likely as any other. bins: longest of each, ascending; the first
    one begins at 1."""

    def __init__(self, bins: Sequence[int], shares: Sequence[float]) -> None:
        total = sum(shares)
        if len(bins) != len(shares):
            raise ValueError(f"{len(shares)} shares for {len(bins)} bins")
        if any(after <= before for before, after in pairwise(bins)):
            raise ValueError("the bins must ascend")
        if total <= 0:
            raise ValueError("all shares are 0")
        self._bins = list(bins)
        self._ends = [part / total for part in accumulate(shares)]

    def at(self, normal: float) -> float:
        place = _NORMAL.cdf(normal)
        bin_ = min(bisect_left(self._ends, place), len(self._ends) - 1)
        before, first = (self._ends[bin_ - 1], self._bins[bin_ - 1]) if bin_ else (0.0, 0)
        share = self._ends[bin_] - before
        return first + (self._bins[bin_] - first) * ((place - before) / share if share else 1.0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """`models.Answers`: every answer drawn.

    max_new_tokens: what is longer is cut there. prompt: of prompts' lengths; prompt_limit: the longest.
    alike: correlation of a group's members. growth: of lengths, a share of their first value, for each `batch_groups`
    groups. success: share of answers with reward 1, of those that aren't cut (a cut answer has 0).
    """

    seed: int
    lengths: Lengths
    prompt: LogNormal
    prompt_limit: int
    max_new_tokens: int
    alike: float
    growth: float
    batch_groups: int
    success: float
    _own: float = field(init=False)  # weights of an answer's own draw and of its group's
    _shared: float = field(init=False)
    _succeed: float = field(init=False)  # draws below it do
    _shared_by: Callable[[int], "_Group"] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_own", sqrt(1 - self.alike))
        object.__setattr__(self, "_shared", sqrt(self.alike))
        below = _NORMAL.inv_cdf(self.success) if 0 < self.success < 1 else (-inf if self.success <= 0 else inf)
        object.__setattr__(self, "_succeed", below)
        object.__setattr__(self, "_shared_by", lru_cache(maxsize=64)(self._group))  # members come one after another

    def answer(self, group: int, member: int, attempt: int) -> Answer:
        drawn = self._shared_by(group)
        sample = _hash(_hash(drawn.state, member), attempt)
        wanted = max(1, round(self.lengths.at(self._own * _normal(sample, 0) + drawn.length) * drawn.growth))
        if wanted > self.max_new_tokens:
            return Answer(drawn.prompt, self.max_new_tokens, truncated=True, reward=0.0)
        succeeds = self._own * _normal(sample, 1) + drawn.success < self._succeed
        return Answer(drawn.prompt, wanted, truncated=False, reward=1.0 if succeeds else 0.0)

    def _group(self, group: int) -> "_Group":
        drawn = _hash(self.seed ^ _GROUP, group)
        return _Group(
            state=_hash(self.seed, group),
            length=self._shared * _normal(drawn, 0),
            success=self._shared * _normal(drawn, 1),
            prompt=self._prompt(_normal(drawn, 2)),
            growth=max(0.0, 1 + self.growth * (group // self.batch_groups)),
        )

    def _prompt(self, normal: float) -> int:
        wanted = self.prompt.at(normal) if self.prompt.sigma else exp(self.prompt.mu)
        return min(max(1, round(wanted)), self.prompt_limit)


def means(lengths: Lengths, limit: int) -> tuple[float, float]:
    """(mean length, mean context of a running answer) of answers that are cut at `limit`, without the prompt.

    An answer of L tokens runs L decoding steps, with L/2 of its tokens there in the mean: E[L²] / (2 · E[L]).
    """
    drawn = [min(lengths.at(_NORMAL.inv_cdf((k + 0.5) / _POINTS)), limit) for k in range(_POINTS)]
    total = sum(drawn)
    return total / _POINTS, sum(length * length for length in drawn) / (2 * total)


_GROUP: Final = 0x67726F7570  # draws of a group aren't those of any sample of it


class _Group(NamedTuple):
    """What the samples of a group share. state: from which their own draws come. length, success: its part of their
    normal numbers. prompt: tokens. growth: times as long as the first groups' answers."""

    state: int
    length: float
    success: float
    prompt: int
    growth: float


def _normal(state: int, stream: int) -> float:
    return _inverse(((_hash(state, stream) >> 11) + 0.5) / _TOP)


def _hash(state: int, number: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): its output function over the state and a counter."""
    value = (state + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
