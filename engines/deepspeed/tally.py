"""What a rank sees in a step, added up over micro-batches and ranks into the metrics of `StepDone`.

What always holds: sums travel, never means, so that no split over micro-batches or ranks changes a metric; every rank
reports the same. Means are over the tokens that get a gradient; those that are too old for one are only counted.
"""

import time
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed
from torch import Tensor

from areal_async.engines.deepspeed import losses
from areal_async.engines.deepspeed.batch import MicroBatch
from areal_async.engines.deepspeed.prox import Kept

# What is summed over tokens, micro-batches and ranks, in the order of the tensor that travels.
SUMS: Final = (
    "tokens", "masked", "entropy", "clipped", "capped", "kl",
    "compared", "k3", "weight", "weight_squared", "mismatch_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """Of the tokens of a micro-batch, each [N]. trained: those that get a gradient. prox: None where nobody has it.
    kl: the estimate of the distance to the reference, 0 if there is none."""

    trained: Tensor
    entropy: Tensor
    prox: Tensor | None
    kl: Tensor
    token: losses.TokenLosses


@dataclass(slots=True)
class Tally:
    """sums: float64 [len(SUMS)]; losses: float64 [minibatches]; mismatch: float64 scalar. kept: log π_prox, where it is
    asked for."""

    sums: Tensor
    losses: Tensor
    mismatch: Tensor
    norms: list[float] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    kept: Kept | None = None
    began: float = field(default_factory=time.monotonic)


def new_tally(minibatches: int, device: torch.device) -> Tally:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    return Tally(zeros(len(SUMS)), zeros(minibatches), zeros())


@torch.no_grad()
def count(tally: Tally, part: MicroBatch, seen: Seen, step: int) -> None:
    """Add a micro-batch."""
    trained = seen.trained
    compared = trained if seen.prox is not None else torch.zeros_like(trained)
    prox = part.behav if seen.prox is None else seen.prox
    fresh = compared & (part.versions == step)
    tally.sums += torch.stack([
        trained.sum().double(),
        (part.mask & ~trained).sum().double(),
        torch.where(trained, seen.entropy, 0).sum().double(),
        (seen.token.clipped & trained).sum().double(),
        (seen.token.capped & trained).sum().double(),
        torch.where(trained, seen.kl, 0).sum().double(),
        compared.sum().double(),
        *losses.behaviour_sums(prox, part.behav, compared),
        fresh.sum().double(),
    ])  # fmt: skip
    tally.mismatch = torch.maximum(tally.mismatch, losses.largest_difference(prox, part.behav, fresh).double())


def report(tally: Tally, world: int, lr: float) -> dict[str, float]:
    """The metrics of the step, after the ranks have added up what they saw."""
    joined = torch.cat([tally.sums, tally.losses])
    if world > 1:
        torch.distributed.all_reduce(joined)
        torch.distributed.all_reduce(tally.mismatch, torch.distributed.ReduceOp.MAX)
    total = dict(zip(SUMS, joined.tolist(), strict=False))
    values = joined[len(SUMS) :]
    tokens, compared = max(1.0, total["tokens"]), max(1.0, total["compared"])
    finite = values[values.isfinite()].tolist()
    metrics = {
        "loss": sum(finite) / max(1, len(finite)),
        "grad_norm": sum(tally.norms) / max(1, len(tally.norms)),
        "entropy": total["entropy"] / tokens,
        "clip_share": total["clipped"] / tokens,
        "capped_share": total["capped"] / tokens,
        "kl_ref": total["kl"] / tokens,
        "mismatch_max": float(tally.mismatch),
        "mismatch_tokens": total["mismatch_tokens"],
        "behav_k3": total["k3"] / compared,
        "behav_ess": losses.effective_share(total["weight"], total["weight_squared"], compared),
        "lr": lr,
        "tokens_trained": total["tokens"],
        "tokens_masked": total["masked"],
        "train_s": time.monotonic() - tally.began,
    }
    # JSON has no NaN; where one was, `skipped` says so
    return {name: value if abs(value) < float("inf") else 0.0 for name, value in metrics.items()}
