"""Whether two expressions are the same function of their variables.

What always holds: "no" is certain (at some point the two differ by more than the errors of both). "Yes" is never
nearness to a fixed number of digits. Two expressions are the same if they are the same up to the order of terms and
factors, or if at every point of POINTS where both have a value, and at MIN_POINTS at least, they agree to

    BASE_DIGITS + 2 * (nodes + digits of all their numbers)   digits, and twice as many as the largest power of ten
                                                              that either meets on its way.

Why that is beyond doubt: numbers of different expressions can be near to each other, but not arbitrarily so for their
length. Two rationals of a and b digits differ by 10^-(a+b) at least; for algebraic numbers there are such bounds too,
and for expressions in exp, log and roots Richardson's uniformity conjecture has 1.3 digits for each sign as long as
the numbers on the way are of ordinary size, which is the last condition. The variables' values are 53 bits that look
random, so different functions don't meet at them by chance. sqrt(x)^2 and x are the same: they agree where both have
a value. Where that needs more digits than MAX_BITS, only the same up to order is the same.

Nothing is simplified or expanded, so the time is linear in the sizes of the two (WORK bounds it).
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from typing import Final

from mpmath import MPContext

from areal_async.rewards.math.evaluate import EXACT, Approximate, Doubt, Evaluator, Undefined, drawn, magnitude
from areal_async.rewards.math.values import Call, Constant, Expression, Number, Power, Product, Sum, Symbol, bits

BASE_DIGITS: Final = 40
BITS_A_DIGIT: Final = 10 / 3
MAX_BITS: Final = 8_000
MIN_POINTS: Final = 3

POINTS: Final = ((0.0, 1.0), (1.0, 4.0), (-1.0, 0.0), (0.0, 1.0), (1.0, 4.0), (-4.0, 4.0), (4.0, 20.0), (-20.0, 20.0))
"""Where the values of variables are drawn: near 0 for arcsin x, large for sqrt(x - 3), negative for |x|. Two more lie
beyond WIDE times the largest number, for the other side of |x + 50|."""
GAMMA: Final = 60  # times the work of another function
WIDE: Final = 10
WIDEST: Final = 10**9


class Work:
    """What may still be evaluated, in operations on short numbers (some 3 µs each). All parts of a comparison share it;
    what comes when it is used up isn't equal."""

    def __init__(self, operations: int = 300_000) -> None:
        self._left = operations

    @cached_property
    def context(self) -> MPContext:
        """Of this comparison alone: its precision changes. Most comparisons need none."""
        return MPContext()

    def spend(self, nodes: Iterable[Expression], precision: int) -> bool:
        """False when it is used up. Functions take the square of what a sum takes with longer numbers."""
        longer = 1 + precision / 400
        for node in nodes:
            match node:
                case Call("factorial" | "binomial"):
                    self._left -= int(GAMMA * longer**2)
                case Call() | Power():
                    self._left -= int(longer**2)
                case _:
                    self._left -= int(longer)
        return self._left >= 0


def same(one: Expression, other: Expression, work: Work) -> bool:
    """The two are the same function."""
    return key(one) == key(other) or _Pair(one, other, work).agree()


def factor_sign(one: Expression, other: Expression, work: Work) -> int:
    """+1 or -1: `one` is `other` times a positive or negative constant; 0: it isn't, or neither has variables."""
    return _Pair(one, other, work).factor_sign()


def rounds_to(exact: Expression, decimal: Number, work: Work) -> bool:
    """A real constant rounds to the decimal."""
    if symbols(exact) or decimal.places is None or not work.spend(_nodes(exact), bits(decimal.value)):
        return False
    precision = bits(decimal.value) + int(BITS_A_DIGIT * (decimal.places + _size(exact))) + 64
    if precision > MAX_BITS:
        return False
    evaluator = Evaluator(work.context, precision, {}, real=True)
    try:
        found = evaluator.at(exact)
    except (Undefined, Doubt):
        return False
    if found.error > -BITS_A_DIGIT * decimal.places - 32:
        return False
    scaled = (found.value - evaluator.context.mpf(decimal.value.numerator) / decimal.value.denominator) * 2
    return bool(abs(scaled) * 10**decimal.places <= 1)


def ranks(constants: list[Expression], work: Work) -> list[int] | None:
    """Their places in increasing order, equal ones with one place; None if they can't be ordered."""
    found = []
    for index, constant in enumerate(constants):
        value = _real(constant, work)
        if value is None:
            return None
        found.append((value, index))
    found.sort()
    places = [0] * len(constants)
    rank = 0
    for (_, before), (_, after) in pairwise(found):
        rank += not same(constants[before], constants[after], work)
        places[after] = rank
    return places


def key(node: Expression) -> str:
    """The same for expressions that differ only by the order of terms and factors."""
    match node:
        case Number(value):
            return f"{value.numerator:x}/{value.denominator:x}"
        case Symbol(name):
            return f"${name}"
        case Constant(name):
            return name
        case Sum(terms):
            return f"+({','.join(sorted(map(key, terms)))})"
        case Product(factors):
            return f"*({','.join(sorted(map(key, factors)))})"
        case Power(base, exponent):
            return f"^({key(base)},{key(exponent)})"
        case Call(name, arguments):
            return f"{name}({','.join(map(key, arguments))})"


def symbols(node: Expression) -> frozenset[str]:
    """The names of its variables."""
    return frozenset(part.name for part in _nodes(node) if isinstance(part, Symbol))


def _nodes(node: Expression) -> Iterator[Expression]:
    stack = [node]
    while stack:
        part = stack.pop()
        yield part
        match part:
            case Sum(terms):
                stack += terms
            case Product(factors):
                stack += factors
            case Power(base, exponent):
                stack += (base, exponent)
            case Call(_, arguments):
                stack += arguments


def _size(node: Expression) -> int:
    """Nodes, and digits of numbers."""
    digits = 0
    for part in _nodes(node):
        digits += 1
        if isinstance(part, Number):
            value = part.value
            digits += int((value.numerator.bit_length() + value.denominator.bit_length()) / BITS_A_DIGIT)
    return digits


def _real(node: Expression, work: Work) -> float | Fraction | None:
    """Good enough to sort by."""
    if isinstance(node, Number):
        return node.value
    if node == Constant("inf"):
        return float("inf")
    if isinstance(node, Product) and set(node.factors) == {Constant("inf"), Number(Fraction(-1))}:
        return float("-inf")
    if symbols(node) or not work.spend(_nodes(node), 128):
        return None
    try:
        found = Evaluator(work.context, 128, {}, real=True).at(node)
    except (Undefined, Doubt):
        return None
    if found.error > magnitude(found.value) - 64 and found.error > -64:
        return None
    sign, mantissa, exponent, _ = found.value._mpf_
    if abs(exponent) > 10_000:
        return None
    size = Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
    return -size if sign else size


class _Pair:
    """Two expressions and their values at the points."""

    def __init__(self, one: Expression, other: Expression, work: Work) -> None:
        self._one, self._other, self._work = one, other, work
        self._names = sorted(symbols(one) | symbols(other))
        self._size = _size(one) + _size(other)
        self._needed = int(BITS_A_DIGIT * (BASE_DIGITS + 2 * self._size))  # bits that must agree
        self._precision = self._needed + 64

    @cached_property
    def _points(self) -> tuple[tuple[float, float], ...]:
        return (*POINTS, *_beyond(self._one, self._other)) if self._names else POINTS[:1]

    def agree(self) -> bool:
        if self._precision > MAX_BITS:
            return False
        needed = MIN_POINTS if self._names else 1
        for real in (True, False):
            agreed = 0
            for index in range(len(self._points)):
                found = self._at(index, real=real)
                if found is False:
                    return False
                agreed += found is True
            if agreed >= needed:
                return True
        return False

    def factor_sign(self) -> int:
        if not self._names or self._precision > MAX_BITS:
            return 0
        values = []
        for index in range(len(self._points)):
            found = self._values(index, self._precision, real=True)
            if found is not None:
                values.append(found)
        if len(values) < MIN_POINTS + 1:
            return 0
        _, first, second = values[0]
        for evaluator, mine, theirs in values[1:]:
            left, right = evaluator.times(mine, second), evaluator.times(theirs, first)
            if _certainly_differ(left, right, evaluator) or not self._close(left, right, evaluator.largest):
                return 0
        if any(magnitude(value.value) <= value.error + 2 for value in (first, second)):
            return 0
        return 1 if (first.value > 0) == (second.value > 0) else -1

    def _at(self, index: int, *, real: bool) -> bool | None:
        """They agree beyond doubt, they certainly differ, or neither can be said at this point."""
        precision = self._precision
        while precision <= MAX_BITS:
            found = self._values(index, precision, real=real)
            if found is None:
                return None
            evaluator, mine, theirs = found
            if _certainly_differ(mine, theirs, evaluator):
                return False
            if self._close(mine, theirs, evaluator.largest):
                return True
            precision = max(2 * precision, 2 * evaluator.largest + self._precision)
        return None

    def _values(self, index: int, precision: int, *, real: bool) -> tuple[Evaluator, Approximate, Approximate] | None:
        if not self._work.spend(chain(_nodes(self._one), _nodes(self._other)), precision):
            return None
        low, high = self._points[index]
        values = {name: low + (high - low) * drawn(f"{index} {name}") for name in self._names}
        evaluator = Evaluator(self._work.context, precision, values, real=real)
        try:
            return evaluator, evaluator.at(self._one), evaluator.at(self._other)
        except (Undefined, Doubt):
            return None

    def _close(self, one: Approximate, other: Approximate, largest: int) -> bool:
        """What is known of them is enough to say that they are the same."""
        error = max(one.error, other.error, EXACT)
        size = max(magnitude(one.value), magnitude(other.value), 0)
        return size - error >= max(self._needed, 2 * largest)


def _beyond(one: Expression, other: Expression) -> tuple[tuple[float, float], tuple[float, float]]:
    """Ranges on both sides of all numbers in the two."""
    values = [abs(part.value) for node in (one, other) for part in _nodes(node) if isinstance(part, Number)]
    largest = max(values, default=Fraction(0))
    wide = WIDE * float(min(Fraction(WIDEST), max(Fraction(WIDE), largest)))
    return (-2 * wide, -wide), (wide, 2 * wide)


def _certainly_differ(one: Approximate, other: Approximate, evaluator: Evaluator) -> bool:
    size = max(magnitude(one.value), magnitude(other.value))
    error = max(one.error, other.error, size - evaluator.context.prec) + 2
    return bool(magnitude(one.value - other.value) - 2 > error)
