"""The SQLite file that holds what was read of a log: its tables, and how a sample becomes a row and a life again.

    samples    a row for each sample whose answer has come; `key` is made of group and member, so that a group's rows
               lie beside each other. What never changes of an answer, and what becomes of it
    texts      prompt and answer of a sample, folded: what a search for text looks through
    lags       trained tokens by step and lag; a lag of NULL: of tokens whose versions nobody knows any more
    troubles   what went wrong; `times` of the same kind
    checks     of the run's checks.jsonl

What always holds: the file is made anew by whoever opens it and of no use afterwards, so nothing waits for the disk.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from areal_async.log.format import PayloadRef
from areal_async.messages import GroupId, SampleDone, SampleId, Verdict, Version, group_of
from areal_async.trace.life import GroupLife, GroupState, Outcome, SampleLife, SampleState

Value: TypeAlias = str | bytes | int | float | None

CACHE_KIB: Final = 16_384  # of pages, in this process
PAGE_BYTES: Final = 65_536  # long texts are looked through twice as fast as with SQLite's 4,096
MOST_MEMBERS: Final = 1 << 20  # of a group, in a key

_SCHEMA: Final = """
CREATE TABLE samples (
    key INTEGER PRIMARY KEY, id TEXT, "group" INTEGER, at REAL, attempt INTEGER, length INTEGER, loss_tokens INTEGER,
    prompt_tokens INTEGER, oldest INTEGER, newest INTEGER, versions INTEGER, counts TEXT, truncated INTEGER,
    given REAL, server TEXT, start TEXT, row INTEGER, position INTEGER, floor INTEGER, asked REAL, started REAL,
    segment INTEGER, offset INTEGER, nbytes INTEGER,
    outcome TEXT, step INTEGER, branch INTEGER, advantage REAL, lag INTEGER, verdict TEXT, reward REAL,
    scored REAL, ready REAL, handed REAL, trained REAL
);
CREATE INDEX samples_at ON samples (at);
CREATE TABLE texts (key INTEGER PRIMARY KEY, folded BLOB);
CREATE TABLE lags (step INTEGER, lag INTEGER, tokens INTEGER);
CREATE INDEX lags_step ON lags (step);
CREATE TABLE troubles (
    id INTEGER PRIMARY KEY, at REAL, what TEXT, thing TEXT, text TEXT, same TEXT UNIQUE, times INTEGER
);
CREATE INDEX troubles_at ON troubles (at);
CREATE TABLE checks (
    sample TEXT, attempt INTEGER, verdict TEXT, reward REAL, why TEXT, extracted TEXT, seconds REAL
);
CREATE INDEX checks_sample ON checks (sample);
"""
TABLES: Final = ("samples", "texts", "lags", "troubles", "checks")

ANSWER: Final = (
    *("key", "id", "group", "at", "attempt", "length", "loss_tokens", "prompt_tokens", "oldest", "newest", "versions"),
    *("counts", "truncated", "given", "server", "start", "row", "position", "floor", "asked", "started"),
    *("segment", "offset", "nbytes"),
)  # columns that an answer comes with
FATE: Final = (
    *("outcome", "step", "branch", "advantage", "lag", "verdict", "reward"),
    *("scored", "ready", "handed", "trained"),
)  # columns that change later

_INSERT: Final = "INSERT OR REPLACE INTO samples ({}, outcome) VALUES ({}, 'outstanding')".format(
    ", ".join(f'"{name}"' for name in ANSWER), ", ".join("?" * len(ANSWER))
)
_UPDATE: Final = "UPDATE samples SET {} WHERE key = ?".format(", ".join(f"{name} = ?" for name in FATE))


def open_database(path: Path) -> sqlite3.Connection:
    """A new database in a file that isn't there yet, without its tables (each part of the page makes its own)."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA synchronous = OFF")
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA temp_store = MEMORY")
    database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    return database


def make_tables(database: sqlite3.Connection) -> None:
    for name in TABLES:
        database.execute(f"DROP TABLE IF EXISTS {name}")
    database.executescript(_SCHEMA)


def folded(text: str) -> bytes:
    """As `texts` has it: without upper case, in UTF-8."""
    return text.casefold().encode("utf-8", "replace")


def key_of(sample: SampleId) -> int:
    return group_of(sample) * MOST_MEMBERS + int(sample.partition(".")[2])


def _in_range(key: int) -> int:
    """SQLite has 64 bits; nobody has a group of such a number."""
    return key if key < 1 << 63 else -1


def keys_of(group: GroupId) -> tuple[int, int]:
    """First key of a group's members, and that behind the last."""
    return group * MOST_MEMBERS, (group + 1) * MOST_MEMBERS


class Looked(NamedTuple):
    """What the arrays of an answer say. versions: how many different ones its trained tokens have. counts: tokens by
    version, None where the arrays are gone and there are several. start: of the answer's text."""

    versions: int
    counts: dict[Version, int] | None
    start: str


def answer_row(group: GroupLife, sample: SampleLife, looked: Looked) -> tuple[Value, ...]:
    """The columns `ANSWER` of a sample whose answer has just come."""
    done, ref = sample.done, sample.payload
    assert done is not None, "an answer has come"
    counts = None
    if looked.counts is not None:
        counts = " ".join(f"{version}:{tokens}" for version, tokens in looked.counts.items())
    place = (None, None, None) if ref is None else (ref.segment, ref.offset, ref.nbytes)
    return (
        key_of(sample.id), sample.id, group.id, done.at, done.attempt, done.length, done.loss_tokens,
        done.prompt_tokens, done.oldest, done.newest, looked.versions, counts, done.finish == "length", done.reward,
        sample.server, looked.start, group.row, group.position, group.floor, group.asked_at, sample.started_at, *place,
    )  # fmt: skip


def fate_row(group: GroupLife, sample: SampleLife) -> tuple[Value, ...]:
    """The columns `FATE` of a sample whose answer has come, and its key."""
    outcome, done = group.outcome(sample), sample.done
    trained = outcome == "trained" and group.step is not None and done is not None
    step, branch = (group.step, group.branch) if trained else (None, None)
    lag = group.step - done.oldest if trained and group.step is not None and done is not None else None
    return (
        outcome, step, branch, sample.advantage, lag, sample.verdict, sample.reward, sample.scored_at, group.ready_at,
        group.handed_at, group.trained_at, key_of(sample.id),
    )  # fmt: skip


def insert_answers(database: sqlite3.Connection, rows: Iterable[tuple[Value, ...]]) -> None:
    database.executemany(_INSERT, rows)


def update_fates(database: sqlite3.Connection, rows: Iterable[tuple[Value, ...]]) -> None:
    database.executemany(_UPDATE, rows)


def counts_of(text: str) -> dict[Version, int]:
    """The column `counts`."""
    pairs = (pair.partition(":") for pair in text.split())
    return {int(version): int(tokens) for version, _, tokens in pairs}


# --------------------------------------------------------------------------------------------------- a row as a life

_STATES: Final[dict[Outcome, GroupState]] = {
    "trained": "trained", "training": "training", "filtered": "filtered", "stale": "stale", "failed": "failed",
    "cancelled": "cancelled", "outstanding": "running",
}  # fmt: skip


def life_of(database: sqlite3.Connection, name: SampleId) -> tuple[GroupLife, SampleLife] | None:
    """A sample as `trace.samples.Assembler` wants it, of its row alone; None: there is none."""
    cursor = database.execute("SELECT * FROM samples WHERE id = ? AND key = ?", (name, _in_range(key_of(name))))
    found = cursor.fetchone()
    if found is None:
        return None
    row = dict(zip((column[0] for column in cursor.description), found, strict=True))
    outcome: Outcome = row["outcome"]
    state: SampleState = "failed" if outcome == "failed" else "scored" if row["scored"] is not None else "scoring"
    verdict: Verdict | None = row["verdict"]
    sample = SampleLife(
        name, state, row["attempt"], server=row["server"], started_at=row["started"], scored_at=row["scored"],
        verdict=verdict, reward=row["reward"], advantage=row["advantage"],
    )  # fmt: skip
    sample.done = SampleDone(
        at=row["at"], sample=name, attempt=row["attempt"], oldest=row["oldest"], newest=row["newest"],
        prompt_tokens=row["prompt_tokens"], length=row["length"], loss_tokens=row["loss_tokens"],
        finish="length" if row["truncated"] else "stop", reward=row["given"],
    )  # fmt: skip
    if row["segment"] is not None:
        sample.payload = PayloadRef(row["segment"], row["offset"], row["nbytes"])
    group = GroupLife(
        row["group"], row["position"], row["asked"], [sample], state=_STATES[outcome], row=row["row"],
        prompt_tokens=row["prompt_tokens"], floor=row["floor"], ready_at=row["ready"], step=row["step"],
        branch=row["branch"] or 0, handed_at=row["handed"], trained_at=row["trained"],
    )  # fmt: skip
    return group, sample
