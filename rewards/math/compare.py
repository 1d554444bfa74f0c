"""When two typed values are the same answer.

What always holds: `equal(v, v)` is true, and `equal` is symmetric; a number never equals another one by nearness,
except a decimal and what rounds to it (Policy.rounding_digits); work is bounded by MAX_COMPARISONS and symbolic.Work.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import msgspec

from areal_async.rewards.math import sets, symbolic
from areal_async.rewards.math.arithmetic import ZERO, expression, negative, product, quotient, total
from areal_async.rewards.math.grammar import NAMED_FUNCTIONS
from areal_async.rewards.math.units import DEGREE, unit_of
from areal_async.rewards.math.values import (
    EXPRESSIONS,
    Based,
    Call,
    Combined,
    Expression,
    Interval,
    Listing,
    Matrix,
    Number,
    Percent,
    Product,
    Quantity,
    Ratio,
    Reals,
    Relation,
    Set,
    Symbol,
    Text,
    Time,
    Tuple,
    Unreadable,
    Value,
)

MAX_COMPARISONS: Final = 4_000
"""Of two parts, in one comparison (unordered things are matched by trying)."""
LONGEST_PRODUCT: Final = 3
"""Letters that may be variables next to each other and no word."""
SIGNIFICANT: Final = 3
"""Digits that a rounded decimal must show: 0.000000 is no rounding of 1/2^99."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """bare_percent: 28 and 28 % are the same. rounding_digits: a decimal of at least so many digits after the point is
    the same as what rounds to it; None: never."""

    bare_percent: bool
    rounding_digits: int | None


def equal(gold: Value, given: Value, policy: Policy) -> bool:
    """The two are the same answer."""
    return gold == given or _Comparison(policy).same(gold, given)


class _Comparison:
    """Of two values under one policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._left = MAX_COMPARISONS
        self._work = symbolic.Work()

    def same(self, one: Value, other: Value) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        if isinstance(one, Number) and isinstance(other, Number):
            return one.value == other.value or self._rounds(one, other)
        if one == other:
            return True
        first, second = sorted((one, other), key=_order)
        return self._rule(first, second) or (_order(first) == _order(second) and self._rule(second, first))

    def _rule(self, one: Value, other: Value) -> bool:
        """The rule for these two kinds, the first of which stands before the second in ORDER, or with it."""
        match one, other:
            case Relation(), Relation():
                return self._relations(one, other)
            case Relation(), _:
                return self._named(one, other) or self._regions(one, other)
            case Quantity(), _:
                return self._quantity(one, other)
            case Percent(), _:
                return self._percent(one, other)
            case Text(), Text():
                return self._texts(one, other)
            case Text(), _:
                return one.letters is not None and self.same(one.letters, other)
            case Time(), Time():
                return one.parts == other.parts and (one.half == other.half or "" in (one.half, other.half))
            case Time() | Ratio(), _:
                return self._ratio(one, other)
            case Based(), Based():
                return one.base == other.base and one.digits.lstrip("0") == other.digits.lstrip("0")
            case Based(), _:
                return False
            case Matrix(), Matrix():
                return self._matrices(one, other)
            case Matrix(), Tuple() | Interval():
                return self._vector(one, other)
            case Set() | Interval() | Combined() | Reals() | Tuple() | Listing(), _:
                return self._collections(one, other) or self._regions(one, other)
        if isinstance(one, EXPRESSIONS) and isinstance(other, EXPRESSIONS):
            return self._expressions(one, other)
        return False

    # ---------------------------------------------------------------------------------------------------- numbers

    def _rounds(self, one: Number, other: Number) -> bool:
        """The one with more digits (or the exact one) rounds to the other."""
        if one.places is not None and (other.places is None or one.places < other.places):
            return self._is_rounded(one, other.value)
        if other.places is not None and (one.places is None or other.places < one.places):
            return self._is_rounded(other, one.value)
        return False

    def _is_rounded(self, decimal: Number, exact: Fraction) -> bool:
        distance = abs(exact - decimal.value) * 10 ** (decimal.places or 0)
        return self._may_round(decimal) and distance <= Fraction(1, 2)

    def _may_round(self, decimal: Number) -> bool:
        digits = self._policy.rounding_digits
        if digits is None or decimal.places is None or decimal.places < digits:
            return False
        return bool(abs(decimal.value) * 10**decimal.places >= 10 ** (SIGNIFICANT - 1))

    def _expressions(self, one: Expression, other: Expression) -> bool:
        for decimal, exact in ((one, other), (other, one)):
            if isinstance(decimal, Number) and self._may_round(decimal):
                return symbolic.rounds_to(exact, decimal, self._work)
        return symbolic.same(one, other, self._work)

    def _percent(self, one: Percent, other: Value) -> bool:
        if isinstance(other, Percent):
            return self.same(_hundredth(one.amount), _hundredth(other.amount))
        if not isinstance(other, EXPRESSIONS):
            return False
        return self.same(_hundredth(one.amount), other) or (self._policy.bare_percent and self.same(one.amount, other))

    def _quantity(self, one: Quantity, other: Value) -> bool:
        """With a unit: the same after conversion; if only one has a unit, the amounts; 90° is also pi/2."""
        if isinstance(other, Quantity):
            if one.unit == other.unit:
                return self.same(one.amount, other.amount)
            if one.unit.dimensions != other.unit.dimensions:
                return False
            return self.same(_converted(one), _converted(other))
        if self.same(one.amount, other):
            return True
        if (measured := _measured(other)) is not None:
            return self.same(one, measured)
        if one.unit != DEGREE or not isinstance(one.amount, EXPRESSIONS):
            return False
        return self.same(expression(one), other)

    def _ratio(self, one: Ratio | Time, other: Value) -> bool:
        mine = _ratio_parts(one)
        if isinstance(other, Ratio | Time):
            theirs = _ratio_parts(other)
            if len(mine) != len(theirs):
                return False
            if ZERO in mine or ZERO in theirs:
                return self._all(mine, theirs)
            pairs = zip(mine, theirs, strict=True)
            return all(self.same(product((a, theirs[0])), product((b, mine[0]))) for a, b in pairs)
        if len(mine) != 2 or not isinstance(other, EXPRESSIONS):
            return False
        try:
            return self.same(quotient(*mine), other)
        except Unreadable:
            return False

    def _texts(self, one: Text, other: Text) -> bool:
        if one.words == other.words:
            return True
        if one.letters is None or other.letters is None or not (_only_letters(one) and _only_letters(other)):
            return False
        return self.same(one.letters, other.letters)

    # ------------------------------------------------------------------------------------------------- collections

    def _all(self, ones: Sequence[Value], others: Sequence[Value]) -> bool:
        return len(ones) == len(others) and all(map(self.same, ones, others))

    def _any_order(self, ones: Sequence[Value], others: Sequence[Value]) -> bool:
        """Each has a partner of its own."""
        if len(ones) != len(others):
            return False
        free = list(others)
        open_ones = []
        for item in ones:
            if item in free:
                free.remove(item)
            else:
                open_ones.append(item)
        for item in open_ones:
            partner = next((index for index, other in enumerate(free) if self.same(item, other)), None)
            if partner is None:
                return False
            del free[partner]
        return True

    def _matrices(self, one: Matrix, other: Matrix) -> bool:
        return one.bars == other.bars and len(one.rows) == len(other.rows) and all(map(self._all, one.rows, other.rows))

    def _vector(self, one: Matrix, other: Tuple | Interval) -> bool:
        """A row or a column and a tuple of the same entries."""
        if one.bars:
            return False
        if isinstance(other, Interval):
            items: tuple[Value, ...] = (other.low, other.high)
            if not (other.low_closed and other.high_closed):
                return False
        else:
            items = other.items
        if len(one.rows) == 1:
            return self._all(one.rows[0], items)
        return len(one.rows[0]) == 1 and self._all([row[0] for row in one.rows], items)

    def _collections(self, one: Value, other: Value) -> bool:
        match one, other:
            case Tuple(), Tuple():
                return self._all(one.items, other.items)
            case Listing(), Tuple():
                return self._all(one.items, other.items)
            case Set(), Set():
                return self._any_order(self._distinct(one.items), self._distinct(other.items))
            case Listing(), Set():
                return self._any_order(self._distinct(one.items), self._distinct(other.items))
            case Listing(), Listing():
                if {one.joined, other.joined} == {"and", "or"}:
                    return False
                if all(isinstance(item, Text | Symbol) for item in (*one.items, *other.items)):
                    return self._all(one.items, other.items)
                return self._any_order(one.items, other.items)
            case Interval(), Interval():
                return self._intervals(one, other)
            case Set((item,)), _ if isinstance(other, EXPRESSIONS):
                return self.same(item, other)
            case Combined(), Combined() if one.operator == other.operator:
                parts = self._all if one.operator == "setminus" else self._any_order
                return parts(one.parts, other.parts)
        return False

    def _regions(self, one: Value, other: Value) -> bool:
        """By their members, where one of them can only be a set of numbers."""
        region = Interval | Combined | Reals | Relation
        if isinstance(one, region) or isinstance(other, region):
            return sets.same(one, other, self._work) is True
        return False

    def _intervals(self, one: Interval, other: Interval) -> bool:
        ends = (one.low_closed, one.high_closed) == (other.low_closed, other.high_closed)
        return ends and self.same(one.low, other.low) and self.same(one.high, other.high)

    def _distinct(self, items: Sequence[Value]) -> list[Value]:
        found: list[Value] = []
        for item in items:
            if not any(self.same(item, other) for other in found):
                found.append(item)
        return found

    # --------------------------------------------------------------------------------------------------- relations

    def _named(self, one: Relation, other: Value) -> bool:
        """x = 5 is 5, and x = 2 + 3 = 5: the left side is a name, and all that follows is the other."""
        if all(operator in ("=", "~", "in") for operator in one.operators) and _is_name(one.sides[0]):
            return all(self.same(side, other) for side in one.sides[1:])
        return False

    def _relations(self, one: Relation, other: Relation) -> bool:
        if one.operators == other.operators and self._all(one.sides, other.sides):
            return True
        return self._any_pairs(_pairs(one), _pairs(other))

    def _any_pairs(self, ones: list[Relation], others: list[Relation]) -> bool:
        free = list(others)
        for item in ones:
            partner = next((index for index, other in enumerate(free) if self._pair(item, other)), None)
            if partner is None:
                return False
            del free[partner]
        return not free

    def _pair(self, one: Relation, other: Relation) -> bool:
        if one.operators != other.operators:
            return False
        if self._all(one.sides, other.sides):
            return True
        symmetric = one.operators[0] in ("=", "!=", "~")
        if symmetric and self._all(one.sides, other.sides[::-1]):
            return True
        try:
            mine, theirs = _difference(one), _difference(other)
        except Unreadable:
            return False
        sign = symbolic.factor_sign(mine, theirs, self._work) if one.operators[0] in ("=", "!=", "<", "<=") else 0
        return sign > 0 or (sign < 0 and symmetric)


ORDER: Final = (
    (Relation,),
    (Quantity,),
    (Percent,),
    (Text,),
    (Time, Ratio),
    (Based,),
    (Matrix,),
    (Set, Interval, Combined, Reals, Tuple, Listing),
    EXPRESSIONS,
)
_PLACES: Final = {kind: place for place, kinds in enumerate(ORDER) for kind in kinds}


def _order(value: Value) -> int:
    return _PLACES[type(value)]


def _only_letters(text: Text) -> bool:
    """No word, for sure: yx is xy, but cat isn't act."""
    return len(text.words) <= LONGEST_PRODUCT and set("aeiou").isdisjoint(text.words.lower())


def _is_name(side: Value) -> bool:
    """x, f(x), (x, y); a length such as AB, with bars or a line over it."""
    match side:
        case Symbol():
            return True
        case Call("abs" | "overline", (Product() as inside,)):
            return _is_name(inside)
        case Call(name, arguments):
            return name[0] in NAMED_FUNCTIONS and all(isinstance(argument, Symbol) for argument in arguments)
        case Tuple(items):
            return all(isinstance(item, Symbol) for item in items)
        case Product(factors):
            return all(isinstance(factor, Symbol) and factor.name.isupper() for factor in factors)
    return False


def _pairs(relation: Relation) -> list[Relation]:
    """A chain as single relations, with < and <= only."""
    found = []
    for index, operator in enumerate(relation.operators):
        left, right = relation.sides[index : index + 2]
        if operator in (">", ">="):
            left, right, operator = right, left, operator.replace(">", "<")
        found.append(Relation((left, right), (operator,)))
    return found


def _difference(relation: Relation) -> Expression:
    return total((expression(relation.sides[1]), negative(expression(relation.sides[0]))))


def _hundredth(amount: Expression) -> Expression:
    if isinstance(amount, Number):
        return Number(amount.value / 100, None if amount.places is None else amount.places + 2)
    return product((amount, Number(Fraction(1, 100))))


def _converted(quantity: Quantity) -> Value:
    if not isinstance(quantity.amount, EXPRESSIONS):
        return quantity
    return product((quantity.amount, Number(quantity.unit.factor)))


def _measured(value: Value) -> Quantity | None:
    """5 m, where it was read as 5 times m."""
    if not isinstance(value, Product):
        return None
    *amount, last = value.factors
    unit = unit_of(last.name) if isinstance(last, Symbol) else None
    return None if unit is None else Quantity(product(amount), unit)


def _ratio_parts(value: Ratio | Time) -> tuple[Expression, ...]:
    return value.parts if isinstance(value, Ratio) else tuple(Number(Fraction(part)) for part in value.parts)
