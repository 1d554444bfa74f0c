"""One training step of one minibatch, on any engine, so that the gradient which its optimiser is given can be compared.

Shared by gradient_ranks.py (real DeepSpeed ranks) and by the test, which does the same with nothing of DeepSpeed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from areal_async.engines.deepspeed.reference import Reference
from areal_async.engines.deepspeed.step import Trainer
from areal_async.messages import StepDone, Train

from .world import make_batch, spec_for

CPU = torch.device("cpu")
UNCLIPPED = {"max_grad_norm": 1e9, "lr": 0.0, "temperature": 0.8}


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
    trainer.version = trainer._updates = case["batch"].get("step", 0)
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
