"""Figures of the simulator: events per second, beside those of the bare core in the same run. One process, one thread.

    python tools/bench/simulate.py                  # three sizes, some steps each
    python tools/bench/simulate.py --steps 250      # the largest one whole: 512 GPUs, 250 steps of 512 × 16 answers

What it runs: whole simulated runs, from 8 servers up to 384 servers and 128 trainer ranks; drawing answers of
log-normal lengths, swaps, checks and the forming of batches are in them. An event is one that the core has handled.
"""

import gc
import time
from dataclasses import dataclass, replace
from math import log
from typing import Final

import core
import figures
from msgspec.structs import replace as replaced

from areal_async.messages import Rules
from areal_async.simulate.engine import simulate
from areal_async.simulate.figures import Figures
from areal_async.simulate.lengths import Drawn, LogNormal
from areal_async.simulate.models import Cluster, RewardModel, ServerModel, SwapModel, TrainerModel

EVENTS_PER_S: Final = 50_000  # the budgets: these two
LARGEST_S: Final = 300.0  # of 250 steps
WHOLE: Final = 250
BEST_OF: Final = 3  # the fastest counts: the machine may be shared


RULES: Final = Rules(
    seed=1,
    steps=WHOLE,
    batch_groups=512,
    group_size=16,
    max_staleness=4,
    max_concurrent=384 * 64,
    minibatches=4,
    ranks=128,
    max_tokens_per_microbatch=32768,
    max_new_tokens=16384,
    wave=384,
)
CLUSTER: Final = Cluster(
    servers=384,
    server=ServerModel(0.002, 0.004, 2e-8, 3e-5, 1e-5, max_running=256, cache=1_500_000),
    swap=SwapModel(1.0),
    trainer=TrainerModel(1.0, 0.2, 0.05, 1e-5, 0.0, publish_s=2.0),
    rewards=RewardModel(0.05, 256),
    answers=Drawn(
        seed=1,
        lengths=LogNormal(log(4000), 0.9),
        prompt=LogNormal(log(200), 0.0),
        prompt_limit=1000,
        max_new_tokens=16384,
        alike=0.3,
        growth=0.0,
        batch_groups=512,
        success=0.5,
    ),
    server_gpus=384,
    trainer_gpus=128,
)


@dataclass(frozen=True)
class Timed:
    """seconds, cpu_s: wall and CPU time of the simulation."""

    figures: Figures
    seconds: float
    cpu_s: float


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--steps", type=int, default=15, help=f"of the largest run (default 15; the whole is {WHOLE})")
    options = parser.parse_args()
    report = figures.Report("simulate")
    bare = bare_core()
    rows, slowest = [], float("inf")
    sizes = ((8, 8, 32, 8, 100), (96, 32, 128, 16, 25), (384, 128, 512, 16, options.steps))
    for servers, ranks, batch, group, steps in sizes:
        tries = 1 if steps == WHOLE else BEST_OF
        timed = min((run(servers, ranks, batch, group, steps) for _ in range(tries)), key=lambda one: one.cpu_s)
        per_s = timed.figures.events / timed.cpu_s
        slowest = min(slowest, per_s)
        rows.append(
            (
                f"{servers} + {ranks}", f"{steps} × {batch} × {group}", timed.figures.events, timed.seconds,
                timed.figures.events / timed.seconds, per_s, per_s / bare, timed.figures.seconds / timed.seconds,
            )
        )  # fmt: skip
    columns = (
        "servers + ranks", "steps × B × n (η 4)", "events", "seconds", "events/s", "events/s of CPU time",
        "× bare core", "× real time",
    )  # fmt: skip
    report.table(f"Simulated runs; the bare core: {bare:,.0f} events/s of CPU time", columns, rows)
    report.budget("simulation: events per second of CPU time, slowest size", slowest, at_least=EVENTS_PER_S)
    whole_s = timed.seconds * WHOLE / options.steps
    way = "" if options.steps == WHOLE else f", scaled up from {options.steps} steps"
    report.budget(f"512 GPUs, {WHOLE} steps of 512 × 16{way}", whole_s, at_most=LARGEST_S, unit="s")
    report.finish(options.json)


def bare_core() -> float:
    """Events that the core alone handles in a second of CPU time (`core.py`), without garbage collection as here."""
    gc.disable()
    began, cpu_began = time.perf_counter(), time.process_time()
    count = core.whole_run(8192, 256, 6)
    share = count.seconds / (time.perf_counter() - began)  # of it is the core's, the rest its fleet's
    gc.enable()
    return count.events / ((time.process_time() - cpu_began) * share)


def run(servers: int, ranks: int, batch: int, group: int, steps: int) -> Timed:
    rules = replaced(
        RULES, steps=steps, batch_groups=batch, group_size=group, ranks=ranks, max_concurrent=servers * 64, wave=servers
    )
    cluster = replace(CLUSTER, servers=servers, server_gpus=servers, trainer_gpus=ranks)
    began, cpu_began = time.perf_counter(), time.process_time()
    found = simulate(rules, cluster)
    return Timed(found, time.perf_counter() - began, time.process_time() - cpu_began)


if __name__ == "__main__":
    main()
