"""From rows of metrics.jsonl to curves, as lines.js does it for the page: pure functions.

What always holds: a row that a later one of the same step replaces is of an abandoned branch; what isn't known (null, a
field that an older release hadn't) is a gap, never 0 and never the value before; evaluations lie at the version that
was evaluated.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from areal_async.messages import Version
from areal_async.view.api import EvaluationPoint, Figure, Series
from areal_async.view.figures import BusyParts, busy_parts

Row: TypeAlias = dict[str, object]

NAN: Final = math.nan
EVALUATED: Final = "eval_score"
# numbers that say nothing where another field is 0: the largest of no tokens
ONLY_WHERE: Final = {"mismatch_max": "mismatch_tokens", "reward_mean": "samples"}


class Points(NamedTuple):
    """x: steps. y: NaN where there is no value."""

    x: list[float]
    y: list[float]


class Curve(NamedTuple):
    """kept: of the history that survives. abandoned: of each branch that training went back over. evaluations: they are
    single points."""

    label: str
    kept: Points
    abandoned: list[Points]
    evaluations: bool = False


class Branches(NamedTuple):
    """kept: rows by step. abandoned: each part begins with the last row before it that was kept."""

    kept: list[Row]
    abandoned: list[list[Row]]


def branches(rows: Sequence[Row], branch: int = 0, version: Version = 0) -> Branches:
    """branch, version: of now; training may have gone back without a new row yet."""
    kept: list[Row] = []
    abandoned: list[list[Row]] = []

    def give_up(step: float) -> None:
        begin = len(kept)
        while begin > 0 and _number(kept[begin - 1], "step") >= step:
            begin -= 1
        if part := kept[begin:]:
            del kept[begin:]
            abandoned.append([*kept[-1:], *part])

    for row in rows:
        give_up(_number(row, "step"))
        kept.append(row)
    if kept and branch > _number(kept[-1], "branch"):
        give_up(version)
    return Branches(kept, abandoned)


def curves(figure: Figure, history: Branches, evaluations: Sequence[EvaluationPoint]) -> list[Curve]:
    """Those of a figure that has lines, as far as there is anything to draw."""
    found = []
    for series in figure.series:
        if series.field == EVALUATED:
            points = Points([float(each.version) for each in evaluations], [each.score for each in evaluations])
            curve = Curve(series.label, points, [], evaluations=True)
        else:
            read = reader(series)
            curve = Curve(
                series.label, _points(history.kept, read), [_points(part, read) for part in history.abandoned]
            )
        if not all(math.isnan(value) for value in curve.kept.y):
            found.append(curve)
    return found


def reader(series: Series) -> Callable[[Row], float]:
    """Value of a row; NaN where there is none."""

    def read(row: Row) -> float:
        if series.field in ONLY_WHERE and _number(row, ONLY_WHERE[series.field]) == 0:
            return NAN
        value = _number(row, series.field)
        if not series.per:
            return value
        by = _number(row, series.per)
        return value / by if by > 0 else NAN

    return read


def busy(rows: Sequence[Row]) -> list[tuple[float, BusyParts]]:
    """Of each step whose shares are known: the step, and the four parts of its time."""
    names = ("trainer_idle_share", "rollout_idle_share", "both_busy_share")
    shares = [(_number(row, "step"), [_number(row, name) for name in names]) for row in rows]
    return [(step, busy_parts(*parts)) for step, parts in shares if not any(map(math.isnan, parts))]


def _points(rows: Sequence[Row], read: Callable[[Row], float]) -> Points:
    """With a gap where a step is missing."""
    points = Points([], [])
    for row in rows:
        step = _number(row, "step")
        if points.x and step - points.x[-1] > 1:
            points.x.append(points.x[-1])
            points.y.append(NAN)
        points.x.append(step)
        points.y.append(read(row))
    return points


def _number(row: Row, field: str) -> float:
    value = row.get(field)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else NAN
