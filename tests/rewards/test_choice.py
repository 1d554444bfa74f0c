"""`choice`: which letter is stated as the answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.messages import FinishReason, RewardSpec, Verdict
from areal_async.rewards.choice import grader
from areal_async.rewards.verdicts import Check, Outcome


def judged(response: str, answer: str | None, after: str | None = None, finish: FinishReason = "stop") -> Outcome:
    check = Check(prompt="", response=response, answer=answer, finish=finish, columns={})
    return grader(RewardSpec(function="choice", exact_after=after))(check)


STATED = [
    ("The answer is (B)", "B"),
    ("The answer is B.", "B"),
    ("The correct answer is: B", "B"),
    ("The answer to the question is **B**, since it is red.", "B"),
    ("So the answer is B because A is too small.", "B"),
    ("Therefore, the correct option is B) Paris.", "B"),
    ("**Answer:** B", "B"),
    ("**Final answer**: (b)", "B"),
    ("Answer:\n\n**B**\n", "B"),
    ("answer = b", "B"),
    ("Answer: Option B", "B"),
    ("The answer is option (B).", "B"),
    ("\\boxed{B}", "B"),
    ("so $\\boxed{\\text{(B) Paris}}$.", "B"),
    ("\\boxed{B. \\frac{1}{2}}", "B"),
    ("\\fbox{b}", "B"),
    ("I choose B.", "B"),
    ("I'd go with (B)", "B"),
    ("Option B is the best answer.", "B"),
    ("So (B) is correct.", "B"),
    ("B is the correct answer, A is not.", "B"),
    ("The answer is A. No, wait: the answer is B.", "B"),
    ("\\boxed{A}, I mean \\boxed{B}", "B"),
    ("The answer is **B**.\n\n**A** is too small, **C** too large.", "B"),
    ("A. London\nB. Paris\n\nAnswer: B. Paris", "B"),
    ("B", "B"),
    ("b", "B"),
    ("B.", "B"),
    ("(B)", "B"),
    ("**B**", "B"),
    ("**(B)**.", "B"),
    ("B) Paris", "B"),
    ("(B) the dog", "B"),
    ("**B. Paris** lies on the Seine.", "B"),
    ("Let me see. It can't be A dog.\n\nB", "B"),
    ("We look at all of them.\n- **B**\n", "B"),
    ("The answer is A", "A"),
    ("Answer: A dog has four legs.\nAnswer: B", "B"),
    ("The answer is 3.", "3"),
    ("\\boxed{2}", "2"),
    ("Of 4 options, option 2 is correct.", "2"),
]


@pytest.mark.parametrize(("response", "label"), STATED)
def test_the_last_statement_is_the_answer(response: str, label: str) -> None:
    found = judged(response, label)
    assert (found.verdict, found.extracted) == ("right", label)
    other = "7" if label.isdigit() else "Q"
    assert judged(response, other).verdict == "wrong"
    assert judged(response, label, finish="length").verdict == "no_answer"


@pytest.mark.parametrize(
    ("response", "answer", "verdict"),
    [
        ("A dog", "A", "no_answer"),
        ("A dog is an animal. I like it.", "A", "no_answer"),
        ("The answer is A dog", "A", "no_answer"),
        ("The answer is a matter of taste.", "A", "no_answer"),
        ("The answer is a, so to speak, matter of taste.", "A", "no_answer"),
        ("The answer is I'm not sure", "I", "no_answer"),
        ("(A) is smaller than (B)", "A", "no_answer"),
        ("I think A, B and C are all fine", "A", "no_answer"),
        ("A. London\nB. Paris\nC. Rome", "C", "no_answer"),
        ("If B is correct, then 2 = 3.", "B", "no_answer"),
        ("Neither A nor B is correct.", "B", "no_answer"),
        ("", "A", "no_answer"),
        ("The answer is Paris", "P", "no_answer"),
        ("The answer is 3.5", "3", "no_answer"),
        ("The answer is 12 %", "12", "no_answer"),
        ("The answer is 1,000", "1", "no_answer"),
        ("The answer is B", "2", "no_answer"),
        ("The answer is A or B", "A", "wrong"),
        ("The answer is A or B", "B", "wrong"),
        ("Answer: A, C", "A", "wrong"),
        ("\\boxed{A, B}", "B", "wrong"),
        ("(A) and (B) both fit.\nAnswer: (A) and (B)", "B", "wrong"),
        ("The answer is A/B.", "B", "wrong"),
        ("A, B", "B", "wrong"),
        ("\\boxed{Paris}", "B", "wrong"),
        ("The answer is B, A is wrong.", "B", "right"),
        ("The answer is B and B.", "B", "right"),
        ("\\boxed{B", "B", "no_answer"),
    ],
)
def test_what_is_no_statement_of_one_option(response: str, answer: str, verdict: Verdict) -> None:
    assert judged(response, answer).verdict == verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [("B", "right"), ("b", "right"), ("(B)", "right"), ("B.", "right"), (" **B** ", "right"), ("\\text{B}", "right"),
     ("", "bad_data"), (None, "bad_data"), ("AB", "bad_data"), ("A, B", "bad_data"), ("Paris", "bad_data"),
     ("-1", "bad_data"), ("1.5", "bad_data")],
)  # fmt: skip
def test_what_the_data_row_may_say(answer: str | None, verdict: Verdict) -> None:
    assert judged("Answer: B", answer).verdict == verdict


@pytest.mark.parametrize(
    ("response", "verdict"),
    [("A? >B", "right"), ("The answer is A >B because", "right"), (">A >  (B)\n", "right"), ("B", "no_answer"),
     (">B >", "no_answer"), (">A or B", "wrong"), (">so \\boxed{B}", "right")],
)  # fmt: skip
def test_only_what_follows_the_marker_is_looked_at(response: str, verdict: Verdict) -> None:
    assert judged(response, "B", after=">").verdict == verdict


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    before=st.text("ABCDabcd .,:;()*\n$", max_size=40),
    stated=st.sampled_from("ABCDEFGHIJ"),
    form=st.sampled_from(["\\boxed{%s}", "the answer is (%s).", "Answer: %s", "**Answer:** **%s**"]),
)
def test_whatever_stands_before_the_last_statement_decides(before: str, stated: str, form: str) -> None:
    response = f"{before}\n{form % stated}"
    for label in "ABCDEFGHIJ":
        assert judged(response, label).verdict == ("right" if label == stated else "wrong")
