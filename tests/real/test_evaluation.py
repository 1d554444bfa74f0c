"""Evaluation on real vLLM and DeepSpeed: it tells what `areal-async eval` tells, and rollouts never stop for it."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from areal_async.config import Config
from areal_async.controller import Controller
from areal_async.controller.evaluate import evaluate
from areal_async.controller.evaluating import Evaluation
from areal_async.log.reader import read_records
from areal_async.messages import Evaluate, EvaluationDone, Event, SampleDone

pytestmark = pytest.mark.slow

Quickstart = Callable[..., Config]

OPTIONS = (
    "train.steps=24", "train.batch_groups=16", "rollout.group_size=8", "rollout.max_concurrent=128",
    "eval.every_steps=8", "eval.limit=64", "eval.temperature=0",
)  # fmt: skip


async def test_evaluation_during_a_run(quickstart: Quickstart) -> None:
    """Every token of one version (or the evaluation fails); greedy, so the saved model scores the same with a fresh
    server, but for a near tie here and there that another batch size decides otherwise."""
    config = quickstart(*OPTIONS)
    async with Controller(config) as run:
        result = await run.run()
    assert result.model is not None
    last = result.evaluations[-1]
    assert (last.version, last.n, last.unscored) == (24, 64, 0)
    assert len(result.evaluations) >= 2
    assert sum(row.eval_version is not None for row in result.rows) >= 1
    fresh = await evaluate(config, result.model, progress=lambda done, of: None)
    print(f"\nlast evaluation {last.score:.4f} of {last.n}, areal-async eval of the saved model {fresh.score:.4f}")
    assert abs(fresh.score - last.score) <= 1 / 64
    what_it_cost(result.folder, result.evaluations[:-1])


def what_it_cost(folder: Path, evaluations: tuple[Evaluation, ...]) -> None:
    """Rollout tokens that came while evaluations ran against those that would have come at the rate of the time
    between: at most as many are missing as the evaluations took. A rollout's tokens count when it is finished. The last
    evaluation has no rollouts beside it."""
    told = [record.message for record in read_records(folder / "log")]
    begins = [at for at, message in enumerate(told) if isinstance(message, Evaluate)][:-1]
    spans = []
    for begin in begins:
        before = next(message for message in reversed(told[:begin]) if isinstance(message, Event))
        done = next(message for message in told[begin:] if isinstance(message, EvaluationDone))
        spans.append((before.at, done.at))
    answers = [(message.at, message.length) for message in told if isinstance(message, SampleDone)]
    during, longest = measured(answers, spans)
    outside, longest_outside = measured(answers, between(answers[0][0], spans, answers[-1][0]))
    seconds = sum(end - begin for begin, end in spans)
    took = sum(one.tokens for one in evaluations)
    missing = (outside - during) * seconds
    print(
        f"{len(spans)} evaluations, {seconds:.1f} s: {during:,.0f} rollout tok/s + {took / seconds:,.0f} evaluation "
        f"tok/s, longest time without a finished rollout {longest:.2f} s\n"
        f"between: {outside:,.0f} rollout tok/s, longest time without a finished rollout {longest_outside:.2f} s\n"
        f"rollout tokens missing: {missing:,.0f}; tokens of evaluations: {took:,}"
    )
    assert all(any(begin < at < end for at, _ in answers) for begin, end in spans), "rollouts stopped for an evaluation"
    assert missing <= took


def between(first: float, spans: list[tuple[float, float]], last: float) -> list[tuple[float, float]]:
    edges = [first, *(edge for span in spans for edge in span), last]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin]


def measured(answers: list[tuple[float, int]], spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Tokens a second, and the longest gap, over some spans of time."""
    tokens = sum(length for begin, end in spans for at, length in answers if begin <= at < end)
    gaps = [
        later - earlier
        for begin, end in spans
        for earlier, later in pairwise([begin, *(at for at, _ in answers if begin < at < end), end])
    ]
    return tokens / sum(end - begin for begin, end in spans), max(gaps)
