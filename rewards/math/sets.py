"""Sets of real numbers, compared by what is in them.

What always holds: two sets are the same if the same of their ends, and of the gaps between the ends of both, are in
them; the ends are ordered exactly (symbolic.ranks). What isn't a set with constant ends is None, never a guess.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from areal_async.rewards.math import symbolic
from areal_async.rewards.math.arithmetic import INFINITY, negative
from areal_async.rewards.math.values import (
    EXPRESSIONS,
    Combined,
    Expression,
    Interval,
    Listing,
    Reals,
    Relation,
    Set,
    Symbol,
    Tuple,
    Unreadable,
    Value,
)

Places: TypeAlias = Sequence[int]
Within: TypeAlias = Callable[[Places, int], bool]
"""Whether a position is in the set: 2k + 1 is the end of rank k, 2k the gap before it."""


def same(one: Value, other: Value, work: symbolic.Work) -> bool | None:
    """They have the same members; None if one of them isn't a set of real numbers that can be read."""
    reader = _Reader()
    try:
        first, second = reader.within(one), reader.within(other)
    except Unreadable:
        return None
    places = symbolic.ranks(reader.ends, work)
    if places is None or any(places[low] > places[high] for low, high in reader.intervals):
        return None  # (3, 2) is a point, or a slip, but not the empty set
    infinite = {place for place, end in zip(places, reader.ends, strict=True) if end in (INFINITY, negative(INFINITY))}
    positions = [at for at in range(2 * len(places) + 1) if at % 2 == 0 or at // 2 not in infinite]
    return all(first(places, at) == second(places, at) for at in positions)


class _Reader:
    """Of the two sets; ends: all that were met, -infinity and infinity first. intervals: indices of their ends."""

    def __init__(self) -> None:
        self.ends: list[Expression] = [negative(INFINITY), INFINITY]
        self.intervals: list[tuple[int, int]] = []
        self._variable: str | None = None

    def within(self, value: Value) -> Within:
        match value:
            case Interval(low, high, low_closed, high_closed):
                return self._interval(low, high, low_closed, high_closed)
            case Tuple((low, high)):
                return self._interval(low, high, False, False)
            case Set(items):
                return _any([self._point(item) for item in items])
            case Reals("R"):
                return _between(0, 1, False, False)
            case Combined(operator, parts):
                first, *rest = [self.within(part) for part in parts]
                if operator == "setminus":
                    return _without(first, rest[0])
                return _any([first, *rest]) if operator == "cup" else _all([first, *rest])
            case Listing(items, "or"):
                return _any([self.within(item) for item in items])
            case Listing(items, "and"):
                return _all([self.within(item) for item in items])
            case Relation(sides, operators):
                pairs = zip(sides, operators, sides[1:], strict=False)
                return _all([self._relation(left, operator, right) for left, operator, right in pairs])
        raise Unreadable("no set of real numbers")

    def _relation(self, left: Value, operator: str, right: Value) -> Within:
        if not isinstance(left, Symbol):
            turned = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
            if not isinstance(right, Symbol) or operator not in turned:
                raise Unreadable("no condition on one variable")
            left, operator, right = right, turned[operator], left
        if self._variable not in (None, left.name):
            raise Unreadable("conditions on two variables")
        self._variable = left.name
        match operator:
            case "in":
                return self.within(right)
            case "=":
                return self._point(right)
            case "!=":
                return _without(_between(0, 1, False, False), self._point(right))
            case "<" | "<=":
                return self._interval(self.ends[0], right, False, operator == "<=")
            case ">" | ">=":
                return self._interval(right, self.ends[1], operator == ">=", False)
        raise Unreadable("no condition on one variable")

    def _interval(self, low: Value, high: Value, low_closed: bool, high_closed: bool) -> Within:
        ends = self._end(low), self._end(high)
        self.intervals.append(ends)
        return _between(*ends, low_closed, high_closed)

    def _point(self, value: Value) -> Within:
        end = self._end(value)
        return _between(end, end, True, True)

    def _end(self, value: Value) -> int:
        if not isinstance(value, EXPRESSIONS):
            raise Unreadable("an end that is no number")
        self.ends.append(value)
        return len(self.ends) - 1


def _between(low: int, high: int, low_closed: bool, high_closed: bool) -> Within:
    def within(places: Places, at: int) -> bool:
        first, last = 2 * places[low] + 1, 2 * places[high] + 1
        return first < at < last or (at == first <= last and low_closed) or (at == last >= first and high_closed)

    return within


def _any(parts: Sequence[Within]) -> Within:
    return lambda places, at: any(part(places, at) for part in parts)


def _all(parts: Sequence[Within]) -> Within:
    return lambda places, at: all(part(places, at) for part in parts)


def _without(whole: Within, part: Within) -> Within:
    return lambda places, at: whole(places, at) and not part(places, at)
