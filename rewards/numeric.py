"""The reward `numeric`: the last number of the response is the data row's, within a tolerance.

A number is written in digits, with commas between groups of three or without, and may have a fraction after a point, a
power of ten (`1.5e3`, `1.5 × 10^3`), a sign right before it, a currency sign, and a number under it (`3/4`). A percent
sign and whatever else follows is left away: `28 %` is 28. Digits right after a letter (`x2`) begin no number, and a
minus after a letter, a digit or a bracket (`5-3`) is no sign. Nothing is computed: of `2 * 3` the last number is 3.

What always holds: numbers are compared exactly, as fractions of whole numbers; two whole numbers of whatever length are
the same if they are equal, or within `numeric.absolute` where that is set; a cut answer is never right, since its last
number may be cut, too.
"""

import re
from collections import deque
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Final, NamedTuple

from areal_async.messages import NumericOptions, RewardSpec, Verdict
from areal_async.rewards.verdicts import Check, Grader, Outcome

_DIGITS: Final = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
_CURRENCY: Final = r"\\?[$€£¥₹]\s?"
_NUMBER: Final = re.compile(
    r"(?<![A-Za-z_0-9])(?<![0-9]\.)"  # in the middle of a word or of a number none begins
    rf"(?:(?<![)\]}}])(?P<sign>[-+−])(?:{_CURRENCY})?)?(?P<digits>{_DIGITS})"
    r"(?:[eE](?P<e>[-+−]?[0-9]+)|\s?(?:×|x|\*|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?\{?(?P<ten>[-+−]?[0-9]+)\}?)?"
    rf"(?:\s?/\s?(?P<under>{_DIGITS})(?![0-9]))?"
)
_AROUND: Final = re.compile(rf"^(?:{_CURRENCY})?(.*?)(?:\s?\\?%)?$", re.DOTALL)  # of the data row's answer
_LARGEST_POWER: Final = 10_000  # of ten; a number beyond it is compared as it is written, never as a fraction


class Number(NamedTuple):
    """over / under, as it was written."""

    text: str
    over: Decimal
    under: Decimal


def grader(spec: RewardSpec) -> Grader:
    """With `exact_after`: the last number of what follows its last occurrence. Without: of the whole response."""
    after, options = spec.exact_after, spec.numeric

    def grade(check: Check) -> Outcome:
        expected = (check.answer or "").strip()
        if not expected:
            return Outcome("bad_data", "the data row has no answer")
        right = whole_number_text(expected)
        if right is None:
            return Outcome("bad_data", f"the data row's answer {expected[:200]!r} is no number")
        if check.finish == "length":
            return Outcome("no_answer", "cut at the token limit")
        _, found, rest = check.response.rpartition(after) if after else ("", "", check.response)
        if after and not found:
            return Outcome("no_answer", f"no {after!r} in the response")
        given = last_number(rest)
        if given is None:
            return Outcome("no_answer", f"no number after {after!r}" if after else "no number in the response")
        verdict: Verdict = "right" if same(given, right, options) else "wrong"
        return Outcome(verdict, f"expected {expected[:200]!r}", given.text)

    return grade


def whole_number_text(text: str) -> Number | None:
    """The number that a text is, but for a currency sign before and a percent sign after it; None if it isn't one."""
    around = _AROUND.match(text)
    found = _NUMBER.fullmatch(around[1]) if around else None
    return None if found is None else _read(found)


def last_number(text: str) -> Number | None:
    """The last number in a text; None if there is none, or it is one through nothing."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _read(last[0]) if last else None


def _read(found: re.Match[str]) -> Number | None:
    power = (found["e"] or found["ten"] or "0").replace("−", "-")
    try:
        over = Decimal(found["digits"].replace(",", "") + "e" + power)
        under = Decimal((found["under"] or "1").replace(",", ""))
    except InvalidOperation:  # a power that is a number of twenty digits
        return None
    if not under:
        return None
    return Number(found[0].strip(), over.copy_negate() if found["sign"] in ("-", "−") else over, under)


def same(given: Number, right: Number, options: NumericOptions) -> bool:
    """Whether they are equal, or as near as the options allow."""
    one, other = _fraction(given), _fraction(right)
    if one is None or other is None:
        return given.over == right.over and given.under == right.under
    allowed = Fraction(str(options.absolute))
    if not (one.denominator == other.denominator == 1):  # a whole number isn't another one's rounding
        allowed = max(allowed, Fraction(str(options.relative)) * abs(other))
    return abs(one - other) <= allowed


def _fraction(number: Number) -> Fraction | None:
    """None for what would take too long to write out."""
    for part in (number.over, number.under):
        exponent = part.as_tuple().exponent
        if part and (abs(part.adjusted()) > _LARGEST_POWER or int(exponent) < -_LARGEST_POWER):
            return None
    return Fraction(number.over) / Fraction(number.under) if number.over else Fraction(0)
