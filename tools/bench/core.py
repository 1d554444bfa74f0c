"""Figures of the core: events per second, time per finished sample. One process, one thread.

    python tools/bench/core.py

What it runs: whole runs against a fleet that answers at once, with many samples in flight; the time of a finished
sample is all that the core does from its admission to its training, so Train and its packing are in it.
"""

import time
from dataclasses import dataclass
from typing import Final

import figures

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

EVENTS_PER_S: Final = 50_000  # the budgets: these two
SAMPLE_US: Final = 50.0


@dataclass
class Count:
    """What a run cost. seconds: inside `handle` only."""

    events: int = 0
    samples: int = 0
    seconds: float = 0.0
    train_seconds: float = 0.0  # of the events that led to a Train
    most_in_flight: int = 0


def main() -> None:
    options = figures.parser(__doc__).parse_args()
    report = figures.Report("core")
    rows, per_sample_us, per_second = [], 0.0, 0.0
    for concurrent, batch, steps in ((256, 32, 40), (2048, 128, 16), (8192, 256, 12)):
        count = whole_run(concurrent, batch, steps)
        plain = count.events / (count.seconds - count.train_seconds)
        per_sample_us, per_second = count.seconds / count.samples * 1e6, count.events / count.seconds
        rows.append((count.most_in_flight, f"{steps} × {batch} × 8", per_second, plain, per_sample_us))
    columns = ("in flight", "steps × B × n (η 4)", "events/s", "events/s but those that form a batch", "µs a sample")
    report.table("The core alone: a fleet that answers at once", columns, rows)
    report.budget("core: events per second", per_second, at_least=EVENTS_PER_S)
    report.budget("core: a finished sample, 8,192 in flight", per_sample_us, at_most=SAMPLE_US, unit="µs")
    report.finish(options.json)


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


if __name__ == "__main__":
    main()
