"""Expressions as numbers with a bound on their error.

What always holds: the true value of what `at` gives lies within 2**error of it; where that can't be said it raises
Undefined (no value here) or Doubt (these digits can't tell). Real: roots and logarithms of negative numbers have no
value, odd roots have theirs, as in school. Complex: principal values.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from mpmath import MPContext
from mpmath.ctx_mp_python import _mpc

from areal_async.rewards.math.arithmetic import HALF, MINUS_ONE, ONE, TWO, negative, power, product, quotient, total
from areal_async.rewards.math.values import Call, Constant, Expression, Number, Power, Product, Sum, Symbol, bits

Float: TypeAlias = Any  # mpmath has no types: a real or a complex number of any precision

EXACT: Final = -(10**9)  # an error of nothing
MAX_MAGNITUDE: Final = 200_000  # bits before the point, or zeros behind it
MAX_ARGUMENT: Final = 18  # bits of what exp and sin are given
MAX_FACTORIAL: Final = 5  # bits of what gamma is given, which is slow with many digits


class Undefined(Exception):
    """The expression has no value here."""


class Doubt(Exception):
    """More digits, or something better than digits, must decide."""


class Approximate(NamedTuple):
    """|value - truth| <= 2**error"""

    value: Float
    error: int


class Evaluator:
    """At one point, of one precision. largest: bits before the point, or zeros behind it, of any number on the way."""

    def __init__(self, context: MPContext, precision: int, symbols: Mapping[str, Float], *, real: bool) -> None:
        self.largest = 0
        self.context = context
        context.prec = precision
        self._precision = precision
        self._real = real
        self._symbols = symbols

    def at(self, node: Expression) -> Approximate:
        """The value."""
        match node:
            case Number(value):
                return self._number(value.numerator, value.denominator)
            case Symbol(name):
                return Approximate(self.context.mpf(self._symbols[name]), EXACT)
            case Constant(name):
                return self._constant(name)
            case Sum(terms):
                return self._sum([self.at(term) for term in terms])
            case Product(factors):
                result = self.at(factors[0])
                for factor in factors[1:]:
                    result = self.times(result, self.at(factor))
                return result
            case Power(base, exponent):
                return self._power(base, exponent)
            case Call(name, arguments):
                return self._call(node, name, arguments)

    def times(self, one: Approximate, other: Approximate) -> Approximate:
        """Their product."""
        error = max(magnitude(one.value) + other.error, magnitude(other.value) + one.error, one.error + other.error)
        return self._rounded(one.value * other.value, error + 2)

    def _rounded(self, value: Float, error: int) -> Approximate:
        """With the error of the last operation too."""
        size = magnitude(value)
        if size == EXACT:
            return Approximate(value, max(error, EXACT))
        if abs(size) > MAX_MAGNITUDE:
            raise Doubt
        if size > error:  # else it may be anything, zero too
            self.largest = max(self.largest, abs(size))
        return Approximate(value, max(error, size - self._precision + 2) + 1)

    def _number(self, above: int, below: int) -> Approximate:
        if below == 1 and above.bit_length() <= self._precision:
            return Approximate(self.context.mpf(above), EXACT)
        return self._rounded(self.context.mpf(above) / below, EXACT)

    def _constant(self, name: str) -> Approximate:
        if name == "pi":
            return Approximate(+self.context.pi, 3 - self._precision)
        if name == "e":
            return Approximate(+self.context.e, 3 - self._precision)
        if name == "i" and not self._real:
            return Approximate(self.context.mpc(0, 1), EXACT)
        raise Undefined

    def _sum(self, terms: list[Approximate]) -> Approximate:
        size = max(magnitude(term.value) for term in terms)
        error = max(max(term.error for term in terms), size - self._precision) + len(terms).bit_length()
        if all(term.error == EXACT for term in terms) and size < self._precision // 2 and self._whole(terms):
            return Approximate(sum(term.value for term in terms), EXACT)
        return self._rounded(sum(term.value for term in terms), error)

    def _whole(self, terms: list[Approximate]) -> bool:
        return all(self.context.isint(term.value) for term in terms)

    # ------------------------------------------------------------------------------------------------------ powers

    def _power(self, base: Expression, exponent: Expression) -> Approximate:
        if base == Constant("e"):
            return self._exp(self.at(exponent))
        value = self.at(base)
        if isinstance(exponent, Number) and bits(exponent.value) <= MAX_ARGUMENT:
            return self._rational(value, exponent.value.numerator, exponent.value.denominator)
        return self._exp(self.times(self.at(exponent), self._log(value)))

    def _rational(self, base: Approximate, above: int, below: int) -> Approximate:
        """base ** (above / below)"""
        if base.error >= magnitude(base.value) - 2:  # it may be zero
            if above < 0:
                raise Undefined
            return Approximate(
                self.context.mpf(0), max(EXACT, max(base.error, magnitude(base.value)) * above // below + 3)
            )
        if abs(magnitude(base.value) * above) > MAX_MAGNITUDE * below:
            raise Doubt
        sign = 1
        value = base.value
        if below > 1 and not self._positive(value):
            if not self._real:
                return self._exp(self.times(self._number(above, below), self._log(base)))
            if below % 2 == 0:
                raise Undefined
            sign, value = -1 if above % 2 else 1, -value
        result = value**above if below == 1 else value ** (self.context.mpf(above) / below)
        relative = base.error - magnitude(value) + 2 + abs(above).bit_length()
        return self._rounded(sign * result, max(EXACT, magnitude(result) + max(relative, 4 - self._precision)))

    def _positive(self, value: Float) -> bool:
        return isinstance(value, self.context.mpf) and bool(value > 0)

    def _exp(self, value: Approximate) -> Approximate:
        if magnitude(value.value) > MAX_ARGUMENT or value.error > -2:
            raise Doubt
        result = self.context.exp(value.value)
        return self._rounded(result, magnitude(result) + value.error + 2)

    def _log(self, value: Approximate) -> Approximate:
        size = magnitude(value.value)
        if value.error >= size - 2:
            raise Undefined
        if not self._positive(value.value):
            if self._real:
                raise Undefined
            if isinstance(value.value, self.context.mpc):
                near_the_cut = value.value.real < 0 and magnitude(value.value.imag) <= value.error + 1
                if near_the_cut and value.value.imag != 0:
                    raise Doubt
        return self._rounded(self.context.log(value.value), max(EXACT, value.error - size + 3))

    # --------------------------------------------------------------------------------------------------- functions

    def _call(self, node: Call, name: str, arguments: tuple[Expression, ...]) -> Approximate:
        if name in _REWRITTEN and len(arguments) == 1:
            return self.at(_REWRITTEN[name](arguments[0]))
        match name, arguments:
            case "log", (argument,):
                return self._log(self.at(argument))
            case "logbase", (argument, base):
                below = self._log(self.at(base))
                return self.times(self._log(self.at(argument)), self._rational(below, -1, 1))
            case "root", (argument, Number(degree)) if bits(degree) <= MAX_ARGUMENT:
                return self._rational(self.at(argument), 1, int(degree))
            case "sin" | "cos", (argument,):
                return self._wave(name, self.at(argument))
            case "arctan", (argument,):
                inside = self.at(argument)
                self._must_be_real(inside)
                return self._rounded(self.context.atan(inside.value), inside.error + 1)
            case "arcsin", (argument,):
                return self._arcsin(self.at(argument))
            case "abs", (argument,):
                inside = self.at(argument)
                return self._rounded(abs(inside.value), inside.error)
            case "floor" | "ceil" | "sgn", (argument,):
                return self._step(name, self.at(argument))
            case "factorial", (argument,):
                return self._factorial(self.at(argument))
            case "binomial", (above, below_):
                parts = (above, below_, total((above, negative(below_))))
                n, k, rest = (self._factorial(self.at(part)) for part in parts)
                return self.times(n, self._rational(self.times(k, rest), -1, 1))
            case "max" | "min", _:
                return self._extreme(name, [self.at(argument) for argument in arguments])
            case (("gcd" | "lcm" | "Re" | "Im"), _):
                raise Doubt
        return Approximate(self.context.mpf(drawn(repr(node))) + 1, EXACT)  # a function that is only a name

    def _must_be_real(self, value: Approximate) -> None:
        if isinstance(value.value, self.context.mpc):
            raise Undefined

    def _wave(self, name: str, inside: Approximate) -> Approximate:
        if magnitude(inside.value) > MAX_ARGUMENT:
            raise Doubt
        growth = 0
        if isinstance(inside.value, self.context.mpc):
            growth = int(abs(inside.value.imag) * 2) + 1
            if growth > MAX_MAGNITUDE:
                raise Doubt
        value = self.context.sin(inside.value) if name == "sin" else self.context.cos(inside.value)
        return self._rounded(value, max(EXACT, inside.error + 1, 1 - self._precision) + growth)

    def _arcsin(self, inside: Approximate) -> Approximate:
        self._must_be_real(inside)
        left = 1 - abs(inside.value)
        if left < 0 and magnitude(left) > inside.error + 1:
            raise Undefined
        if magnitude(left) <= inside.error + 2:
            edge = self.context.pi / 2 * (1 if inside.value > 0 else -1)
            return self._rounded(edge, max(EXACT, inside.error // 2 + 3))
        return self._rounded(self.context.asin(inside.value), max(EXACT, inside.error - magnitude(left) // 2 + 3))

    def _step(self, name: str, inside: Approximate) -> Approximate:
        self._must_be_real(inside)
        if self._symbols and name != "sgn":  # x and x + 1/1000 have the same floor almost everywhere
            raise Doubt
        nearest = self.context.mpf(0) if name == "sgn" else self.context.nint(inside.value)
        if inside.error > EXACT and magnitude(inside.value - nearest) <= inside.error + 1:
            raise Doubt
        if name == "sgn":
            return Approximate(self.context.sign(inside.value), EXACT)
        function = self.context.floor if name == "floor" else self.context.ceil
        return Approximate(function(inside.value), EXACT)

    def _factorial(self, inside: Approximate) -> Approximate:
        self._must_be_real(inside)
        if inside.value < 0:
            raise Undefined
        if magnitude(inside.value) > MAX_FACTORIAL:
            raise Doubt
        value = self.context.gamma(inside.value + 1)
        return self._rounded(value, max(EXACT, magnitude(value) + max(inside.error, -self._precision) + 5))

    def _extreme(self, name: str, values: list[Approximate]) -> Approximate:
        for value in values:
            self._must_be_real(value)
        chosen = (max if name == "max" else min)(value.value for value in values)
        return Approximate(chosen, max(value.error for value in values))


def magnitude(value: Float) -> int:
    """|value| < 2**magnitude, and for real numbers 2**(magnitude - 1) <= |value|; EXACT for zero."""
    if isinstance(value, _mpc):
        parts = value._mpc_
        sizes = [part[2] + part[3] for part in parts if part[1]]
        return max(sizes) + 1 if sizes else EXACT
    _, mantissa, exponent, count = value._mpf_
    return int(exponent + count) if mantissa else EXACT


def drawn(seed: str) -> float:
    """A number between 0 and 1 that looks random, and is exact in 53 bits."""
    digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _sine(x: Expression) -> Expression:
    return Call("sin", (x,))


def _cosine(x: Expression) -> Expression:
    return Call("cos", (x,))


def _e_to(x: Expression) -> Expression:
    return power(Constant("e"), x)


def _sinh(x: Expression) -> Expression:
    return product((HALF, total((_e_to(x), negative(_e_to(negative(x)))))))


def _cosh(x: Expression) -> Expression:
    return product((HALF, total((_e_to(x), _e_to(negative(x))))))


def _area(x: Expression, shift: Expression) -> Expression:
    """ln(x + sqrt(x^2 + shift))"""
    return Call("log", (total((x, power(total((power(x, TWO), shift)), HALF))),))


def _inverse(x: Expression) -> Expression:
    return Power(x, MINUS_ONE)


def _right_angle_less(x: Expression) -> Expression:
    return total((product((HALF, Constant("pi"))), negative(x)))


_REWRITTEN: Final[dict[str, Callable[[Expression], Expression]]] = {
    "tan": lambda x: quotient(_sine(x), _cosine(x)),
    "cot": lambda x: quotient(_cosine(x), _sine(x)),
    "sec": lambda x: _inverse(_cosine(x)),
    "csc": lambda x: _inverse(_sine(x)),
    "arccos": lambda x: _right_angle_less(Call("arcsin", (x,))),
    "arccot": lambda x: _right_angle_less(Call("arctan", (x,))),
    "arcsec": lambda x: _right_angle_less(Call("arcsin", (_inverse(x),))),
    "arccsc": lambda x: Call("arcsin", (_inverse(x),)),
    "sinh": _sinh,
    "cosh": _cosh,
    "tanh": lambda x: quotient(_sinh(x), _cosh(x)),
    "coth": lambda x: quotient(_cosh(x), _sinh(x)),
    "sech": lambda x: _inverse(_cosh(x)),
    "csch": lambda x: _inverse(_sinh(x)),
    "arsinh": lambda x: _area(x, ONE),
    "arcosh": lambda x: _area(x, MINUS_ONE),
    "artanh": lambda x: product(
        (HALF, Call("log", (quotient(total((ONE, x)), total((ONE, negative(x)))),))),
    ),
}
