"""Which sequences share a micro-batch, and which rank gets which: by their lengths in tokens, without padding.

What always holds: every index once, no micro-batch over the capacity, never more micro-batches than Algorithm 1 of the
AReaL paper (arXiv 2505.24298) makes, and the same result for the same lengths on any machine.
"""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace


def pack(lengths: Sequence[int], capacity: int, min_count: int = 1) -> list[list[int]]:
    """Micro-batches of indices into `lengths`: as few as best fit decreasing or Algorithm 1 finds, at least min_count.

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
        raise ValueError(f"sequence {order[-1]} has {lengths[order[-1]]} tokens")
    bins = best_fit_decreasing(lengths, capacity, order)
    if len(bins) > lower_bound(lengths, capacity):
        fewest = algorithm_1(lengths, capacity, order)
        bins = min(bins, fewest, key=len)
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


def best_fit_decreasing(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Each sequence, the longest first (`order`), to the fullest micro-batch that it fits in."""
    bins: list[list[int]] = []
    width = len(order) + 1
    rooms: list[int] = []  # free tokens * width + micro-batch, ascending: the first one with enough room fits best
    for index in order:
        length = lengths[index]
        place = bisect_left(rooms, length * width)
        if place == len(rooms):
            bins.append([index])
            room = (capacity - length) * width + len(bins) - 1
        else:
            room = rooms.pop(place)
            bins[room % width].append(index)
            room -= length * width
        rooms.insert(bisect_left(rooms, room), room)
    return bins


def algorithm_1(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Dynamic batching as in Algorithm 1 of the AReaL paper, without its minimum (`pack` sees to that).

    Each sequence, the longest first, to the micro-batch with the fewest sequences among those that it fits in (the
    emptiest one of equals); a new one where it fits in none.
    """
    bins: list[list[int]] = []
    width = len(order) + 1
    levels: list[list[int]] = [[], []]  # levels[n]: micro-batches of n sequences, a heap of -(free * width + number)
    for index in order:
        length = lengths[index]
        least = length * width
        for level in levels:
            if level and -level[0] >= least:
                room = -heappop(level)
                chosen = bins[room % width]
                chosen.append(index)
                room -= least
                break
        else:
            chosen = [index]
            bins.append(chosen)
            room = (capacity - length) * width + len(bins) - 1
        if len(chosen) == len(levels):
            levels.append([])
        heappush(levels[len(chosen)], -room)
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
        for half in balance([lengths[index] for index in batch], 2):
            part = [batch[place] for place in half]
            heappush(heavy, (-sum(lengths[index] for index in part), number, part))
            number += 1
    done += [batch for _, _, batch in sorted(heavy)]
    return done + [[] for _ in range(count - len(done))]
