"""Which rules may change when a run is resumed.

What always holds: what a log's decisions rest on stays: with other batches, groups or rewards than before, the steps
that are trained again would not be the same, and the ledger would count unlike things together.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from areal_async.messages import Rules

CHANGEABLE: Final[frozenset[str]] = frozenset(
    {
        "ranks",
        "max_tokens_per_microbatch",
        "steps",
        "retries",
        "max_failures",
        "nan_budget",
        "max_restarts",
        "max_worker_restarts",
        "max_trainer_restarts",
        "checkpoint_steps",
        "checkpoint_s",
        "checkpoint_keep",
        "eval_every",
        "wave",
        "servers",
        "max_concurrent",
        "max_filtered",
    }
)

_REWARDS: Final = "steps that are trained again would get other advantages from the same answers"
_AGE: Final = "groups that wait were admitted for another age than they would be trained at"
_FILTERS: Final = "groups that wait, or are trained again, were chosen by the old one"

WHY: Final[Mapping[str, tuple[str, str]]] = {
    "seed": ("seed", "the order of the data and of minibatches would be another one"),
    "batch_groups": ("train.batch_groups", "every step so far took that many groups, and capacity is counted in steps"),
    "group_size": ("rollout.group_size", "groups that wait, or are trained again, have that many samples"),
    "max_staleness": ("rollout.max_staleness", _AGE),
    "when_older": ("rollout.when_older", _AGE),
    "requeue": ("rollout.requeue", _AGE),
    "minibatches": ("train.minibatches", "steps that are trained again would make another number of updates"),
    "max_new_tokens": ("rollout.max_new_tokens", "answers that wait were cut at the old length"),
    "min_group": ("rollout.min_group", _FILTERS),
    "drop_equal": ("rollout.drop_equal", _FILTERS),
    "success_min": ("rollout.success_min", _FILTERS),
    "success_max": ("rollout.success_max", _FILTERS),
    "success_above": ("rollout.success_above", _FILTERS),
    "advantage": ("train.advantage", _REWARDS),
    "advantage_eps": ("train.advantage_eps", _REWARDS),
    "aggregation": ("train.aggregation", "steps that are trained again would have other gradients"),
    "truncated": ("train.truncated", _REWARDS),
    "reward_scale": ("reward.scale", _REWARDS),
    "reward_bias": ("reward.bias", _REWARDS),
    "min_tokens": ("reward.min_tokens", _REWARDS),
    "max_tokens": ("reward.max_tokens", _REWARDS),
    "truncated_penalty": ("reward.truncated_penalty", _REWARDS),
    "overlong_tokens": ("reward.overlong_tokens", _REWARDS),
    "overlong_penalty": ("reward.overlong_penalty", _REWARDS),
}
"""Of the others: the key in the configuration, and why it must stay."""


def refusals(old: Rules, new: Rules) -> list[str]:
    """What of the new rules can't follow the old ones, in words: key, old value, new value, why. Empty if all can."""
    told = []
    for name in Rules.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if before != after and name not in CHANGEABLE:
            key, why = WHY[name]
            told.append(f"{key} was {_shown(before)} and can't become {_shown(after)} by a resume: {why}")
    if new.steps < old.steps:
        told.append(f"train.steps was {old.steps} and can't become {new.steps} by a resume: there can only be more")
    return told


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()
