"""`exact` and the table of verdicts."""

from typing import get_args

import pytest

from areal_async.messages import FinishReason, RewardSpec, RewardTable, Verdict
from areal_async.rewards.exact import grader
from areal_async.rewards.verdicts import Check, Outcome, given, reward_of


def check(response: str, answer: str | None = "42", finish: FinishReason = "stop") -> Check:
    return Check(prompt="6*7=", response=response, answer=answer, finish=finish, columns={})


@pytest.mark.parametrize(
    ("response", "after", "verdict"),
    [
        ("42", None, "right"),
        (" 42\n", None, "right"),
        ("42.0", None, "wrong"),
        ("6*7>42", ">", "right"),
        ("1>42>41", ">", "wrong"),
        ("41>1>42", ">", "right"),
        ("42", ">", "no_answer"),
        ("42> ", ">", "no_answer"),
        ("", None, "no_answer"),
    ],
)
def test_what_follows_the_last_marker_is_compared(response: str, after: str | None, verdict: Verdict) -> None:
    assert grader(RewardSpec(exact_after=after))(check(response)).verdict == verdict


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_row_without_an_answer_is_bad_data(answer: str | None) -> None:
    assert grader(RewardSpec())(check("", answer)).verdict == "bad_data"


def test_a_cut_answer_is_never_right() -> None:
    assert grader(RewardSpec())(check("42", finish="length")).verdict == "no_answer"


TABLE = RewardTable(right=2.0, wrong=-1.0, no_answer=-2.0, timeout=-3.0, crash=-4.0)


@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_every_verdict_has_its_reward_from_the_table_or_none(verdict: Verdict) -> None:
    reward = reward_of(Outcome(verdict, reward=0.5), TABLE)
    assert reward == {"given": 0.5, "bad_data": None, "infrastructure": None}.get(
        verdict, getattr(TABLE, verdict, None)
    )


def test_a_number_that_is_not_finite_is_no_reward() -> None:
    for number in (float("nan"), float("inf")):
        assert reward_of(given(number), TABLE) is None
