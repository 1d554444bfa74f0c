"""The training objectives, the distance to a reference model, and what is measured beside them.

    decoupled_ppo   loss of a token = −w · min(u·A, clip(u, 1−ε_low, 1+ε_high)·A),   u = π_θ/π_prox, w = π_prox/π_behav
                    (Eq. 5 of the AReaL paper, arXiv 2505.24298)
    ppo             the same with u = π_θ/π_behav and no w (arXiv 1707.06347)
    gspo            the same with u and w of the whole answer, each the geometric mean over its loss tokens
                    (arXiv 2507.18071, decoupled as Eq. 5)

What always holds:
- Masks apply before `exp`: what stands at a masked position (200, −inf, NaN) reaches neither the loss nor a gradient.
- The factor w is there wherever it belongs to the objective, and has no gradient. A cap on it takes tokens out of the
  sum, never out of the divisor.
- There are two masks: `mask`, the loss tokens, which make divisors and counts; and `trained`, those of them that are
  young enough to get a gradient. The others add nothing to the sum.
- A loss is a local sum over one divisor that the whole minibatch shares, so that no split over micro-batches or ranks
  changes it. Nothing in here takes a mean over what one rank happens to hold.
- Everything works in float32 and float64, on flat tensors [N] (loss tokens of a micro-batch) and on any other shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from areal_async.messages import Aggregation, Loss

# A chunk of logits is worked on in float32; bounds the extra memory (32k tokens × 152k words would be 20 GB a copy).
LOGIT_CHUNK_ELEMENTS: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Which objective, and its numbers.

    clip_low, clip_high: ε below and above 1. dual_clip: c > 1, for A < 0 the objective isn't less than c·A.
    weight_cap: on w; `over_cap` says what becomes of tokens above it (one exactly at the cap is kept).
    """

    loss: Loss = "decoupled_ppo"
    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    weight_cap: float | None = None
    over_cap: Literal["mask", "clamp"] = "mask"
    aggregation: Aggregation = "token_mean"


class TokenLosses(NamedTuple):
    """loss: per token, 0 where not trained; has the gradient. clipped: where the clip was active (no gradient there).
    capped: where w was over the cap."""

    loss: Tensor
    clipped: Tensor
    capped: Tensor


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


def policy_loss(
    logp: Tensor,
    prox: Tensor,
    behav: Tensor,
    advantage: Tensor,
    mask: Tensor,
    trained: Tensor,
    sequence: Tensor,
    objective: Objective,
) -> TokenLosses:
    """The objective's loss for each token; only `logp` gets a gradient.

    logp, prox, behav: log-probabilities under the weights that are trained, those at the start of the step, and those
    that sampled. advantage: per token. mask, trained: bool (see the module). sequence: number of each token's answer.
    All of one shape. ppo doesn't look at `prox`, the token-wise ones not at `mask` and `sequence`.
    """
    match objective.loss:
        case "decoupled_ppo":
            return decoupled_ppo(logp, prox, behav, advantage, trained, objective)
        case "ppo":
            return decoupled_ppo(logp, behav, behav, advantage, trained, objective)
        case "gspo":
            return gspo(logp, prox, behav, advantage, mask, trained, sequence, objective)


def decoupled_ppo(
    logp: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor, trained: Tensor, objective: Objective
) -> TokenLosses:
    """Eq. 5 for each token."""
    weight = masked_difference(prox, behav, trained).detach().exp()
    ratio = masked_difference(logp, prox.detach(), trained).exp()
    return _surrogate(ratio, weight, torch.where(trained, advantage, 0), trained, objective)


def gspo(
    logp: Tensor,
    prox: Tensor,
    behav: Tensor,
    advantage: Tensor,
    mask: Tensor,
    trained: Tensor,
    sequence: Tensor,
    objective: Objective,
) -> TokenLosses:
    """The loss of an answer at each of its tokens; its mean over an answer, with gradients through each token, is what
    `sequence_mean` takes.

    A token that is too old adds nothing to its answer's log-ratios and stays in their count. The advantage is that of
    the answer: of its first token.
    """
    count = _sums(mask.to(logp.dtype), sequence).clamp(min=1)
    weight = (_sums(masked_difference(prox, behav, trained).detach(), sequence) / count).exp()
    ratio = (_sums(masked_difference(logp, prox.detach(), trained), sequence) / count).exp()
    own = _first(torch.where(mask, advantage, 0), mask, sequence)
    return _surrogate(ratio[sequence], weight[sequence], own[sequence], mask, objective)


def _surrogate(ratio: Tensor, weight: Tensor, advantage: Tensor, used: Tensor, objective: Objective) -> TokenLosses:
    plain = ratio * advantage
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantage
    gain = torch.minimum(plain, bounded)
    decided = bounded < plain
    if objective.dual_clip is not None:
        floor = torch.where(advantage < 0, objective.dual_clip * advantage, -torch.inf)
        decided = decided | (gain < floor)
        gain = torch.maximum(gain, floor)
    clipped, capped = used & decided, torch.zeros_like(used)
    if objective.weight_cap is not None:
        capped = used & (weight > objective.weight_cap)
        if objective.over_cap == "mask":
            used = used & ~capped
        else:
            weight = weight.clamp(max=objective.weight_cap)
    return TokenLosses(torch.where(used, -weight * gain, 0), clipped, capped)


def kl_estimate(logp: Tensor, reference: Tensor, mask: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per token, 0 where masked: an estimate of KL(π ‖ π_ref) from d = log π − log π_ref at tokens that π has sampled:
    k1 = d, k2 = d²/2, k3 = e⁻ᵈ − 1 + d (http://joschu.net/blog/kl-approx.html). The gradient is that of the formula."""
    d = masked_difference(logp, reference, mask)
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.expm1(-d) + d


def gae(
    rewards: Sequence[float], values: Sequence[float], bootstrap: float, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimates of one trajectory (arXiv 1506.02438) and the returns, one of each per reward.

    values: of the states in which the rewards were earned; bootstrap: of the state after the last.
    δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, return_t = A_t + V_t.
    """
    advantages, advantage, following = [0.0] * len(rewards), 0.0, bootstrap
    for t in reversed(range(len(rewards))):
        advantage = rewards[t] + gamma * following - values[t] + gamma * lam * advantage
        advantages[t], following = advantage, values[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def lowered_by(estimates: Tensor, advantage: Tensor, sequence: Tensor, coefficient: float) -> Tensor:
    """Advantages [N] of tokens if each had cost coefficient × its KL estimate: every token pays for itself and for
    those of its answer that follow. estimates: [N], without gradient; sequence: int64 [N], ascending."""
    _, counts = torch.unique_consecutive(sequence, return_counts=True)
    paid: list[float] = []
    for costs in (-coefficient * estimates.double()).cpu().split(counts.tolist()):
        paid += gae(costs.tolist(), [0.0] * len(costs), 0.0, 1.0, 1.0)[0]
    return advantage + torch.tensor(paid, dtype=advantage.dtype, device=advantage.device)


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
    return 1 / _sums(mask.to(torch.float64), sequence).clamp(min=1)[sequence]


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


def _sums(values: Tensor, sequence: Tensor) -> Tensor:
    """Sum of the values of each sequence, [sequences]."""
    zeros = values.new_zeros(int(sequence.max()) + 1)
    return zeros.index_add(0, sequence.flatten(), values.flatten())


def _first(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """The value at the first masked-in token of each sequence, [sequences]; 0 where there is none."""
    own = mask.flatten()
    place = torch.arange(own.numel(), device=own.device)[own]
    numbers = sequence.flatten()[own]
    first = torch.full((int(sequence.max()) + 1,), own.numel(), device=own.device)
    first = first.scatter_reduce(0, numbers, place, "amin")
    return torch.cat([values.flatten(), values.new_zeros(1)])[first]


def _chunks(logits: Tensor) -> list[slice]:
    step = max(1, LOGIT_CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    return [slice(start, start + step) for start in range(0, len(logits), step)]
