"""`areal-async simulate`: how fast a run would be, from models of its parts, in virtual time.

What always holds: nothing is started; exit code 0 where every row was simulated, 1 where the core ended one with an
error, 2 where the plan or the command line is wrong. What `--json` prints is the same for the same plan and seed.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from areal_async import output_file
from areal_async.cli_folder import log_folder
from areal_async.cli_output import ended_by_sigterm, page, printing
from areal_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from areal_async.simulate.engine import Progress
    from areal_async.simulate.fit import Fitted
    from areal_async.simulate.plan_file import Row
    from areal_async.simulate.sweep import Prepared, Result

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

PLOTS: Final = (".png", ".svg")
WIDEST: Final = 1000  # characters of a table

EXAMPLES: Final = """examples:
  areal-async simulate configs/plans/small.yaml
  areal-async simulate configs/plans/small.yaml rollout.max_staleness=8 cluster.gpus=64
  areal-async simulate configs/plans/small.yaml 'sweep.rollout.when_older=[wait,mask,train,drop]'
  areal-async simulate configs/plans/small.yaml --plot small.svg
  areal-async simulate plan.yaml from_run=runs/quickstart-TIME validate=runs/OTHER-TIME
  areal-async simulate configs/plans/small.yaml --json | python -m json.tool
"""


def add_simulate(commands: "Commands") -> None:
    about = "Predict how fast a run would be, and where it would wait: the run's own rules in virtual time."
    parser = commands.add_parser(
        "simulate",
        help=about,
        description=about + " docs/simulate.md says how to write a plan, and what isn't modelled.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", metavar="PLAN", help="plan file (YAML; docs/simulate.md)")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="options that differ from the file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, too, as FILE.png or FILE.svg")
    parser.add_argument("--seed", type=int, metavar="N", help="the same as seed=N")
    parser.set_defaults(do=run)


def run(arguments: argparse.Namespace) -> int:
    """`areal-async simulate`."""
    from areal_async.simulate.plan_file import load_rows
    from areal_async.simulate.sweep import baselines, compared, prepare, simulate_rows

    _check_plot(arguments.plot)
    overrides = list(arguments.overrides) + ([] if arguments.seed is None else [f"seed={arguments.seed}"])
    rows = load_rows(arguments.plan, overrides)
    if rows[0].plan.validate is not None:
        return _validate(rows, arguments)
    baselines(rows)  # what is wrong there is told before the hours, not after them
    prepared = prepare(rows, _fit)
    assumed = list(dict.fromkeys(text for _, made in prepared for text in made.assumed))
    title = rows[0].plan.title or Path(arguments.plan).name
    with _progress(prepared, arguments.json) as progress:
        results = compared(rows, list(simulate_rows(prepared, progress)))
    with printing():
        if arguments.json:
            told = {"title": title, "rows": results, "assumed": assumed}
            print(msgspec.json.encode(told).decode())
        else:
            _show(results, title)
            for text in assumed:
                print(f"assumed: {text}")
    if arguments.plot is not None:  # last, so that a full disk doesn't cost the figures
        from areal_async.simulate.plot import draw

        with ended_by_sigterm():
            draw(results, title, arguments.plot)
    for number, result in enumerate(results, 1):
        if result.failed:
            values = ", ".join(f"{key}={value}" for key, value in result.values.items())
            print(f"areal-async: row {number} ({values or arguments.plan}): {result.failed}", file=sys.stderr)
    return 1 if any(result.failed for result in results) else 0


def _validate(rows: "Sequence[Row]", arguments: argparse.Namespace) -> int:
    """`validate: RUN`: this run, predicted from `from_run` or from itself, beside what happened in it."""
    from areal_async.simulate.sweep import prepare
    from areal_async.simulate.validate import table, validate

    row = rows[0]
    run, where = str(row.plan.validate), row.sources.where("validate")
    if len(rows) > 1:
        raise ConfigError(f"{where}: validate: compares one plan with a run, and sweep makes {len(rows)}; leave it out")
    if arguments.plot is not None:
        raise ConfigError("command line: --plot: validate gives a table alone; leave it out")
    folder = log_folder("validate", Path(run))
    plan = msgspec.structs.replace(row.plan, from_run=row.plan.from_run or run)
    made = prepare([replace(row, plan=plan)], _fit)[0].scenario
    compared = validate(folder, made.cluster, plan.seed)
    title = plan.title or Path(run).name
    assumed = (*made.assumed, *compared.assumed)
    with printing():
        if arguments.json:
            lines = [{**line._asdict(), "error": line.error} for line in compared.lines]
            told = {"title": title, "validate": lines, "disturbed": compared.disturbed, "assumed": assumed}
            print(msgspec.json.encode(told).decode())
            return 0
        _wide(table(compared, title))
        for text in compared.disturbed:
            print(f"not simulated: {text}")
        for text in assumed:
            print(f"assumed: {text}")
    return 0


def _fit(run: Path) -> "Fitted":
    from areal_async.simulate.fit import fit

    return fit(log_folder("from_run", run))


def _check_plot(file: Path | None) -> None:
    if file is None:
        return
    if file.suffix.lower() not in PLOTS:
        raise ConfigError(f"command line: --plot: {file} must end in {' or '.join(PLOTS)}")
    output_file.check("--plot", file)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "command line: --plot: needs matplotlib, which isn't installed; pip install 'areal-async[plots]'"
        ) from error


def _show(results: "Sequence[Result]", title: str) -> None:
    from areal_async.simulate import table

    figures = results[0].figures
    if len(results) > 1:
        _wide(table.rows(results, title))
    elif figures is not None:
        page().print(table.page(results[0], figures, title))


def _wide(table: "Table") -> None:
    """As wide as it is: folded, it tells nothing."""
    from rich.console import Console

    console = page()
    console.width = max(console.width, Console(width=WIDEST).measure(table).maximum)
    console.print(table)


@contextmanager
def _progress(prepared: "Sequence[Prepared]", quiet: bool) -> "Iterator[Callable[[int], Progress] | None]":
    """On a terminal: steps of all rows together, and how much virtual time has passed in the present one."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
               progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn())  # fmt: skip
    before = [0]
    for _, made in prepared:
        before.append(before[-1] + made.rules.steps)
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("steps", total=before[-1])

        def of_row(number: int) -> "Progress":
            row = f"row {number + 1} of {len(prepared)}" if len(prepared) > 1 else "steps"

            def tell(steps: int, seconds: float) -> None:
                bar.update(task, completed=before[number] + steps, description=f"{row}, {seconds / 3600:.1f} h")

            return tell

        yield of_row
