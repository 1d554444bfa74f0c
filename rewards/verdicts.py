"""What a check is given, what comes of it, and the one place where a verdict becomes a reward.

What always holds: `reward_of` is a finite number or None; `bad_data` and `infrastructure` never give a number.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from areal_async.messages import FinishReason, RewardTable, ScoreResult, ScoreTask, Verdict


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to be judged.

    prompt: text as rendered for the model. response: the answer's text without special tokens. answer: the data row's.
    finish: "stop", or "length" if it was cut at the token limit. columns: the data row's other columns.
    """

    prompt: str
    response: str
    answer: str | None
    finish: FinishReason
    columns: dict[str, object]


class Outcome(msgspec.Struct, frozen=True):
    """reward: of the verdict `given` only. why: for people. extracted: what was taken as the answer. settled: of
    `infrastructure`: the check isn't to be made again, since that would not be safe."""

    verdict: Verdict
    why: str = ""
    extracted: str = ""
    reward: float | None = None
    settled: bool = False


Grader: TypeAlias = Callable[[Check], Outcome]
"""Judges one answer. What it raises is a `crash`."""


def given(reward: float, why: str = "", extracted: str = "") -> Outcome:
    """A number of its own. One that is not finite says nothing of the answer: `bad_data`."""
    if not math.isfinite(reward):
        return Outcome("bad_data", f"{reward} is no reward" + (f"; {why}" if why else ""), extracted)
    return Outcome("given", why, extracted, reward)


def reward_of(outcome: Outcome, table: RewardTable) -> float | None:
    """The reward: the number that was given, the table's, or None where the verdict gives none."""
    match outcome.verdict:
        case "given":
            return outcome.reward
        case "bad_data" | "infrastructure":
            return None
        case verdict:
            return float(getattr(table, verdict))


def result_of(task: ScoreTask, outcome: Outcome, table: RewardTable, seconds: float = 0.0) -> ScoreResult:
    """The answer to a task."""
    return ScoreResult(
        sample=task.sample,
        attempt=task.attempt,
        verdict=outcome.verdict,
        reward=reward_of(outcome, table),
        why=outcome.why,
        extracted=outcome.extracted,
        seconds=seconds,
        settled=outcome.settled,
    )
