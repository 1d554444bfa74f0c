"""Drawn answers: the same for the same names, in the distribution that was asked for."""

from dataclasses import replace
from math import exp, log
from statistics import NormalDist, fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.simulate.lengths import Drawn, Empirical, Histogram, LogNormal, means

NORMAL = NormalDist()


def drawn(lengths, **changes) -> Drawn:
    values = {
        "seed": 1, "prompt": LogNormal(log(100), 0.0), "prompt_limit": 1000, "max_new_tokens": 10_000, "alike": 0.0,
        "growth": 0.0, "batch_groups": 10, "success": 0.5,
    } | changes  # fmt: skip
    return Drawn(lengths=lengths, **values)


def members(answers: Drawn, groups: int = 150, size: int = 8) -> list[list]:
    return [[answers.answer(group, member, 1) for member in range(size)] for group in range(groups)]


def test_reference_values():
    """The same on any machine and under any hash seed: written down once."""
    answers = drawn(LogNormal(7.0, 0.8), alike=0.3, prompt=LogNormal(log(100), 0.5))
    told = [answers.answer(group, member, attempt) for group, member, attempt in ((0, 0, 1), (0, 1, 1), (5, 0, 2))]
    assert [(answer.prompt_tokens, answer.length, answer.reward) for answer in told] == [
        (75, 555, 0.0),
        (75, 821, 0.0),
        (280, 1650, 1.0),
    ]


@settings(max_examples=25)
@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 100), st.integers(1, 5))
def test_an_answer_is_a_function_of_its_name(seed, group, member, attempt):
    answers = drawn(LogNormal(6.0, 1.0), seed=seed)
    one = answers.answer(group, member, attempt)
    answers.answer(group + 1, member, attempt)
    assert answers.answer(group, member, attempt) == one
    assert 1 <= one.length <= 10_000
    cut = replace(answers, max_new_tokens=500).answer(group, member, attempt)
    assert (cut.length, cut.truncated) == (min(one.length, 500), one.length > 500)
    assert cut.reward == (0 if cut.truncated else one.reward)


def test_names_that_differ_give_other_answers():
    answers = drawn(LogNormal(7.0, 0.5))
    one = {answers.answer(*name).length for name in ((1, 2, 1), (2, 1, 1), (1, 2, 2), (3, 0, 1), (0, 3, 1))}
    assert len(one) == 5
    assert answers.answer(1, 2, 1) != drawn(LogNormal(7.0, 0.5), seed=2).answer(1, 2, 1)


@settings(max_examples=25)
@given(st.floats(1, 1e5), st.floats(0, 2.5), st.floats(1.05, 100))
def test_a_lognormal_has_the_mean_that_was_asked_for(mean, sigma, room):
    limit = int(mean * room) + 1
    assert LogNormal.of_mean(mean, sigma).mean_cut(1e18) == pytest.approx(mean, rel=1e-3)
    assert LogNormal.of_mean(mean, sigma, limit).mean_cut(limit) == pytest.approx(mean, rel=1e-6)


def test_means_of_what_is_drawn():
    lengths = LogNormal.of_mean(600, 0.9, 2000)
    seen = [answer.length for group in members(drawn(lengths, max_new_tokens=2000)) for answer in group]
    assert fmean(seen) == pytest.approx(600, rel=0.05)
    mean, context = means(lengths, 2000)
    assert mean == pytest.approx(600, rel=1e-3)
    assert context == pytest.approx(sum(n * n for n in seen) / (2 * sum(seen)), rel=0.05)


def test_percentiles():
    lengths = LogNormal.of_percentiles(300, 3000)
    assert lengths.at(0.0) == pytest.approx(300)
    assert lengths.at(NORMAL.inv_cdf(0.95)) == pytest.approx(3000)
    with pytest.raises(ValueError, match="below the median"):
        LogNormal.of_percentiles(300, 200)


def test_what_was_seen_is_drawn_as_often():
    seen = Empirical([30, 10, 10, 20])
    assert [seen.at(NORMAL.inv_cdf(place)) for place in (0.01, 0.49, 0.51, 0.74, 0.76, 0.999)] == [
        10,
        10,
        20,
        20,
        30,
        30,
    ]
    assert seen.at(9.0) == 30


def test_a_histogram():
    lengths = Histogram([100, 200, 400], [1, 2, 1])
    assert [round(lengths.at(NORMAL.inv_cdf(place))) for place in (0.125, 0.25, 0.5, 0.75, 0.875)] == [
        50, 100, 150, 200, 300
    ]  # fmt: skip
    for bins, shares, message in (
        ([1, 2], [1], "1 shares for 2 bins"), ([2, 2], [1, 1], "ascend"), ([1], [0], "all shares are 0")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Histogram(bins, shares)


@settings(max_examples=25)
@given(st.floats(-6, 6), st.floats(0, 3))
def test_longer_for_larger_numbers(normal, more):
    for lengths in (LogNormal(5.0, 0.7), Empirical([5, 1, 9]), Histogram([10, 20, 90], [0.5, 0.0, 0.5])):
        assert lengths.at(normal + more) >= lengths.at(normal)


def test_members_are_as_alike_as_was_asked():
    for alike in (0.0, 0.5, 1.0):
        groups = members(drawn(LogNormal(6.0, 0.5), alike=alike))
        between = pstdev([fmean(log(answer.length) for answer in group) for group in groups])
        # of a mean of 8: the shared part whole, an eighth of the rest
        assert between == pytest.approx(0.5 * (alike + (1 - alike) / 8) ** 0.5, rel=0.2)
        lengths = [answer.length for group in groups for answer in group]
        assert pstdev(map(log, lengths)) == pytest.approx(0.5, rel=0.1)
        rewards = [answer.reward for group in groups for answer in group]
        assert fmean(rewards) == pytest.approx(0.5, abs=0.08)
        equal = fmean(len({answer.reward for answer in group}) == 1 for group in groups)
        assert (equal == 1) if alike == 1 else (equal < 0.4)


def test_answers_grow():
    answers = drawn(LogNormal(log(100), 0.0), growth=0.1)
    assert [answers.answer(group, 0, 1).length for group in (0, 9, 10, 29, 100)] == [100, 100, 110, 120, 200]


def test_prompts_are_of_a_group():
    answers = drawn(LogNormal(log(100), 0.0), prompt=LogNormal(log(100), 0.5))
    groups = members(answers, size=2)
    assert all(len({answer.prompt_tokens for answer in group}) == 1 for group in groups)
    assert fmean(group[0].prompt_tokens for group in groups) == pytest.approx(100 * exp(0.125), rel=0.1)
    assert (
        max(
            answer.prompt_tokens
            for answer, *_ in members(drawn(LogNormal(5.0, 0.0), prompt=LogNormal(9.0, 2.0)), 40, 1)
        )
        == 1000
    )
