"""Typed values of mathematical answers: what `parse` reads and `equal` compares.

What always holds: values are immutable; a Number is exact. They are built by `arithmetic`, which keeps them small.
"""

from fractions import Fraction
from typing import Final, TypeAlias

import msgspec

from areal_async.rewards.math.units import Unit


class Unreadable(Exception):
    """The text is no answer that can be read, or it means nothing (1/0)."""


class Value(msgspec.Struct, frozen=True):
    """What an answer says."""


class Number(Value, frozen=True):
    """An exact rational. places: digits after the point if it was written as a decimal, else None."""

    value: Fraction
    places: int | None = None

    def __repr__(self) -> str:  # Python refuses to write out more than 4,300 digits
        large = bits(self.value) > 1_000
        return f"Number(of {bits(self.value)} bits)" if large else f"Number({self.value}, {self.places})"


class Symbol(Value, frozen=True):
    """A variable: a letter, perhaps with an index (`x_1`), or a Greek one (`alpha`)."""

    name: str


class Constant(Value, frozen=True):
    """pi, e, i or inf."""

    name: str


class Sum(Value, frozen=True):
    """Two terms or more."""

    terms: "tuple[Expression, ...]"


class Product(Value, frozen=True):
    """Two factors or more."""

    factors: "tuple[Expression, ...]"


class Power(Value, frozen=True):
    base: "Expression"
    exponent: "Expression"


class Call(Value, frozen=True):
    """A function of the table in `symbolic`, or one that is only a name (`f`)."""

    name: str
    arguments: "tuple[Expression, ...]"


Expression: TypeAlias = Number | Symbol | Constant | Sum | Product | Power | Call


class Percent(Value, frozen=True):
    """amount: what stands before the sign, so 28 for 28 %."""

    amount: Expression


class Quantity(Value, frozen=True):
    """An amount with a unit (degrees are one)."""

    amount: Value
    unit: Unit


class Tuple(Value, frozen=True):
    """(a, b, …) or [a, b, c, …]. A pair in round brackets may also be an open interval: the other side decides."""

    items: tuple[Value, ...]


class Listing(Value, frozen=True):
    """a, b, … without brackets; `x = 1 or x = 2`; both values of a ±. joined: "," "or" "and", or "sign" (of a ±)."""

    items: tuple[Value, ...]
    joined: str = ","


class Set(Value, frozen=True):
    """A finite set; no items: the empty set."""

    items: tuple[Value, ...]


class Reals(Value, frozen=True):
    """A set of numbers known by its name: R, Z, Q, N, C."""

    name: str


class Interval(Value, frozen=True):
    """Not both ends open: that is a Tuple."""

    low: Value
    high: Value
    low_closed: bool
    high_closed: bool


class Combined(Value, frozen=True):
    """Sets joined by one operator: "cup", "cap" or "setminus"."""

    operator: str
    parts: tuple[Value, ...]


class Matrix(Value, frozen=True):
    """rows: all of one length. bars: it was written between bars, so it is a determinant."""

    rows: tuple[tuple[Value, ...], ...]
    bars: bool = False


class Relation(Value, frozen=True):
    """A chain: sides[0] operators[0] sides[1] …; operators: = < <= > >= != ~ (about) in."""

    sides: tuple[Value, ...]
    operators: tuple[str, ...]


class Ratio(Value, frozen=True):
    """a : b : …"""

    parts: tuple[Expression, ...]


class Time(Value, frozen=True):
    """A clock's 12:00 (which may also be the ratio of 12 and 0). half: "am", "pm" or ""."""

    parts: tuple[int, ...]
    half: str = ""


class Based(Value, frozen=True):
    """Digits in a base: 52_8."""

    digits: str
    base: int


class Text(Value, frozen=True):
    """Words, in small letters. letters: what they are if each letter is a variable (`xy`); None if they can't be."""

    words: str
    letters: Expression | None = None


EXPRESSIONS: Final = (Number, Symbol, Constant, Sum, Product, Power, Call)


def bits(value: Fraction) -> int:
    """Size of a rational."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())
