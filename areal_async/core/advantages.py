"""Advantages of a batch from its rewards: one number a sample, the same for all of its tokens.

What always holds: a sample without a reward (None) is left out and gets None; no advantage is NaN; equal rewards give
exactly 0 wherever they are compared with each other. Python floats and `math.fsum`: any machine gets the same.
"""

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

Advantage: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "areal_paper"]
Rewards: TypeAlias = Sequence[float | None]

PAPER_REWARD: Final = 5.0  # AReaL (arXiv 2505.24298, Table 3): +5 for right, -5 for wrong


def advantages(kind: Advantage, rewards: Sequence[Rewards], lengths: Sequence[Sequence[int]], eps: float) -> list[
    list[float | None]
]:  # fmt: skip
    """rewards[g][m] and lengths[g][m]: of member m of group g; rows may differ in length. lengths: trained tokens.

    grpo: (r - group mean) / (group std + eps), std with n - 1 (arXiv 2402.03300). dr_grpo: r - group mean
    (arXiv 2503.20783). rloo: r - mean of the other members (arXiv 2402.14740). reinforce_pp: (r - m) / (s + eps), m and
    s over all trained tokens of the batch, each sample weighing its length (arXiv 2501.03262). areal_paper: the same,
    after rewards of 0 and 1 have become -5 and +5.
    """
    match kind:
        case "grpo":
            return [grpo(group, eps) for group in rewards]
        case "dr_grpo":
            return [dr_grpo(group) for group in rewards]
        case "rloo":
            return [rloo(group) for group in rewards]
        case "reinforce_pp":
            return reinforce_pp(rewards, lengths, eps)
        case "areal_paper":
            return reinforce_pp([[_as_in_the_paper(reward) for reward in group] for group in rewards], lengths, eps)


def grpo(rewards: Rewards, eps: float) -> list[float | None]:
    """Of one group. Exactly 0 for a single reward and for equal rewards."""
    known = [reward for reward in rewards if reward is not None]
    if _teaches_nothing(known):
        return _zeros(rewards)
    mean = math.fsum(known) / len(known)
    widest = max(max(known) - mean, mean - min(known))  # divided by it, no square can vanish or overflow
    std = widest * math.sqrt(math.fsum(((reward - mean) / widest) ** 2 for reward in known) / (len(known) - 1))
    return [None if reward is None else (reward - mean) / (std + eps) for reward in rewards]


def dr_grpo(rewards: Rewards) -> list[float | None]:
    """Of one group. Exactly 0 for a single reward and for equal rewards."""
    known = [reward for reward in rewards if reward is not None]
    if _teaches_nothing(known):
        return _zeros(rewards)
    mean = math.fsum(known) / len(known)
    return [None if reward is None else reward - mean for reward in rewards]


def rloo(rewards: Rewards) -> list[float | None]:
    """Of one group. Exactly 0 for a single reward and for equal rewards."""
    known = [reward for reward in rewards if reward is not None]
    if _teaches_nothing(known):
        return _zeros(rewards)
    total = math.fsum(known)
    return [None if reward is None else reward - (total - reward) / (len(known) - 1) for reward in rewards]


def reinforce_pp(rewards: Sequence[Rewards], lengths: Sequence[Sequence[int]], eps: float) -> list[list[float | None]]:
    """Of a whole batch; all 0 where nothing is known, or all known rewards are equal."""
    known = [
        (reward, length)
        for group, its_lengths in zip(rewards, lengths, strict=True)
        for reward, length in zip(group, its_lengths, strict=True)
        if reward is not None and length > 0
    ]
    if _teaches_nothing([reward for reward, _ in known]):
        return [_zeros(group) for group in rewards]
    tokens = sum(length for _, length in known)
    mean = math.fsum(reward * length for reward, length in known) / tokens
    widest = max(abs(reward - mean) for reward, _ in known)
    variance = math.fsum(length * ((reward - mean) / widest) ** 2 for reward, length in known) / tokens
    std = widest * math.sqrt(variance)
    return [[None if reward is None else (reward - mean) / (std + eps) for reward in group] for group in rewards]


def _as_in_the_paper(reward: float | None) -> float | None:
    return None if reward is None else PAPER_REWARD * (2 * reward - 1)


def _teaches_nothing(known: Sequence[float]) -> bool:
    return not known or min(known) == max(known)


def _zeros(rewards: Rewards) -> list[float | None]:
    return [None if reward is None else 0.0 for reward in rewards]
