"""The order of the data: pinned, fair, whole, and as the shares say."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.rollout.order import Positions, Shares, order


def test_the_order_is_pinned():
    """It must never change, or a resumed run would go through its data in another order."""
    assert [list(order(8, 0, epoch)) for epoch in (0, 1)] == PINNED
    assert list(order(8, 1, 0)) != PINNED[0]
    assert list(order(8, 0, 0, file=1)) not in PINNED
    assert list(order(1, 0, 0)) == [0]
    assert [Shares([0.5, 0.3, 0.2], 0).at(position) for position in range(10)] == PINNED_SHARES


PINNED = [[0, 7, 2, 5, 6, 3, 1, 4], [3, 2, 0, 7, 1, 4, 5, 6]]
PINNED_SHARES = [(1, 0), (0, 0), (0, 1), (2, 0), (1, 1), (0, 2), (0, 3), (1, 2), (2, 1), (0, 4)]


def test_the_order_is_fair():
    """Each row comes first about equally often: 6,000 orders of 6 rows; 1,000 ± 5 standard deviations (29)."""
    first = Counter(order(6, seed, 0)[0] for seed in range(6000))
    assert all(855 < first[row] < 1145 for row in range(6))


def one_file(n: int, seed: int, shuffle: bool, epochs: int | None) -> Positions:
    return Positions([range(n)], [], seed, shuffle, epochs)


@given(n=st.integers(1, 40), seed=st.integers(0, 2**63), epochs=st.integers(1, 4), data=st.data())
def test_each_epoch_has_every_row_once_in_whatever_order_it_is_asked(n, seed, epochs, data):
    positions = one_file(n, seed, shuffle=True, epochs=epochs)
    rows: dict[int, int | None] = {}
    for position in data.draw(st.permutations(range(n * epochs))):
        rows[position] = positions.row(position)
    for epoch in range(epochs):
        assert [rows[epoch * n + i] for i in range(n)] == list(order(n, seed, epoch))
        assert sorted(order(n, seed, epoch)) == list(range(n))
    assert positions.row(n * epochs) is None
    assert positions.row(n * epochs + 7) is None


def test_five_prompts_for_a_batch_of_eight_repeat():
    positions = one_file(5, 0, shuffle=True, epochs=None)
    batch = [positions.row(position) for position in range(8)]
    assert sorted(batch[:5]) == list(range(5))
    assert None not in batch


def test_without_shuffling_rows_come_in_order():
    positions = one_file(3, 0, shuffle=False, epochs=2)
    assert [positions.row(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, None]


# -------------------------------------------------------------------------------------------------------- several files


def test_without_weights_files_are_shuffled_together():
    positions = Positions([range(3), range(3, 8)], [], 0, True, 1)
    assert [positions.row(position) for position in range(9)] == [*PINNED[0], None]
    positions = Positions([[0, 2], [5]], [], 0, False, None)  # rows 1, 3 and 4 are left out
    assert [positions.row(position) for position in range(6)] == [0, 2, 5] * 2


weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@given(weights=weights, seed=st.integers(0, 2**63), position=st.integers(0, 10**9), data=st.data())
def test_shares_at_any_position(weights, seed, position, data):
    """Draws are counted without a gap, a file's share is kept all along, and nothing is remembered."""
    shares = Shares(weights, seed)
    drawn = shares.at(position)
    assert drawn[0] < len(weights)
    whole = sum(weights)
    assert abs(drawn[1] - position * weights[drawn[0]] / whole) <= len(weights) + 1
    again = Shares(weights, seed)
    for other in data.draw(st.lists(st.integers(0, 10**9), max_size=3)):
        again.at(other)
    assert again.at(position) == drawn


@given(weights=weights, seed=st.integers(0, 2**63), start=st.integers(0, 10**6))
def test_each_draw_of_a_file_comes_once_and_in_order(weights, seed, start):
    """Also far from the beginning, where a count that is off by one would be drawn twice or never."""
    shares = Shares(weights, seed)
    drawn = [shares.at(position) for position in range(start, start + 60)]
    for file in range(len(weights)):
        assert all(b == a + 1 for a, b in pairwise(k for f, k in drawn if f == file))
    if start == 0:
        assert all(k == 0 for _, k in {f: (f, k) for f, k in reversed(drawn)}.values())


@given(weights=weights, seed=st.integers(0, 2**63))
def test_from_the_beginning_no_draw_is_missing(weights, seed):
    shares = Shares(weights, seed)
    drawn = [shares.at(position) for position in range(80)]
    for file in range(len(weights)):
        assert [k for f, k in drawn if f == file] == list(range(sum(f == file for f, _ in drawn)))
    assert drawn == brute_force(weights, seed, 80)


def brute_force(weights: list[float], seed: int, n: int) -> list[tuple[int, int]]:
    """The definition, literally: all moments of all draws, sorted."""
    shares = Shares(weights, seed)
    moments = [
        ((k + offset) / share, file, k)
        for file, (offset, share) in enumerate(zip(shares._offsets, shares._shares, strict=True))
        for k in range(n)
    ]
    return [(file, k) for _, file, k in sorted(moments)[:n]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_draw_files_by_their_shares_each_in_passes_of_its_own(shuffle):
    files = [range(4), range(4, 14), [20, 30]]
    positions = Positions(files, [5, 3, 2], 7, shuffle, None)
    drawn = [positions.row(position) for position in range(1000)]
    for file, count in zip(files, (500, 300, 200), strict=True):
        rows = [row for row in drawn if row in file]
        assert abs(len(rows) - count) <= 1
        passes = [rows[i : i + len(file)] for i in range(0, len(rows) - len(file), len(file))]
        assert all(sorted(one) == list(file) for one in passes)  # each row once a pass
        assert (len({tuple(one) for one in passes}) > 1) == shuffle
    assert drawn != [Positions(files, [5, 3, 2], 8, shuffle, None).row(position) for position in range(1000)]


def test_an_epoch_with_weights_has_as_many_positions_as_there_are_rows():
    positions = Positions([range(2), range(2, 10)], [1, 1], 0, True, 2)
    rows = [positions.row(position) for position in range(21)]
    assert rows[20] is None
    assert None not in rows[:20]
    assert sum(row < 2 for row in rows[:20]) == 10
