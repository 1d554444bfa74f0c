"""Which samples stand in a report: a few that say much, each with the reasons why it is there.

What always holds: the same log gives the same samples; one that still has its text goes before one that hasn't.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from areal_async.errors import ConfigError

_FIRST: Final = (
    ("first", "1", '"at" ASC'),
    ("last", "1", '"at" DESC'),
    ("highest reward", "reward IS NOT NULL", 'reward DESC, "at" DESC'),
    ("lowest reward", "reward IS NOT NULL", 'reward ASC, "at" DESC'),
    ("longest", "1", 'length DESC, "at" DESC'),
    ("most versions", "versions > 1", 'versions DESC, "at" DESC'),
    ("oldest when it was trained", "lag > 0", 'lag DESC, "at" DESC'),
    ("cut at the limit", "truncated", '"at" DESC'),
)  # why, WHERE, ORDER BY
_EACH: Final = (("verdict", "verdict"), ("outcome", "outcome"))  # the newest of each value; column, what it is called


class Chosen(msgspec.Struct, frozen=True):
    """id: of the sample. why: in words."""

    id: str
    why: str


def choose(database: sqlite3.Connection, most: int) -> list[Chosen]:
    """At most so many, in the order in which they came. Those that fill the number are spread over the run."""
    reasons: dict[str, list[str]] = {}
    for name, why in _candidates(database):
        if name in reasons or len(reasons) < most:
            reasons.setdefault(name, []).append(why)
    for name, step in _spread(database, most - len(reasons), list(reasons)):
        reasons[name] = ["not trained" if step is None else f"of step {step}"]
    places = ", ".join("?" * len(reasons))
    rows = database.execute(f'SELECT id FROM samples WHERE id IN ({places}) ORDER BY "at"', list(reasons))
    return [Chosen(name, ", ".join(reasons[name])) for (name,) in rows]


def named(database: sqlite3.Connection, names: Sequence[str]) -> list[Chosen]:
    """Those that somebody wants. Errors: ConfigError: there is no such sample."""
    for name in names:
        if database.execute("SELECT 1 FROM samples WHERE id = ?", (name,)).fetchone() is None:
            raise ConfigError(f"command line: view: --samples {name}: the log has no answer of this name")
    return [Chosen(name, "asked for") for name in dict.fromkeys(names)]


def _candidates(database: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    for why, where, order in _FIRST:
        if (name := _one(database, where, order)) is not None:
            yield name, why
    for column, what in _EACH:
        values = database.execute(f"SELECT DISTINCT {column} FROM samples WHERE {column} IS NOT NULL ORDER BY 1")
        for (value,) in values.fetchall():
            name = _one(database, f"{column} = ?", '"at" DESC', value)
            assert name is not None, "the value is one that there is"
            yield name, f"{what} {value}"


def _one(database: sqlite3.Connection, where: str, order: str, *values: str) -> str | None:
    query = f"SELECT id FROM samples WHERE {where} ORDER BY start = '', {order}, key DESC LIMIT 1"
    found = database.execute(query, values).fetchone()
    return None if found is None else str(found[0])


def _spread(database: sqlite3.Connection, many: int, without: list[str]) -> Iterator[tuple[str, int | None]]:
    """So many of the others, from the first to the last, with the step that trained each."""
    others = f"FROM samples WHERE id NOT IN ({', '.join('?' * len(without))})"
    with_text = f"{others} AND start != ''"
    for where in (with_text, others):
        (count,) = database.execute(f"SELECT COUNT(*) {where}", without).fetchone()
        if count >= many or where is others:
            break
    for place in sorted({round((number + 0.5) * count / max(1, many) - 0.5) for number in range(many)}):
        found = database.execute(
            f'SELECT id, step {where} ORDER BY "at" LIMIT 1 OFFSET ?', [*without, place]
        ).fetchone()
        if found is not None:
            yield found
