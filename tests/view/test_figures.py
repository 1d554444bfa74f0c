"""The overview's figures draw what `metrics.jsonl` has, all of it, and say in which unit."""

from typing import Final, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.controller.metrics import Meter, StepRow
from areal_async.view.figures import FIGURES, busy_parts

FIELDS: Final = get_type_hints(StepRow)
NUMBERS: Final = {name for name, kind in FIELDS.items() if kind is not str}
LEFT_OUT: Final = {
    "step": "the axis below all figures",
    "time_s": "the other axis below all figures",
    "version": "step + 1",
    "branch": "it parts lines into what was kept and what was abandoned",
    "eval_version": "where the points of an evaluation stand",
}


def _fields() -> list[str]:
    return [name for figure in FIGURES for one in figure.series for name in (one.field, one.per) if name]


def test_every_field_of_a_figure_is_one_of_a_row() -> None:
    assert {name.partition("/")[0] for name in _fields()} <= FIELDS.keys()


def test_entries_are_those_of_fields_that_have_several() -> None:
    for name in _fields():
        field, slash, _ = name.partition("/")
        several = getattr(FIELDS[field], "__origin__", None) in (dict, tuple)
        assert several == bool(slash), name


def test_every_number_of_a_row_is_drawn_or_left_out_for_a_reason() -> None:
    drawn = {name.partition("/")[0] for name in _fields()}
    assert NUMBERS - drawn == LEFT_OUT.keys()


def test_figures_have_keys_units_and_sentences() -> None:
    keys = [figure.key for figure in FIGURES]
    assert len(keys) == len(set(keys))
    for figure in FIGURES:
        assert all((figure.title, figure.unit, figure.series)), figure.key
        assert (figure.about[0].isupper(), figure.about[-1]) == (True, "."), figure.key
        assert figure.about.count("`") % 2 == 0, figure.key


def test_the_main_ones_come_first() -> None:
    main = [figure.main for figure in FIGURES]
    assert main == sorted(main, reverse=True)
    assert 0 < sum(main) < len(main)


def test_shares_are_shown_as_percent() -> None:
    for figure in FIGURES:
        if figure.kind != "lags" and any(name.field.partition("/")[0].endswith("_share") for name in figure.series):
            assert figure.unit == "%", figure.key


def test_a_figure_of_one_field_says_its_description() -> None:
    [about] = [figure.about for figure in FIGURES if figure.key == "truncated_share"]
    assert about == "Share of the step's samples that were cut at the token limit."


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 10), st.sampled_from(["train", "rest", "serve", "pause", "ask", "answer"]), st.booleans()
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 3),
)
def test_who_was_busy_adds_up_to_all_of_the_time(happened: list[tuple[float, str, bool]], servers: int) -> None:
    """Whatever the trainer and the servers did: of what a row says, each part is in 0..1, and together they are 1."""
    meter, now, asked = Meter(servers), 0.0, [0] * servers
    for passed, what, first in happened:
        now += passed
        server = 0 if first else servers - 1
        match what:
            case "train" | "rest":
                meter.training(now, what == "train")
            case "serve" | "pause":
                meter.serving(now, str(server), what == "serve")
            case "ask":
                asked[server] += 1
                meter.load(now, str(server), 1)
            case _ if asked[server]:
                asked[server] -= 1
                meter.load(now, str(server), -1)
            case _:
                pass
    lap = meter.lap(now + 1.0)
    parts = busy_parts(lap.trainer_idle, lap.rollout_idle, lap.both_busy)
    assert sum(parts) == pytest.approx(1.0, abs=1e-9)
    assert all(0.0 <= part <= 1.0 + 1e-9 for part in parts)
    assert parts.both + parts.trainer == pytest.approx(1 - lap.trainer_idle, abs=1e-9)
    assert parts.both + parts.rollout == pytest.approx(1 - lap.rollout_idle, abs=1e-9)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ((0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.0)),
        ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)),
        ((0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 0.0)),
        ((1.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)),
        ((0.5, 0.25, 0.375), (0.375, 0.125, 0.375, 0.125)),
    ],
)
def test_who_was_busy(row: tuple[float, float, float], parts: tuple[float, float, float, float]) -> None:
    assert busy_parts(*row) == parts
