"""Whole runs on real vLLM and DeepSpeed with the rewards `math` and `code`: checks go out, verdicts come back and are
trained."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_async.config import Config
from areal_async.config_file import load_config
from areal_async.controller import Controller
from areal_async.controller.metrics import StepRow

from .conftest import ROOT

pytestmark = pytest.mark.slow

CODE = ROOT / "configs" / "smollm2-code.yaml"


async def trained(config: Config) -> tuple[tuple[StepRow, ...], Counter[str]]:
    """The steps of a run, and its verdicts. Always: each finished answer has a verdict that gives a number."""
    async with Controller(config) as run:
        result = await run.run()
    verdicts: Counter[str] = Counter()
    for row in result.rows:
        verdicts.update(row.verdicts)
    steps = [
        (row.step, round(row.reward_mean, 3), round(row.grad_norm, 3), round(row.step_s, 1)) for row in result.rows
    ]
    print(f"{config.reward.function}: {dict(verdicts)}; step, reward, gradient, seconds: {steps}")
    assert len(steps) == config.train.steps
    assert not verdicts.keys() - {"right", "wrong", "no_answer", "timeout", "crash"}, verdicts
    assert sum(verdicts.values()) >= sum(row.samples for row in result.rows)
    # Rewards differ within groups: with equal ones every advantage of GRPO is nothing, and so is the gradient
    assert all(row.grad_norm > 0 for row in result.rows)
    return result.rows, verdicts


async def test_math(quickstart: Callable[..., Config]) -> None:
    """The last number of `3=43,2=49,1=55>55` is the answer."""
    rows, verdicts = await trained(
        quickstart("reward.function=math", "reward.exact_after=null", "reward.math.last_number=true", "train.steps=3")
    )
    assert verdicts["right"] >= 20
    assert verdicts["wrong"] >= 10
    assert all(0.1 < row.reward_mean < 0.99 for row in rows)


async def test_code(smollm2: Path, tmp_path: Path) -> None:
    """A small pretrained model writes Python programs, each run in its jail; groups of equal rewards are left out."""
    _, verdicts = await trained(
        load_config(
            CODE,
            [
                f"model.path={smollm2}/model", f"data.train={smollm2}/code-train.jsonl",
                f"data.eval={smollm2}/code-eval.jsonl", f"runs_dir={tmp_path}/runs", "train.steps=2",
                "train.batch_groups=2", "rollout.group_size=4", "rollout.drop_equal=true",
            ],
        )
    )  # fmt: skip
    assert verdicts["right"] >= 4  # one in each of the four groups
    assert verdicts["wrong"] >= 2
