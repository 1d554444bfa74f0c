"""`numeric`: the last number, compared exactly."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.messages import FinishReason, NumericOptions, RewardSpec, Verdict
from areal_async.rewards.numeric import grader
from areal_async.rewards.verdicts import Check, Outcome

EXACT = NumericOptions(relative=0.0)
HUGE = "9" * 20_000


def judged(
    response: str,
    answer: str | None,
    options: NumericOptions = EXACT,
    *,
    after: str | None = None,
    finish: FinishReason = "stop",
) -> Outcome:
    check = Check(prompt="", response=response, answer=answer, finish=finish, columns={})
    return grader(RewardSpec(function="numeric", numeric=options, exact_after=after))(check)


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("42", "42"),
        ("6 * 7 = 42.", "42"),
        ("first 41, then 42!", "42"),
        ("It costs $1,234.50.", "1234.5"),
        ("-$5", "-5"),
        ("€ -5", "-5"),
        ("x = −3", "-3"),
        ("5-3", "3"),
        ("f(2)-3", "3"),
        ("x-3", "3"),
        ("5 - 3", "3"),
        ("28 %", "28"),
        ("28%", "28"),
        ("1.5e3 m", "1500"),
        ("2E-2", "0.02"),
        ("1.5 × 10^3", "1500"),
        ("1.5 \\times 10^{-3}", "0.0015"),
        ("2*10**6", "2000000"),
        ("3/4", "0.75"),
        ("-3 / 4", "-3/4"),
        (".5", "0.5"),
        ("(3,4)", "4"),
        ("12,34", "34"),
        ("1,2345", "2345"),
        ("1,234,567", "1234567"),
        ("x2 = 7 cm2", "7"),
        ("答案是5。", "5"),
        ("so it is ...42", "42"),
        ("3.14 in v1.2.3", "3.14"),
        ("**42**", "42"),
        ("\\boxed{42}", "42"),
        ("007", "7"),
        (HUGE, HUGE),
        ("1e999999999", "10e999999998"),
    ],
)
def test_the_last_number_is_found_and_compared(response: str, number: str) -> None:
    assert judged(response, number).verdict == "right"
    assert judged(response, number + "1").verdict == "wrong"
    assert judged(response, number, finish="length").verdict == "no_answer"


@pytest.mark.parametrize("response", ["", "none", "x2", "1/0", "-", "1e" + "9" * 30, "٣"])
def test_no_number_is_no_answer(response: str) -> None:
    assert judged(response, "3").verdict == "no_answer"


@pytest.mark.parametrize("answer", [None, "", " ", "many", "3 cm", "\\frac{1}{2}", "1,23", "1 2", "1/0", "nan", "inf"])
def test_a_data_row_without_a_number_is_bad_data(answer: str | None) -> None:
    assert judged("3", answer).verdict == "bad_data"


@pytest.mark.parametrize(
    "answer", ["1,234", " 1234 ", "$1,234", "1234%", "1234.0", "1.234e3", "2468/2", "+1234", "\\$1234"]
)
def test_a_data_row_may_write_it_in_any_of_the_ways(answer: str) -> None:
    assert judged("1234", answer).verdict == "right"


@pytest.mark.parametrize(
    ("response", "answer", "relative", "absolute", "verdict"),
    [
        ("0.3333333", "1/3", 1e-6, 0.0, "right"),
        ("0.33333", "1/3", 1e-6, 0.0, "wrong"),
        ("0.3333333", "1/3", 0.0, 0.0, "wrong"),
        ("0.1", "0.10", 0.0, 0.0, "right"),
        ("10000001", "10000000", 1e-6, 0.0, "wrong"),  # whole numbers aren't each other's rounding
        ("10000000.5", "10000000", 1e-6, 0.0, "right"),
        ("1.01", "1", 0.01, 0.0, "right"),
        ("1.0100001", "1", 0.01, 0.0, "wrong"),
        ("103", "100", 0.0, 3.0, "right"),
        ("104", "100", 0.0, 3.0, "wrong"),
        ("-100", "100", 1.0, 3.0, "wrong"),
        ("0.0000001", "0", 1e-6, 0.0, "wrong"),
        ("0.0000001", "0", 0.0, 1e-6, "right"),
    ],
)
def test_the_tolerance(response: str, answer: str, relative: float, absolute: float, verdict: Verdict) -> None:
    options = NumericOptions(relative=relative, absolute=absolute)
    assert judged(response, answer, options).verdict == verdict


@pytest.mark.parametrize(
    ("response", "verdict"),
    [("7 #### 42", "right"), ("42 #### 7", "wrong"), ("42", "no_answer"), ("42 ####", "no_answer"),
     ("#### 7 #### 42", "right")],
)  # fmt: skip
def test_only_what_follows_the_marker_is_looked_at(response: str, verdict: Verdict) -> None:
    assert judged(response, "42", after="####").verdict == verdict


@settings(derandomize=True, max_examples=100, deadline=None)
@given(number=st.integers(), words=st.text("ab .=:", max_size=10), form=st.sampled_from(["{}", "{:,}", "{}.0"]))
def test_whole_numbers_of_any_length_are_exact(number: int, words: str, form: str) -> None:
    response = f"{words} {form.format(number)} {words}"
    assert judged(response, str(number), NumericOptions()).verdict == "right"
    for other in (number + 1, number * 10 + 1, -number - 1):
        assert judged(response, str(other), NumericOptions()).verdict == "wrong"


@settings(derandomize=True, max_examples=100, deadline=None)
@given(one=st.decimals(allow_nan=False, allow_infinity=False), other=st.decimals(allow_nan=False, allow_infinity=False))
def test_decimals_are_compared_as_fractions(one: Decimal, other: Decimal) -> None:
    same = Fraction(one) == Fraction(other)
    assert judged(str(one), str(other)).verdict == ("right" if same else "wrong")
