"""Cleaning: what an answer looks like before it is read."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.rewards.math.text import clean, read
from areal_async.rewards.math.units import unit_of

from .timing import seconds_of


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # thousands and lists
        ("8,000", "8000"), (r"\$9{,}500", "9500"), (r"11,\! 111,\! 111,\! 100", "11111111100"),
        ("1,234,567.5", "1234567.5"),
        (r"1\,000\,000", "1000000"), ("1 000 000", "1000000"), ("1,2", "1, 2"), ("1,2,345", "1, 2, 345"),
        ("1,23", "1, 23"),
        ("0,123", "0, 123"), ("0 123", "0 123"), ("1234,567", "1234, 567"), ("(1,234)", "(1,234)"),
        ("(1,000)", "(1000)"),
        ("[0,100]", "[0,100]"),
        (r"\{1,200\}", r"\{1,200\}"), (r"\frac{1,000}{3}", r"\frac{1000}{3}"), ("3{,}14", "3.14"), ("0{,}500", "0.500"),
        ("2 100/300", "2 100/300"), ("12 34", "12 34"),
        # wrappers, sizes, spacing
        (r"\left(0,1\right]", "(0,1]"), (r"\text{E}", "E"), (r"\textbf{(E)}\ 12", "(E) 12"),
        (r"\mathrm{e}^{2}", "e^{2}"),
        (r"\pi\!r", r"\pi r"), (r"\cdot\mathrm{e}", r"\cdot e"), (r"\displaystyle\dfrac12", r"\frac12"), ("$x$", "x"),
        (r"\(x\)", "x"), (r"\[ x \]", "x"), (r"\left.5\right|", "5|"), (r"\operatorname{arctan} 2", r"\arctan 2"),
        (r"\textcolor{red}{x}", "x"), (r"a\quad b", "a b"),
        (r"\begin{pmatrix}1\\[2pt]3\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
        (r"\boxed{5}", "5"), (r"\mathbb{R}", r"\mathbb{R}"),
        # Unicode
        ("−7", "-7"), ("3×4", r"3\times 4"), ("√3/2", r"\sqrt{3}/2"), ("√(x+1)", r"\sqrt {x+1}"), ("2π", r"2\pi"),
        ("x²+1", "x^{2}+1"),
        ("x₁", "x_{1}"), ("½", r"\frac{1}{2}"), ("１２", "12"), ("x ≤ 5", r"x \le 5"), ("(−∞, 3]", r"(-\infty , 3]"),
        ("[0,1]∪[2,3]", r"[0,1]\cup [2,3]"),
        # ends and words
        ("5.", "5"), ("x = 5,", "x = 5"), ("= 5", "5"), (r"\approx 3.1", "3.1"), (r"2 \text{ or } 3", "2, 3"),
        ("1, 2, and 3", "1, 2, 3"),
        (r"x<1 \text{ or } x>2", r"x<1 \lor x>2"), (r"x<1 \text{ and } x>-2", r"x<1 \land x>-2"),
        ("28%", r"28\%"), ("28 pct", r"28\%"), ("4th", "4"), (r"3^{\text{rd}}", "3"), ("5 to 4", "5:4"),
        ("{1,2}", "1, 2"),
        ("5 p.m.", "5:00 pm"), ("10:30AM", "10:30 am"), ("5am", "5am"), (r"\text{all real numbers}", r"\mathbb{R}"),
        ("14 {, }916", "14916"),
        ("28 percent", r"28\%"), (r"28\text{ percent}", r"28\%"), (r"28 \%", r"28\%"),
        (r"3\text{ million}", r"3\times 10^{6}"), (r"\text{No solution}", "No solution"),
        (r"\sin 30^{\circ}", r"\sin 30^\circ"),
    ],
)  # fmt: skip
def test_cleaned(written: str, expected: str) -> None:
    assert clean(written) == expected


@pytest.mark.parametrize(
    ("written", "expected", "unit"),
    [
        ("5 cm", "5", "cm"), (r"5\text{ cm}^2", "5", "cm^2"), (r"12\pi\text{ cm}", r"12\pi", "cm"),
        ("90°", "90", "degree"),
        (r"90^\circ", "90", "degree"), (r"5\text{ m}", "5", "m"), ("5 m", "5 m", None), ("5m", "5m", None),
        ("2ab", "2ab", None),
        (r"\$5", "5", "dollar"), ("$29.00", "29.00", "dollar"), ("€5", "5", "euro"), ("25 miles per hour", "25", "mph"),
        ("10 square feet", "10", "ft^2"), (r"2\sqrt{3}~\mathrm{cm}", r"2\sqrt{3}", "cm"),
        (r"20^\circ\text{C}", "20", "celsius"),
        ("72 clips", "72", None), (r"5\text{ apples}", "5", None), (r"x\text{ cm}", "x", "cm"),
        ("6 abc", "6 abc", None),
        (r"5\text{ cm}, 6\text{ cm}", "5, 6", "cm"), ("x^2", "x^2", None),
        (r"\frac{3}{4}\text{ hours}", r"\frac{3}{4}", "hour"),
        (r"10^{-3}\text{ J}", "10^{-3}", "J"), (r"5\text{ m/s}^2", "5", "m/s^2"),
        (r"5 \text{ or } 6 \text{ cm}", "5, 6", "cm"),
    ],
)  # fmt: skip
def test_units(written: str, expected: str, unit: str | None) -> None:
    found = read(written)
    assert (found.text, found.unit) == (expected, None if unit is None else unit_of(unit))


def test_what_is_too_long_to_be_an_answer_is_left_as_it_is() -> None:
    text = r"1,234\text{ cm}" * 2000
    assert clean(text) == text


def test_units_are_exact() -> None:
    for one, other, ratio in (
        ("km", "m", Fraction(1000)), ("in", "cm", Fraction(127, 50)), ("miles", "feet", Fraction(5280)),
        ("km/h", "m/s", Fraction(5, 18)),
        ("square yards", "ft^2", Fraction(9)), ("N", "kg m/s^2", Fraction(1)), ("dollars", "cents", Fraction(100)),
        ("L", "cm^3", Fraction(1000)), ("cubic meters", "liters", Fraction(1000)), ("hours", "s", Fraction(3600)),
    ):  # fmt: skip
        first, second = unit_of(one), unit_of(other)
        assert first is not None
        assert second is not None
        assert first.dimensions == second.dimensions, one
        assert first.factor / second.factor == ratio, one
    for nothing in ("", "x", "cmm", "abc", "/", "per", "cm^", "square", "m " * 100):
        assert unit_of(nothing) is None, nothing


def test_words_are_told_from_mathematics() -> None:
    for text in (r"\text{Yes}", "Monday", r"\text{No solution}", "forty two", r"\text{odd}"):
        assert read(text).words, text
    for text in (
        "xy",
        r"\sin x",
        "5 apples",
        r"\text{E}",
        "abc",
        r"\begin{cases}x&\text{otherwise}\end{cases}",
        "x = 5",
    ):
        assert not read(text).words, text


ALPHABET = r"""
1 2 12 , 000 345 . ( ) [ ] { } \{ \} $ \$ % \% \text{ \mathrm{ \left \right \, \! \\ ~ ^ _ x cm and or \frac \pi \circ
= < ≤ π ² √ − percent million apples \boxed{ / - + \sqrt E m
"""
PIECES = st.sampled_from([*ALPHABET.split(), " "])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=30))
def test_cleaning_raises_nothing_and_does_not_change_what_is_clean(text: str) -> None:
    assert clean(clean(text)) == clean(text)


@pytest.mark.slow
def test_cleaning_takes_time_by_the_length() -> None:
    for piece in (
        r"\text{",
        "{",
        "1,",
        "1 ",
        "1{,}",
        "and ",
        "a ",
        r"\text{cm}",
        "^2",
        "^\\circ ",
        " ",
        "m/",
        ", ",
        "($",
        "√(",
        "%",
        "1,000",
        "¹",
    ):
        seconds = []
        for length in (2_000, 16_000):
            text = "5 " + piece * (length // len(piece))
            seconds.append(seconds_of(lambda text=text: clean(text), tries=3))
        assert seconds[1] < 32 * seconds[0] + 0.03, piece
