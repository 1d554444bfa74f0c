"""`eval/results.jsonl` of a run that may still write it.

What always holds: it is read again only when it has changed, since a page asks every 2 s; a line that isn't whole yet
comes when it is, a broken one is left out and told, and so is a file that can't be read.
"""

from pathlib import Path

import msgspec

from areal_async.runfiles import EVALUATIONS
from areal_async.view.api import EvaluationPoint
from areal_async.view.told import mark


class Evaluations:
    """Of a run folder. points: None where it has no such file. problem: what is wrong with it, or ""."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVALUATIONS
        self._mark = (0, 0, 0)
        self.points: list[EvaluationPoint] | None = None
        self.problem = ""

    def look(self) -> None:
        now = mark(self._path)
        if now == self._mark:
            return
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            self.points, self.problem = None, ""
        except OSError as error:
            self.points, self.problem = None, f"{self._path}: can't be read: {error.strerror}"
        else:
            self.points, self.problem = self._read(lines)
        self._mark = now

    def _read(self, lines: list[bytes]) -> tuple[list[EvaluationPoint], str]:
        points, problem = [], ""
        for number, line in enumerate(lines, 1):
            try:
                points.append(msgspec.json.decode(line, type=EvaluationPoint))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if line.endswith(b"\n"):  # else it is being written
                    problem = f"{self._path}:{number}: is no evaluation of this release, and is left out: {error}"
        return points, problem
