"""A training step: π_prox, then for each minibatch micro-batches forward and backward and one optimiser step.

What always holds:
- log π_prox is taken with the weights from before the step. The first minibatch's own forward is under these weights,
  so only the later ones need a pass of their own; with one minibatch there is none.
- All ranks make the same calls in the same order, whatever they hold and whatever goes wrong with the numbers: a loss
  that isn't finite on one rank makes the gradient not finite on all of them, and then nobody applies it.
- The gradient is that of Σ token losses / divisor over all ranks and micro-batches, however they are split: the loss is
  multiplied by the number of ranks because DeepSpeed averages over them.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed
from torch import Tensor

from areal_async.engines.deepspeed import losses
from areal_async.engines.deepspeed.batch import Array, MicroBatch, micro_batches
from areal_async.engines.deepspeed.engine import apply_update, learning_rate
from areal_async.engines.deepspeed.packed import packed_logits
from areal_async.errors import TrainerError
from areal_async.messages import StepDone, Train, TrainerSpec, Version

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# What is summed over tokens, micro-batches and ranks, in the order of the tensor that travels.
SUMS: Final = ("tokens", "entropy", "clipped", "k3", "weight", "weight_squared", "mismatch_tokens")


@dataclass(slots=True)
class _Tally:
    """What a rank saw in a step. sums: float64 [len(SUMS)]; losses: float64 [minibatches]; mismatch: float64 scalar."""

    sums: Tensor
    losses: Tensor
    mismatch: Tensor
    norms: list[float] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class Trainer:
    """One rank's share of the training. version: how many steps its weights have seen."""

    def __init__(self, engine: "DeepSpeedEngine", spec: TrainerSpec, rank: int, world: int) -> None:
        self.engine = engine
        self.version: Version = 0
        self._spec = spec
        self._rank = rank
        self._world = world
        self._device: torch.device = engine.module.device
        self._updates = 0
        self._objective = losses.Objective(clip_low=spec.clip_low, clip_high=spec.clip_high)

    def train(self, train: Train, arrays: list[Array]) -> StepDone:
        """Train version `train.step` into the next. arrays: those of `messages.Train`, this rank's.

        Raises TrainerError, before anything was changed, if the step doesn't follow or the batch can't be right.
        """
        began = time.monotonic()
        if train.step != self.version:
            raise TrainerError(f"rank {self._rank} holds version {self.version} and was asked for step {train.step}")
        parts = micro_batches(train, self._rank, arrays, self._device)
        tally = self._tally(len(parts))
        prox = self._proximal(parts)
        for number, minibatch in enumerate(train.minibatches):
            finite = self.accumulate(train.step, number, parts[number], prox[number], minibatch.divisor, tally)
            norm = apply_update(self.engine, self._spec, learning_rate(self._spec, self._updates))
            if norm is None:
                what = "the gradient" if finite else "the loss"
                tally.skipped.append(f"minibatch {number + 1} of {len(parts)}: {what} is not finite")
            else:
                tally.norms.append(norm)
                self._updates += 1
        self.version += 1
        return self._report(train, tally, began)

    def accumulate(
        self, step: int, number: int, parts: list[MicroBatch], prox: list[Tensor] | None, divisor: float, tally: _Tally
    ) -> bool:
        """Forward and backward of all micro-batches of minibatch `number`; the gradients are averaged over the ranks
        at the last. prox: None if the weights are those of the step's start. False: some rank's loss is not finite."""
        finite = True
        for index, part in enumerate(parts):
            logp, entropy = self._forward(part, self.engine)
            anchor = logp.detach() if prox is None else prox[index]
            token = losses.decoupled_ppo(logp, anchor, part.behav, part.advantage, part.mask, self._objective)
            weights = losses.token_weights(self._objective.aggregation, part.mask, part.sequence)
            loss = losses.local_loss(token.loss, weights, divisor)
            tally.losses[number] += loss.detach()
            _count(tally, part, anchor, entropy, token.clipped, step)
            last = index == len(parts) - 1
            if last and not (finite := self._all_finite(tally.losses[number])):
                loss = loss * torch.nan  # so that no rank's gradient is finite, whoever's loss it was
            self.engine.set_gradient_accumulation_boundary(last)
            self.engine.backward(loss * self._rank_factor())
        return finite

    def _rank_factor(self) -> float:
        """DeepSpeed divides gradients by the number of ranks; the divisor already belongs to all of them."""
        return float(self._world)

    @torch.no_grad()
    def _proximal(self, parts: list[list[MicroBatch]]) -> list[list[Tensor] | None]:
        later = [[self._forward(part, self.engine.module)[0] for part in minibatch] for minibatch in parts[1:]]
        return [None, *later]

    def _forward(self, part: MicroBatch, model: torch.nn.Module) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the loss tokens and entropies, float32 [N] each, at the sampling temperature."""
        logits = packed_logits(model, part.token_ids, part.packing, part.rows)
        return losses.log_probs(logits, part.targets, self._spec.temperature)

    def _all_finite(self, loss: Tensor) -> bool:
        flag = loss.isfinite().to(torch.float32)
        if self._world > 1:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
        return bool(flag)

    def _tally(self, minibatches: int) -> _Tally:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=self._device)

        return _Tally(zeros(len(SUMS)), zeros(minibatches), torch.zeros((), dtype=torch.float64, device=self._device))

    def _report(self, train: Train, tally: _Tally, began: float) -> StepDone:
        joined = torch.cat([tally.sums, tally.losses])
        if self._world > 1:
            torch.distributed.all_reduce(joined)
            torch.distributed.all_reduce(tally.mismatch, torch.distributed.ReduceOp.MAX)
        total = dict(zip(SUMS, joined.tolist(), strict=False))
        values = joined[len(SUMS) :]
        tokens = max(1.0, total["tokens"])
        finite = values[values.isfinite()].tolist()
        metrics = {
            "loss": sum(finite) / max(1, len(finite)),
            "grad_norm": sum(tally.norms) / max(1, len(tally.norms)),
            "entropy": total["entropy"] / tokens,
            "clip_share": total["clipped"] / tokens,
            "mismatch_max": float(tally.mismatch),
            "mismatch_tokens": total["mismatch_tokens"],
            "behav_k3": total["k3"] / tokens,
            "behav_ess": losses.effective_share(total["weight"], total["weight_squared"], tokens),
            "lr": learning_rate(self._spec, max(0, self._updates - 1)),
            "tokens_trained": total["tokens"],
            "train_s": time.monotonic() - began,
        }
        # JSON has no NaN; where one was, `skipped` says so
        metrics = {name: value if abs(value) < float("inf") else 0.0 for name, value in metrics.items()}
        return StepDone(at=0.0, step=train.step, branch=train.branch, metrics=metrics, skipped="; ".join(tally.skipped))


@torch.no_grad()
def _count(tally: _Tally, part: MicroBatch, prox: Tensor, entropy: Tensor, clipped: Tensor, step: int) -> None:
    """Add a micro-batch to what is reported. `prox` here is the one that the loss was computed with."""
    fresh = part.mask & (part.versions == step)
    behaviour = losses.behaviour_sums(prox, part.behav, part.mask)
    tally.sums += torch.stack([
        part.mask.sum().double(),
        torch.where(part.mask, entropy, 0).sum().double(),
        clipped.sum().double(),
        *behaviour,
        fresh.sum().double(),
    ])  # fmt: skip
    tally.mismatch = torch.maximum(tally.mismatch, losses.largest_difference(prox, part.behav, fresh).double())
