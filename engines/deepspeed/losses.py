"""The training objective: Eq. 5 of the AReaL paper (arXiv 2505.24298), and what is measured beside it.

    loss of a token = −w · min(u·A, clip(u, 1−ε_low, 1+ε_high)·A),   u = π_θ/π_prox,   w = π_prox/π_behav

What always holds:
- Masks apply before `exp`: what stands at a masked position (200, −inf, NaN) reaches neither the loss nor a gradient.
- The factor w is always there and has no gradient. A cap on it takes tokens out of the sum, never out of the divisor.
- A loss is a local sum over one divisor that the whole minibatch shares, so that no split over micro-batches or ranks
  changes it. Nothing in here takes a mean over what one rank happens to hold.
- Everything works in float32 and float64, on flat tensors [N] (loss tokens of a micro-batch) and on any other shape.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

# A chunk of logits is worked on in float32; bounds the extra memory (32k tokens × 152k words would be 20 GB a copy).
LOGIT_CHUNK_ELEMENTS: Final = 1 << 24

Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The numbers in Eq. 5.

    clip_low, clip_high: ε below and above 1. dual_clip: c > 1, for A < 0 the objective isn't less than c·A.
    weight_cap: on w; `over_cap` says what becomes of tokens above it (one exactly at the cap is kept).
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    weight_cap: float | None = None
    over_cap: Literal["mask", "clamp"] = "mask"
    aggregation: Aggregation = "token_mean"


class TokenLosses(NamedTuple):
    """loss: per token, 0 where masked; has the gradient. clipped: where the clip was active (no gradient there)."""

    loss: Tensor
    clipped: Tensor


class _LogProbs(torch.autograd.Function):
    """Log-probabilities of given tokens without a second copy of the logits: softmax is made again, by chunks."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(logits.dtype, torch.float32)
        log_norm = torch.empty(len(logits), dtype=exact, device=logits.device)
        log_probs, entropy = torch.empty_like(log_norm), torch.empty_like(log_norm)
        for rows in _chunks(logits):
            scaled = logits[rows].to(exact) / temperature
            log_norm[rows] = scaled.logsumexp(dim=-1)
            log_probs[rows] = scaled.gather(1, targets[rows, None]).squeeze(1) - log_norm[rows]
            entropy[rows] = torch.special.entr((scaled - log_norm[rows, None]).exp_()).sum(dim=-1)
        ctx.save_for_backward(logits, targets, log_norm)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _entropy: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_norm = ctx.saved_tensors
        slope = grad / ctx.temperature
        result = torch.empty_like(logits)
        for rows in _chunks(logits):
            part = logits[rows].to(log_norm.dtype) / ctx.temperature
            part = part.sub_(log_norm[rows, None]).exp_().mul_(-slope[rows, None])
            part.scatter_add_(1, targets[rows, None], slope[rows, None])
            result[rows] = part.to(logits.dtype)
        return result, None, None


def log_probs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of `targets` (int64 [N]) and entropies [N] (nats, no gradient) at `temperature`.

    logits: [N, vocabulary], any float dtype; the results are float32, or float64 for float64 logits.
    """
    result: tuple[Tensor, Tensor] = _LogProbs.apply(logits, targets, temperature)
    return result


def decoupled_ppo(
    logp: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor, mask: Tensor, objective: Objective
) -> TokenLosses:
    """Eq. 5 for each token; only `logp` gets a gradient.

    logp, prox, behav: log-probabilities under the weights that are trained, those at the start of the step, and those
    that sampled. advantage: per token. mask: bool, where the loss applies. All of one shape.
    """
    weight = masked_difference(prox, behav, mask).detach().exp()
    ratio = masked_difference(logp, prox.detach(), mask).exp()
    advantage = torch.where(mask, advantage, 0)
    plain = ratio * advantage
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantage
    gain = torch.minimum(plain, bounded)
    if objective.dual_clip is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, objective.dual_clip * advantage), gain)
    used = mask
    if objective.weight_cap is not None:
        if objective.over_cap == "mask":
            used = mask & (weight <= objective.weight_cap)
        else:
            weight = weight.clamp(max=objective.weight_cap)
    return TokenLosses(torch.where(used, -weight * gain, 0), mask & (bounded < plain).detach())


def masked_difference(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """a − b where the mask is set and 0 elsewhere, with no gradient there whatever stands there."""
    return torch.where(mask, a, 0) - torch.where(mask, b, 0)


def token_weights(aggregation: Aggregation, mask: Tensor, sequence: Tensor) -> Tensor:
    """How much each token's loss weighs in the local sum, before the division by the minibatch's divisor.

    `token_mean` (divisor: loss tokens) and `constant`: 1. `sequence_mean` (divisor: sequences with a loss token): 1 /
    own loss tokens of the token's sequence. sequence: int64, the number of each token's sequence, same shape as `mask`.
    """
    if aggregation != "sequence_mean":
        return torch.ones(mask.shape, dtype=torch.float64, device=mask.device)
    count = torch.zeros(int(sequence.max()) + 1, dtype=torch.float64, device=mask.device)
    count.index_add_(0, sequence.flatten(), mask.flatten().to(torch.float64))
    return 1 / count.clamp(min=1)[sequence]


def local_loss(token_losses: Tensor, weights: Tensor, divisor: float) -> Tensor:
    """This part's share of the loss: a sum over what is here, divided by what belongs to the whole minibatch."""
    return (token_losses * weights.to(token_losses.dtype)).sum() / divisor


class BehaviourSums(NamedTuple):
    """Sums over loss tokens that tell how far π_prox is from π_behav; float64 scalars, added up over parts.

    k3: of exp(d) − 1 − d with d = log π_prox − log π_behav, the low-variance estimate of KL(π_behav ‖ π_prox)
    (http://joschu.net/blog/kl-approx.html). weight, weight_squared: of w = exp(d).
    """

    k3: Tensor
    weight: Tensor
    weight_squared: Tensor


def behaviour_sums(prox: Tensor, behav: Tensor, mask: Tensor) -> BehaviourSums:
    difference = masked_difference(prox, behav, mask).double()
    weight = torch.where(mask, difference.exp(), 0)
    k3 = torch.where(mask, difference.expm1() - difference, 0)
    return BehaviourSums(k3.sum(), weight.sum(), weight.square().sum())


def effective_share(weight: float, weight_squared: float, tokens: float) -> float:
    """Effective sample size (Σw)² / Σw² as a share of the tokens; 1 if all weigh the same, 0 if there are none."""
    return weight * weight / (weight_squared * tokens) if weight_squared and tokens else 0.0


def largest_difference(prox: Tensor, behav: Tensor, mask: Tensor) -> Tensor:
    """max |prox − behav| over the mask, a scalar; 0 if the mask is empty."""
    difference = masked_difference(prox, behav, mask).abs()
    return difference.max() if difference.numel() else difference.new_zeros(())


def _chunks(logits: Tensor) -> list[slice]:
    step = max(1, LOGIT_CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    return [slice(start, start + step) for start in range(0, len(logits), step)]
