"""Samples of a run for people: the rows that a filter leaves, and one sample with all that is known of it.

What always holds: what is asked for becomes parameters of a query, never a part of its text; only what was read of the
log is told, and each thing that can't be shown has a line that says why, and hinders nothing else.
"""

import math
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from areal_async.errors import ConfigError, LogError
from areal_async.messages import GroupId, SampleId
from areal_async.runfiles import CHECKS, prox_of
from areal_async.trace.samples import LOST, Assembler, Decode, SampleRecord
from areal_async.trace.things import nearest
from areal_async.view import tables
from areal_async.view.api import Check, SampleFull, SamplePage, SampleQuery, SampleRow
from areal_async.view.data_row import columns_of
from areal_async.view.index import Index
from areal_async.view.made_rows import MadeRows
from areal_async.view.tables import Value

MOST_ROWS: Final = 500  # of a page
MOST_OF_A_CHARACTER: Final = 4  # tokens: its bytes in UTF-8
COLUMNS: Final = SampleRow.__struct_fields__
_COLUMNS: Final = ", ".join(f'samples."{name}"' for name in COLUMNS)
_EQUAL: Final = {"step": "step", "verdict": "verdict", "outcome": "outcome", "server": "server", "group": '"group"'}
_LEAST: Final = {
    "reward_min": "reward", "lag_min": "lag", "length_min": "length", "versions_min": "versions"
}  # fmt: skip
_MOST: Final = {"reward_max": "reward", "lag_max": "lag", "length_max": "length"}


class Samples:
    """Of the run in `run_folder`, whose log `index` reads. decode: token ids to text; None: missing says why not. made:
    rows of the data that were made again so far."""

    def __init__(self, run_folder: Path, log_folder: Path, index: Index, decode: Decode | None, missing: str) -> None:
        self._run_folder: Final = run_folder
        self._log_folder: Final = log_folder
        self._index: Final = index
        self._decode: Final = decode
        self._missing: Final = missing
        self.made: Final = MadeRows()

    def page(self, query: SampleQuery) -> SamplePage:
        """Raises ConfigError: the question is wrong."""
        begun = time.perf_counter()
        self._index.write()
        total, rows = search(self._index.database, query)
        return SamplePage(
            rows=rows,
            total=total,
            took_ms=1000 * (time.perf_counter() - begun),
            missing=f"no texts to search in: {self._missing}" if self._decode is None else "",
            reading=self._index.reading(),
        )

    def full(self, name: SampleId) -> SampleFull | None:
        """None: there is no such sample, or it has no answer yet."""
        self._index.write()
        found = tables.life_of(self._index.database, name)
        if found is None:
            return None
        missing: list[str] = []
        with Assembler(self._log_folder, self._decode) as assembler:
            try:
                record = assembler.record(*found)
            except LogError as error:
                missing.append(str(error))
                found[1].payload = None  # its arrays are damaged: the rest is shown
                record = assembler.record(*found)
            else:
                if record.missing and self._index.is_lost(record.id):
                    record = replace(record, missing=LOST)
                missing += [record.missing] * bool(record.missing)
        if self._decode is None:
            missing.append(f"no texts, tokens only: {self._missing}")
        prompt, tokens = (
            self._pieces(record.prompt_ids, record.prompt),
            self._pieces(record.response_ids, record.response),
        )
        return SampleFull(
            record=record,
            prompt_tokens=prompt,
            tokens=tokens,
            prox=self._prox(record, missing),
            checks=self._checks(record, missing),
            members=self._members(record.group),
            columns=columns_of(self._run_folder, record.row, record.prompt, missing, self.made),
            missing=missing,
        )

    def _pieces(self, ids: list[int] | None, text: str | None) -> list[str] | None:
        return None if ids is None or text is None or self._decode is None else pieces(self._decode, ids, text)

    def _prox(self, record: SampleRecord, missing: list[str]) -> list[float | None] | None:
        if record.step is None:
            return None
        try:
            found = prox_of(self._run_folder, record.step, record.id)
        except LogError as error:
            missing.append(str(error))
            return None
        if found is None:
            missing.append(f"log π_prox of step {record.step} wasn't kept, or was removed with the step's arrays")
            return None
        if len(found) != record.response_tokens:
            missing.append(f"log π_prox of {len(found)} tokens was kept, the answer has {record.response_tokens}")
            return None
        return [None if math.isnan(value) else value for value in found.tolist()]

    def _checks(self, record: SampleRecord, missing: list[str]) -> list[Check]:
        rows = self._index.database.execute(
            "SELECT verdict, reward, why, extracted, seconds FROM checks WHERE sample = ? ORDER BY rowid", (record.id,)
        )
        found = [
            Check(verdict=verdict, reward=reward, why=why, extracted=extracted, seconds=seconds)
            for verdict, reward, why, extracted, seconds in rows
        ]
        if self._index.checks_problem:
            missing.append(self._index.checks_problem)
        elif not found and record.verdict is not None:
            missing.append(f"what the check said isn't known: {self._run_folder / CHECKS} has no line of this sample")
        return found

    def _members(self, group: GroupId) -> list[SampleRow]:
        rows = self._index.database.execute(
            f"SELECT {_COLUMNS} FROM samples WHERE key >= ? AND key < ? ORDER BY key", tables.keys_of(group)
        )
        return [_row(row) for row in rows]


# ------------------------------------------------------------------------------------------------------------- search


def search(database: sqlite3.Connection, query: SampleQuery) -> tuple[int, list[SampleRow]]:
    """How many samples the filters leave, and those of the page. Raises ConfigError: the question is wrong."""
    _check(query)
    where, values = _filters(query)
    column = "key" if query.sort == "id" else f'"{query.sort}"'
    way = "DESC" if query.descending else "ASC"
    order = f"ORDER BY samples.{column} IS NULL, samples.{column} {way}, samples.key {way}"  # nothing comes last
    if column in ("key", '"at"'):
        order = f"ORDER BY samples.{column} {way}"  # as the index has it
    if query.text:  # looked through once, for number and rows
        _find_text(database, query.text, where, values)
        where, values = "WHERE key IN (SELECT key FROM temp.found)", []
    total = database.execute(f"SELECT COUNT(*) FROM samples {where}", values).fetchone()[0]
    keys = f"SELECT key FROM samples {where} {order} LIMIT ? OFFSET ?"  # by themselves they are sorted twice as fast
    rows = database.execute(
        f"SELECT {_COLUMNS} FROM samples WHERE key IN ({keys}) {order}", [*values, query.limit, query.offset]
    )
    return total, [_row(row) for row in rows]


def _check(query: SampleQuery) -> None:
    """The one place where it is checked what becomes a part of the text, and how much may be asked for."""
    if query.sort not in COLUMNS:
        raise ConfigError(f"sort: {query.sort[:40]!r} is no column; there is {nearest(query.sort, COLUMNS)}")
    if not 1 <= query.limit <= MOST_ROWS:
        raise ConfigError(f"limit: {query.limit} is not in 1 … {MOST_ROWS}")
    if query.offset < 0:
        raise ConfigError(f"offset: {query.offset} is below 0")


def _filters(query: SampleQuery) -> tuple[str, list[Value]]:
    terms: list[str] = []
    values: list[Value] = []

    def add(term: str, *given: Value) -> None:
        terms.append(term)
        values.extend(given)

    for comparison, columns in (("=", _EQUAL), (">=", _LEAST), ("<=", _MOST)):
        for field, column in columns.items():
            if (value := getattr(query, field)) not in (None, ""):
                add(f"{column} {comparison} ?", value)
    if query.version is not None:
        add("oldest <= ? AND newest >= ?", query.version, query.version)
    if query.truncated is not None:
        add("truncated = ?", query.truncated)
    return ("WHERE " + " AND ".join(terms) if terms else ""), values


def _find_text(database: sqlite3.Connection, text: str, where: str, values: Sequence[Value]) -> None:
    """Puts the keys of the samples with this text into `found`."""
    wanted = tables.folded(text)
    # Python looks through bytes three times as fast as SQLite through text
    database.create_function("holds", 1, lambda folded: wanted in folded, deterministic=True)
    database.execute("DROP TABLE IF EXISTS temp.found")
    database.execute("CREATE TEMP TABLE found (key INTEGER PRIMARY KEY)")
    source = f"samples JOIN texts USING (key) {where} AND holds(folded)" if where else "texts WHERE holds(folded)"
    database.execute(f"INSERT INTO temp.found SELECT key FROM {source}", values)


def _row(values: Sequence[Value]) -> SampleRow:
    fields = dict(zip(COLUMNS, values, strict=True))
    return SampleRow(**fields | {"truncated": bool(fields["truncated"])})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- tokens


def pieces(decode: Callable[[list[int]], str], ids: Sequence[int], text: str) -> list[str]:
    """The text of each token, so that they join to `text`, which is that of all of them. A token that ends inside of a
    character has an empty one: the token that completes it has the character.

    A token is decoded with those before it (some tokenizers write the first one of a text otherwise), of which two
    steps back are enough.
    """
    found: list[str] = []
    begin = read = place = 0  # decoded from `begin` on; what is before `read` has been given; how much of the text
    for number in range(1, len(ids) + 1):
        before, now = decode(list(ids[begin:read])), decode(list(ids[begin:number]))
        waits = number - read < MOST_OF_A_CHARACTER  # more than that are bytes of no character
        if (waits and now.endswith("\N{REPLACEMENT CHARACTER}")) or len(now) < len(before):
            found.append("")
            continue
        piece = text[place : place + len(now) - len(before)]
        found.append(piece)
        place += len(piece)
        begin, read = read, number
    if found:
        found[-1] += text[place:]
    return found
