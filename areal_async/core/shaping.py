"""What an answer's reward becomes before advantages are made of it, and which answers aren't trained for being cut.

What always holds: pure functions of what the check gave, of how the answer ended and of the rules; a shaped reward is
finite; where there is no reward there is no shaped one. The reward itself stays what the check gave: success filters
and metrics look at that (`rollout.success_above` speaks of right answers, not of short ones), while advantages and
`rollout.drop_equal` look at the shaped one (groups whose shaped rewards are equal have no gradient).
"""

import math
from collections.abc import Sequence
from typing import Final

from areal_async.messages import Rules, SampleDone

LARGEST_REWARD: Final = 1e100  # beyond it sums lose all meaning; such a reward, an infinite one or a NaN is none


def check(rules: Rules) -> None:
    """Raises ValueError for rules by which rewards can't be shaped."""
    for name, penalty in (
        ("truncated_penalty", rules.truncated_penalty),
        ("overlong_penalty", rules.overlong_penalty),
    ):
        if not 0 <= penalty <= LARGEST_REWARD:
            raise ValueError(f"reward.{name} {penalty} must be from 0 to {LARGEST_REWARD:g}")
    if not 0 <= rules.overlong_tokens <= rules.max_new_tokens:
        raise ValueError(
            f"reward.overlong_tokens {rules.overlong_tokens} must be from 0 to rollout.max_new_tokens"
            f" {rules.max_new_tokens}"
        )
    if not math.isfinite(rules.success_above) or not 0 <= rules.success_min <= rules.success_max <= 1:
        raise ValueError(
            f"rollout.success_min {rules.success_min} and success_max {rules.success_max} must be shares with"
            f" 0 <= success_min <= success_max <= 1, and success_above {rules.success_above} a finite number"
        )


def usable(reward: float | None) -> float | None:
    """The reward, or None where it is a NaN, infinite, or so large that nothing could be computed with it."""
    return reward if reward is not None and abs(reward) <= LARGEST_REWARD else None


def shaped(reward: float | None, done: SampleDone, rules: Rules) -> float | None:
    """What advantages are made of. reward: what the check gave (`usable`)."""
    if reward is None:
        return None
    if done.finish == "length" and rules.truncated == "penalize":
        reward -= rules.truncated_penalty
    if rules.overlong_tokens:
        reward -= rules.overlong_penalty * overlong(done.length, rules)
    return reward


def overlong(length: int, rules: Rules) -> float:
    """How far an answer of `length` tokens reaches into the last `overlong_tokens` before `max_new_tokens`.

    0 up to their beginning, 1 from their end on, linear between: DAPO's soft overlong punishment, eq. 13 of
    arXiv 2503.14476, with the other sign. 0 where there are none.
    """
    if not rules.overlong_tokens:
        return 0.0
    into = length - (rules.max_new_tokens - rules.overlong_tokens)
    return min(max(into / rules.overlong_tokens, 0.0), 1.0)


def masked(done: SampleDone, rules: Rules) -> bool:
    """Whether the answer isn't trained because it was cut; its reward still counts in the baseline of its group."""
    return done.finish == "length" and rules.truncated == "mask"


def success_share(rewards: Sequence[float], rules: Rules) -> float:
    """Share of a group's members with a reward (at least one) whose reward is over `success_above`."""
    return sum(reward > rules.success_above for reward in rewards) / len(rewards)
