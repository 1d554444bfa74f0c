"""What a check is given, what comes of it, and the one table from verdicts to rewards.

What always holds: an `Outcome` whose reward is a number has a finite one.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from areal_async.messages import FinishReason, Verdict

REWARDS: Final[dict[Verdict, float | None]] = {
    "right": 1.0,
    "wrong": 0.0,
    "no_answer": 0.0,  # the model's fault: it was to give one
    "timeout": 0.0,  # an answer that can't be checked in time must not pay
    "crash": 0.0,  # nor one that breaks the checker
    "bad_data": None,  # the data row's fault: neither good nor bad for the model
    "infrastructure": None,  # nobody looked at the answer
}
"""`given` isn't in here: its reward is the number that was given."""


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
    """reward: None where the verdict gives none. why: for people."""

    verdict: Verdict
    reward: float | None
    why: str = ""


Grader: TypeAlias = Callable[[Check], Outcome]
"""Judges one answer. What it raises is a `crash`."""


def outcome(verdict: Verdict, why: str = "") -> Outcome:
    """The outcome that the table has for this verdict."""
    return Outcome(verdict, REWARDS[verdict], why)
