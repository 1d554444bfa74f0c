"""How a benchmark says what it found: a table for people, the same numbers as JSON for `tools/bench/table.py`.

    options = figures.parser(__doc__).parse_args()
    report = figures.Report("core")
    report.table("Events per second", ("in flight", "events/s"), [(8192, 138_440.0)])
    report.budget("core, per finished sample", 15.4, at_most=50.0, unit="µs")
    report.finish(options.json)

What always holds: every number in the JSON was measured by the run that wrote it; a budget knows whether it was met.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

ROOT: Final = Path(__file__).resolve().parents[2]
GIB: Final = 1 << 30
Cell: TypeAlias = str | int | float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures were taken. load: runnable processes, mean of the minute before."""

    cpu: str
    cores: int
    memory_gib: float
    python: str
    load: float


class Table(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """One promise of the design. Exactly one of at_most and at_least is given. bound_by: what the figure is made of."""

    name: str
    measured: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    bound_by: str = ""

    @property
    def limit(self) -> float:
        limit = self.at_least if self.at_most is None else self.at_most
        assert limit is not None, f"the budget {self.name!r} has no limit"
        return limit

    @property
    def missed_by(self) -> float:
        """How far the figure is on the wrong side, as a share of the limit (of 1, where that is 0); 0 if it is met."""
        over = self.limit - self.measured if self.at_most is None else self.measured - self.limit
        return max(0.0, over) / (abs(self.limit) or 1.0)

    def wanted(self) -> str:
        return f"{'≥' if self.at_most is None else '≤'} {number(self.limit)}{self._unit()}"

    def found(self) -> str:
        return f"{number(self.measured)}{self._unit()}"

    def verdict(self) -> str:
        if not self.missed_by:
            return "met"
        if not self.unit:  # a count
            return f"missed by {number(abs(self.measured - self.limit))}"
        return f"missed by {self.missed_by:.0%}" if self.missed_by < 1 else f"missed: {self.times():.1f} × the limit"

    def times(self) -> float:
        return self.measured / self.limit if self.at_least is None else self.limit / self.measured

    def _unit(self) -> str:
        return f" {self.unit}" if self.unit and self.unit not in "×%" else self.unit


class Findings(msgspec.Struct, kw_only=True):
    """All that one run of one benchmark found."""

    benchmark: str
    command: str
    commit: str
    begun: str
    seconds: float
    machine: Machine
    budgets: list[Budget]
    tables: list[Table]
    notes: list[str]


class Report:
    """Collects findings, and prints each as it comes."""

    def __init__(self, benchmark: str) -> None:
        self._begun = time.monotonic()
        self.findings = Findings(
            benchmark=benchmark,
            command=command_line(),
            commit=commit(),
            begun=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            seconds=0.0,
            machine=machine(),
            budgets=[],
            tables=[],
            notes=[],
        )

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        table = Table(title=title, columns=tuple(columns), rows=[tuple(row) for row in rows])
        self.findings.tables.append(table)
        print(f"\n{title}")
        cells = [table.columns, *(tuple(shown(cell) for cell in row) for row in table.rows)]
        widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
        for row in cells:
            first, *others = (cell.ljust(width) if place == 0 else cell.rjust(width)
                              for place, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
            print("  ".join((first, *others)), flush=True)

    def budget(
        self,
        name: str,
        measured: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        unit: str = "",
        bound_by: str = "",
    ) -> None:
        budget = Budget(
            name=name, measured=measured, unit=unit, at_most=at_most, at_least=at_least, bound_by=bound_by
        )  # fmt: skip
        self.findings.budgets.append(budget)
        why = f" ({bound_by})" if bound_by and budget.missed_by else ""
        print(f"{budget.verdict():>14}: {name}: {budget.found()}, wanted {budget.wanted()}{why}", flush=True)

    def note(self, text: str) -> None:
        self.findings.notes.append(text)
        print(text, flush=True)

    def finish(self, path: Path | None) -> None:
        """Write the JSON file, if there is to be one."""
        self.findings.seconds = time.monotonic() - self._begun
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self.findings), indent=1))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Arguments that every benchmark takes."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path, metavar="FILE", help="also write the findings to this file")
    return found


def number(value: float) -> str:
    """A figure with three digits that count."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def shown(cell: Cell) -> str:
    return cell if isinstance(cell, str) else number(cell)


def machine() -> Machine:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory / GIB, 1),
        python=platform.python_version(),
        load=round(os.getloadavg()[0], 2),
    )


def command_line() -> str:
    script, *arguments = sys.argv
    path = Path(script).resolve()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else script
    left_out = {place for i, argument in enumerate(arguments) if argument == "--json" for place in (i, i + 1)}
    kept = [argument for place, argument in enumerate(arguments) if place not in left_out]
    return shlex.join(["python", name, *kept])


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"
