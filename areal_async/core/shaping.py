"""What an answer's reward becomes before advantages are made of it, and which answers aren't trained for being cut.

What always holds: pure functions of what the check gave, of how the answer ended and of the rules; a shaped reward is
finite; where there is no reward there is no shaped one. The reward itself stays what the check gave: success filters
and metrics look at that (`rollout.success_above` speaks of right answers, not of short ones), while advantages and
`rollout.drop_equal` look at the shaped one (groups whose shaped rewards are equal have no gradient).
"""

import math
from collections.abc import Sequence
from typing import Final

from areal_async.core.lifecycle import Word
from areal_async.messages import Rules, SampleDone

LARGEST_SCALE: Final = 1e100
LARGEST_REWARD: Final = 1e100  # beyond it sums lose all meaning; such a reward, an infinite one or a NaN is none


def check(rules: Rules) -> None:
    """Raises ValueError for rules by which rewards can't be shaped."""
    for name, penalty in (
        ("truncated_penalty", rules.truncated_penalty),
        ("overlong_penalty", rules.overlong_penalty),
    ):
        if not 0 <= penalty <= LARGEST_REWARD:
            raise ValueError(f"reward.{name} {penalty} must be from 0 to {LARGEST_REWARD:g}")
    if not 0 < rules.reward_scale <= LARGEST_SCALE or not abs(rules.reward_bias) <= LARGEST_REWARD:
        raise ValueError(
            f"reward.scale {rules.reward_scale} must be above 0 and at most {LARGEST_SCALE:g}, and reward.bias"
            f" {rules.reward_bias} at most {LARGEST_REWARD:g} from 0"
        )
    if rules.max_tokens is not None and rules.max_tokens < max(rules.min_tokens, 1):
        raise ValueError(
            f"reward.max_tokens {rules.max_tokens} is less than reward.min_tokens {rules.min_tokens}, or 0"
        )
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


def usable(reward: float | None, done: SampleDone, rules: Rules) -> float | None:
    """The reward; None where it is a NaN, infinite, or so large that nothing could be computed with it, and for an
    answer whose length isn't wanted."""
    if reward is None or not abs(reward) <= LARGEST_REWARD or not has_wanted_length(done.length, rules):
        return None
    return reward


def has_wanted_length(length: int, rules: Rules) -> bool:
    """Whether an answer of `length` tokens may have a reward (`reward.min_tokens`, `reward.max_tokens`)."""
    return rules.min_tokens <= length and (rules.max_tokens is None or length <= rules.max_tokens)


def shaped(reward: float | None, done: SampleDone, rules: Rules) -> float | None:
    """What advantages are made of: scale × reward + bias, less penalties. reward: what the check gave (`usable`)."""
    if reward is None:
        return None
    reward = rules.reward_scale * reward + rules.reward_bias
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


def unwanted(known: Sequence[tuple[float, SampleDone]], rules: Rules) -> tuple[str, tuple[Word, ...]] | None:
    """Why a group whose members all have their outcome is filtered, a text with `{}` for the words; None if it isn't.

    known: its members with a reward, as the check gave it (`usable`).
    """
    if len(known) < rules.min_group:
        return "{} members have a reward, {} are needed", (len(known), rules.min_group)
    share = success_share([reward for reward, _ in known], rules)
    if not rules.success_min <= share <= rules.success_max:
        return "a share of {} succeeded, wanted is {} to {}", (share, rules.success_min, rules.success_max)
    if all(masked(done, rules) for _, done in known):
        return "all {} answers with a reward were cut", (len(known),)
    if rules.drop_equal and len({shaped(reward, done, rules) for reward, done in known}) == 1:
        return "all {} rewards are equal", (len(known),)
    return None
