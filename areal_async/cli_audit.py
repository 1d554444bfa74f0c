"""`areal-async audit`: prove from a run's log alone that each prompt and sample is accounted for.

What always holds: nothing is started and nothing is changed; exit code 0 where everything holds (a torn end is said, a
run may be killed), 1 where something doesn't, or the log is damaged, 2 where there is no log.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from areal_async.cli_folder import log_folder
from areal_async.cli_output import page, printing

if TYPE_CHECKING:
    from rich.console import Console

    from areal_async.audit.report import Report

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

SHOWN: Final = 20  # findings, and steps of the table, that are printed; --json has more
BAR: Final = 40  # characters of the longest line of the histogram

EXAMPLES: Final = """examples:
  areal-async audit runs/quickstart-20260101-120000
  areal-async audit runs/quickstart-20260101-120000 --payloads
  areal-async audit runs/quickstart-20260101-120000 --json | python -m json.tool
"""


def add_audit(commands: "Commands") -> None:
    about = "Prove from a run's log that every prompt and sample is accounted for, and none is older than promised."
    parser = commands.add_parser(
        "audit",
        help=about,
        description=about + " docs/audit.md says what is proven.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or the log folder in it")
    parser.add_argument("--payloads", action="store_true", help="read and check all arrays of all samples, too")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of tables")
    parser.set_defaults(do=run)


def run(arguments: argparse.Namespace) -> int:
    """`areal-async audit`."""
    from areal_async.audit.auditor import audit

    report = audit(log_folder("audit", arguments.run), payloads=arguments.payloads)
    with printing():
        if arguments.json:
            print(msgspec.json.encode(report).decode())
        else:
            show(report, page(soft_wrap=True), arguments.run)
    return 0 if report.proven else 1


def show(report: "Report", console: "Console", path: Path) -> None:
    """For people: one page, findings last."""
    from rich.markup import escape

    if report.records:
        _tables(report, console)
        _steps(report, console)
    for back in report.backs:
        who = "resumed" if back.resumed else "the trainer was lost"
        why = back.why.partition("\n")[0]
        line = f"back at {back.at:.1f} s ({who}): version {back.from_version} -> {back.to}, branch {back.branch}: {why}"
        console.print(escape(line))
    for text in (report.torn, report.corrupt):
        if text:
            console.print(escape(text))
    shown = report.findings[:SHOWN]
    for finding in shown:
        console.print(escape(str(finding)))
    count = sum(report.found.values())
    if count > len(shown):
        kinds = ", ".join(f"{name} {times}" for name, times in report.found.items())
        console.print(escape(f"{count} findings in all: {kinds}"))
    verdict = f"{count} finding{'s' * (count > 1)}" if count else "not read to its end"
    if report.proven:
        verdict = "everything holds" if report.records else "nothing was recorded"
    console.print(escape(f"{path}: {report.records} records, {report.seconds:.1f} s of the run: {verdict}"))


def _tables(report: "Report", console: "Console") -> None:
    from rich.table import Table

    prompts = report.prompts
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("groups", justify="right")
    table.add_column("samples", justify="right")
    for end, count in report.groups.items():
        table.add_row(end, str(count), str(report.samples[end]))
    console.print(table)
    rows = f"{prompts.rows} rows, each {_times(prompts.read_least, prompts.read_most)}" if prompts.rows else "none"
    ended = "" if prompts.ended is None else f"; the data ended at {prompts.ended}"
    console.print(
        f"prompts: {prompts.positions} positions asked for, {prompts.asked_again} of them again; read: {rows}{ended}"
    )
    attempts = ", ".join(f"{count} in {number}" for number, count in report.attempts.items())
    console.print(f"samples by attempts that were started: {attempts or 'none'}")
    if report.payloads:
        console.print(f"payloads: {report.payloads} references lead to their samples, {report.payload_bytes} bytes")


def _steps(report: "Report", console: "Console") -> None:
    rules = report.rules
    dead = sum(report.dead_steps.values())
    console.print(
        f"steps: versions {report.first_version} to {report.version} on branch {report.branch}, {len(report.steps)} in "
        f"the surviving history, {dead} done in vain; checkpoints made: {report.checkpoints_made}, kept: "
        f"{', '.join(map(str, report.checkpoints)) or 'none'}"
    )
    if not report.lags:
        return
    worst = max(report.steps, key=lambda step: (step.lag_max, step.lag_mean))
    count = sum(report.lags.values())
    mean = sum(lag * samples for lag, samples in report.lags.items()) / count
    console.print(
        f"lag of trained samples: mean {mean:.2f}, max {worst.lag_max} (step {worst.step}); bound "
        f"{rules['max_staleness']}, rollout.when_older {rules['when_older']}"
    )
    largest = max(report.lags.values())
    for lag, samples in report.lags.items():
        bar = "#" * max(1, round(BAR * samples / largest))
        console.print(f"  lag {lag:>3}  {samples:>9}  {bar}")


def _times(least: int, most: int) -> str:
    if most == 1:
        return "once"
    return f"{least} times" if least == most else f"{least} to {most} times"
