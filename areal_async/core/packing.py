"""Which sequences share a micro-batch, and which rank gets which: by their lengths in tokens, without padding.

What always holds: every index once, no micro-batch over the capacity, never more micro-batches than Algorithm 1 of the
AReaL paper (arXiv 2505.24298) makes, and the same result for the same lengths on any machine.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

PAIRS: Final = 4  # pairs tried at the end of a micro-batch; more of them hardly save one in a thousand


def pack(lengths: Sequence[int], capacity: int, min_count: int = 1) -> list[list[int]]:
    """Micro-batches of indices into `lengths`: as few as `fill` or Algorithm 1 finds, at least min_count.

    lengths and capacity in tokens. Where there are fewer sequences than `min_count`, the rest is empty lists. Raises
    ValueError, with the index, for a length over the capacity.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if order and lengths[order[0]] > capacity:
        raise ValueError(
            f"sequence {order[0]} has {lengths[order[0]]} tokens, a micro-batch holds {capacity};"
            " raise train.max_tokens_per_microbatch or make answers shorter"
        )
    if order and lengths[order[-1]] < 0:
        raise ValueError(f"sequence {order[-1]} has {lengths[order[-1]]} tokens; a length can't be negative")
    bins = fill(lengths, capacity, order)
    if len(bins) > lower_bound(lengths, capacity):
        bins = algorithm_1(lengths, capacity, order, least=min_count, fewer_than=len(bins)) or bins
    return _split(lengths, bins, min_count)


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices into `lengths` for each of `parts` ranks, so that they get nearly the same number of tokens.

    The longest first, each to the part with the fewest tokens (the first one of equals).
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = list(range(parts))  # tokens * parts + part: one number, so that the heap compares quickly
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        load = loads[0]
        shares[load % parts].append(index)
        heapreplace(loads, load + lengths[index] * parts)
    return shares


def lower_bound(lengths: Sequence[int], capacity: int) -> int:
    """No packing can have fewer micro-batches: by all tokens, and by the sequences of which no two fit together."""
    return max(-(-sum(lengths) // capacity), sum(2 * length > capacity for length in lengths))


def fill(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """One micro-batch after the other: the longest sequence left (`order`), then always the longest that still fits.

    Where no more than two can fit, the best of a few pairs is taken; that leaves less room unused than best fit
    decreasing does where there are few short sequences.
    """
    left = list(reversed(order))  # the shortest first
    sizes = [lengths[index] for index in left]
    bins: list[list[int]] = []
    while left:
        room = capacity - sizes.pop()
        batch = [left.pop()]
        while left and sizes[0] <= room:
            places = _last(sizes, room) if room < 3 * sizes[0] else [bisect_right(sizes, room) - 1]
            for place in places:  # descending, so that the ones before stay where they are
                room -= sizes.pop(place)
                batch.append(left.pop(place))
        bins.append(batch)
    return bins


def _last(sizes: Sequence[int], room: int) -> list[int]:
    """Places of the one or two of `sizes` (ascending, at most two fit) that fill the room best, descending."""
    single = bisect_right(sizes, room) - 1
    best, places = sizes[single], [single]
    longer = bisect_right(sizes, room - sizes[0]) - 1
    for _ in range(PAIRS):
        shorter = bisect_right(sizes, room - sizes[longer], 0, longer) - 1 if longer > 0 else -1
        if shorter < 0:
            break
        if sizes[longer] + sizes[shorter] > best:
            best, places = sizes[longer] + sizes[shorter], [longer, shorter]
        longer = bisect_left(sizes, sizes[longer]) - 1  # the next shorter length
    return places


def algorithm_1(
    lengths: Sequence[int], capacity: int, order: Sequence[int], *, least: int, fewer_than: int
) -> list[list[int]] | None:
    """Dynamic batching as in Algorithm 1 of the AReaL paper.

    Each sequence, the longest first (`order`), to the micro-batch with the fewest sequences among those that it fits
    in (the emptiest one of equals); a new one where it fits in none, and for the first `least` of them. None as soon
    as that makes `fewer_than` micro-batches.
    """
    bins: list[list[int]] = []
    width = len(order) + 1
    levels: list[list[int]] = [[], []]  # levels[n]: micro-batches of n sequences, a heap of -(free * width + number)
    lowest = 1  # levels below are empty
    shortest = lengths[order[-1]] * width if order else 0
    for index in order:
        need = lengths[index] * width
        for place in range(lowest, len(levels)) if len(bins) >= least else ():
            level = levels[place]
            if level and -level[0] >= need:
                room = -heappop(level)
                chosen = bins[room % width]
                chosen.append(index)
                room -= need
                break
        else:
            if len(bins) + 1 >= fewer_than:
                return None
            chosen = [index]
            bins.append(chosen)
            room = capacity * width - need + len(bins) - 1
            lowest = 1
        if len(chosen) == len(levels):
            levels.append([])
        if room >= shortest:  # else it is full
            heappush(levels[len(chosen)], -room)
        while lowest < len(levels) - 1 and not levels[lowest]:
            lowest += 1
    return bins


def _split(lengths: Sequence[int], bins: list[list[int]], count: int) -> list[list[int]]:
    """At least `count` micro-batches: the heaviest that can be halved is halved, then empty ones are added."""
    if len(bins) >= count:
        return bins
    done: list[list[int]] = []
    heavy = [(-sum(lengths[index] for index in batch), number, batch) for number, batch in enumerate(bins)]
    heapify(heavy)
    number = len(bins)
    while heavy and len(heavy) + len(done) < count:
        _, _, batch = heappop(heavy)
        if len(batch) == 1:
            done.append(batch)
            continue
        for half in balance([lengths[index] + 1 for index in batch], 2):  # + 1: an empty sequence counts, too
            part = [batch[place] for place in half]
            heappush(heavy, (-sum(lengths[index] for index in part), number, part))
            number += 1
    done += [batch for _, _, batch in sorted(heavy)]
    return done + [[] for _ in range(count - len(done))]
