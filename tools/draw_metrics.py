"""Draws docs/metrics.md from the definition of a row of `metrics.jsonl`."""

import typing
from pathlib import Path

from msgspec import Meta

from areal_async.controller.metrics import StepRow

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

HEAD = """# Metrics

`metrics.jsonl` in the run folder has one line of JSON a training step. This page is drawn from the definition in
`areal_async/controller/metrics.py` by `tools/draw_metrics.py`.

Tokens are trained tokens (loss mask 1) unless it says otherwise; shares of time are shares of the wall time since the
step before was done (for the first step: since the run began, so it has the start-up in it).

| field | type | meaning |
|---|---|---|
"""


def page() -> str:
    lines = []
    for name, hint in typing.get_type_hints(StepRow, include_extras=True).items():
        kind, *metas = typing.get_args(hint)
        about = next(meta.description for meta in metas if isinstance(meta, Meta))
        shown = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
        lines.append(f"| `{name}` | {shown} | {about.replace('|', chr(92) + '|')} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
