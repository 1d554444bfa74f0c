"""Recorded answers beside those of now: what counts as the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.errors import ConfigError
from areal_async.replay.answers import TOLERANCES, Compared, distance, largest, not_compared, over, read_tolerances

NUMBERS = st.floats(-1e6, 1e6)


def compared(recorded: dict[str, float], now: dict[str, float], *skipped: str) -> Compared:
    was, is_now = skipped or ("", "")
    return Compared(7, 0, recorded, now, was, is_now)


@settings(max_examples=25)
@given(recorded=NUMBERS, now=NUMBERS)
def test_a_distance_is_absolute_below_one_and_relative_above(recorded: float, now: float) -> None:
    found = distance(recorded, now)
    assert found == pytest.approx(abs(now - recorded) / max(1, abs(recorded)))
    assert (found == 0) == (recorded == now)


def test_what_is_over_its_tolerance_is_told_with_both_values() -> None:
    same = compared(
        {"loss": 0.5, "grad_norm": 200.0, "train_s": 1.0}, {"loss": 0.50009, "grad_norm": 200.01, "train_s": 9}
    )
    assert list(over(same, {})) == []
    (found,) = over(compared({"loss": 0.5}, {"loss": 0.5002}), {})
    assert str(found) == "step 7: loss: recorded 0.5, now 0.5002: they differ by 0.0002, allowed is 0.0001"
    assert list(over(compared({"loss": 0.5}, {"loss": 0.5002}), {"loss": 1e-3})) == []
    assert [d.field for d in over(same, {"grad_norm": 1e-6})] == ["grad_norm"]
    (found,) = over(compared({"loss": 0.5}, {"loss": float("nan")}), {"loss": 1e9})
    assert found.field == "loss"


def test_counts_and_rates_must_be_the_same() -> None:
    for name in ("tokens_trained", "tokens_masked", "mismatch_tokens", "lr"):
        assert [d.field for d in over(compared({name: 1e-4}, {name: 1.0000001e-4}), {})] == [name]


@pytest.mark.parametrize(("was", "now"), [("", "minibatch 1 of 2: the loss is not finite"), ("the gradient", "")])
def test_an_update_that_only_one_side_left_out_is_a_difference(was: str, now: str) -> None:
    (found,) = over(compared({}, {}, was, now), {})
    assert str(found) == f"step 7: skipped: recorded: {was or 'no'}; now: {now or 'no'}"
    assert list(over(compared({}, {}, "the loss", "the gradient"), {})) == []


def test_the_largest_by_field_and_what_only_one_side_has() -> None:
    steps = [
        Compared(step, 0, {"loss": 0.0, "old": 1.0}, {"loss": loss, "new": 1.0}, "", "")
        for step, loss in enumerate([0.0, 0.3, 1e-5, 0.2])
    ]
    found = largest(steps, {})["loss"]
    assert (found.difference, found.step, found.allowed, found.over) == (0.3, 1, TOLERANCES["loss"], 2)
    assert largest(steps[:1], {})["loss"].step == 0
    assert not_compared(steps) == ("new", "old")


@pytest.mark.parametrize(
    ("given_text", "wrong"),
    [
        ("los=1", "no such field; did you mean loss?"),
        ("loss", "should be a number"),
        ("loss=-1", "should be a number"),
        ("loss=inf", "should be a number"),
        ("loss=nan", "should be a number"),
    ],
)
def test_tolerances_that_are_wrong(given_text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"--tolerance {given_text}: {wrong}"):
        read_tolerances([given_text])
    assert read_tolerances(["loss=1e-3", "grad_norm=0"]) == {"loss": 1e-3, "grad_norm": 0.0}
