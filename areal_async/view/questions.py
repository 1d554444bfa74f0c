"""What stands behind `?` of an address, as values: each field checked, and named where it is wrong.

What always holds: a field that a route doesn't know is an error, not one that is passed over: a filter with a typing
error would seem to filter nothing. An empty field counts as left out.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from areal_async.errors import ArealError
from areal_async.trace.things import nearest
from areal_async.view.api import SampleQuery

# by what msgspec calls it: the words for people
_WANTED: Final = {"`int": "a whole number", "`float": "a number", "`bool": "true or false"}


class WrongQuestion(ArealError):
    """The message names the field."""


class Fields:
    """Of one question. known: names that its route has. Errors of all methods: WrongQuestion."""

    def __init__(self, query: Mapping[str, str], known: Iterable[str]) -> None:
        names = tuple(known)
        for name in query:
            if name not in names:
                raise WrongQuestion(f"{name}: no such field; there is {nearest(name, names) or 'none'}")
        self._given = {name: value for name, value in query.items() if value}

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name, default)

    def whole(self, name: str, default: int, least: int = 0) -> int:
        """From `least` on."""
        text = self._given.get(name)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            raise WrongQuestion(f"{name}: {text[:40]!r} is not a whole number") from None
        if not least <= value < 1 << 63:
            raise WrongQuestion(f"{name}: {text[:40]} is too {'small' if value < least else 'large'}; from {least} on")
        return value

    def number(self, name: str, default: float) -> float:
        text = self._given.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise WrongQuestion(f"{name}: {text[:40]!r} is not a number")
        return value


def sample_query(query: Mapping[str, str]) -> SampleQuery:
    """Filters and order of a page of samples; what of it may be asked is checked where it is looked for. Errors:
    WrongQuestion."""
    names = SampleQuery.__struct_fields__
    Fields(query, names)
    values = {}
    for name in names:
        if given := query.get(name):
            values[name] = _value(name, given)
    return msgspec.convert(values, SampleQuery)


def _value(name: str, given: str) -> object:
    """As the type that the field has."""
    try:
        read = msgspec.convert({name: given}, SampleQuery, strict=False)
    except msgspec.ValidationError as error:
        wanted = next((words for kind, words in _WANTED.items() if kind in str(error)), "allowed here")
        raise WrongQuestion(f"{name}: {given[:40]!r} is not {wanted}") from None
    value: object = getattr(read, name)
    if isinstance(value, float) and math.isnan(value):
        raise WrongQuestion(f"{name}: {given[:40]!r} is not a number")
    if isinstance(value, int | float) and not abs(value) < 1 << 63:
        raise WrongQuestion(f"{name}: {given[:40]} is too large")
    return value
