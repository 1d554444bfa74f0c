"""How late the controller's loop gets while 1,000 checks are to be made, half of which hang until they are killed.

    python tools/bench/rewards_lag.py [--checks 1000] [--workers 2] [--in-flight 256] [--timeout 1.5]

A whole run: controller, core, log and wire in this process; a scripted server and a scripted trainer in others, which
go on all the time; real reward workers. First the run alone is watched, then all checks are asked for at once and it is
watched until the last one has its verdict. Of four checks one spins and one sleeps until its deadline, two are quick.
The lag is how much later than asked a sleep of 5 ms returns.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import crowd
import figures
import numpy as np
import uvloop

from areal_async.config import Config
from areal_async.controller import Controller
from areal_async.controller.garbage import collect_rarely
from areal_async.messages import ScoreResult, ScoreTask

LAG_MS: Final = 20.0  # the budget
TOKENS, CHUNK_TOKENS, TOKEN_S = 128, 16, 0.01  # of an answer on average; 1.3 s an answer
ALONE_S: Final = 10.0
BATCH: Final = 8  # groups a step
NO_TOKENS: Final = np.zeros(0, np.int32)
REWARD: Final = """
import time

def reward(response):
    kind = int(response) % 4
    while kind == 1:
        pass
    if kind == 3:
        time.sleep(3600)
    return float(kind)
"""


@dataclass
class Watched:
    """What was seen of the loop for a while. answers: that the server finished meanwhile."""

    what: str
    cost: crowd.Cost = field(default_factory=crowd.Cost)
    seconds: float = 0.0
    answers: int = 0

    @property
    def row(self) -> tuple[str | float, ...]:
        cost = self.cost
        return (
            self.what, self.seconds, self.answers / self.seconds, cost.late_ms(0.5), cost.late_ms(0.99),
            max(cost.late_s) * 1e3, cost.own_ms(0.99), cost.cpu_s / self.seconds * 100,
        )  # fmt: skip


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--checks", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--timeout", type=float, default=1.5, help="deadline of a check, seconds")
    options = parser.parse_args()
    report = figures.Report("rewards_lag")
    collect_rarely()  # as `areal-async run` does
    crowd.raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="aa-bench-") as folder:
        alone, checking, results = uvloop.run(measured(configuration(Path(folder), options), options.checks))
    columns = (
        "",
        "seconds",
        "answers/s",
        "lag p50, ms",
        "lag p99, ms",
        "lag max, ms",
        "p99 with the CPU, ms",
        "CPU, %",
    )
    report.table("The controller's loop", columns, [alone.row, checking.row])
    report.table(*verdicts(results))
    wrong = sum(not is_right(number, result) for number, result in enumerate(results))
    report.budget(
        f"loop lag p99 while {options.checks:,} checks run, half of them hanging", checking.cost.late_ms(0.99),
        at_most=LAG_MS, unit="ms",
        bound_by=f"{checking.cost.own_ms(0.99):.3g} ms with the CPU; else it waits for a core",
    )  # fmt: skip
    report.budget("checks that have another verdict than they must", wrong, at_most=0)
    report.finish(options.json)


def configuration(folder: Path, options: argparse.Namespace) -> Config:
    (folder / "hanging.py").write_text(REWARD)
    return crowd.configuration(
        folder,
        f"rollout.max_concurrent={options.in_flight}",
        f"rollout.max_new_tokens={2 * TOKENS}",
        f"rollout.max_staleness={4 * options.in_flight // crowd.GROUP // BATCH + 4}",  # admission holds nothing back
        f"train.batch_groups={BATCH}",
        "train.steps=100000",
        f"server.stream_interval={CHUNK_TOKENS}",
        "reward.function=hanging:reward",
        f"reward.workers={options.workers}",
        f"reward.timeout_s={options.timeout}",
    )


async def measured(config: Config, count: int) -> tuple[Watched, Watched, list[ScoreResult]]:
    """The run alone, the run with the checks, and what came of these."""
    wanted = config.rollout.max_concurrent
    workflow = crowd.Answers(TOKENS, wanted)
    recipes = crowd.recipes(CHUNK_TOKENS, TOKEN_S)
    async with Controller(config, workflow=workflow, recipes=recipes) as controller:
        going = asyncio.create_task(controller.run())
        while workflow.samples < 2 * wanted and not going.done():
            await asyncio.wait({going}, timeout=crowd.LOOK_S)
        async with watched("the run alone", workflow) as alone:
            await asyncio.wait({going}, timeout=ALONE_S)
        async with watched(f"with {count:,} checks", workflow) as checking:
            results = await asyncio.gather(*(check(controller, number) for number in range(count)))
        if going.done():
            going.result()  # it can't have been done with all its steps: this raises
        going.cancel()
        await asyncio.wait({going})
    return alone, checking, results


@asynccontextmanager
async def watched(what: str, workflow: crowd.Answers) -> AsyncIterator[Watched]:
    found = Watched(what)
    watching = asyncio.create_task(crowd.watch_loop(found.cost, workflow))
    begun, cpu_s, answers = time.perf_counter(), time.process_time(), workflow.samples
    try:
        yield found
    finally:
        found.seconds = time.perf_counter() - begun
        found.cost.cpu_s = time.process_time() - cpu_s
        found.answers = workflow.samples - answers
        watching.cancel()


async def check(controller: Controller, number: int) -> ScoreResult:
    task = ScoreTask(
        sample=f"check {number}", attempt=0, prompt="", answer=None, finish="stop", columns={}, response=str(number)
    )
    return await controller._parts._checks.check(task, NO_TOKENS)


def is_right(number: int, result: ScoreResult) -> bool:
    return result.verdict == ("timeout" if number % 2 else "given")


def verdicts(results: list[ScoreResult]) -> tuple[str, tuple[str, ...], list[tuple[str | float, ...]]]:
    """A table: how many of each, and how long such checks took."""
    rows: list[tuple[str | float, ...]] = []
    for verdict, count in sorted(Counter(result.verdict for result in results).items()):
        seconds = sorted(result.seconds for result in results if result.verdict == verdict)
        rows.append((verdict, count, share(seconds, 0.5), share(seconds, 0.99), seconds[-1]))
    return "The checks", ("verdict", "checks", "p50, s", "p99, s", "max, s"), rows


def share(ordered: list[float], part: float) -> float:
    """The value that so large a part lies below."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


if __name__ == "__main__":
    main()
