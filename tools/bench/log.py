"""What recording costs: the same run with the run log and with one that writes nothing.

    python tools/bench/log.py [--in-flight 8192] [--tokens 4096]

Throughput is what a core of the controller's time allows: tokens that arrive a second of CPU time. The two runs take
turns, and the middle of each kind's figures counts, since the machine's speed changes with what else it does.
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import crowd
import figures

from areal_async.controller import parts
from areal_async.log.format import PayloadRef
from areal_async.log.writer import RunLog
from areal_async.messages import AnyRecord, SampleId
from areal_async.wire.arrays import Array

COST_PERCENT: Final = 5.0  # the budgets
ROUNDS: Final = 3


class Unwritten(RunLog):
    """A run log that keeps nothing."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.folder = folder

    def append(self, record: AnyRecord, payload: PayloadRef | None = None) -> None: ...

    def put(self, sample: SampleId, attempt: int, arrays: Sequence[Array]) -> PayloadRef:
        return PayloadRef(segment=0, offset=0, nbytes=0)

    def forget(self, samples: Iterable[SampleId]) -> None: ...

    def release(self, samples: Iterable[SampleId]) -> None: ...

    def position(self) -> tuple[int, int]:
        return 0, 0

    def flush(self) -> None: ...

    async def sync(self) -> None: ...

    def close(self) -> None: ...


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--in-flight", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096, help="of an answer, on average")
    parser.add_argument("--interval", type=int, default=128, help="server.stream_interval")
    parser.add_argument("--window", type=float, default=8.0, help="seconds that are measured, of each run")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    report = figures.Report("log")
    per_second: dict[str, list[float]] = {"recorded": [], "not recorded": []}
    for _ in range(options.rounds):
        for name, kind in (("recorded", RunLog), ("not recorded", Unwritten)):
            parts.RunLog = kind
            cost = crowd.run(
                in_flight=options.in_flight,
                tokens=options.tokens,
                chunk_tokens=options.interval,
                window_s=options.window,
                warm_up=0.3,
            )
            per_second[name].append(cost.tokens / cost.cpu_s)
    middle = {name: statistics.median(values) for name, values in per_second.items()}
    rows = [(name, middle[name], min(values), max(values)) for name, values in per_second.items()]
    columns = ("run", "tokens/s a core", "least", "most")
    report.table(f"{options.in_flight:,} in flight, {options.tokens:,} tokens an answer", columns, rows)
    report.budget(
        f"recording, of throughput ({options.in_flight:,} in flight, {options.tokens:,} tokens an answer)",
        (1 - middle["recorded"] / middle["not recorded"]) * 100,
        at_most=COST_PERCENT,
        unit="%",
        bound_by="runs of one kind differ by "
        + ", ".join(f"{(max(values) / min(values) - 1):.0%}" for values in per_second.values()),
    )
    report.finish(options.json)


if __name__ == "__main__":
    main()
