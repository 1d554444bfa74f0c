"""Figures of the core: events per second, time per finished sample, packing and balance. One process, one thread.

    python tools/bench/core.py

What it runs: whole runs against a fleet that answers at once, with many samples in flight; the time of a finished
sample is all that the core does from its admission to its training, so Train and its packing are in it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from areal_async.core import packing
from areal_async.core.batches import shuffled
from areal_async.core.orchestrator import Orchestrator
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Finish,
    GroupRead,
    Joined,
    Publish,
    Published,
    ReadGroup,
    Rules,
    SampleDone,
    Score,
    Scored,
    StartSample,
    StepDone,
    Swap,
    Swapped,
    Train,
)

BEST_OF: Final = 7
SEQUENCES: Final = 4096
RANKS: Final = 32
Result = TypeVar("Result")


@dataclass
class Count:
    """What a run cost. seconds: inside `handle` only."""

    events: int = 0
    samples: int = 0
    seconds: float = 0.0
    train_seconds: float = 0.0  # of the events that led to a Train
    most_in_flight: int = 0


def main() -> None:
    print(f"{'in flight':>10} {'events/s':>10} {'µs/sample':>10} {'events/s but Train':>19}   steps × B × n (η 4)")
    for concurrent, batch, steps in ((256, 32, 40), (2048, 128, 16), (8192, 256, 12)):
        count = whole_run(concurrent, batch, steps)
        plain = count.events / (count.seconds - count.train_seconds)
        print(
            f"{count.most_in_flight:>10} {count.events / count.seconds:>10,.0f}"
            f" {count.seconds / count.samples * 1e6:>10.1f} {plain:>19,.0f}   {steps} × {batch} × 8"
        )
    packings()


def whole_run(concurrent: int, batch: int, steps: int) -> Count:
    rules = Rules(
        seed=1,
        steps=steps,
        batch_groups=batch,
        group_size=8,
        max_staleness=4,
        max_concurrent=concurrent,
        minibatches=4,
        ranks=8,
        max_tokens_per_microbatch=32768,
        max_new_tokens=4096,
        min_group=8,
    )
    core = Orchestrator(rules)
    count = Count()
    versions = {f"server {number}": 0 for number in range(8)}
    queue: list[AnyCommand] = []
    events: list[AnyEvent] = [
        Joined(at=0.0, peer="trainer", id="trainer"),
        Joined(at=0.0, peer="rewards", id="rewards"),
    ]
    events += [Joined(at=0.0, peer="server", id=name) for name in versions]
    in_flight = 0
    while True:
        for event in events:
            started = time.perf_counter()
            commands = core.handle(event)
            taken = time.perf_counter() - started
            count.events += 1
            count.seconds += taken
            if any(isinstance(command, Train) for command in commands):
                count.train_seconds += taken
            in_flight += sum(isinstance(command, StartSample) for command in commands) - isinstance(event, SampleDone)
            count.most_in_flight = max(count.most_in_flight, in_flight)
            queue += commands
        if any(isinstance(command, Finish) for command in queue):
            return count
        commands, queue = shuffled(queue, 0, count.events), []
        answers = [answer(command, versions, count) for command in commands]
        events = [event for event in answers if event is not None]


def answer(command: AnyCommand, versions: dict[str, int], count: Count) -> AnyEvent | None:
    match command:
        case ReadGroup(group=group, position=position):
            return GroupRead(at=1.0, group=group, row=position, prompt_tokens=100)
        case StartSample(sample=sample, attempt=attempt, server=server):
            count.samples += 1
            length = 100 + hash(sample) % 8000
            return SampleDone(
                at=1.0,
                sample=sample,
                attempt=attempt,
                oldest=versions[server],
                newest=versions[server],
                prompt_tokens=100,
                length=length,
                loss_tokens=length,
                finish="stop",
            )
        case Score(sample=sample, attempt=attempt):
            return Scored(at=1.0, sample=sample, attempt=attempt, verdict="right", reward=float(hash(sample) % 2))
        case Train(step=step, branch=branch):
            return StepDone(at=1.0, step=step, branch=branch, metrics={})
        case Publish(version=version, branch=branch):
            return Published(at=1.0, version=version, branch=branch, location="", nbytes=0)
        case Swap(server=server, version=version, branch=branch):
            versions[server] = version
            return Swapped(at=1.0, server=server, version=version, branch=branch, pause_s=0.0)
    return None


def packings() -> None:
    print(f"\n{SEQUENCES} lengths, capacity 32,768; balance over {RANKS} ranks: the heaviest above the mean")
    print(f"{'lengths':<22} {'bound':>6} {'Alg. 1':>7} {'pack':>5} {'ms':>6} {'balance':>9} {'ms':>6}")
    for name, lengths in distributions().items():
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        bound = packing.lower_bound(lengths, 32768)
        fewest = len(packing.algorithm_1(lengths, 32768, order, fewer_than=SEQUENCES + 1) or ())
        bins, pack_s = best(partial(packing.pack, lengths, 32768))
        shares, balance_s = best(partial(packing.balance, lengths, RANKS))
        heaviest = max(sum(lengths[index] for index in share) for share in shares)
        print(
            f"{name:<22} {bound:>6} {fewest:>7} {len(bins):>5}"
            f" {pack_s * 1e3:>6.2f} {heaviest / (sum(lengths) / RANKS) - 1:>9.4%} {balance_s * 1e3:>6.2f}"
        )


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
