"""`areal-async replay RUN --peer trainer`: the real trainer, sent the recorded batches again; its answers beside those
of the run.

What always holds: exit code 0 where each answer is within its tolerance, 1 where one isn't or the trainer can't go on,
2 where the command line is wrong or the model isn't the run's; a row is printed as soon as its step is done.
"""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from areal_async.cli_output import printable, printing

if TYPE_CHECKING:
    from areal_async.messages import Version
    from areal_async.replay.answers import Compared, Difference, Largest
    from areal_async.replay.trainer import Plan, Watch

    Group = argparse._ArgumentGroup

COLUMNS: Final = ("loss", "grad_norm")  # of the table; all fields are in the summary, and in --json
DIFFERENCES: Final = 1000  # that --json has

EXAMPLES: Final = """  areal-async replay runs/quickstart-20260101-120000 --peer trainer
  areal-async replay runs/quickstart-20260101-120000 --peer trainer --from step-40 --steps 5
  areal-async replay runs/first --peer trainer model.path=/models/moved --tolerance loss=1e-3 --tolerance grad_norm=0.01
"""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """For --json. version: that the trainer began with; checkpoint: its folder, "" for the run's model. seconds: of
    all, the trainer's start included."""

    run: str
    version: int
    checkpoint: str
    said: tuple[str, ...]
    steps: "tuple[Compared, ...]"
    largest: "dict[str, Largest]"
    not_compared: tuple[str, ...]
    over: int
    differences: "tuple[Difference, ...]"
    seconds: float


def add_options(group: "Group") -> None:
    group.add_argument(
        "--from",
        dest="begin",
        metavar="WHERE",
        help="model or step-N (a checkpoint of the run); default: the earliest from which all batches are on the disk",
    )
    group.add_argument("--steps", type=int, metavar="N", help="train N steps again (default: all)")
    group.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="NAME=X",
        help="largest difference of a metric, of 1 or of the recorded value, whichever is more; with --peer server X "
        "alone, of a token's log-probability (docs/replay.md has the usual ones)",
    )


def given(arguments: argparse.Namespace) -> str | None:
    """An option of this peer that was given."""
    options = {"--from": arguments.begin, "--steps": arguments.steps}
    if arguments.peer != "server":
        options["--tolerance"] = arguments.tolerance or None
    return next((name for name, value in options.items() if value is not None), None)


def replay(folder: Path, arguments: argparse.Namespace) -> int:
    """folder: of the log. Errors: any ArealError."""
    import uvloop

    from areal_async.cli_score import ended_by_signals
    from areal_async.errors import ConfigError
    from areal_async.replay import answers
    from areal_async.replay.trainer import Nobody, plan, train_again

    if arguments.limit is not None:
        raise ConfigError("command line: replay: --limit: has no meaning with --peer trainer; --steps N has")
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"command line: replay: --steps {arguments.steps}: must be at least 1")
    tolerances = answers.read_tolerances(arguments.tolerance)
    begun = time.monotonic()
    planned = plan(folder.resolve(), tuple(arguments.overrides), arguments.begin, arguments.steps)
    shown: Watch = Nobody() if arguments.json else _Rows(tolerances)
    if not arguments.json:
        with printing():
            _tell_plan(planned)

    async def again() -> "list[Compared]":
        with ended_by_signals():
            return await train_again(planned, shown)

    steps = uvloop.run(again())
    differences = [difference for compared in steps for difference in answers.over(compared, tolerances)]
    report = Report(
        run=printable(arguments.run),
        version=planned.version,
        checkpoint=str(planned.checkpoint or ""),
        said=planned.said,
        steps=tuple(steps),
        largest=answers.largest(steps, tolerances),
        not_compared=answers.not_compared(steps),
        over=len(differences),
        differences=tuple(differences[:DIFFERENCES]),
        seconds=round(time.monotonic() - begun, 3),
    )
    with printing():
        if arguments.json:
            print(msgspec.json.encode(report).decode())
        else:
            _tell_end(report)
    return 1 if differences else 0


def _tell_plan(planned: "Plan") -> None:
    first, last = planned.steps[0].step, planned.steps[-1].step
    where = f"the checkpoint {planned.checkpoint}" if planned.checkpoint is not None else "the run's first weights"
    print(f"{planned.log.parent}: steps {first} to {last}, from {where}")
    for line in planned.said:
        print(line)


class _Rows:
    """Prints a row a step. It goes on when nobody reads them any more: the exit code is of all steps."""

    def __init__(self, tolerances: dict[str, float]) -> None:
        self._tolerances = tolerances

    def starting(self, version: "Version", ranks: int) -> None:
        titles = "".join(f"  {name:>13}  {'now':>13}  {'differs by':>10}" for name in COLUMNS)
        with printing():
            print(f"starting the trainer: version {version}, {ranks} rank(s)")
            print(f"{'step':>5}{titles}")

    def step(self, compared: "Compared") -> None:
        from areal_async.replay.answers import over

        cells = "".join(
            f"  {compared.recorded[name]:>13.7g}  {compared.now[name]:>13.7g}  {difference:>10.1e}"
            for name in COLUMNS
            if (difference := compared.differences().get(name)) is not None
        )
        wrong = ", ".join(difference.field for difference in over(compared, self._tolerances))
        with printing():
            print(f"{compared.step:>5}{cells}{f'  over: {wrong}' if wrong else ''}")


def _tell_end(report: Report) -> None:
    print(f"{'field':<16}  {'largest difference':>18}  {'at step':>7}  {'allowed':>8}  {'steps over it':>13}")
    for name, found in report.largest.items():
        step = found.step if found.difference else ""
        print(f"{name:<16}  {found.difference:>18.1e}  {step:>7}  {found.allowed:>8g}  {found.over:>13}")
    if report.not_compared:
        print(f"not compared, since only one side has it: {', '.join(report.not_compared)}")
    print(f"{len(report.steps)} steps trained again in {report.seconds:.1f} s, {_trained(report)}")
    if not report.differences:
        print("every answer is within its tolerance")
        return
    steps = len({difference.step for difference in report.differences})
    print(f"the first difference over its tolerance: {report.differences[0]}")
    print(f"in all {report.over} in {steps} of the {len(report.steps)} steps")


def _trained(report: Report) -> str:
    now, recorded = (
        sum(metrics.get("train_s", 0.0) for metrics in side)
        for side in zip(*((compared.now, compared.recorded) for compared in report.steps), strict=True)
    )
    return f"{now:.1f} s of them the steps themselves (in the run: {recorded:.1f} s)"
