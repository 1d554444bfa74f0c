"""What asynchrony wins: real vLLM and DeepSpeed on two cores, the quickstart's model, answers of different lengths.

    python tools/bench/async_vs_sync.py [--steps 6]

Five ways to do the same work, each in tokens trained a second of its steady state (the first steps are left out, and
each run is stopped before its end):
  split, η = 0     server on core 0, trainer on core 1, one waits for the other
  split, η = 4     the same, asynchronously
  colocated, η = 0 both cores for the server, then both for the trainer
  plain loop       no controller: tools/bench/plain_loop.py, which also measures each phase alone
  ceiling          the slower of the two phases, alone
The settings are chosen so that the phases alone take about the same time: that is where asynchrony can win most.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import figures
import heavy
import msgspec
import plain_loop
import uvloop

from areal_async.config import Config
from areal_async.config_file import load_config
from areal_async.controller import Controller, StepRow
from areal_async.specs import trainer_spec

QUICKSTART: Final = figures.ROOT / "configs" / "quickstart.yaml"
ETA: Final = 4
SPLIT: Final = ("server.cores=0", "train.cores=1")
COLOCATED: Final = ("server.cores=0-1", "train.cores=0-1")
CEILING_SHARE, LOOP_SHARE = 0.85, 0.95  # the budgets: of the ceiling, and the same as the plain loop but for 5 %
SYNC_WARM_UP: Final = 3
LONGER: Final = 3  # times as many steps asynchronously: they are shorter, and what is in store changes by a few
ALONE_S: Final = 15.0


@dataclass
class Run:
    """The steady state of one run. rows: its steps. cpu_share: of one core, that the controller's process took."""

    rows: list[StepRow]
    seconds: float
    cpu_share: float

    @property
    def tokens_per_s(self) -> float:
        return sum(row.tokens_trained for row in self.rows) / self.seconds

    @property
    def generated_per_s(self) -> float:
        return sum(row.tokens_generated for row in self.rows) / self.seconds

    def mean(self, field: str) -> float:
        return fmean(getattr(row, field) for row in self.rows)


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="that are measured, of each synchronous run")
    parser.add_argument("--batch-groups", type=int, default=32)
    parser.add_argument("--minibatches", type=int, default=4)
    options = parser.parse_args()
    report = figures.Report("async_vs_sync")
    with tempfile.TemporaryDirectory(prefix="aa-bench-") as folder:
        make = Maker(Path(folder), options.batch_groups, options.minibatches)
        loop = plain(make, options.steps)
        sync = measured(make.config(0, *SPLIT), SYNC_WARM_UP, options.steps)
        apart = measured(make.config(ETA, *SPLIT), ETA + 3, LONGER * options.steps)
        colocated = measured(make.config(0, *COLOCATED), SYNC_WARM_UP, options.steps)
    tell(report, loop, sync, apart, colocated)
    report.finish(options.json)


class Maker:
    """Configurations of the runs, which differ in what is given to `config` alone."""

    def __init__(self, folder: Path, batch_groups: int, minibatches: int) -> None:
        self.folder = folder
        self._options = (
            f"model.path={heavy.model(QUICKSTART.with_suffix('') / 'model', folder / 'model')}",
            f"runs_dir={folder}/runs",
            f"rollout.max_new_tokens={heavy.LONGEST}",
            f"train.batch_groups={batch_groups}",
            f"train.minibatches={minibatches}",
            "train.steps=100000",  # stopped long before
            "train.lr=1e-9",  # lengths and rewards are drawn: there is nothing to learn
        )

    def config(self, eta: int, *options: str) -> Config:
        return load_config(QUICKSTART, [*self._options, f"rollout.max_staleness={eta}", *options])


def measured(config: Config, warm_up: int, steps: int) -> Run:
    return uvloop.run(_measured(config, warm_up, steps))


async def _measured(config: Config, warm_up: int, steps: int) -> Run:
    rows: list[StepRow] = []
    cpu_s = 0.0
    async with Controller(config, workflow=heavy.HeavyTail()) as controller:
        async for row in controller.steps():
            rows.append(row)
            if len(rows) == warm_up:
                cpu_s = time.process_time()
            if len(rows) == warm_up + steps:
                cpu_s = time.process_time() - cpu_s
                controller.stop()
    kept = rows[warm_up : warm_up + steps]
    seconds = kept[-1].time_s - rows[warm_up - 1].time_s
    return Run(kept, seconds, cpu_s / seconds)


def plain(make: Maker, steps: int) -> plain_loop.Found:
    """The plain loop in a process of its own, on the trainer's core."""
    config = make.config(0, *SPLIT)
    task = plain_loop.Task(
        spec=trainer_spec(config, f"aa-bench-{time.time_ns()}"),
        data=config.data.train[0],
        steps=steps,
        warm_up=SYNC_WARM_UP,
        batch_groups=config.train.batch_groups,
        group_size=config.rollout.group_size,
        minibatches=config.train.minibatches,
        max_tokens_per_microbatch=config.train.max_tokens_per_microbatch,
        max_concurrent=config.rollout.max_concurrent,
        max_num_seqs=config.server.max_num_seqs,
        alone_s=ALONE_S,
    )
    given, out = make.folder / "task.json", make.folder / "found.json"
    given.write_bytes(msgspec.json.encode(task))
    script = Path(__file__).with_name("plain_loop.py")
    argv = ["taskset", "-c", "1", "env", "OMP_NUM_THREADS=1", sys.executable, script, "--task", given, "--out", out]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return msgspec.json.decode(out.read_bytes(), type=plain_loop.Found)


def tell(report: figures.Report, loop: plain_loop.Found, sync: Run, apart: Run, colocated: Run) -> None:
    ceiling = min(loop.generate_alone, loop.train_alone)
    tokens = apart.mean("tokens_trained")
    each: Sequence[tuple[str, float]] = (
        ("split, η = 0", sync.tokens_per_s),
        (f"split, η = {ETA}", apart.tokens_per_s),
        ("colocated, η = 0", colocated.tokens_per_s),
        ("plain loop", loop.loop),
        ("generation alone", loop.generate_alone),
        ("training alone", loop.train_alone),
    )
    report.table(
        f"Tokens trained a second ({tokens:,.0f} tokens a step, of {apart.mean('samples'):.0f} answers)",
        ("way", "tokens/s", "steps/s", "of the ceiling, %"),
        [(name, rate, rate / tokens, rate / ceiling * 100) for name, rate in each],
    )
    report.table(
        "Where a step's time goes",
        ("run", "step, s", "generated, tokens/s", "in the ranks, s", "trainer idle, %", "server idle or paused, %",
         "pause, s", "controller, % of a core", "lag, mean"),
        [
            (name, run.seconds / len(run.rows), run.generated_per_s, run.mean("train_s"),
             run.mean("trainer_idle_share") * 100, run.mean("rollout_idle_share") * 100, run.mean("swap_pause_s"),
             run.cpu_share * 100, run.mean("lag_mean"))
            for name, run in (("split, η = 0", sync), (f"split, η = {ETA}", apart), ("colocated, η = 0", colocated))
        ],
    )  # fmt: skip
    report.table(
        "The plain loop's step",
        ("generate, s", "train, s", "publish, s", "swap, s"),
        [(loop.generate_s, loop.train_s, loop.publish_s, loop.swap_s)],
    )
    report.note(f"η = {ETA} against the split η = 0: {apart.tokens_per_s / sync.tokens_per_s:.2f} ×; against the "
                f"colocated η = 0: {apart.tokens_per_s / colocated.tokens_per_s:.2f} ×.")  # fmt: skip
    report.budget(
        f"asynchronous (η = {ETA}) against the ceiling", apart.tokens_per_s / ceiling * 100,
        at_least=CEILING_SHARE * 100, unit="%", bound_by=bound(loop, apart),
    )  # fmt: skip
    report.budget(
        "synchronous (η = 0) against a plain loop", sync.tokens_per_s / loop.loop * 100, at_least=LOOP_SHARE * 100,
        unit="%", bound_by=f"the controller's process took {sync.cpu_share:.0%} of a core",
    )  # fmt: skip


def bound(loop: plain_loop.Found, apart: Run) -> str:
    """What keeps the asynchronous run from the ceiling, from its own figures."""
    in_ranks = sum(row.tokens_trained for row in apart.rows) / sum(row.train_s for row in apart.rows)
    return (
        f"the trainer was idle for {apart.mean('trainer_idle_share'):.0%} of the time; while it trained it did "
        f"{in_ranks / loop.train_alone:.0%} of its tokens/s alone; servers were idle or paused for "
        f"{apart.mean('rollout_idle_share'):.0%}; the controller took {apart.cpu_share:.0%} of a core, and each of the "
        f"two cores is a phase's"
    )


if __name__ == "__main__":
    main()
