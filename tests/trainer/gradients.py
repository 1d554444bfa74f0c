"""One training step of one minibatch, on any engine, so that the gradient which its optimiser is given can be compared.

Shared by gradient_ranks.py (real DeepSpeed ranks) and by the test, which does the same with nothing of DeepSpeed.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from areal_async.engines.deepspeed.model import load_model
from areal_async.engines.deepspeed.reference import Reference, load_reference
from areal_async.engines.deepspeed.step import Trainer
from areal_async.messages import StepDone, Train

from .world import PlainEngine, make_batch, spec_for

CPU = torch.device("cpu")
UNCLIPPED = {"max_grad_norm": 1e9, "lr": 0.0, "temperature": 0.8}


BATCH = {"samples": 12, "minibatches": 1, "seed": 5, "per_micro": 5}
# Set beside loss and aggregation, so that every branch of the objective has tokens in it.
CLIPS = {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 2.0}
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
OBJECTIVES: dict[str, dict[str, Any]] = {
    **{f"decoupled_ppo, {a}": {"weight_cap": 2.0, "aggregation": a} for a in AGGREGATIONS},
    **{f"ppo, {a}": {"loss": "ppo", "aggregation": a} for a in AGGREGATIONS},
    "gspo, sequence_mean": {
        "loss": "gspo",
        "weight_cap": 0.3,
        "over_cap": "clamp",
        "aggregation": "sequence_mean",
        "dual_clip": None,
    },
}
OLD = {"step": 2, "versions": 3, "mask_below": 1}


@dataclass
class Models:
    policy: Path
    reference: Path


def equal_cases() -> dict[str, dict[str, Any]]:
    """Those whose gradient must be right. The first two must be skipped, and leave nothing behind for the third."""
    cases: dict[str, dict[str, Any]] = {
        "skip the loss": {"spec": {}, "batch": BATCH, "broken": "loss"},
        "skip the gradient": {"spec": {}, "batch": BATCH, "broken": "gradient"},
    }
    for (name, objective), per_micro in itertools.product(OBJECTIVES.items(), (1, 5, 100)):
        spec = CLIPS | objective | {"kl_coef": 0.3}
        cases[f"{name}, {per_micro} a micro-batch"] = {"spec": spec, "batch": BATCH | {"per_micro": per_micro}}
    for name, objective in OBJECTIVES.items():
        cases[f"{name}, older tokens"] = {"spec": objective | {"kl_coef": 0.3}, "batch": BATCH | OLD}
    for estimator, where, loss in (("k1", "loss", "ppo"), ("k2", "loss", "decoupled_ppo"), ("k3", "reward", "ppo")):
        spec = {"kl_coef": 0.3, "kl_estimator": estimator, "kl_in": where, "loss": loss}
        cases[f"{loss}, {estimator} in the {where}"] = {"spec": spec, "batch": BATCH}
    for name in ("decoupled_ppo, token_mean", "gspo, sequence_mean"):
        spec = OBJECTIVES[name] | {"kl_coef": 0.3, "kl_in": "reward"}
        cases[f"{name}, k3 in the reward"] = {"spec": spec, "batch": BATCH}
        for samples in (5, 3, 1):  # on two ranks: three passes against two; one of the second's is empty; both are
            cases[f"{name}, {samples} samples"] = {
                "spec": OBJECTIVES[name],
                "batch": BATCH | {"samples": samples, "per_micro": 1},
            }
    return cases


def moved_prox(trainer: Trainer) -> Callable[[Any], Any]:
    """A π_prox away from π_θ, though the weights don't move: so ratios aren't 1, and some are clipped."""

    @torch.no_grad()
    def proximal(parts: Any) -> Any:
        return [[trainer._forward(p)[0] + 0.3 * torch.sin(100 * p.behav) for p in minibatch] for minibatch in parts]

    return proximal


def take_step(engine: Any, reference: Reference, model: Path, case: dict[str, Any], rank: int, world: int) -> StepDone:
    """case: spec (changes), batch (how `make_batch` makes it), broken (see `spoil`)."""
    spec = spec_for(model, **(UNCLIPPED | case["spec"]))
    trainer = Trainer(engine, spec, rank, world, reference if spec.kl_coef else None)
    if spec.loss != "ppo" or spec.kl_in == "reward":
        trainer._proximal = moved_prox(trainer)  # type: ignore[method-assign]
    trainer.version = trainer.updates = case["batch"].get("step", 0)
    train, arrays = make_batch(**(case["batch"] | {"ranks": world, "aggregation": spec.aggregation}))
    spoil(case.get("broken", ""), trainer, arrays, rank, world)
    if case.get("broken") == "divisor":
        train = own_divisor(train, arrays[rank])
    return trainer.train(train, arrays[rank])


def spoil(broken: str, trainer: Trainer, arrays: list[np.ndarray], rank: int, world: int) -> None:
    if broken == "rank average":
        trainer._rank_factor = lambda: 1.0  # type: ignore[method-assign]
    if broken == "loss":  # of the last rank only
        arrays[-1][3][np.flatnonzero(arrays[-1][2])[0]] = -1000.0
    if broken == "gradient" and rank == world - 1:
        trainer._rank_factor = lambda: float("inf")  # type: ignore[method-assign]


def own_divisor(train: Train, arrays: list[np.ndarray]) -> Train:
    """The classic mistake: each rank divides by the loss tokens that it holds itself, then ranks are averaged."""
    [minibatch] = train.minibatches
    own = msgspec.structs.replace(minibatch, divisor=float(arrays[2].sum()) * len(minibatch.ranks))
    return msgspec.structs.replace(train, minibatches=(own,))


class Plain:
    """An engine without DeepSpeed that takes the same steps: one rank, one micro-batch."""

    def __init__(self, models: Models, changes: dict[str, Any]) -> None:
        self._models, self._changes = models, changes
        spec = spec_for(models.policy, **(UNCLIPPED | changes), reference_path=str(models.reference))
        model = load_model(str(models.policy), "float32", CPU)
        self.engine = PlainEngine(model, spec)
        self._reference: Reference = load_reference(spec, model, CPU)

    def step(self, case: dict[str, Any]) -> tuple[np.ndarray, dict[str, float]]:
        whole = {"spec": self._changes | case["spec"], "batch": case["batch"] | {"per_micro": 100}}
        done = take_step(self.engine, self._reference, self._models.policy, whole, 0, 1)
        assert not done.skipped
        return self.engine.gradients[-1].numpy(), done.metrics
