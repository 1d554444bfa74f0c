"""Which samples stand in a report, and why."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from areal_async.errors import ConfigError
from areal_async.view import tables
from areal_async.view.chosen import Chosen, choose, named


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(tables.open_database(tmp_path / "x.sqlite")) as opened:
        tables.make_tables(opened)
        yield opened


def put(database: sqlite3.Connection, name: str, at: float, **values: object) -> None:
    group, _, member = name.partition(".")
    row = {
        "key": tables.key_of(name), "id": name, '"group"': int(group), "at": at, "length": 5, "versions": 1,
        "truncated": 0, "start": "text", "outcome": "trained", "step": int(member), "lag": 0, "verdict": "right",
        "reward": 0.5, **values,
    }  # fmt: skip
    places = ", ".join("?" * len(row))
    database.execute(f"INSERT INTO samples ({', '.join(row)}) VALUES ({places})", list(row.values()))


def test_those_that_say_much(database: sqlite3.Connection) -> None:
    put(database, "0.0", 1.0)
    put(database, "0.1", 2.0, reward=1.0)
    put(database, "0.2", 3.0, reward=0.0, verdict="wrong")
    put(database, "0.3", 4.0, length=9, truncated=1)
    put(database, "1.0", 5.0, versions=3)
    put(database, "1.1", 6.0, lag=2)
    put(database, "1.2", 7.0, verdict="crash", reward=None)
    put(database, "1.3", 8.0, verdict=None, reward=None, outcome="filtered", lag=None)
    put(database, "2.0", 9.0)
    assert choose(database, 9) == [
        Chosen("0.0", "first"),
        Chosen("0.1", "highest reward"),
        Chosen("0.2", "lowest reward, verdict wrong"),
        Chosen("0.3", "longest, cut at the limit"),
        Chosen("1.0", "most versions"),
        Chosen("1.1", "oldest when it was trained"),
        Chosen("1.2", "verdict crash"),
        Chosen("1.3", "outcome filtered"),
        Chosen("2.0", "last, verdict right, outcome trained"),
    ]
    assert [each.id for each in choose(database, 2)] == ["0.0", "2.0"]
    assert choose(database, 0) == []


def test_the_rest_is_spread_over_the_run(database: sqlite3.Connection) -> None:
    for number in range(40):
        put(database, f"0.{number}", float(number))
    found = choose(database, 6)
    assert len(found) == 6
    assert [each.id for each in found] == sorted((each.id for each in found), key=tables.key_of)
    spread = [each.why for each in found if each.why.startswith("of step")]
    assert len(spread) == 4
    steps = [int(why.removeprefix("of step ")) for why in spread]
    assert steps == [5, 15, 24, 34]


def test_one_with_its_text_goes_first(database: sqlite3.Connection) -> None:
    put(database, "0.0", 1.0, start="", length=99)
    put(database, "0.1", 2.0)
    put(database, "0.2", 3.0, start="")
    assert [(each.id, each.why.startswith("first, last")) for each in choose(database, 1)] == [("0.1", True)]
    database.execute("UPDATE samples SET start = ''")  # there is no tokenizer
    assert [each.id for each in choose(database, 2)] == ["0.0", "0.2"]


def test_none_is_there(database: sqlite3.Connection) -> None:
    assert choose(database, 12) == []
    with pytest.raises(ConfigError, match=r"--samples 3\.1: the log has no answer of this name"):
        named(database, ["3.1"])
    put(database, "3.1", 1.0)
    assert named(database, ["3.1", "3.1"]) == [Chosen("3.1", "asked for")]
