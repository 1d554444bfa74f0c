"""What a trainer answered once, and what it answers now: the same, or by how much not.

What always holds: a difference is counted from the recorded value, in units of 1 or of the recorded value, whichever is
more, so that one number bounds small losses and large norms; what both sides don't tell isn't compared, and is named.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from areal_async.errors import ConfigError
from areal_async.messages import StepDone

# Arithmetic of the same weights and tokens: on the same machine the same to the last digit (on a CPU also with another
# number of threads). Other processors and builds of torch add in another order: some 1e-7 of a sum in float32, and the
# weights that follow carry it along.
SUMS: Final = 1e-4
# Shares of tokens on one side of a bound. One that lies at the bound may fall to the other side: 1/3,000 of a step of
# 3,000 tokens, and a few may.
SHARES: Final = 2e-3
TOLERANCES: Final[dict[str, float]] = {
    "loss": SUMS,
    "grad_norm": SUMS,
    "entropy": SUMS,
    "kl_ref": SUMS,
    "mismatch_max": SUMS,
    "behav_k3": SUMS,
    "behav_ess": SUMS,
    "clip_share": SHARES,
    "capped_share": SHARES,
    # counted or computed from the configuration alone
    "mismatch_tokens": 0.0,
    "tokens_trained": 0.0,
    "tokens_masked": 0.0,
    "lr": 0.0,
}
TIMES: Final = ("train_s",)  # never the same
SKIPPED: Final = "skipped"


class Compared(msgspec.Struct, frozen=True):
    """One step. recorded, now: its metrics. recorded_skipped, now_skipped: why the update was left out, or ""."""

    step: int
    branch: int
    recorded: dict[str, float]
    now: dict[str, float]
    recorded_skipped: str
    now_skipped: str

    @classmethod
    def of(cls, recorded: StepDone, now: StepDone) -> "Compared":
        return cls(recorded.step, recorded.branch, recorded.metrics, now.metrics, recorded.skipped, now.skipped)

    def differences(self) -> dict[str, float]:
        """By field; of those that both have, and that aren't times."""
        return {
            name: distance(value, self.now[name])
            for name, value in self.recorded.items()
            if name in self.now and name not in TIMES
        }


class Difference(msgspec.Struct, frozen=True):
    """One that is larger than allowed. Of `skipped`: 1 where the update was left out, else 0."""

    step: int
    field: str
    recorded: float
    now: float
    difference: float
    allowed: float
    why: str = ""

    def __str__(self) -> str:
        if self.field == SKIPPED:
            return f"step {self.step}: skipped: {self.why}"
        return (
            f"step {self.step}: {self.field}: recorded {self.recorded:.9g}, now {self.now:.9g}: they differ by "
            f"{self.difference:.2g}, allowed is {self.allowed:g}"
        )


class Largest(msgspec.Struct, frozen=True):
    """Of a field: the largest difference, at which step, and what is allowed. over: at how many steps it is more."""

    difference: float
    step: int
    allowed: float
    over: int


def distance(recorded: float, now: float) -> float:
    return abs(now - recorded) / max(1.0, abs(recorded))


def allowed_for(field: str, tolerances: Mapping[str, float]) -> float:
    """tolerances: that were given, in place of the usual ones."""
    return tolerances.get(field, TOLERANCES.get(field, SUMS))


def over(compared: Compared, tolerances: Mapping[str, float]) -> Iterator[Difference]:
    """What of a step is not the same."""
    if bool(compared.recorded_skipped) != bool(compared.now_skipped):
        words = [text or "no" for text in (compared.recorded_skipped, compared.now_skipped)]
        was, now = float(bool(compared.recorded_skipped)), float(bool(compared.now_skipped))
        why = f"recorded: {words[0]}; now: {words[1]}"
        yield Difference(compared.step, SKIPPED, was, now, 1.0, 0.0, why)
    for field, difference in compared.differences().items():
        allowed = allowed_for(field, tolerances)
        if not difference <= allowed:
            yield Difference(compared.step, field, compared.recorded[field], compared.now[field], difference, allowed)


def largest(steps: Iterable[Compared], tolerances: Mapping[str, float]) -> dict[str, Largest]:
    """By field."""
    found: dict[str, Largest] = {}
    for compared in steps:
        for field, difference in compared.differences().items():
            allowed = allowed_for(field, tolerances)
            before = found.get(field, Largest(-1.0, -1, allowed, 0))
            count = before.over + (not difference <= allowed)
            more = difference > before.difference
            found[field] = Largest(
                difference if more else before.difference, compared.step if more else before.step, allowed, count
            )
    return found


def not_compared(steps: Iterable[Compared]) -> tuple[str, ...]:
    """Fields that only one side tells."""
    names = {name: None for compared in steps for name in sorted(compared.recorded.keys() ^ compared.now.keys())}
    return tuple(names)


def read_tolerances(given: Iterable[str]) -> dict[str, float]:
    """Of `NAME=X`. Raises ConfigError."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in TOLERANCES:
            close = difflib.get_close_matches(name, TOLERANCES, 1, 0.0)
            raise ConfigError(f"command line: --tolerance {text}: no such field; did you mean {close[0]}?")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if not 0 <= found[name] < float("inf"):
            raise ConfigError(f"command line: --tolerance {text}: should be a number from 0 on, such as {name}=1e-3")
    return found
