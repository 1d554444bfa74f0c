"""A training step: π_prox, then for each minibatch micro-batches forward and backward and one optimiser step.

What always holds:
- log π_prox is taken with the weights from before the step. The first minibatch's own forward is under these weights,
  so only the later ones need a pass of their own; with one minibatch there is none, and none where nothing asks for it
  (ppo, without a distance to a reference in the reward).
- All ranks make the same calls in the same order, whatever they hold and whatever goes wrong with the numbers: a loss
  that isn't finite on one rank makes the gradient not finite on all of them, and then nobody applies it. All passes go
  through the engine, which gathers what ZeRO 3 has split.
- The gradient is that of Σ token losses / divisor over all ranks and micro-batches, however they are split: the loss is
  multiplied by the number of ranks because DeepSpeed averages over them.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor

from areal_async.engines.deepspeed import losses, tally
from areal_async.engines.deepspeed.batch import Array, MicroBatch, micro_batches
from areal_async.engines.deepspeed.engine import apply_update, learning_rate
from areal_async.engines.deepspeed.packed import packed_logits
from areal_async.engines.deepspeed.prox import Kept
from areal_async.engines.deepspeed.tally import Seen, Tally
from areal_async.errors import TrainerError
from areal_async.messages import StepDone, Train, TrainerSpec, Version

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from areal_async.engines.deepspeed.reference import Reference


class Trainer:
    """One rank's share of the training. version: how many steps its weights have seen. updates: how many optimiser
    steps; less than minibatches where some were skipped. kept: the arrays that belong to the last `StepDone`."""

    def __init__(
        self, engine: "DeepSpeedEngine", spec: TrainerSpec, rank: int, world: int, reference: "Reference | None" = None
    ) -> None:
        """reference: needed if `spec.kl_coef` is set. Raises TrainerError for an objective that can't be right."""
        self.engine = engine
        self.version: Version = 0
        self.updates = 0
        self.kept: tuple[Array, ...] = ()
        self._spec = spec
        self._rank = rank
        self._world = world
        self._reference = reference
        self._device: torch.device = engine.module.device
        self._objective = objective_of(spec)

    def train(self, train: Train, arrays: list[Array]) -> StepDone:
        """Train version `train.step` into the next. arrays: those of `messages.Train`, this rank's.

        Raises TrainerError, before anything was changed, if the step doesn't follow or the batch can't be right.
        """
        if train.step != self.version:
            raise TrainerError(f"rank {self._rank} holds version {self.version} and was asked for step {train.step}")
        parts = micro_batches(train, self._rank, arrays, self._device)
        seen = tally.new_tally(len(parts), self._device)
        seen.kept = Kept(arrays[0]) if self._spec.keep_prox else None
        prox = self._proximal(parts)
        for number in range(len(parts)):
            finite = self.accumulate(train, number, parts[number], prox[number], seen)
            norm = apply_update(self.engine, self._spec, learning_rate(self._spec, self.updates))
            if norm is None:
                what = "the gradient" if finite else "the loss"
                seen.skipped.append(f"minibatch {number + 1} of {len(parts)}: {what} is not finite")
            else:
                seen.norms.append(norm)
                self.updates += 1
        self.version += 1
        self.kept = seen.kept.arrays() if seen.kept is not None else ()
        metrics = tally.report(seen, self._world, learning_rate(self._spec, max(0, self.updates - 1)))
        return StepDone(at=0.0, step=train.step, branch=train.branch, metrics=metrics, skipped="; ".join(seen.skipped))

    def accumulate(
        self, train: Train, number: int, parts: list[MicroBatch], prox: list[Tensor] | None, seen: Tally
    ) -> bool:
        """Forward and backward of all micro-batches of minibatch `number`; the gradients are averaged over the ranks
        at the last. prox: of each micro-batch, or None where no pass has taken it. False: some rank's loss is not
        finite."""
        finite = True
        for index, part in enumerate(parts):
            logp, entropy = self._forward(part)
            anchor = prox[index] if prox is not None else logp.detach() if number == 0 else None
            if seen.kept is not None and anchor is not None:
                seen.kept.add(part, anchor)
            loss = self._loss(train, number, part, logp, anchor, entropy, seen)
            seen.losses[number] += loss.detach()
            last = index == len(parts) - 1
            if last and not (finite := self._all_finite(seen.losses[number])):
                loss = loss * torch.nan  # so that no rank's gradient is finite, whoever's loss it was
            self.engine.set_gradient_accumulation_boundary(last)
            self.engine.backward(loss * self._rank_factor())
        return finite

    def _loss(
        self,
        train: Train,
        number: int,
        part: MicroBatch,
        logp: Tensor,
        prox: Tensor | None,
        entropy: Tensor,
        seen: Tally,
    ) -> Tensor:
        """This micro-batch's share of the minibatch's loss."""
        spec, trained = self._spec, part.mask & (part.versions >= train.mask_below)
        advantage, distance = part.advantage, torch.zeros_like(logp)
        if self._reference is not None:
            reference = self._reference.log_probs(part)
            if spec.kl_in == "loss":
                distance = losses.kl_estimate(logp, reference, part.mask, spec.kl_estimator)
            else:
                assert prox is not None
                distance = losses.kl_estimate(prox, reference, part.mask, spec.kl_estimator)
                advantage = losses.lowered_by(distance, advantage, part.sequence, spec.kl_coef)
        anchor = part.behav if prox is None else prox
        token = losses.policy_loss(
            logp, anchor, part.behav, advantage, part.mask, trained, part.sequence, self._objective
        )
        tally.count(seen, part, Seen(trained, entropy, prox, distance.detach(), token), train.step)
        total = token.loss
        if self._reference is not None and spec.kl_in == "loss":
            total = total + spec.kl_coef * torch.where(trained, distance, 0)
        weights = losses.token_weights(self._objective.aggregation, part.mask, part.sequence)
        return losses.local_loss(total, weights, train.minibatches[number].divisor)

    def _rank_factor(self) -> float:
        """DeepSpeed divides gradients by the number of ranks; the divisor already belongs to all of them."""
        return float(self._world)

    @torch.no_grad()
    def _proximal(self, parts: list[list[MicroBatch]]) -> list[list[Tensor] | None]:
        """log π_prox of each minibatch's micro-batches, as far as it takes a pass of its own."""
        if self._spec.loss == "ppo" and (self._reference is None or self._spec.kl_in == "loss"):
            return [None for _ in parts]
        return [None, *([self._forward(part)[0] for part in minibatch] for minibatch in parts[1:])]

    def _forward(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the loss tokens and entropies, float32 [N] each, at the sampling temperature."""
        logits = packed_logits(self.engine, part.token_ids, part.packing, part.rows)
        return losses.log_probs(logits, part.targets, self._spec.temperature)

    def _all_finite(self, loss: Tensor) -> bool:
        flag = loss.isfinite().to(torch.float32)
        if self._world > 1:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
        return bool(flag)


def objective_of(spec: TrainerSpec) -> losses.Objective:
    """Raises TrainerError for options that don't go together."""
    if spec.loss == "gspo" and spec.aggregation != "sequence_mean":
        raise TrainerError(
            f"train.aggregation: gspo has one loss for an answer, so it needs sequence_mean, not {spec.aggregation}"
        )
    if spec.loss == "gspo" and spec.dual_clip is not None:
        raise TrainerError("train.dual_clip: it is made for ratios of tokens; gspo's are those of answers; remove it")
    if spec.loss == "ppo" and spec.weight_cap is not None:
        raise TrainerError("train.weight_cap: ppo has no behaviour weight that could be capped; remove it")
    return losses.Objective(
        loss=spec.loss,
        clip_low=spec.clip_low,
        clip_high=spec.clip_high,
        dual_clip=spec.dual_clip,
        weight_cap=spec.weight_cap,
        over_cap=spec.over_cap,
        aggregation=spec.aggregation,
    )
