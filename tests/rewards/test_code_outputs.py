"""Right output is right in whatever form it is printed; anything else never is."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.rewards.code.outputs import Json, printed_difference, read_json, result_difference

GOOGOL = "1" + "0" * 10_000


@pytest.mark.parametrize(
    ("expected", "got", "right"),
    [
        pytest.param("0.333333333333", "0.333333", True, id="C14-decimal"),
        pytest.param("50000000000000000", "50000000000000001", False, id="C14-integer"),
        pytest.param("1 2\n3", "1 2 \r\n3\n\n", True, id="C14-white-space"),
        pytest.param("1\n2", "1 2", False, id="C14-lines"),
        pytest.param(GOOGOL, GOOGOL + "\n", True, id="C14-long-integer"),
        (GOOGOL, GOOGOL[:-1] + "1", False),
        ("1 2", "1 2 3", False),
        ("1  2", "1\t2", True),
        ("1", "\n1", False),
        ("a\n\nb", "a\nb", False),
        ("", "", True),
        ("", "\n \n", True),
        ("", "0", False),
        ("0", "", False),
        ("5", "5.0", False),
        ("5.0", "5", True),
        ("5.0", "5.000001", True),
        ("5.0", "5.00001", False),
        ("1e-9", "0", True),
        ("1E3", "1000.0001", True),
        ("1000000.5", "1000000.9", True),
        ("1000000.5", "1000002", False),
        ("0.5", "nan", False),
        ("0.5", "inf", False),
        ("1e999", "1e999", True),
        ("1e999", "5", False),
        ("0.5", "1/2", False),
        ("0.5", "0.5_0", False),
        ("0.5", "٠.٥", False),
        ("nan", "nan", True),
        ("Yes", "YES", False),
        ("007", "7", False),
        ("x=0.5", "x=0.50", False),
        ("√2 → 1.41421356", "√2 → 1.414213562", True),
    ],
)
def test_printed(expected: str, got: str, right: bool) -> None:
    assert (printed_difference(expected, got) == "") == right


@pytest.mark.parametrize(
    ("expected", "got", "right"),
    [
        pytest.param("[0.1, 0.2]", "[0.1000000001, 0.2]", True, id="C14-call"),
        pytest.param("1", "true", False, id="C15-true-for-1"),
        ("[0.1, 0.2]", "[0.1, 0.21]", False),
        ("true", "1", False),
        ("1", "1.0", False),
        ("1.0", "1", True),
        ("1.0", "true", False),
        ("1", '"1"', False),
        ("null", "0", False),
        ("null", "null", True),
        ("[]", "{}", False),
        ("[1, 2]", "[2, 1]", False),
        ("[1]", "[1, 1]", False),
        ('{"a": [1, 2.0]}', '{"a":[1,2]}', True),
        ('{"a": 1}', '{"a": 1, "b": 1}', False),
        ('"a"', '"a "', False),
        (GOOGOL, GOOGOL, True),
        (GOOGOL, GOOGOL + "0", False),
        ("NaN", "NaN", True),
        ("Infinity", "Infinity", True),
        ("Infinity", "1e308", False),
        ("1.5", "NaN", False),
        (f"1.5{'0' * 400}", GOOGOL, False),
    ],
)
def test_results(expected: str, got: str, right: bool) -> None:
    found = result_difference(read_json(expected), read_json(got), bool_is_int=False)
    assert (found == "") == right


def test_true_is_1_where_that_is_wished() -> None:
    for expected, got in (("[1, true]", "[true, 1]"), ("0", "false")):
        assert result_difference(read_json(expected), read_json(got), bool_is_int=True) == ""
    assert result_difference(read_json("2"), read_json("true"), bool_is_int=True)


def test_a_difference_says_where() -> None:
    assert printed_difference("1\n2\n3", "1\n5\n3") == "line 2: expected '2', got '5'"
    assert "expected 1 lines, got 2" in printed_difference("1", "1\n2")
    found = result_difference(read_json('[[1], {"a": 2}]'), read_json('[[1], {"a": 3}]'), bool_is_int=False)
    assert found == """expected '[[1], {"a": 2}]', got '[[1], {"a": 3}]' (first difference at [1].a)"""


def test_depth_is_a_difference_and_no_error() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        read_json("[" * 100_000 + "]" * 100_000)
    deep: Json = None
    for _ in range(5000):
        deep = [deep]
    assert "nested too deep" in result_difference(deep, deep, bool_is_int=False)


TOKENS = st.one_of(
    st.integers(-(10**30), 10**30).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(str),
    st.text("abcXYZ→.-_", min_size=1, max_size=6),
)
LINES = st.lists(st.lists(TOKENS, min_size=1, max_size=5), min_size=1, max_size=5)


def text_of(lines: list[list[str]]) -> str:
    return "\n".join(" ".join(line) for line in lines)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(LINES, st.sampled_from(["\n", "\r\n", " \n"]), st.sampled_from(["", "\n", "\n\n \n"]))
def test_output_equals_itself_in_other_white_space(lines: list[list[str]], newline: str, end: str) -> None:
    assert printed_difference(text_of(lines), text_of(lines).replace("\n", newline) + end) == ""


@settings(max_examples=80, deadline=None, derandomize=True)
@given(LINES, st.data())
def test_one_changed_token_is_wrong(lines: list[list[str]], data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(lines) - 1))
    column = data.draw(st.integers(0, len(lines[row]) - 1))
    old = lines[row][column]
    new = data.draw(st.one_of(TOKENS, st.just(f"{old}1"), st.just(f"-{old}"), st.just(f"1{old}")))
    changed = [[*line] for line in lines]
    changed[row][column] = new
    if new != old and not same_decimal(old, new):
        assert printed_difference(text_of(lines), text_of(changed))


def same_decimal(expected: str, got: str) -> bool:
    """By another way than the code's: text with a point or an exponent, and close."""
    if not set(expected) & set(".e") or not (set(expected + got) <= set("0123456789.e+-")):
        return False
    try:
        return math.isclose(float(expected), float(got), rel_tol=1.1e-6, abs_tol=1.1e-6)
    except ValueError:
        return False


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(VALUES)
def test_a_result_equals_itself_and_nothing_around_it(value: object) -> None:
    found = read_json(json.dumps(value))
    assert result_difference(found, found, bool_is_int=False) == ""
    assert result_difference(found, [found], bool_is_int=False)
    assert result_difference([found], found, bool_is_int=False)
