"""From rows to curves: branches, gaps, and what divides what."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.view.api import EvaluationPoint, Figure, Series
from areal_async.view.curves import Row, branches, busy, curves, reader
from areal_async.view.figures import FIGURES


def rows(*steps: int) -> list[Row]:
    return [{"step": step, "branch": 0, "number": number} for number, step in enumerate(steps)]


def numbers(part: list[Row]) -> list[object]:
    return [row["number"] for row in part]


def figure(*series: Series) -> Figure:
    return Figure(key="x", title="X", unit="", about="", series=list(series))


def test_what_was_trained_again_is_an_abandoned_branch() -> None:
    found = branches(rows(0, 1, 2, 3, 2, 3, 1))
    assert numbers(found.kept) == [0, 6]
    assert [numbers(part) for part in found.abandoned] == [[1, 2, 3], [0, 1, 4, 5]]
    assert branches(rows(0, 1, 0)).abandoned == [rows(0, 1)]
    gone_back = branches(rows(0, 1, 2), branch=1, version=1)  # no row of the new branch yet
    assert (numbers(gone_back.kept), [numbers(part) for part in gone_back.abandoned]) == ([0], [[0, 1, 2]])


@settings(max_examples=50)
@given(st.lists(st.integers(0, 6), max_size=20))
def test_each_row_is_kept_or_abandoned_once(steps: list[int]) -> None:
    found = branches(rows(*steps))
    kept = [row["step"] for row in found.kept]
    assert kept == sorted(set(kept))  # type: ignore[type-var]
    last = {step: number for number, step in enumerate(steps)}
    assert all(row["number"] == last[row["step"]] for row in found.kept)  # type: ignore[index]
    begins = [part[0]["number"] for part in found.abandoned]
    given_up = [n for part, begin in zip(found.abandoned, begins, strict=True) for n in numbers(part)[1:]]
    given_up += [begin for begin, part in zip(begins, found.abandoned, strict=True) if len(part) == 1]
    assert set(numbers(found.kept)) | set(given_up) | set(begins) == set(range(len(steps)))
    assert not set(numbers(found.kept)) & set(given_up)


def test_what_is_not_known_is_a_gap() -> None:
    read = reader(Series(field="loss", label=""))
    assert [read({"loss": 0.5}), read({"loss": 2})] == [0.5, 2.0]
    assert all(math.isnan(read(row)) for row in ({}, {"loss": None}, {"loss": "x"}))
    rate = reader(Series(field="tokens", label="", per="step_s"))
    assert rate({"tokens": 6, "step_s": 2.0}) == 3.0
    assert math.isnan(rate({"tokens": 6, "step_s": 0.0}))
    mismatch = reader(Series(field="mismatch_max", label=""))
    assert math.isnan(mismatch({"mismatch_max": 0.0, "mismatch_tokens": 0}))
    assert mismatch({"mismatch_max": 0.25, "mismatch_tokens": 1}) == 0.25


def test_curves_have_gaps_and_evaluations_lie_at_their_version() -> None:
    history = branches([{"step": 0, "loss": 1.0}, {"step": 1, "loss": None}, {"step": 4, "loss": 3.0}])
    points = [EvaluationPoint(version=4, time_s=9.0, score=0.5, pass_at={})]
    wanted = figure(
        Series(field="loss", label="loss"), Series(field="eval_score", label="eval"), Series(field="no", label="")
    )
    loss, evaluation = curves(wanted, history, points)
    assert loss.kept.x == [0.0, 1.0, 1.0, 4.0]
    assert [None if math.isnan(value) else value for value in loss.kept.y] == [1.0, None, None, 3.0]
    assert (evaluation.kept.x, evaluation.kept.y, evaluation.evaluations) == ([4.0], [0.5], True)


def test_parts_of_time_add_up() -> None:
    row: Row = {"step": 3, "trainer_idle_share": 0.5, "rollout_idle_share": 0.25, "both_busy_share": 0.375}
    ((step, parts),) = busy([row, {"step": 4}])
    assert (step, parts) == (3.0, (0.375, 0.125, 0.375, 0.125))


def test_a_picture_can_draw_all_main_figures() -> None:
    """Entries of a field (`verdicts/*`) are for the page alone."""
    assert not [series.field for each in FIGURES if each.main for series in each.series if "/" in series.field]
