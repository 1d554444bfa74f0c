"""`metrics.jsonl` of a run that may still write it: its lines from any one on.

What always holds: a line without its end isn't whole yet, and is read when it is; a broken line is left out and told,
and those behind it are read; only where the lines lie is kept, so memory doesn't follow the length of the run. A file
that has become shorter, or begins with another line, is another one, and is read from its beginning.
"""

import time
import zlib
from array import array
from pathlib import Path
from typing import Final

import msgspec

from areal_async.runfiles import METRICS
from areal_async.view.api import EvaluationPoint

PIECE_BYTES: Final = 1 << 18  # read and checked in about 3 ms
HEAD_BYTES: Final = 512  # of the first line: times and losses in it differ from run to run
AT_ONCE_BYTES: Final = 1 << 20  # of rows in one answer: more is asked for again
TOLD: Final = 3  # broken lines that are told one by one


class Row(msgspec.Struct, frozen=True):
    """What the list and the header need of a line; it may be of another version, so nothing else of it is."""

    step: int = 0
    version: int = 0
    branch: int = 0
    time_s: float = 0.0
    reward_mean: float | None = None
    ledger: dict[str, int] = {}
    eval_version: int | None = None
    eval_score: float | None = None
    eval_pass_at: dict[int, float] = {}


class Rows:
    """Of the file in a run folder. last: the newest whole line. evaluations: of which a line tells. mark: another
    one if the file is; "" before its first line."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._begin()

    def _begin(self) -> None:
        self._begins, self._ends = array("q"), array("q")  # of whole lines
        self._offset = 0  # up to where it was read
        self._number = 0  # of the line that begins there, from 1
        self._head = b""  # of its first line
        self._broken: list[str] = []
        self.mark = ""
        self.last: Row | None = None
        self.evaluations: list[EvaluationPoint] = []

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def problems(self) -> list[str]:
        """For people."""
        further = len(self._broken) - TOLD
        return [*self._broken[:TOLD], *([f"{self._path}: {further} more lines are broken"] if further > 0 else [])]

    def read_some(self, seconds: float) -> bool:
        """Read on for about so long; whether more lies there. Errors: OSError; a missing file is an empty one."""
        deadline = time.monotonic() + seconds
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._begin()
            return False
        with file:
            size = file.seek(0, 2)
            file.seek(0)
            if size < self._offset or file.read(len(self._head)) != self._head:
                self._begin()
            while self._offset < size:
                file.seek(self._offset)
                if not self._take(file.read(PIECE_BYTES)):
                    file.seek(self._offset)
                    if not self._take(file.readline()):  # longer than a piece, or not whole yet
                        return False
                if time.monotonic() > deadline:
                    return self._offset < size
        return False

    def _take(self, data: bytes) -> bool:
        """The whole lines that this begins with; whether there was one."""
        whole = data[: data.rfind(b"\n") + 1]
        if whole and not self._offset:
            self._head = whole[: min(HEAD_BYTES, whole.find(b"\n") + 1)]
            self.mark = f"{zlib.crc32(self._head):08x}"
        for line in whole.splitlines(keepends=True):
            self._number += 1
            try:
                line.decode()  # also of fields that aren't looked at here: others get the line as it is
                row = msgspec.json.decode(line, type=Row)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._broken.append(f"{self._path}:{self._number}: is no row of this release, and is left out: {error}")
            else:
                self._begins.append(self._offset)
                self._ends.append(self._offset + len(line.rstrip()))
                self._count(row)
            self._offset += len(line)
        return bool(whole)

    def _count(self, row: Row) -> None:
        self.last = row
        if row.eval_version is not None and row.eval_score is not None:
            self.evaluations.append(
                EvaluationPoint(
                    version=row.eval_version, time_s=row.time_s, score=row.eval_score, pass_at=row.eval_pass_at
                )
            )

    def since(self, number: int) -> tuple[list[msgspec.Raw], int]:
        """Lines from this one on (counted without the broken ones), as many as fit an answer; and the number of the
        next. Errors: OSError."""
        begin = number if number <= len(self) else 0  # the file was replaced: all of it is new
        if begin == len(self):
            return [], begin
        end = begin + 1
        while end < len(self) and self._ends[end] - self._begins[begin] <= AT_ONCE_BYTES:
            end += 1
        start = self._begins[begin]
        with self._path.open("rb") as file:
            file.seek(start)
            data = file.read(self._ends[end - 1] - start)
        if len(data) < self._ends[end - 1] - start:
            return [], number  # it has just become shorter: the next look finds out
        rows = [msgspec.Raw(data[self._begins[row] - start : self._ends[row] - start]) for row in range(begin, end)]
        return rows, end
