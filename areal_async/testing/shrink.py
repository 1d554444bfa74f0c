"""The shortest part of a list that still fails.

What always holds: what is given back fails, in the order of the list, and with any one of its elements left out it
doesn't (if the same elements always fail or always don't).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def shrink(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002): leave out
    parts, large ones first, as long as what remains fails. `items` fails, or ValueError. No list is tried twice."""
    tried: dict[tuple[int, ...], bool] = {}

    def still_fails(numbers: list[int]) -> bool:
        key = tuple(numbers)
        if key not in tried:
            tried[key] = fails([items[number] for number in numbers])
        return tried[key]

    kept = list(range(len(items)))
    if not still_fails(kept):
        raise ValueError(f"these {len(items)} don't fail, so no part of them can be found that does")
    if kept and still_fails([]):
        return []
    parts = 2
    while len(kept) > 1:
        shorter = next((rest for rest in _without_a_part(kept, parts) if still_fails(rest)), None)
        if shorter is not None:
            kept, parts = shorter, max(parts - 1, 2)
        elif parts < len(kept):
            parts = min(2 * parts, len(kept))
        else:
            break
    return [items[number] for number in kept]


def _without_a_part(numbers: list[int], parts: int) -> list[list[int]]:
    parts = min(parts, len(numbers))
    borders = [len(numbers) * part // parts for part in range(parts + 1)]
    return [numbers[:begin] + numbers[end:] for begin, end in itertools.pairwise(borders)]
