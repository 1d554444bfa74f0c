"""Typed values of mathematical answers: what `parse` reads and `equal` compares.

What always holds: values are immutable; a Number is exact; arithmetic that would grow beyond MAX_BITS is not carried
out but kept as written, so that no value is larger than a bounded multiple of the text that it was read from.
"""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TypeAlias

import msgspec

from areal_async.rewards.math.units import Unit

MAX_BITS = 32_768
"""Of a numerator or denominator (about 9,800 digits: 2006! fits, 1000000! and 9^(9^9) don't)."""
MAX_FACTORIAL = 3_000
"""The largest n of an n! that is carried out; the result has 30,000 bits."""


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


def number(value: int) -> Number:
    return Number(Fraction(value))


ZERO, ONE, TWO, MINUS_ONE, TEN = number(0), number(1), number(2), number(-1), number(10)
HALF = Number(Fraction(1, 2))
PI, INFINITY = Constant("pi"), Constant("inf")


def bits(value: Fraction) -> int:
    """Size of a rational."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def negative(value: Expression) -> Expression:
    """-value; a decimal stays one."""
    if isinstance(value, Number):
        return Number(-value.value, value.places)
    return product((MINUS_ONE, value))


def total(terms: Iterable[Expression]) -> Expression:
    """Their sum; numbers are added up while they stay small."""
    constant, rest = ZERO, []
    for term in _flat(Sum, terms):
        if isinstance(term, Number):
            if bits(constant.value) + bits(term.value) > MAX_BITS:
                rest.append(term)
            elif not constant.value:
                constant = term
            else:
                constant = Number(constant.value + term.value)
        else:
            rest.append(term)
    if constant.value or not rest:
        rest.append(constant)
    return rest[0] if len(rest) == 1 else Sum(tuple(rest))


def product(factors: Iterable[Expression]) -> Expression:
    """Their product; numbers are multiplied while they stay small. A decimal times a power of ten stays a decimal."""
    constant, rest = ONE, []
    for factor in _flat(Product, factors):
        if isinstance(factor, Number):
            if bits(constant.value) + bits(factor.value) > MAX_BITS:
                rest.append(factor)
            else:
                constant = _times(constant, factor)
        else:
            rest.append(factor)
    if not constant.value:
        return constant
    if constant.value != 1 or not rest:
        rest.insert(0, constant)
    return rest[0] if len(rest) == 1 else Product(tuple(rest))


def quotient(above: Expression, below: Expression) -> Expression:
    """above / below. Raises Unreadable for a division by the number zero."""
    return product((above, power(below, MINUS_ONE)))


def power(base: Expression, exponent: Expression) -> Expression:
    """base ^ exponent, carried out for rationals where the result is rational and small."""
    if isinstance(exponent, Number):
        if exponent.value == 1:
            return base
        if isinstance(base, Number):
            done = _rational_power(base.value, exponent.value)
            if done is not None:
                return done
        if isinstance(base, Power) and isinstance(base.exponent, Number):  # (x^a)^n is x^(a n) for whole n only
            whole = exponent.value.denominator == base.exponent.value.denominator == 1
            if whole and bits(exponent.value) + bits(base.exponent.value) < MAX_BITS:
                return power(base.base, Number(base.exponent.value * exponent.value))
    return Power(base, exponent)


def factorial(value: Expression) -> Expression:
    """n!, carried out for small whole n."""
    if isinstance(value, Number):
        if value.value.denominator != 1 or value.value < 0:
            raise Unreadable("a factorial of no whole number")
        if value.value <= MAX_FACTORIAL:
            return number(math.factorial(int(value.value)))
    return Call("factorial", (value,))


def binomial(above: Expression, below: Expression) -> Expression:
    """n over k, carried out for small whole n and k."""
    if isinstance(above, Number) and isinstance(below, Number):
        n, k = above.value, below.value
        if n.denominator == k.denominator == 1 and 0 <= n <= MAX_FACTORIAL and 0 <= k <= MAX_FACTORIAL:
            return number(math.comb(int(n), int(k)))
    return Call("binomial", (above, below))


def root(value: Expression, degree: Expression) -> Expression:
    """The real root for odd degrees of negative numbers (so it is not value ^ (1/degree))."""
    if degree == TWO:
        return power(value, HALF)
    if isinstance(degree, Number):
        if degree.value.denominator != 1 or degree.value < 2:
            raise Unreadable("a root of a strange degree")
        if isinstance(value, Number) and bits(value.value) <= MAX_BITS and degree.value <= MAX_BITS:
            odd_negative = value.value < 0 and degree.value % 2 == 1
            found = _root(abs(value.value) if odd_negative else value.value, int(degree.value))
            if found is not None:
                return Number(-found if odd_negative else found)
    return Call("root", (value, degree))


def _flat(kind: type[Sum] | type[Product], items: Iterable[Expression]) -> Iterator[Expression]:
    for item in items:
        if isinstance(item, Sum) and kind is Sum:
            yield from item.terms
        elif isinstance(item, Product) and kind is Product:
            yield from item.factors
        else:
            yield item


def _times(one: Number, other: Number) -> Number:
    if one.value == 1 and one.places is None:
        return other
    value = one.value * other.value
    if (one.places is None) == (other.places is None):
        return Number(value)
    decimal, factor = (one, other) if other.places is None else (other, one)
    shift = _power_of_ten(factor.value)
    if shift is None or decimal.places is None:
        return Number(value)
    return Number(value, max(0, decimal.places - shift))


def _power_of_ten(value: Fraction) -> int | None:
    """The k of 10^k."""
    size = max(value.numerator, value.denominator)
    if value.numerator <= 0 or min(value.numerator, value.denominator) != 1:
        return None
    k = round(math.log10(size))
    if 10**k != size:
        return None
    return k if value.denominator == 1 else -k


def _rational_power(base: Fraction, exponent: Fraction) -> Number | None:
    if base == 0:
        if exponent <= 0:
            raise Unreadable("zero to a power that isn't positive")
        return ZERO
    if base == 1:
        return ONE
    if exponent.denominator != 1:
        if exponent.denominator > MAX_BITS or base < 0:
            return None
        found = _root(base, exponent.denominator)
        return None if found is None else _rational_power(found, Fraction(exponent.numerator))
    if base == -1:
        return ONE if exponent % 2 == 0 else MINUS_ONE
    if abs(exponent) * bits(base) > MAX_BITS:
        return None
    return Number(base ** int(exponent))


def _root(value: Fraction, degree: int) -> Fraction | None:
    """The exact root of a rational that isn't negative, if it is rational."""
    if value < 0:
        return None
    above, below = _whole_root(value.numerator, degree), _whole_root(value.denominator, degree)
    return None if above is None or below is None else Fraction(above, below)


def _whole_root(value: int, degree: int) -> int | None:
    if value < 2:
        return value
    if degree == 2:
        found = math.isqrt(value)
        return found if found * found == value else None
    if degree >= value.bit_length():
        return None
    low, high = 1, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**degree < value:
            low = middle + 1
        else:
            high = middle
    return low if low**degree == value else None
