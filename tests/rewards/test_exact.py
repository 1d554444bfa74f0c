"""`exact` and the table of verdicts."""

from typing import get_args

import pytest

from areal_async.messages import FinishReason, Verdict
from areal_async.rewards.exact import exact
from areal_async.rewards.verdicts import REWARDS, Check


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
    found = exact(after)(check(response))
    assert found.verdict == verdict
    assert found.reward == (1.0 if verdict == "right" else 0.0)


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_row_without_an_answer_is_bad_data(answer: str | None) -> None:
    found = exact(None)(check("", answer))
    assert (found.verdict, found.reward) == ("bad_data", None)


def test_a_cut_answer_is_never_right() -> None:
    assert exact(None)(check("42", finish="length")).verdict == "no_answer"


def test_every_verdict_but_given_has_its_reward_in_the_table() -> None:
    assert {*REWARDS, "given"} == set(get_args(Verdict))
