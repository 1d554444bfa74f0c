"""One run that somebody looks at: its rows, its status, its evaluations, and what was read of its log.

What always holds: a run may be live, finished, copied or half there; what can't be read of it is a line of `problems`,
and the rest is shown. Its log is read by `follow` in slices, which the server owns as a task.
"""

from pathlib import Path
from typing import Final

import msgspec

from areal_async.errors import ArealError
from areal_async.view.api import EvaluationPoint, Overview, Reading
from areal_async.view.rows import Rows
from areal_async.view.told import CONFIG_NAME, Told, log_of

SLICE_S: Final = 0.03  # of reading, before others get their turn
EVALUATIONS: Final = "eval/results.jsonl"


class Run:
    """folder: of the run. key: in addresses."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        self.log = log_of(folder)
        self.rows = Rows(folder)
        self.told = Told(folder, key)

    async def overview(self, since: int) -> Overview:
        """Rows from line `since` on, and how it stands. Errors: OSError: its files can't be read."""
        while self.rows.read_some(SLICE_S):
            pass
        rows, following = self.rows.since(since)
        run = self.told.row(self.rows.last)
        told, last = self.told.status, self.rows.last
        evaluations, problem = self._evaluations()
        return Overview(
            run=run,
            branch=max(0 if told is None else told.branch, 0 if last is None else last.branch),
            rows=rows,
            next=following,
            evaluations=evaluations,
            waits=[] if told is None else list(told.waits),
            phase="" if told is None else told.phase,
            in_flight=0 if told is None else told.in_flight,
            ready=0 if told is None else told.ready,
            balance=told.balance if told is not None else {} if last is None else last.ledger,
            troubles=[],
            reading=Reading(nbytes=0, of=0, events=0, samples=0, done=True),
            problems=[*filter(None, [self.told.problem, problem]), *self.rows.problems],
        )

    def config(self) -> str:
        """Text of its configuration. Errors: ArealError: there is none."""
        path = self.folder / CONFIG_NAME
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ArealError(f"{path}: can't be read: {error.strerror}") from None

    def _evaluations(self) -> tuple[list[EvaluationPoint], str]:
        """Of `eval/results.jsonl`, or of the rows where a copy lacks it; and what is wrong with the file."""
        path = self.folder / EVALUATIONS
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError:
            return [
                EvaluationPoint(
                    version=row.eval_version, time_s=row.time_s, score=row.eval_score, pass_at=row.eval_pass_at
                )
                for row in self.rows.evaluated
                if row.eval_version is not None and row.eval_score is not None
            ], ""
        points, problem = [], ""
        for number, line in enumerate(lines, 1):
            try:
                points.append(msgspec.json.decode(line, type=EvaluationPoint))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if line.endswith(b"\n"):
                    problem = f"{path}:{number}: is no evaluation of this release, and is left out: {error}"
        return points, problem
