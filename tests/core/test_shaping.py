"""Rewards after their scale, bias and penalties, against the formula and against exact arithmetic; wanted lengths."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.core.shaping import (
    LARGEST_REWARD,
    LARGEST_SCALE,
    check,
    overlong,
    shaped,
    success_share,
    usable,
)
from areal_async.messages import FinishReason, SampleDone, Truncated

from . import expected
from .world import World, make_rules

PENALTIES = st.floats(0.0, LARGEST_REWARD)
SCALES = st.floats(0.0, LARGEST_SCALE, exclude_min=True)
BIASES = st.floats(-LARGEST_REWARD, LARGEST_REWARD)
LENGTHS = st.tuples(st.integers(0, 500), st.one_of(st.none(), st.integers(1, 500))).filter(
    lambda bounds: bounds[1] is None or bounds[0] <= bounds[1]
)


def make_answer(length: int, finish: FinishReason = "stop") -> SampleDone:
    return SampleDone(
        at=0.0,
        sample="0.0",
        attempt=0,
        oldest=0,
        newest=0,
        prompt_tokens=2,
        length=length,
        loss_tokens=length,
        finish=finish,
    )


@pytest.mark.parametrize(
    ("length", "expected_share"), [(0, 0.0), (16384, 0.0), (16385, 1 / 4096), (18432, 0.5), (20480, 1.0), (30000, 1.0)]
)
def test_overlong_as_in_dapo(length: int, expected_share: float) -> None:
    """Arxiv 2503.14476: 16,384 tokens and 4,096 of cache, so L_max = 20,480."""
    rules = make_rules(max_new_tokens=20480, overlong_tokens=4096, overlong_penalty=1.0)
    assert overlong(length, rules) == expected_share
    assert shaped(1.0, make_answer(length), rules) == 1.0 - expected_share


def test_where_nothing_is_asked_for_nothing_changes() -> None:
    rules = make_rules(truncated_penalty=1.0, overlong_penalty=1.0)
    assert overlong(10**6, rules) == 0.0
    for finish in ("stop", "length"):
        assert shaped(0.3, make_answer(500, finish), rules) == 0.3
        assert shaped(None, make_answer(500, finish), rules) is None


def test_only_an_answer_that_was_cut_is_penalised_for_it() -> None:
    rules = make_rules(truncated="penalize", truncated_penalty=0.25)
    assert shaped(1.0, make_answer(500, "length"), rules) == 0.75
    assert shaped(1.0, make_answer(500, "stop"), rules) == 1.0


@given(
    reward=st.floats(),
    length=st.integers(0, 1000),
    finish=st.sampled_from(["stop", "length"]),
    truncated=st.sampled_from(["train", "mask", "penalize"]),
    tokens=st.integers(0, 500),
    penalties=st.tuples(PENALTIES, PENALTIES),
    scale=st.one_of(st.just(1.0), SCALES),
    bias=st.one_of(st.just(0.0), BIASES),
    wanted=LENGTHS,
)
def test_a_shaped_reward_is_finite_and_right(
    reward: float,
    length: int,
    finish: FinishReason,
    truncated: Truncated,
    tokens: int,
    penalties: tuple[float, float],
    scale: float,
    bias: float,
    wanted: tuple[int, int | None],
) -> None:
    rules = make_rules(
        truncated=truncated, truncated_penalty=penalties[0], overlong_tokens=tokens, overlong_penalty=penalties[1],
        reward_scale=scale, reward_bias=bias, min_tokens=wanted[0], max_tokens=wanted[1],
    )  # fmt: skip
    check(rules)
    answer = make_answer(length, finish)
    raw = usable(reward, answer, rules)
    found = shaped(raw, answer, rules)
    assert raw == expected.usable(rules, reward, answer)
    assert (found is None) == (raw is None)
    if raw is not None and found is not None:
        assert math.isfinite(found)
        size = abs(raw) * scale + abs(bias) + sum(penalties)
        assert abs(found - float(expected.shaped(rules, raw, answer))) <= 1e-15 * size + 1e-300


def test_what_can_be_computed_with() -> None:
    answer, rules = make_answer(5), make_rules()
    assert [usable(reward, answer, rules) for reward in (math.nan, math.inf, -math.inf, 1e101, None)] == [None] * 5
    assert [usable(reward, answer, rules) for reward in (1e100, -3.0, 0.0)] == [1e100, -3.0, 0.0]


def test_a_length_that_is_not_wanted_means_no_reward() -> None:
    rules = make_rules(min_tokens=3, max_tokens=5)
    assert [usable(1.0, make_answer(length), rules) for length in range(2, 7)] == [None, 1.0, 1.0, 1.0, None]
    assert usable(1.0, make_answer(10**6), make_rules()) == 1.0


def test_scale_and_bias_as_in_the_paper() -> None:
    """±5 for right and wrong answers (arXiv 2505.24298), before the penalties."""
    rules = make_rules(reward_scale=10.0, reward_bias=-5.0, truncated="penalize", truncated_penalty=1.0)
    assert [shaped(reward, make_answer(5), rules) for reward in (1.0, 0.0, None)] == [5.0, -5.0, None]
    assert shaped(1.0, make_answer(5, "length"), rules) == 4.0


def test_success_is_counted_strictly_above() -> None:
    rules = make_rules(success_above=0.5)
    assert success_share([0.5, 0.6, -1.0, 1.0], rules) == 0.5


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"truncated_penalty": math.inf}, "reward.truncated_penalty inf must be from 0 to 1e"),
        ({"overlong_penalty": math.nan}, "reward.overlong_penalty nan"),
        ({"overlong_penalty": -1.0}, r"reward.overlong_penalty -1\.0"),
        ({"overlong_tokens": 501}, "reward.overlong_tokens 501 must be from 0 to rollout.max_new_tokens 500"),
        ({"reward_scale": 0.0}, r"reward.scale 0\.0 must be above 0"),
        ({"reward_scale": math.inf}, "reward.scale inf"),
        ({"reward_bias": math.nan}, "reward.bias nan"),
        ({"max_tokens": 0}, "reward.max_tokens 0 is less than reward.min_tokens 0, or 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "reward.max_tokens 8 is less than reward.min_tokens 9"),
        ({"success_min": 0.6, "success_max": 0.5}, r"rollout.success_min 0\.6 and success_max 0\.5"),
        ({"success_above": math.nan}, "success_above nan a finite number"),
    ],
)
def test_rules_by_which_nothing_can_be_shaped(changes: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        World(make_rules(**changes))
