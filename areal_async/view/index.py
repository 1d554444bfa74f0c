"""A run's log, read beside the run and kept as tables that a page can ask: samples, lags, troubles, the timeline.

What always holds: the tables say what `trace.lives` says of the turns that were taken, once `write` was called, however
the log was cut into slices and however it grew meanwhile; one `Lives` follows the log, and it is the drawing's. Reading
goes on where it stopped; a slice takes about as long as it may. Memory follows what training may go back to. A log that
turns out to be another one than was read (`log.follow`) is read again from its start.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import numpy as np

from areal_async.errors import LogError
from areal_async.log.follow import Follower
from areal_async.log.turns import Turn
from areal_async.messages import (
    DataEnded,
    Failed,
    GroupId,
    Release,
    RolledBack,
    SampleDone,
    SampleId,
    Scored,
    StartSample,
    StepDone,
    Train,
    Version,
    group_of,
)
from areal_async.runfiles import CHECKS, read_checks
from areal_async.trace.drawing import Drawing
from areal_async.trace.life import GroupLife, SampleLife
from areal_async.trace.lives import Lives
from areal_async.trace.samples import Assembler, Decode
from areal_async.view import api, tables, timeline, troubles
from areal_async.view.configs import Configs
from areal_async.view.spans import SpanTable
from areal_async.view.tables import Looked, Value
from areal_async.wire.arrays import Array

START: Final = 120  # characters of an answer in its row
_AT_ONCE: Final = 256  # rows that are written together: enough to be quick, few enough for a short slice
_BETWEEN: Final = b"\x1f"  # prompt and answer in `texts`: nobody searches for it


class Index:
    """Of the log in `log_folder` (it may not be there yet), in a database of `tables.open_database`.

    decode: token ids to text; None: without texts. lives, drawing: of what was read so far, None before its beginning.
    spans: of the timeline. configs: in force so far. verdicts: how checks ended, and how many. checks_problem: why the
    run's checks can't be read, or "". `close` it at the end.
    """

    def __init__(self, log_folder: Path, database: sqlite3.Connection, decode: Decode | None) -> None:
        self._log_folder: Final = log_folder
        self._run_folder: Final = log_folder.parent if log_folder.name == "log" else log_folder
        self.database: Final = database
        self._decode: Final = decode
        self._assembler = Assembler(log_folder, decode)
        self._begin()

    def close(self) -> None:
        """The database stays open."""
        self._assembler.__exit__()

    def _begin(self) -> None:
        self._follower = Follower(self._log_folder)
        self.lives: Lives | None = None
        self.drawing: Drawing | None = None
        self.spans = SpanTable(self.database)
        self.configs = Configs()
        self.samples = 0
        self.verdicts: Counter[str] = Counter()
        self._released: set[SampleId] = set()  # of groups that aren't over
        self._done = False
        self._checks_at = 0  # byte of checks.jsonl
        self.checks_problem = ""
        self._answers: list[tuple[Value, ...]] = []  # rows to be inserted
        self._texts: list[tuple[int, bytes]] = []
        self._changed: dict[GroupId, GroupLife] = {}  # whose rows are to be updated
        self._prompt: tuple[GroupId, list[int], bytes] = (-1, [], b"")  # the newest, of which a group has many
        self._training: dict[int, dict[int | None, int]] = {}  # tokens by lag of steps that aren't trained yet
        tables.make_tables(self.database)

    # ------------------------------------------------------------------------------------------------------- reading

    def read_some(self, seconds: float) -> bool:
        """Read on for about so long. Returns whether more lies there."""
        until = time.perf_counter() + seconds
        self._done = False
        for turn in self._follower.turns(time.time()):
            self._take(turn)
            if time.perf_counter() >= until:
                return True
        if self._follower.outdated:
            self._assembler.__exit__()
            self._assembler = Assembler(self._log_folder, self._decode)  # its segments may be others, too
            self._begin()
            return True
        if self._read_checks():
            return True
        self.write()
        self._done = True
        return False

    def reading(self) -> api.Reading:
        follower = self._follower
        return api.Reading(
            nbytes=follower.offset if follower.records else 0,
            of=follower.size,
            events=follower.records,
            samples=self.samples,
            done=self._done,
            problem=follower.problem,
        )

    def write(self) -> None:
        """Bring the tables to what was read."""
        if not (self._answers or self._changed):
            return
        fates = [
            tables.fate_row(group, sample)
            for group in self._changed.values()
            for sample in group.samples
            if sample.done is not None
        ]
        self.database.execute("BEGIN")
        tables.insert_answers(self.database, self._answers)
        tables.update_fates(self.database, fates)
        self.database.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?)", self._texts)
        self.database.execute("COMMIT")
        self._answers.clear()
        self._texts.clear()
        self._changed.clear()

    def lags(self, begin: int, end: int) -> tuple[dict[int, int], int]:
        """Trained tokens by lag of the steps begin … end - 1, and those whose lag nobody knows any more."""
        found: dict[int | None, int] = dict(
            self.database.execute(
                "SELECT lag, SUM(tokens) FROM lags WHERE step >= ? AND step < ? GROUP BY lag ORDER BY lag", (begin, end)
            ).fetchall()
        )
        unknown = found.pop(None, 0)
        return {lag: tokens for lag, tokens in found.items() if lag is not None}, unknown

    def timeline(self, begin: float, end: float, width: int, opened: Collection[str] | None) -> api.Timeline:
        """What was there between two seconds of the run clock, for so many pixels. opened: as in `timeline.look`."""
        return timeline.look(self.spans, self.drawing, self.reading(), begin, end, width, opened)

    def is_lost(self, name: SampleId) -> bool:
        """Of a sample whose arrays aren't there: whether they should be."""
        return self.lives is not None and group_of(name) in self.lives.groups and name not in self._released

    def troubles(self, most: int) -> list[api.Trouble]:
        """The newest, the newest last."""
        return troubles.newest_troubles(self.database, most)

    # --------------------------------------------------------------------------------------------------------- turns

    def _take(self, turn: Turn) -> None:
        drawing = self.drawing
        if drawing is None:
            assert self._follower.rules is not None, "a log begins with its rules"
            drawing = self.drawing = Drawing(self.spans, self._follower.rules, lambda sample: False, None)
            self.configs.note(self._follower.notes)
        lives = self.lives = drawing.lives
        before = (lives.version, lives.branch)
        for command in turn.commands:
            if isinstance(command, Release):
                self._released.update(command.samples)
        for group in drawing.take(turn):
            self._changed[group.id] = group
            self._released.difference_update(sample.id for sample in group.samples)
        self._take_event(turn, before)
        self.configs.note(turn.notes)
        for command in turn.commands:
            match command:
                case StartSample(attempt=attempt) if attempt:
                    self._again(command.sample)
                case Train():
                    self._change(command.groups)
                    self._training[command.step] = self._lags(command)
        troubles.note_troubles(self.database, turn)
        if len(self._answers) >= _AT_ONCE or len(self._changed) * lives.rules.group_size >= _AT_ONCE:
            self.write()

    def _take_event(self, turn: Turn, before: tuple[Version, int]) -> None:
        lives = self.lives
        assert lives is not None, "a turn was taken"
        match turn.event:
            case SampleDone() as event:
                self._change([group_of(event.sample)])
                self._answered(event)
            case Scored() as event:
                self.verdicts[event.verdict] += 1
                self._change([group_of(event.sample)])
            case Failed(of="sample") as event:
                self._change([group_of(event.id)])
            case Failed(of="group") as event:
                self._change([int(event.id)])
            case DataEnded() as event:
                self._change([event.group])
            case StepDone() as event if (event.step, event.branch) == before:
                self._change(group.id for group in lives.trained(event.step))
                self._trained(event.step)
            case RolledBack() as event:
                again = [
                    group.id for group in lives.groups.values() if group.step is not None and group.step >= event.to
                ]
                self._change(again)
                self.database.execute("DELETE FROM lags WHERE step >= ?", (event.to,))
                self.configs.back(event.to)

    def _change(self, groups: Iterable[GroupId]) -> None:
        assert self.lives is not None, "a turn was taken"
        for number in groups:
            if (group := self.lives.groups.get(number)) is not None:
                self._changed[number] = group

    def _answered(self, event: SampleDone) -> None:
        group, sample = self._find(event.sample)
        if group is None or sample is None or sample.done is not event:
            return  # it came too late
        looked, folded = self._look(group, sample)
        self._answers.append(tables.answer_row(group, sample, looked))
        if folded is not None:
            self._texts.append((tables.key_of(sample.id), folded))
        self.samples += 1

    def _find(self, name: SampleId) -> tuple[GroupLife | None, SampleLife | None]:
        """Also in a group that is over since this turn."""
        group, member = self._changed.get(group_of(name)), int(name.partition(".")[2])
        if group is None or not 0 <= member < len(group.samples):
            return None, None
        return group, group.samples[member]

    def _again(self, name: SampleId) -> None:
        """A new attempt of a sample starts: what came of an earlier one is of no use."""
        self.write()
        gone = self.database.execute("DELETE FROM samples WHERE key = ?", (tables.key_of(name),)).rowcount
        self.database.execute("DELETE FROM texts WHERE key = ?", (tables.key_of(name),))
        self.samples -= gone

    def _look(self, group: GroupLife, sample: SampleLife) -> tuple[Looked, bytes | None]:
        """What the arrays of an answer say, and its texts for a search."""
        done = sample.done
        assert done is not None, "an answer has come"
        try:
            arrays, _ = self._assembler.arrays(sample)
        except LogError as error:
            troubles.note_damage(self.database, done.at, sample.id, str(error))
            arrays = None
        one = done.oldest == done.newest
        counts = {done.oldest: done.loss_tokens} if one else None
        if arrays is None:
            return Looked(1 if one else 2, counts, ""), None
        ids, mask, _, versions = arrays
        count = done.prompt_tokens
        if counts is None:
            counts = _counted(versions[count:], mask[count:])
        if self._decode is None:
            return Looked(len(counts), counts, ""), None
        answer = self._decode(ids[count:].tolist())
        prompt = self._prompt_text(group.id, ids[:count].tolist())
        return Looked(len(counts), counts, answer[:START]), prompt + _BETWEEN + tables.folded(answer)

    def _prompt_text(self, group: GroupId, ids: list[int]) -> bytes:
        """Folded. Answers of a group come close together, and have the same prompt."""
        if self._prompt[:2] != (group, ids):
            assert self._decode is not None, "there are texts"
            self._prompt = (group, ids, tables.folded(self._decode(ids)))
        return self._prompt[2]

    # --------------------------------------------------------------------------------------------------------- steps

    def _lags(self, train: Train) -> dict[int | None, int]:
        """Tokens by lag that a step trains."""
        self.write()
        found: dict[int | None, int] = {}
        for entry in train.samples:
            row = self.database.execute(
                "SELECT counts, loss_tokens FROM samples WHERE key = ?", (tables.key_of(entry.sample),)
            ).fetchone()
            if row is None:
                continue
            if row[0] is None:
                found[None] = found.get(None, 0) + row[1]
                continue
            for version, tokens in tables.counts_of(row[0]).items():
                if version >= train.mask_below:
                    lag = train.step - version
                    found[lag] = found.get(lag, 0) + tokens
        return found

    def _trained(self, step: int) -> None:
        rows = [(step, lag, tokens) for lag, tokens in self._training.pop(step, {}).items()]
        self.database.execute("DELETE FROM lags WHERE step = ?", (step,))
        self.database.executemany("INSERT INTO lags VALUES (?, ?, ?)", rows)

    def _read_checks(self) -> bool:
        """Whether more of them may lie there."""
        try:
            found, at = read_checks(self._run_folder, self._checks_at)
        except OSError as error:
            self.checks_problem = f"{self._run_folder / CHECKS}: can't be read: {error.strerror}"
            return False
        self.checks_problem = ""
        rows = [(c.sample, c.attempt, c.verdict, c.reward, c.why, c.extracted, c.seconds) for c in found]
        self.database.executemany("INSERT INTO checks VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        more, self._checks_at = at != self._checks_at, at
        return more


def _counted(versions: Array, mask: Array) -> dict[Version, int]:
    """Tokens that are the model's, by version."""
    found, counts = np.unique(versions[mask != 0], return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
