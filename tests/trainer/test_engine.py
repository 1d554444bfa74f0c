"""Learning rates: the shapes of transformers' schedules, to a floor of our own."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from areal_async.engines.deepspeed.engine import learning_rate

from .world import spec_for

SHAPES = st.sampled_from(["constant", "linear", "cosine"])


def factors(make: object, *arguments: object) -> list[float]:
    """What a schedule of transformers multiplies the rate with at steps 0 … 59."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    shape = make(optimizer, *arguments).lr_lambdas[0]
    return [shape(step) for step in range(60)]


def ours(**changes: object) -> list[float]:
    spec = spec_for(Path(), lr=2.0, updates=50, **changes)
    return [learning_rate(spec, update) / 2.0 for update in range(60)]


@pytest.mark.parametrize("warmup", [0, 7])
def test_after_the_warm_up_rates_are_those_of_transformers(warmup: int) -> None:
    linear = factors(get_linear_schedule_with_warmup, warmup, 50)
    cosine = factors(get_cosine_schedule_with_warmup, warmup, 50)[:50] + [0.0] * 10  # theirs goes up again after it
    floored = factors(get_cosine_with_min_lr_schedule_with_warmup, warmup, 50, 0.5, -1, None, 0.1)
    assert ours(lr_schedule="linear", warmup_steps=warmup)[warmup:] == pytest.approx(linear[warmup:])
    assert ours(lr_schedule="cosine", warmup_steps=warmup)[warmup:] == pytest.approx(cosine[warmup:], abs=1e-12)
    assert ours(lr_schedule="cosine", warmup_steps=warmup, min_lr_share=0.1)[warmup:50] == pytest.approx(
        floored[warmup:50]
    )
    assert ours(lr_schedule="linear", warmup_steps=warmup, min_lr_share=0.1)[warmup:] == pytest.approx(
        [0.1 + 0.9 * factor for factor in linear[warmup:]]
    )


def test_the_warm_up_is_that_of_transformers_one_step_on() -> None:
    """Theirs has a rate of 0 at the first step, which trains nothing; ours begins where theirs is at the second."""
    theirs = factors(get_constant_schedule_with_warmup, 8)
    for shape in ("constant", "linear", "cosine"):
        assert ours(lr_schedule=shape, warmup_steps=7)[:8] == pytest.approx(theirs[1:9])


@given(shape=SHAPES, warmup=st.integers(0, 30), updates=st.integers(1, 60), share=st.floats(0, 1))
def test_rates_grow_then_fall_and_end_at_their_share(shape: str, warmup: int, updates: int, share: float) -> None:
    spec = spec_for(Path(), lr=1.0, warmup_steps=warmup, updates=updates, lr_schedule=shape, min_lr_share=share)
    rates = [learning_rate(spec, update) for update in range(updates + warmup + 2)]
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates) == pytest.approx(1.0)
    assert all(rate > 0 for rate in rates[:warmup])
    assert rates[-1] == pytest.approx(1.0 if shape == "constant" else share)
