"""Equality of expressions."""

from areal_async.rewards.math.values import Expression, Number


def same(one: Expression, other: Expression) -> bool:
    return one == other


def rounds_to(exact: Expression, decimal: Number) -> bool:
    return False


def factor_sign(one: Expression, other: Expression) -> int:
    return 0
