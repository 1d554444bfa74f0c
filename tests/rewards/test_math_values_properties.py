r"""Mathematical answers as values: what holds for any text, and for any expression.

Expressions are drawn as trees, written in LaTeX in two ways, and evaluated here with exact rationals, so that what is
equal is known without the code that is tested.
"""

from fractions import Fraction
from random import Random
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from areal_async.rewards.math.compare import Policy, equal
from areal_async.rewards.math.parse import parse
from areal_async.rewards.math.values import Value

from .timing import seconds_of

USUAL = Policy(bare_percent=True, rounding_digits=6)
EXACT = Policy(bare_percent=False, rounding_digits=None)

TOKENS = r"""
1 2 3 12 0.5 0.333333 1/3 x y n a e i A B \pi \infty ( ) [ ] { } \{ \} , ; + - * / ^ _ = < > \le \ge \ne \pm \mp | : ! '
\frac \sqrt \cup \cap \setminus \sin \cos \tan \ln \log \log_2 \arcsin \% ^\circ \text{or} \text{and} \text{cm} m f(
\left( \right) \begin{pmatrix} \end{pmatrix} & \\ \mathbb{R} \emptyset \in \cdot \times {2} {x} {3} (x+1) (1,2) \binom
\lfloor \rfloor \langle \rangle \overline{3} 0. apples 12:00 \$ sqrt pi exp max( gcd( sinh x_1 52_8 3! ^2 ^{-1} \approx
"""
SIGNS = TOKENS.split()

marks = st.lists(st.sampled_from([*SIGNS, " "]), max_size=14).map("".join)
anything = st.one_of(st.text(max_size=40), marks, marks, marks)
PARSE_S = 0.1
EQUAL_S = 1.0


def holds_for(texts: list[str]) -> None:
    """None of the texts makes anything raise or take long; each is equal to itself; order doesn't matter."""
    values = []
    for text in texts:
        assert seconds_of(lambda text=text: parse(text)) < PARSE_S, text
        values.append(parse(text))
        assert values[-1] == parse(text), text
    read = [value for value in values if value is not None]
    for value in read:
        assert equal(value, value, EXACT)
        for other in read:
            assert equal(value, other, USUAL) == equal(other, value, USUAL), (value, other)
            assert seconds_of(lambda one=value, two=other: equal(one, two, USUAL)) < EQUAL_S, (value, other)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(st.lists(anything, min_size=1, max_size=3))
def test_any_text(texts: list[str]) -> None:
    holds_for(texts)


@pytest.mark.slow
@settings(derandomize=True, max_examples=1_500, deadline=None)
@given(st.lists(anything, min_size=2, max_size=3))
def test_any_text_at_length(texts: list[str]) -> None:
    holds_for(texts)


# ----------------------------------------------------------------------------------------------- trees of expressions

Tree: TypeAlias = "int | str | tuple[str, Tree, Tree]"
"""A whole number, a variable, or (operator, left, right); the exponent of ^ is a small number."""
POINTS = tuple({"x": Fraction(a), "y": Fraction(b, 3)} for a, b in ((5, 7), (-3, 11), (13, -8), (17, 25)))

leaves = st.one_of(st.integers(0, 30), st.sampled_from(["x", "y"]))


def grown(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(st.sampled_from("+-*/"), inner, inner),
        st.tuples(st.just("^"), inner, st.integers(1, 3)),
    )


trees = st.recursive(leaves, grown, max_leaves=8)


def at(tree: Tree, point: dict[str, Fraction]) -> Fraction:
    """The exact value; ZeroDivisionError where there is none."""
    match tree:
        case int():
            return Fraction(tree)
        case str():
            return point[tree]
        case ("+", left, right):
            return at(left, point) + at(right, point)
        case ("-", left, right):
            return at(left, point) - at(right, point)
        case ("*", left, right):
            return at(left, point) * at(right, point)
        case ("/", left, right):
            return at(left, point) / at(right, point)
        case ("^", left, right):
            return at(left, point) ** int(at(right, point))
    raise AssertionError(tree)


def defined(tree: Tree) -> list[Fraction]:
    """Its values at the points; a tree with none at one of them is not looked at further."""
    try:
        return [at(tree, point) for point in POINTS]
    except ZeroDivisionError:
        assume(False)
        raise


def latex(tree: Tree) -> str:
    """As it would be typeset, brackets everywhere."""
    match tree:
        case int() | str():
            return str(tree)
        case ("/", left, right):
            return rf"\frac{{{latex(left)}}}{{{latex(right)}}}"
        case ("^", left, right):
            return rf"\left({latex(left)}\right)^{{{right}}}"
        case ("*", left, right):
            return rf"\left({latex(left)}\right) \cdot \left({latex(right)}\right)"
        case (operator, left, right):
            return rf"\left({latex(left)}\right) {operator} \left({latex(right)}\right)"
    raise AssertionError(tree)


def plain(tree: Tree) -> str:
    """As it would be typed: another order of terms and factors, differences as sums, powers as products."""
    match tree:
        case int() | str():
            return str(tree)
        case ("+", left, right):
            return f"(({plain(right)})+({plain(left)}))"
        case ("-", left, right):
            return f"(-({plain(right)})+({plain(left)}))"
        case ("*", left, right):
            return f"(({plain(right)})*({plain(left)}))"
        case ("/", left, right):
            return f"(({plain(left)})/({plain(right)}))"
        case ("^", left, right):
            return "(" + "*".join([f"({plain(left)})"] * int(str(right))) + ")"
    raise AssertionError(tree)


def changed(tree: Tree, random: Random) -> Tree:
    """With another leaf or another operator somewhere."""
    match tree:
        case int():
            return tree + random.choice([1, 2, 10])
        case "x":
            return "y"
        case str():
            return "x"
        case (operator, left, right):
            if operator == "^":
                return (operator, changed(left, random), right)
            place = random.randrange(3)
            if place == 0:
                return (random.choice([sign for sign in "+-*/" if sign != operator]), left, right)
            return (operator, changed(left, random), right) if place == 1 else (operator, left, changed(right, random))
    raise AssertionError(tree)


def readable(text: str) -> Value:
    value = parse(text)
    assert value is not None, text
    return value


def written_in_two_ways(tree: Tree, seed: int) -> None:
    """Both are equal; with a change that the exact values show, they aren't."""
    values = defined(tree)
    typeset, typed = readable(latex(tree)), readable(plain(tree))
    assert equal(typeset, typed, EXACT)
    assert equal(typed, typeset, EXACT)
    other = changed(tree, Random(seed))
    if defined(other) != values:
        for written in (latex(other), plain(other)):
            assert not equal(typeset, readable(written), USUAL)
            assert not equal(readable(written), typeset, USUAL)


@settings(derandomize=True, max_examples=15, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(trees, st.integers(0, 1_000))
def test_an_expression_written_in_two_ways(tree: Tree, seed: int) -> None:
    written_in_two_ways(tree, seed)


@pytest.mark.slow
@settings(derandomize=True, max_examples=1_000, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(trees, st.integers(0, 1_000))
def test_expressions_written_in_two_ways_at_length(tree: Tree, seed: int) -> None:
    written_in_two_ways(tree, seed)


# ------------------------------------------------------------------------------------------------- a number is changed

whole = st.integers(-(10**12), 10**12).map(str)
decimal = st.decimals(-(10**6), 10**6, places=8, allow_nan=False).map(lambda value: f"{value:f}")
fraction = st.tuples(st.integers(-999, 999), st.integers(1, 999)).map(
    lambda parts: rf"\frac{{{parts[0]}}}{{{parts[1]}}}"
)
simple = st.one_of(whole, decimal, fraction)
FRAMES = (
    "{}", "x={}", r"\sqrt{{x+{}}}", "({}, 1)", "[0, {}]", r"\{{1, {}\}}", "2, {}", r"{}\%", "y={}x+1", r"x \le {}",
    "{}x^2+x", r"\begin{{pmatrix}} 1 & {} \\ 3 & 4 \end{{pmatrix}}", r"{}\pi", r"{}\text{{ cm}}", r"1 < x < {}",
    r"({}, \infty) \cup \{{-10000000000001\}}", r"\sin({})", "f({})", r"e^{{{}}}x",
)  # fmt: skip


def differ_in(frame: str, one: str, other: str) -> None:
    """Two numbers in the same place."""
    assume(value_of(one) != value_of(other))
    assume("sin" not in frame or abs(value_of(one) - value_of(other)) < 1)  # the period
    values = [readable(frame.format(written)) for written in (one, other)]
    assert equal(values[0], values[0], EXACT)
    assert not equal(*values, EXACT)
    assert not equal(*reversed(values), EXACT)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(simple, simple, st.sampled_from(FRAMES))
def test_another_number_is_another_answer(one: str, other: str, frame: str) -> None:
    differ_in(frame, one, other)


@pytest.mark.slow
@settings(derandomize=True, max_examples=1_000, deadline=None)
@given(simple, simple, st.sampled_from(FRAMES))
def test_another_number_is_another_answer_at_length(one: str, other: str, frame: str) -> None:
    differ_in(frame, one, other)


def value_of(written: str) -> Fraction:
    """Of a number as it was drawn."""
    if written.startswith(r"\frac"):
        above, below = written.removeprefix(r"\frac{").removesuffix("}").split("}{")
        return Fraction(int(above), int(below))
    return Fraction(written)


@settings(derandomize=True, max_examples=20, deadline=None)
@given(st.decimals(0, 1000, places=9, allow_nan=False), st.integers(0, 8), st.data())
def test_a_changed_digit_is_never_right(value: object, place: int, data: st.DataObject) -> None:
    written = f"{value:f}"
    index = [index for index, sign in enumerate(written) if sign.isdigit()][-1 - place]
    digit = data.draw(st.sampled_from([sign for sign in "0123456789" if sign != written[index]]))
    other = written[:index] + digit + written[index + 1 :]
    assert equal(readable(written), readable(written.rstrip("0").rstrip(".")), USUAL)
    assert not equal(readable(written), readable(other), USUAL)
