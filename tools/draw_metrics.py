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
step before was done (for the first step: since the run began, so it has the start-up in it). The same numbers can be
watched with TensorBoard and Prometheus: docs/monitoring.md.

| field | type | meaning |
|---|---|---|
"""


TAIL = """
## Price of age

What `rollout.when_older` costs, whichever it is; `areal-async run` sums it up at the end.

- `trainer_wait_s` is what `wait` costs: the trainer was idle from the publishing of its weights to this step. It waits
  under the other policies too, when generation is slower than training.
- `tokens_older`: what `train` puts up with. `tokens_masked`: what `mask` has generated for nothing.
- `samples_stale`, `tokens_stale`: what `drop` has thrown away. A sample that had not begun yet has no tokens.
- `lost_by_length`: who pays. All samples that ended so far are put in order of length (response tokens), and cut in
  four: up to the first quartile of these lengths, the second, the third, and above it. Of each quarter, the lost
  samples / the samples that ended. A dropped sample is lost whole; a masked one by the share of its tokens that are
  masked; under `wait` and `train` nothing is lost. An unfinished answer that is dropped has the length that it had
  reached by then, so it may stand in a quarter below its own; one that had no token yet is left out. Where many answers
  have one length a quarter may be empty: then it is 0.

`mask` and `drop` lose long answers first, which teaches the model to be brief: that is why `wait` is the default.
"""


def page() -> str:
    lines = []
    for name, hint in typing.get_type_hints(StepRow, include_extras=True).items():
        kind, *metas = typing.get_args(hint)
        about = next(meta.description for meta in metas if isinstance(meta, Meta))
        shown = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
        shown = shown.replace(" | None", " or null")
        lines.append(f"| `{name}` | {shown} | {about.replace('|', chr(92) + '|')} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
