"""Packing of micro-batches and balance over ranks: how good, against the bound and Algorithm 1, and how fast.

python tools/bench/packing.py
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import figures

from areal_async.core import packing
from areal_async.core.batches import shuffled

BEST_OF: Final = 7  # the fastest counts: the machine may be shared
SEQUENCES: Final = 4096
CAPACITY: Final = 32768  # tokens
RANKS: Final = 32
PACK_MS, BALANCE_MS, BALANCE_PERCENT, ABOVE_BOUND = 5.0, 8.0, 1.0, 1  # the budgets
Result = TypeVar("Result")


def main() -> None:
    options = figures.parser(__doc__).parse_args()
    report = figures.Report("packing")
    rows = [row(name, lengths) for name, lengths in distributions().items()]
    columns = ("lengths", "bound", "Algorithm 1", "pack", "pack, ms", "heaviest rank above the mean, %", "balance, ms")
    report.table(f"{SEQUENCES:,} lengths, {CAPACITY:,} tokens a micro-batch, {RANKS} ranks", columns, rows)
    for name, bound, fewest, count, *_ in rows:
        report.budget(
            f"packing, micro-batches above the lower bound: {name}",
            count - bound,
            at_most=ABOVE_BOUND,
            bound_by=f"the bound is the sum of all tokens, and the longest sequences; Algorithm 1 is {fewest - bound} "
            "above it",
        )
    report.budget("packing, micro-batches above Algorithm 1, worst", max(row[3] - row[2] for row in rows), at_most=0)
    report.budget("packing, slowest", max(row[4] for row in rows), at_most=PACK_MS, unit="ms")
    report.budget(
        "balance, heaviest rank above the mean, worst", max(row[5] for row in rows), at_most=BALANCE_PERCENT, unit="%"
    )
    report.budget("balance, slowest", max(row[6] for row in rows), at_most=BALANCE_MS, unit="ms")
    report.finish(options.json)


def row(name: str, lengths: list[int]) -> tuple[str, int, int, int, float, float, float]:
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    bound = packing.lower_bound(lengths, CAPACITY)
    fewest = len(packing.algorithm_1(lengths, CAPACITY, order, least=1, fewer_than=SEQUENCES + 1) or ())
    bins, pack_s = best(partial(packing.pack, lengths, CAPACITY))
    shares, balance_s = best(partial(packing.balance, lengths, RANKS))
    heaviest = max(sum(lengths[index] for index in share) for share in shares)
    above = heaviest / (sum(lengths) / RANKS) - 1
    return name, bound, fewest, len(bins), pack_s * 1e3, above * 100, balance_s * 1e3


def distributions() -> dict[str, list[int]]:
    """Lengths up to 32,768 tokens without a random generator: quantiles, in a shuffled order."""
    shares = [(place + 0.5) / SEQUENCES for place in range(SEQUENCES)]
    shapes: dict[str, Callable[[float], float]] = {
        "mostly short": lambda share: 100 + 32000 * share**6,
        "heavy tail": lambda share: min(1500 * (1 - share) ** -0.5, 32768),
        "a tenth cut at 16k": lambda share: 16384 if share > 0.9 else 300 + 9000 * share,
        "even, 1 to 8k": lambda share: 1 + 8191 * share,
        "even, 1 to 32k": lambda share: 1 + 32767 * share,
        "even, 8k to 16k": lambda share: 8192 + 8191 * share,
    }
    return {
        name: shuffled([int(shape(share)) for share in shares], number, 0)
        for number, (name, shape) in enumerate(shapes.items())
    }


def best(call: Callable[[], Result]) -> tuple[Result, float]:
    """The result, and the seconds of the fastest of a few runs."""
    seconds = []
    for _ in range(BEST_OF):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    return result, min(seconds)


if __name__ == "__main__":
    main()
