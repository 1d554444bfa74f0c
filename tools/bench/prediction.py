"""How well a recorded run predicts others: real quickstart runs that differ in η or batch, beside their simulation.

    python tools/bench/prediction.py [--steps 40] [--repeats 2] [--runs FOLDER]

The models are fitted to the quickstart as it is (η = 3, batches of 16 groups), and the other runs are predicted from
them. All have as many steps, since answers get longer while the model learns. The machine should have nothing else to
do: what slows one of these runs down is in nobody's model. So each run is made `--repeats` times, in turns, and the
medians count; `load` says what else ran.

--runs: where the runs are kept; those that are there are not made again.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Final

import figures

from areal_async.simulate.fit import fit
from areal_async.simulate.validate import Compared, validate

QUICKSTART: Final = figures.ROOT / "configs" / "quickstart.yaml"
LIMIT: Final = 10.0  # %
FITTED: Final = "η = 3, B = 16"
RUNS: Final[Mapping[str, tuple[str, ...]]] = {
    FITTED: (),
    "η = 0, B = 16": ("rollout.max_staleness=0",),
    "η = 1, B = 16": ("rollout.max_staleness=1",),
    "η = 8, B = 16": ("rollout.max_staleness=8",),
    "η = 3, B = 8": ("train.batch_groups=8",),
}
SHOWN: Final = ("step", "training of a step", "trainer's wait a step", "generated", "trainer idle", "servers idle",
                "answer's length", "lag, mean")  # fmt: skip
RUN_S: Final = 900.0


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in")
    options = parser.parse_args()
    report = figures.Report("prediction")
    with tempfile.TemporaryDirectory(prefix="aa-bench-") as temporary:
        folder = options.runs or Path(temporary)
        logs: dict[str, list[Path]] = {name: [] for name in RUNS}
        loads: dict[str, list[float]] = {name: [] for name in RUNS}
        for repeat in range(options.repeats):
            for name in RUNS:
                loads[name].append(os.getloadavg()[0])
                logs[name].append(real_run(folder, name, repeat, options.steps))
        fitted = [fit(log) for log in logs[FITTED]]
        tell(report, {
            name: [validate(log, models.cluster) for log, models in zip(logs[name], fitted, strict=True)]
            for name in RUNS
        }, loads)  # fmt: skip
        for number, models in enumerate(fitted, 1):
            server, trainer = models.cluster.server, models.cluster.trainer
            report.note(f"Fitted to run {number} of {FITTED}: {server}, off by {models.server_error:.1%} an answer; "
                        f"{trainer}, off by {models.trainer_error:.1%} a step; {models.cluster.rewards}; "
                        f"{models.cluster.swap}.")  # fmt: skip
    report.finish(options.json)


def real_run(folder: Path, name: str, repeat: int, steps: int) -> Path:
    """The log of this run, made now if it isn't there."""
    short = "".join(letter for letter in name if letter.isascii() and letter.isalnum())
    run = folder / f"{short}-{steps}-{repeat}"
    if not (run / "model").is_dir():  # a whole run has saved its model
        shutil.rmtree(run, ignore_errors=True)  # one that was broken off
        print(f"{name}, {steps} steps, run {repeat + 1}", file=sys.stderr, flush=True)
        argv = [sys.executable, "-m", "areal_async", "run", str(QUICKSTART), "--run-dir", str(run)]
        argv += [f"train.steps={steps}", *RUNS[name]]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=RUN_S)
    return run / "log"


def tell(report: figures.Report, found: Mapping[str, list[Compared]], loads: Mapping[str, list[float]]) -> None:
    rows = []
    for name, compared in found.items():
        for line in SHOWN:
            lines = [one.line(line) for one in compared]
            predicted, real = median(one.predicted for one in lines), median(one.real for one in lines)
            share = lines[0].unit == "share"
            error = (predicted - real) * 100 if share else (predicted / real - 1) * 100 if real else 0.0
            rows.append((name, line, "points" if share else "%", predicted, real, error))
    report.table(f"Predicted from {FITTED}", ("run", "figure", "error in", "predicted", "real", "error"), rows)
    report.table(
        "Seconds a step, each run",
        ("run", "predicted", "real", "error, %", "load before it"),
        [
            (name, one.line("step").predicted, one.line("step").real, one.line("step").error * 100, load)
            for name, compared in found.items()
            for one, load in zip(compared, loads[name], strict=True)
        ],
    )
    for name in found:
        if name != FITTED:
            predicted = median(one.line("step").predicted for one in found[name])
            real = median(one.line("step").real for one in found[name])
            report.budget(
                f"step time of {name}, predicted from {FITTED}", abs(predicted / real - 1) * 100, at_most=LIMIT,
                unit="%", bound_by=f"predicted {predicted:.3g} s, real {real:.3g} s",
            )  # fmt: skip


if __name__ == "__main__":
    main()
