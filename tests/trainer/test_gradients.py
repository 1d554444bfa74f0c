"""No split, no ZeRO stage and no recomputation of activations changes a gradient, on real DeepSpeed ranks.

For each number of ranks one torchrun takes all cases on engines of all stages. The right gradients come from the same
`Trainer` with an engine that has nothing of DeepSpeed in it, one rank, one micro-batch; test_step.py compares those
with the formulas, sample by sample.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .gradients import BATCH, Models, Plain, equal_cases
from .processes import DEADLINE_S, process
from .world import CONFIGS, save_tiny_model

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
GRADIENT_TOLERANCE = 1e-5  # of the largest entry
HALF_TOLERANCE = 0.05  # of the norm, in bfloat16
MISTAKE = 0.03  # of the norm: a wrong divisor is off by at least that


@dataclass
class Found:
    """reports: of each rank, by case. gradients: by case. weights: at the end."""

    reports: list[dict[str, Any]]
    gradients: dict[str, np.ndarray]
    weights: np.ndarray


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    config = CONFIGS["qwen2, tied"]
    return Models(save_tiny_model(folder / "policy", config), save_tiny_model(folder / "reference", config, seed=1))


async def run_ranks(models: Models, ranks: int, entries: list[dict[str, Any]], out: Path) -> list[Found]:
    """entries: spec (of the engine), cases."""
    plan = []
    for number, entry in enumerate(entries):
        (out / str(number)).mkdir()
        spec = entry["spec"] | {"reference_path": str(models.reference)}
        plan.append({**entry, "spec": spec, "model": str(models.policy), "out": str(out / str(number))})
    (out / "plan.json").write_text(json.dumps(plan))
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    async with process([*argv, "-m", "tests.trainer.gradient_ranks", str(out / "plan.json")], {}) as child:
        _, stderr = await asyncio.wait_for(child.communicate(), DEADLINE_S)
    assert child.returncode == 0, stderr.decode()[-4000:]
    return [found(Path(str(entry["out"])), ranks, entry["cases"]) for entry in plan]


def found(folder: Path, ranks: int, cases: dict[str, Any]) -> Found:
    paths = {name: folder / f"{number}.npy" for number, name in enumerate(cases)}
    return Found(
        [json.loads((folder / f"reports-{rank}.json").read_text()) for rank in range(ranks)],
        {name: np.load(path) for name, path in paths.items() if path.exists()},
        np.load(folder / "weights.npy"),
    )


def largest(gradient: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(gradient - right).max() / np.abs(right).max())


def norm(gradient: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(gradient - right) / np.linalg.norm(right))


def steps_that_move() -> dict[str, dict[str, Any]]:
    """Two steps of one run: clipped, warmed up, on a cosine."""
    return {f"step {step}": {"spec": {}, "batch": BATCH | {"step": step}} for step in (0, 1)}


# Adam divides by √v + ε: with ε far above the gradients' rounding, a rounding error stays one.
MOVING = {
    "lr": 1e-2, "adam_eps": 1e-2, "max_grad_norm": 0.05, "warmup_steps": 1, "lr_schedule": "cosine", "updates": 4,
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
async def test_no_split_and_no_stage_changes_a_gradient(ranks: int, models: Models, tmp_path: Path) -> None:
    cases = equal_cases()
    wrong = {
        f"{broken} broken": {"spec": {}, "batch": BATCH, "broken": broken}
        for broken in ("rank average", "divisor")
        if ranks > 1
    }
    entries = [{"spec": {"zero_stage": stage}, "cases": cases | wrong} for stage in STAGES]
    few = {name: cases[name] for name in list(cases)[2:5]}
    again = [{"spec": {"zero_stage": stage, "gradient_checkpointing": True}, "cases": few} for stage in (0, 3)]
    half = [{"spec": {"zero_stage": stage, "dtype": "bfloat16"}, "cases": few} for stage in STAGES]
    moving = [{"spec": MOVING | {"zero_stage": stage}, "cases": steps_that_move()} for stage in STAGES]
    all_found = await run_ranks(models, ranks, entries + again + half + moving, tmp_path)
    plain = Plain(models, {})
    right = {name: plain.step(case) for name, case in cases.items() if "broken" not in case}
    for entry, seen in zip(entries + again, all_found, strict=False):
        check_equal(entry, seen, right)
        for name in wrong if "gradient_checkpointing" not in entry["spec"] else ():
            assert norm(seen.gradients[name], plain.step(wrong[name])[0]) > MISTAKE, (entry["spec"], name)
    for entry, seen in zip(half, all_found[len(entries + again) :], strict=False):
        for name in few:
            assert norm(seen.gradients[name], right[name][0]) < HALF_TOLERANCE, (entry["spec"], name)
    check_weights(models, all_found[-len(moving) :])


def check_equal(entry: dict[str, Any], seen: Found, right: dict[str, tuple[np.ndarray, dict[str, float]]]) -> None:
    for name in entry["cases"]:
        where = (entry["spec"], name)
        reports = [report[name] for report in seen.reports]
        assert len({report["passes"] for report in reports}) == 1, where  # P14: nobody skips a pass
        if name.startswith("skip"):
            what = name.removeprefix("skip ")
            assert {r["skipped"] for r in reports} == {f"minibatch 1 of 1: {what} is not finite"}, where
        elif name in right:
            gradient, metrics = right[name]
            assert largest(seen.gradients[name], gradient) < GRADIENT_TOLERANCE, where
            for report in reports:
                assert without_time(report["metrics"]) == pytest.approx(without_time(metrics), rel=1e-4, abs=1e-6)
    if "skip the loss" in entry["cases"]:
        passes = {name: seen.reports[0][name]["passes"] for name in entry["cases"]}
        assert passes["decoupled_ppo, token_mean, 5 samples"] == (3 if len(seen.reports) == 2 else 5)


def without_time(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "train_s"}


def check_weights(models: Models, moved: list[Found]) -> None:
    """Two clipped steps of AdamW end in the same weights."""
    plain = Plain(models, MOVING)
    before = np.concatenate([p.detach().flatten().numpy().copy() for p in plain.engine.module.parameters()])
    for case in steps_that_move().values():
        plain.step(case)
    after = np.concatenate([p.detach().flatten().numpy() for p in plain.engine.module.parameters()])
    assert np.abs(after - before).max() > 1e-3
    for seen in moved:
        assert largest(seen.weights - before, after - before) < 1e-4


def test_the_cases_have_tokens_in_every_branch(models: Models) -> None:
    plain = Plain(models, {})
    for name, case in equal_cases().items():
        if "broken" in case:
            continue
        _, metrics = plain.step(case)
        assert metrics["grad_norm"] > 0, name
        if "a micro-batch" in name:
            assert metrics["clip_share"] > 0, name
            assert metrics["kl_ref"] > 0, name
            assert (metrics["capped_share"] > 0) == (not name.startswith("ppo")), name
        assert (metrics["tokens_masked"] > 0) == ("older" in name), name
