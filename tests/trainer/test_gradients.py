"""No split, no ZeRO stage and no recomputation of activations changes a gradient, on real DeepSpeed ranks.

For each number of ranks one torchrun takes all cases on engines of all stages. The right gradients come from the same
`Trainer` with an engine that has nothing of DeepSpeed in it, one rank, one micro-batch; test_step.py compares those
with the formulas, sample by sample.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .gradients import BATCH, Models, Plain, equal_cases
from .processes import run_to_the_end, torchrun
from .world import CONFIGS, save_tiny_model

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
GRADIENT_TOLERANCE = 1e-5  # of the largest entry
HALF_TOLERANCE = 0.05  # of the norm, in bfloat16
STAGES_TOLERANCE = 1e-5  # of the norm: what is added up over micro-batches and ranks is float32 in every stage
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


def run_ranks(models: Models, ranks: int, entries: list[dict[str, Any]], out: Path) -> list[Found]:
    """entries: spec (of the engine), cases."""
    plan = []
    for number, entry in enumerate(entries):
        (out / str(number)).mkdir()
        spec = entry["spec"] | {"reference_path": str(models.reference)}
        plan.append({**entry, "spec": spec, "model": str(models.policy), "out": str(out / str(number))})
    (out / "plan.json").write_text(json.dumps(plan))
    run_to_the_end(torchrun(ranks, "tests.trainer.gradient_ranks", str(out / "plan.json")))
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


@dataclass
class Ran:
    """What the ranks found, each entry with its engine's options: all cases in float32; a few with activations computed
    again; a few in bfloat16; two steps that move the weights. right: gradient and metrics of each case."""

    ranks: int
    equal: list[tuple[dict[str, Any], Found]]
    again: list[tuple[dict[str, Any], Found]]
    half: list[tuple[dict[str, Any], Found]]
    moving: list[tuple[dict[str, Any], Found]]
    right: dict[str, tuple[np.ndarray, dict[str, float]]]


CASES = equal_cases()
FEW = dict(list(CASES.items())[:5])  # the skipped ones, and three after them
WRONG = {f"{broken} broken": {"spec": {}, "batch": BATCH, "broken": broken} for broken in ("rank average", "divisor")}


@pytest.fixture(scope="module", params=[1, 2])
def ran(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    ranks = request.param
    cases = CASES | (WRONG if ranks > 1 else {})
    groups = [
        [{"spec": {"zero_stage": stage}, "cases": cases} for stage in STAGES],
        [{"spec": {"zero_stage": stage, "gradient_checkpointing": True}, "cases": FEW} for stage in (0, 3)],
        [{"spec": {"zero_stage": stage, "dtype": "bfloat16"}, "cases": FEW} for stage in STAGES],
        [{"spec": MOVING | {"zero_stage": stage}, "cases": steps_that_move()} for stage in STAGES],
    ]
    entries = [entry for group in groups for entry in group]
    seen = iter(run_ranks(models, ranks, entries, tmp_path_factory.mktemp("ranks")))
    plain = Plain(models, {})
    right = {name: plain.step(case) for name, case in CASES.items() if "broken" not in case}
    return Ran(ranks, *([(entry["spec"], next(seen)) for entry in group] for group in groups), right)


def test_no_split_and_no_stage_changes_a_gradient(ran: Ran) -> None:
    for spec, seen in ran.equal + ran.again:
        for name in seen.gradients.keys() & ran.right.keys():
            gradient, metrics = ran.right[name]
            assert largest(seen.gradients[name], gradient) < GRADIENT_TOLERANCE, (spec, name)
            for report in seen.reports:
                told = without_time(report[name]["metrics"])
                assert told == pytest.approx(without_time(metrics), rel=1e-4, abs=1e-6), (spec, name)
    for _, seen in ran.equal:
        assert seen.gradients.keys() >= ran.right.keys()


def test_p14_every_rank_makes_as_many_passes(ran: Ran) -> None:
    """Three micro-batches here and two there; one here and nothing there: an empty one takes part, nobody waits."""
    for spec, seen in ran.equal + ran.again + ran.half:
        for name in seen.reports[0]:
            assert len({report[name]["passes"] for report in seen.reports}) == 1, (spec, name)
    for _, seen in ran.equal:
        for samples, passes in ((5, 3), (3, 2), (1, 1)):
            name = f"decoupled_ppo, token_mean, {samples} samples"
            assert seen.reports[-1][name]["passes"] == (passes if ran.ranks == 2 else samples)


def test_what_is_not_finite_on_one_rank_is_skipped_on_all_and_leaves_nothing(ran: Ran) -> None:
    """The gradients of the cases after it, and the weights, show that nothing was left behind."""
    for spec, seen in ran.equal + ran.again + ran.half:
        for name in ("skip the loss", "skip the gradient"):
            why = f"minibatch 1 of 1: {name.removeprefix('skip ')} is not finite"
            assert {report[name]["skipped"] for report in seen.reports} == {why}, (spec, name)
        assert np.isfinite(seen.weights).all()


def test_in_bfloat16_all_stages_come_to_the_same(ran: Ran) -> None:
    for name in FEW.keys() & ran.right.keys():
        gradients = [seen.gradients[name] for _, seen in ran.half]
        for (spec, _), gradient in zip(ran.half, gradients, strict=True):
            assert norm(gradient, ran.right[name][0]) < HALF_TOLERANCE, (spec, name)
            assert norm(gradient, gradients[0]) < STAGES_TOLERANCE, (spec, name)


def test_two_clipped_steps_end_in_the_same_weights(ran: Ran, models: Models) -> None:
    plain = Plain(models, MOVING)
    before = weights_of(plain)
    for case in steps_that_move().values():
        plain.step(case)
    after = weights_of(plain)
    assert np.abs(after - before).max() > 1e-3
    for spec, seen in ran.moving:
        assert largest(seen.weights - before, after - before) < 1e-4, spec


def test_the_classic_mistakes_would_be_seen(ran: Ran, models: Models) -> None:
    plain = Plain(models, {})
    for name, case in WRONG.items() if ran.ranks > 1 else ():
        right, _ = plain.step({"spec": case["spec"], "batch": case["batch"]})
        for spec, seen in ran.equal:
            assert norm(seen.gradients[name], right) > MISTAKE, (spec, name)


def weights_of(plain: Plain) -> np.ndarray:
    return np.concatenate([p.detach().flatten().numpy().copy() for p in plain.engine.module.parameters()])


def without_time(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "train_s"}


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
