"""Makes docs/performance.md from what the benchmarks found: `python tools/bench/table.py build/bench/*.json`.

What always holds: every number on the page comes from these files; each budget has one line, met or by how much missed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import figures
import msgspec

PAGE: Final = figures.ROOT / "docs" / "performance.md"
BUSY: Final = 0.5  # runnable processes a core, before a benchmark began: above it the machine was not quiet

HEAD: Final = """# Performance

Made by `tools/bench/table.py` from the benchmarks' output; `make bench` runs them and makes it again. Ratios are within
one run. A budget that is missed says by how much, and what the figure is made of.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    found = [msgspec.json.decode(path.read_bytes(), type=figures.Findings) for path in options.files]
    options.out.write_text(page(found))


def page(found: Sequence[figures.Findings]) -> str:
    machines = sorted({f"{one.machine.cpu}, {one.machine.cores} cores, {one.machine.memory_gib:g} GiB, Python "
                       f"{one.machine.python}" for one in found})  # fmt: skip
    lines = [HEAD, f"Machine: {'; '.join(machines)}.", "", "## Budgets", ""]
    lines += ["| benchmark | budget | wanted | found | | what bounds it |", "|---|---|---:|---:|---|---|"]
    for one in found:
        for budget in one.budgets:
            verdict = budget.verdict() if not budget.missed_by else f"**{budget.verdict()}**"
            cells = (one.benchmark, budget.name, budget.wanted(), budget.found(), verdict, budget.bound_by)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for one in found:
        lines += ["", f"## {one.benchmark}", "", where(one)]
        for table in one.tables:
            lines += ["", f"{table.title}:", "", *rows(table)]
        lines += ["", *one.notes] if one.notes else []
    return "\n".join(lines) + "\n"


def where(one: figures.Findings) -> str:
    busy = one.machine.load / one.machine.cores
    load = "" if busy < BUSY else f" The machine was busy when it began: {one.machine.load:g} runnable processes."
    return f"`{one.command}`, {one.begun}, commit {one.commit}, {one.seconds:.0f} s.{load}"


def rows(table: figures.Table) -> list[str]:
    head = "| " + " | ".join(table.columns) + " |"
    rule = "|---|" + "---:|" * (len(table.columns) - 1)
    return [head, rule, *("| " + " | ".join(figures.shown(cell) for cell in row) + " |" for row in table.rows)]


if __name__ == "__main__":
    main()
