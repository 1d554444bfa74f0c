"""Arithmetic while an answer is read: exact where the result stays small, else what was written.

What always holds: arithmetic that would grow beyond MAX_BITS is not carried out, so that no value is larger than a
bounded multiple of its text; 1/0 and the like are Unreadable; nothing is rounded.
"""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Final

from areal_async.rewards.math.units import DEGREE
from areal_async.rewards.math.values import (
    EXPRESSIONS,
    Call,
    Constant,
    Expression,
    Matrix,
    Number,
    Percent,
    Power,
    Product,
    Quantity,
    Sum,
    Unreadable,
    Value,
    bits,
)

MAX_BITS: Final = 32_768
"""Of a numerator or denominator (about 9,800 digits: 2006! fits, 1000000! and 9^(9^9) don't)."""
MAX_FACTORIAL: Final = 3_000
"""The largest n of an n! that is carried out; the result has 30,000 bits."""
MAX_BINOMIAL: Final = 1_000


def number(value: int) -> Number:
    return Number(Fraction(value))


ZERO, ONE, TWO, MINUS_ONE, TEN = number(0), number(1), number(2), number(-1), number(10)
HALF = Number(Fraction(1, 2))
PI, INFINITY = Constant("pi"), Constant("inf")


def decimal(whole: str, fraction: str) -> Number:
    """The number of the digits before and after the point; without any after it, a whole one."""
    if not fraction:
        return Number(Fraction(int(whole)))
    return Number(Fraction(int(whole + fraction), 10 ** len(fraction)), len(fraction))


def negative(value: Expression) -> Expression:
    """-value; a decimal stays one."""
    if isinstance(value, Number):
        return Number(-value.value, value.places)
    return product((MINUS_ONE, value))


def total(terms: Iterable[Expression]) -> Expression:
    """Their sum; numbers are added up while they stay small."""
    constant = ZERO
    rest: list[Expression] = []
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
    constant = ONE
    rest: list[Expression] = []
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
        if n.denominator == k.denominator == 1 and 0 <= n <= MAX_BINOMIAL and 0 <= k <= MAX_BINOMIAL:
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


def applied(name: str, base: Expression | None, argument: Expression) -> Expression:
    if base is not None and name != "log":
        raise Unreadable("a base that means nothing")
    match name:
        case "exp":
            return power(Constant("e"), argument)
        case "ln":
            return Call("log", (argument,))
        case "log" | "lg":
            below = TEN if base is None else base
            return Call("log", (argument,)) if below == Constant("e") else Call("logbase", (argument, below))
        case "abs" if isinstance(argument, Number):
            return Number(abs(argument.value), argument.places)
    return Call(name, (argument,))


def negated(value: Value) -> Value:
    match value:
        case Percent(amount):
            return Percent(negative(amount))
        case Quantity(amount, unit):
            return Quantity(negative(expression(amount)), unit)
        case Matrix():
            return scaled(MINUS_ONE, value)
    return negative(expression(value))


def scaled(factor: Expression, matrix: Matrix) -> Value:
    if matrix.bars:
        raise Unreadable("arithmetic with a determinant")
    rows = tuple(tuple(product((factor, expression(entry))) for entry in row) for row in matrix.rows)
    return Matrix(rows)


def expression(value: Value) -> Expression:
    """A value inside a larger expression: percent and degrees as numbers. Raises Unreadable for what is no number."""
    if isinstance(value, EXPRESSIONS):
        return value
    if isinstance(value, Percent):
        return product((value.amount, Number(Fraction(1, 100))))
    if isinstance(value, Quantity) and value.unit == DEGREE:
        return product((expression(value.amount), PI, Number(Fraction(1, 180))))
    raise Unreadable(f"a {type(value).__name__} where a number must stand")


def proper(above: Expression, below: Expression) -> Fraction | None:
    """The value of a fraction of whole numbers between 0 and 1."""
    if not isinstance(above, Number) or not isinstance(below, Number):
        return None
    whole = above.value.denominator == below.value.denominator == 1
    return above.value / below.value if whole and 0 < above.value < below.value else None


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
