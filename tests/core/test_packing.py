"""Packing and balancing: every index once, within capacity, never worse than Algorithm 1."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.core.batches import shuffled
from areal_async.core.packing import balance, lower_bound, pack

LENGTHS = st.lists(st.integers(0, 100), max_size=60)


def algorithm_1_as_printed(lengths: list[int], capacity: int, least: int) -> int:
    """How many micro-batches the paper's Algorithm 1 makes, written down line by line."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [micro for micro in bins if sum(micro) + length <= capacity]
        if len(bins) < least or not fitting:
            bins.append([length])
        else:
            min(fitting, key=lambda micro: (len(micro), sum(micro))).append(length)
    return len(bins)


@given(LENGTHS, st.integers(100, 300), st.integers(1, 8))
def test_packing(lengths: list[int], capacity: int, least: int) -> None:
    bins = pack(lengths, capacity, least)
    assert sorted(index for micro in bins for index in micro) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in micro) <= capacity for micro in bins)
    assert len(bins) >= max(least, lower_bound(lengths, capacity))
    assert len(bins) <= max(algorithm_1_as_printed(lengths, capacity, least), least)
    if len(lengths) >= least:
        assert all(bins)  # no dummy while there is work for everyone


@given(LENGTHS, st.integers(1, 9))
def test_balance(lengths: list[int], parts: int) -> None:
    shares = balance(lengths, parts)
    assert len(shares) == parts
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_a_length_over_capacity_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 101 tokens, a micro-batch holds 100"):
        pack([5, 101, 7], 100)


def many_lengths() -> list[int]:
    """4,096 lengths between 100 and 16,384, most of them short, in no order."""
    return [100 + 16284 * (place * 7919 % 4096) ** 4 // 4095**4 for place in range(4096)]


def test_4096_lengths_are_packed_as_tightly_as_can_be() -> None:
    lengths = many_lengths()
    for capacity in (16384, 32768):
        assert len(pack(lengths, capacity)) <= lower_bound(lengths, capacity) + 1


def test_32_ranks_get_the_same_tokens_within_a_percent() -> None:
    lengths = many_lengths()
    loads = [sum(lengths[index] for index in share) for share in balance(lengths, 32)]
    assert max(loads) <= 1.01 * sum(loads) / 32
    assert min(loads) >= 0.99 * sum(loads) / 32


@given(st.lists(st.integers()), st.integers(0, 2**70), st.integers(0, 10**6))
def test_an_order_is_a_permutation_and_stays_the_same(items: list[int], seed: int, step: int) -> None:
    assert sorted(shuffled(items, seed, step)) == sorted(items)
    assert shuffled(items, seed, step) == shuffled(items, seed, step)


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert shuffled(range(10), seed=1, step=0) == [2, 1, 8, 4, 9, 6, 5, 7, 3, 0]
