"""Whether what a program printed, or a function returned, is what was expected. Outside of the jail.

Printed text is compared line by line, a line token by token, white space being what separates tokens; blank lines at
the end don't count. A token is the expected one if it is the same text; only where the expected token is a number with
a point or an exponent, any number within 1e-6 of it will do. So integers are exact, of any length, and nothing is a
number that isn't written as one.

Results come as JSON and are compared with their types: 1 is not "1", not True (unless `bool_is_int`), and a tuple is a
list, at every depth. Where a number with a point or an exponent is expected, any number within 1e-6 will do.

What always holds: a value equals itself; a difference is a sentence that says where; nothing here raises.
"""

import json
import math
import re
from typing import Final, TypeAlias

TOLERANCE: Final = 1e-6  # of the expected number, or absolute if that is smaller than 1
SHOWN: Final = 200
DECIMAL: Final = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?", re.ASCII)
NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


class Whole(str):
    """An integer by its digits, whatever their number: comparing text costs less than making numbers of it."""

    __slots__ = ()


Json: TypeAlias = "Whole | float | str | bool | list[Json] | dict[str, Json] | None"


def printed_difference(expected: str, got: str) -> str:
    """What is wrong with a program's output; "" if nothing is."""
    wanted, given = _lines(expected), _lines(got)
    if wanted == given:
        return ""
    for number, (line, found) in enumerate(zip(wanted, given, strict=False), 1):
        if line != found and not _same_tokens(line.split(), found.split()):
            return f"line {number}: expected {head(line)}, got {head(found)}"
    if len(wanted) != len(given):
        return f"expected {len(wanted)} lines, got {len(given)}: expected {head(expected)}, got {head(got)}"
    return ""


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_tokens(expected: list[str], got: list[str]) -> bool:
    return len(expected) == len(got) and all(map(_same_token, expected, got))


def _same_token(expected: str, got: str) -> bool:
    if expected == got:
        return True
    return bool(DECIMAL.fullmatch(expected) and NUMBER.fullmatch(got)) and _near(float(expected), float(got))


def _near(expected: float, got: float) -> bool:
    return math.isfinite(expected) and abs(got - expected) <= TOLERANCE * max(1.0, abs(expected))


def read_json(text: str | bytes) -> Json:
    """ValueError if it is none, or nested too deep."""
    try:
        found: Json = json.loads(text, parse_int=Whole)
    except RecursionError:
        raise ValueError("nested too deep") from None
    return found


def result_difference(expected: Json, got: Json, *, bool_is_int: bool) -> str:
    """What is wrong with a function's result; "" if nothing is."""
    try:
        place = _difference(expected, got, bool_is_int)
    except RecursionError:
        return "nested too deep to be compared"
    if place is None:
        return ""
    where = f" (first difference at {place})" if place else ""
    return f"expected {head(shown(expected))}, got {head(shown(got))}{where}"


def _difference(expected: Json, got: Json, bool_is_int: bool) -> str | None:
    """Where they differ first, such as `[3].x`; "" at the top; None if nowhere."""
    match expected, got:
        case (list(), list()) if len(expected) == len(got):
            parts = [(f"[{at}]", left, right) for at, (left, right) in enumerate(zip(expected, got, strict=True))]
        case (dict(), dict()) if expected.keys() == got.keys():
            parts = [(f".{name}", value, got[name]) for name, value in expected.items()]
        case _:
            return None if _same_scalar(expected, got, bool_is_int) else ""
    for place, left, right in parts:
        if (deeper := _difference(left, right, bool_is_int)) is not None:
            return place + deeper
    return None


def _same_scalar(expected: Json, got: Json, bool_is_int: bool) -> bool:
    if bool_is_int:
        expected, got = _as_whole(expected), _as_whole(got)
    if isinstance(expected, float) and isinstance(got, float | Whole):
        number = float(got)
        return number == expected or _near(expected, number) or (math.isnan(expected) and math.isnan(number))
    return type(expected) is type(got) and not isinstance(expected, list | dict) and expected == got


def _as_whole(value: Json) -> Json:
    return Whole(int(value)) if isinstance(value, bool) else value


def shown(value: Json) -> str:
    """As it was written."""
    match value:
        case Whole():
            return str(value)
        case list():
            return f"[{', '.join(map(shown, value[:SHOWN]))}]"
        case dict():
            return "{" + ", ".join(f"{json.dumps(name)}: {shown(item)}" for name, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def head(text: str) -> str:
    """Its beginning, in quotation marks."""
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}… ({len(text)} characters)"
