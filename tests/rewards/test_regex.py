"""`regex`: what the last match found, or that there is one."""

import pytest

from areal_async.errors import RewardError
from areal_async.messages import FinishReason, RegexOptions, RewardSpec, Verdict
from areal_async.rewards.regex import grader
from areal_async.rewards.verdicts import Check, Outcome

ANSWER = r"(?s)<answer>(.*?)</answer>"


def judged(pattern: str, response: str, answer: str | None = "42", finish: FinishReason = "stop") -> Outcome:
    check = Check(prompt="", response=response, answer=answer, finish=finish, columns={})
    return grader(RewardSpec(function="regex", regex=RegexOptions(pattern=pattern)))(check)


@pytest.mark.parametrize(
    ("pattern", "response", "answer", "verdict"),
    [
        (ANSWER, "<answer> 42\n</answer>", " 42", "right"),
        (ANSWER, "<answer>42</answer> <answer>41</answer>", "42", "wrong"),
        (ANSWER, "<answer>41</answer> <answer>42</answer>", "42", "right"),
        (ANSWER, "<answer>42", "42", "no_answer"),
        (ANSWER, "<answer> </answer>", "42", "no_answer"),
        (ANSWER, "<answer>42</answer>", None, "bad_data"),
        (ANSWER, "<answer>42</answer>", " ", "bad_data"),
        (r"####\s*(\d+)|boxed\{(\d+)\}", "#### 41, boxed{42}", "42", "right"),
        (r"(?:a(b))?c", "c", "b", "no_answer"),
        (r"^<think>", "<think>so", None, "right"),
        (r"^<think>", "so <think>", None, "wrong"),
        (r"(?i)ANSWER", "the answer", None, "right"),
    ],
)
def test_the_last_match_is_compared_or_any_is_enough(
    pattern: str, response: str, answer: str | None, verdict: Verdict
) -> None:
    assert judged(pattern, response, answer).verdict == verdict
    if verdict in ("right", "wrong"):
        assert judged(pattern, response, answer, "length").verdict == "no_answer"


def test_what_was_taken_is_said() -> None:
    assert judged(ANSWER, "<answer> 41 </answer>").extracted == "41"
    assert judged("b+", "abbbc").extracted == "bbb"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (None, "reward.regex.pattern is not set"),
        ("a(b", r"reward.regex.pattern: missing \), unterminated subpattern at position 1: a⟶\(b"),
        ("a**", "multiple repeat at position 2"),
    ],
)
def test_a_pattern_that_is_none_is_said_before_anything_runs(pattern: str | None, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        grader(RewardSpec(function="regex", regex=RegexOptions(pattern=pattern)))
