"""What a training step is made of: advantages, order, split and divisors."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_async.core.advantages import Advantage, advantages, grpo
from areal_async.core.batches import divisor, form
from areal_async.core.ledger import Group
from areal_async.messages import Aggregation, Minibatch, Rules, SampleDone, WhenOlder

from . import expected
from .world import make_rules

KINDS: tuple[Advantage, ...] = get_args(Advantage)
NUMBERS = st.floats(-1e100, 1e100, allow_subnormal=False)  # the mean of 0 and 5e-324 can't be written down
REWARDS = st.lists(st.one_of(st.none(), NUMBERS, st.sampled_from([0.0, 1.0])), max_size=9)


def make_group(number: int, lengths: list[int], rewards: list[float | None]) -> Group:
    """Answers of these lengths to a prompt of 2 tokens, of which all but one are trained."""
    group = Group(number, number, "server0", 0, 0, 1, len(lengths), 0.0)
    for sample, length, reward in zip(group.samples, lengths, rewards, strict=True):
        sample.reward = reward
        sample.done = SampleDone(
            at=0.0,
            sample=sample.id,
            attempt=0,
            oldest=0,
            newest=0,
            prompt_tokens=2,
            length=length,
            loss_tokens=length - 1,
            finish="stop",
        )
    return group


def batch_rules(**changes: object) -> Rules:
    return make_rules(**{"batch_groups": 4, "group_size": 2, "max_tokens_per_microbatch": 20, **changes})


@pytest.mark.parametrize(
    ("rewards", "signs"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0]),
        ([1.0, None, 0.0, 1.0], [1, None, -1, 1]),
        ([None, None, None, 0.0], [None, None, None, 0]),
        ([None, None], [None, None]),
    ],
)
def test_p12_advantages(rewards: list[float | None], signs: list[int | None]) -> None:
    for kind in KINDS:
        (found,) = advantages(kind, [rewards], [[3] * len(rewards)], 1e-6)
        assert [a if a is None else (a > 0) - (a < 0) for a in found] == signs, kind


@given(REWARDS, st.sampled_from([0.0, 1e-6, 1.0]))
def test_advantages_are_finite_and_sum_to_zero(rewards: list[float | None], eps: float) -> None:
    found = grpo(rewards, eps)
    assert [a is None for a in found] == [r is None for r in rewards]
    known = [a for a in found if a is not None]
    assert all(math.isfinite(a) for a in known)
    assert math.fsum(known) == pytest.approx(0.0, abs=1e-6)


@given(
    st.lists(
        st.lists(st.tuples(st.one_of(st.none(), st.floats(-1e100, 1e100)), st.integers(0, 9)), max_size=5), max_size=4
    ),
    st.sampled_from(KINDS),
)
def test_every_kind_is_finite_and_leaves_out_what_has_no_reward(
    batch: list[list[tuple[float | None, int]]], kind: Advantage
) -> None:
    rewards = [[reward for reward, _ in group] for group in batch]
    found = advantages(kind, rewards, [[length for _, length in group] for group in batch], 1e-6)
    assert [[a is None for a in group] for group in found] == [[r is None for r in group] for group in rewards]
    assert all(math.isfinite(a) for group in found for a in group if a is not None)


def test_a_batch_is_formed_with_the_chosen_advantage() -> None:
    """Over the batch's tokens: 4 and 6 trained tokens with reward 1, 2 with reward 0."""
    groups = [make_group(0, [5, 7], [1.0, 1.0]), make_group(1, [3], [0.0])]
    train = form(groups, step=0, branch=0, rules=batch_rules(advantage="reinforce_pp", advantage_eps=0.0))
    mean, std = 10 / 12, math.sqrt(10 / 12 * 2 / 12)
    expected = [(1 - mean) / std] * 2 + [-mean / std]
    assert [sample.advantage for sample in train.samples] == pytest.approx(expected)


def test_without_minibatches_nothing_is_shuffled() -> None:
    groups = [make_group(number, [5, 5], [0.0, 1.0]) for number in (3, 5, 6, 9)]
    train = form(groups, step=7, branch=0, rules=batch_rules())
    assert train.groups == (3, 5, 6, 9)
    assert [sample.sample for sample in train.samples] == ["3.0", "3.1", "5.0", "5.1", "6.0", "6.1", "9.0", "9.1"]
    assert train.step == 7


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("capacity", [12, 20, 1000])
def test_p13_the_divisor_does_not_depend_on_the_split(ranks: int, capacity: int) -> None:
    groups = [make_group(number, [3 + number, 8], [0.0, 1.0]) for number in range(4)]
    train = form(groups, step=0, branch=0, rules=batch_rules(ranks=ranks, max_tokens_per_microbatch=capacity))
    (part,) = train.minibatches
    assert part.divisor == sum(number + 2 + 7 for number in range(4))


@pytest.mark.parametrize(("aggregation", "divisor"), [("token_mean", 1.0), ("sequence_mean", 1.0), ("constant", 500.0)])
def test_a_minibatch_without_a_trained_token_divides_by_one_or_by_its_constant(
    aggregation: Aggregation, divisor: float
) -> None:
    rules = batch_rules(batch_groups=1, group_size=1, aggregation=aggregation)
    train = form([make_group(0, [1], [0.0])], step=0, branch=0, rules=rules)
    assert train.minibatches[0].divisor == divisor


@pytest.mark.parametrize(
    ("aggregation", "divisors"),
    [
        ("token_mean", [2 + 0 + 4 + 6]),  # of each answer all tokens but one are trained
        ("sequence_mean", [3]),  # the answer of one token has none that is trained
        ("constant", [4 * 500]),
    ],
)
def test_what_each_aggregation_divides_by(aggregation: Aggregation, divisors: list[int]) -> None:
    groups = [make_group(0, [3, 1], [0.0, 1.0]), make_group(1, [5, 7], [1.0, 0.0])]
    for ranks, capacity in ((1, 20), (2, 9), (3, 12)):
        rules = batch_rules(batch_groups=2, ranks=ranks, max_tokens_per_microbatch=capacity, aggregation=aggregation)
        train = form(groups, step=0, branch=0, rules=rules)
        assert [part.divisor for part in train.minibatches] == divisors


@given(st.lists(st.integers(0, 50), max_size=12), st.sampled_from(["token_mean", "sequence_mean", "constant"]))
def test_a_divisor_is_at_least_one_and_what_it_says(losses: list[int], aggregation: Aggregation) -> None:
    rules = batch_rules(aggregation=aggregation)
    dones = [make_group(0, [count + 1], [1.0]).samples[0].done for count in losses]
    found = divisor(losses, rules)
    assert found == expected.divisor(rules, [done for done in dones if done is not None])
    assert found >= 1


@pytest.mark.parametrize(
    ("policy", "step", "below"),
    [("mask", 9, 5), ("mask", 4, 0), ("mask", 2, 0), ("wait", 9, 0), ("train", 9, 0), ("drop", 9, 0)],
)
def test_only_mask_takes_the_gradient_of_tokens_over_the_bound(policy: WhenOlder, step: int, below: int) -> None:
    groups = [make_group(0, [5, 5], [0.0, 1.0])]
    rules = batch_rules(batch_groups=1, max_staleness=4, when_older=policy)
    train = form(groups, step=step, branch=0, rules=rules)
    assert train.mask_below == below
    assert train.minibatches[0].divisor == 8.0  # masked tokens stay in it


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_answer_counts_in_every_baseline_and_is_not_trained(kind: Advantage) -> None:
    whole, cut = (make_group(0, [5, 5, 5], [1.0, 0.0, 0.0]) for _ in range(2))
    for group in (whole, cut):
        done = group.samples[1].done
        assert done is not None
        group.samples[1].done = replace(done, finish="length")
    rules = batch_rules(batch_groups=1, group_size=3, advantage=kind)
    kept = form([whole], step=0, branch=0, rules=rules)
    left = form([cut], step=0, branch=0, rules=replace(rules, truncated="mask"))
    assert left.samples == (kept.samples[0], kept.samples[2])
    assert left.minibatches[0].divisor == 8.0
    assert [index for rank in left.minibatches[0].ranks for micro in rank for index in micro] == [0, 1]


def test_p14_every_rank_makes_as_many_passes() -> None:
    """Five answers of 10 tokens, 10 a micro-batch: three for rank 0, two for rank 1, which gets a dummy."""
    groups = [make_group(number, [8], [1.0]) for number in range(5)]
    rules = batch_rules(batch_groups=5, group_size=1, ranks=2, max_tokens_per_microbatch=10)
    (part,) = form(groups, step=0, branch=0, rules=rules).minibatches
    assert [len(rank) for rank in part.ranks] == [3, 3]
    assert part.ranks == (((0,), (2,), (4,)), ((1,), (3,), ()))


def test_p14_a_rank_whose_share_is_empty_takes_part() -> None:
    rules = batch_rules(batch_groups=1, group_size=1, ranks=3)
    train = form([make_group(0, [8], [1.0])], step=0, branch=0, rules=rules)
    assert train.minibatches == (Minibatch(divisor=7.0, ranks=(((0,),), ((),), ((),))),)


def test_minibatches_have_the_same_number_of_whole_groups() -> None:
    groups = [make_group(number, [4, 5], [0.0, 1.0]) for number in range(4)]
    train = form(groups, step=0, branch=0, rules=batch_rules(minibatches=2))
    for part in train.minibatches:
        indices = sorted(index for rank in part.ranks for micro in rank for index in micro)
        assert len(indices) == 4
        assert [index // 2 for index in indices[::2]] == [index // 2 for index in indices[1::2]]


def test_a_sample_longer_than_a_microbatch_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"has 32 tokens, a micro-batch holds 20; raise train\.max_tokens_per_microbatch"
    ):
        form([make_group(0, [30], [1.0])], step=0, branch=0, rules=batch_rules(batch_groups=1, group_size=1))
