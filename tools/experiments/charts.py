"""What the experiments share: folders, a plain look for charts, and Markdown tables on docs/experiments.

What always holds: a page is written from the numbers of runs (`*.json` beside the charts), never by hand.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

ROOT: Final = Path(__file__).resolve().parents[2]
OUTPUT: Final = ROOT / "docs" / "experiments"
sys.path.insert(0, str(ROOT / "tools" / "bench"))  # the same drawn lengths, servers and figures as the benchmarks

matplotlib.use("Agg")

import figures  # noqa: E402
from matplotlib import pyplot  # noqa: E402

COLOURS: Final = ("#1f6fb2", "#d1603d", "#3f8f5b", "#8458a6", "#8a8a8a")
DPI: Final = 110


def new(columns: int, title: str) -> tuple[Any, Any]:
    """(figure, its axes, always a list)."""
    figure, axes = pyplot.subplots(1, columns, figsize=(5.2 * columns, 3.6), layout="constrained", squeeze=False)
    figure.suptitle(title, fontsize=10)
    for each in axes[0]:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def save(figure: Any, name: str) -> None:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUTPUT / name, dpi=DPI)
    pyplot.close(figure)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[figures.Cell]]) -> str:
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *([figures.shown(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(name: str, text: str) -> None:
    """A part of docs/experiments.md; `page.py` puts the parts together."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / name).write_text(text)
