"""The staleness rule: when a group may begin, until when it must be trained, which batch may be formed.

What always holds, if groups begin and batches form only as these functions allow: a batch that may be formed always
comes; and as `when_older` says, no trained token has a lag over η (`wait`, `drop`), none has a gradient (`mask`), or
only admission limits it (`train`). Under `wait` no sample is thrown away for its age either. docs/staleness.md has the
proofs. Nothing is stored here.

Words: `taken` = groups handed to training so far + groups outstanding. A deadline is the last step that may train a
group without a token older than η. η is `max_staleness`, B is `batch_groups`.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Protocol, TypeVar

from areal_async.core import shaping
from areal_async.messages import GroupId, Rules, Version


class Placed(Protocol):
    """What the batch test needs to know of an outstanding group."""

    @property
    def id(self) -> GroupId: ...

    @property
    def deadline(self) -> int: ...


AnyGroup = TypeVar("AnyGroup", bound=Placed)


def check(rules: Rules) -> None:
    """Raises ValueError for rules by which no run could go on."""
    if rules.batch_groups % rules.minibatches:
        raise ValueError(f"train.minibatches {rules.minibatches} must divide train.batch_groups {rules.batch_groups}")
    if rules.group_size > rules.max_concurrent:
        raise ValueError(f"rollout.max_concurrent {rules.max_concurrent} has no room for a group of {rules.group_size}")
    if not 1 <= rules.min_group <= rules.group_size:
        raise ValueError(f"rollout.min_group {rules.min_group} must be from 1 to rollout.group_size {rules.group_size}")
    shaping.check(rules)


def capacity(version: Version, taken: int, rules: Rules) -> int:
    """How many more groups may be placed on a server of `version`: Eq. 3 of the AReaL paper, counted in groups.

    A group may be placed if, itself included, handed + outstanding <= (version + η + 1) · B. Negative where the server
    lags behind so far that even the present ones could not all have been placed on it.
    """
    return (version + rules.max_staleness + 1) * rules.batch_groups - taken


def lowest_floor(taken: int, rules: Rules) -> Version:
    """The lowest version of a server on which one more group may be placed: `capacity` solved for the version.

    taken + 1 <= (f + η + 1) · B holds exactly for f >= ceil((taken + 1) / B) - η - 1 = floor(taken / B) - η.
    """
    return taken // rules.batch_groups - rules.max_staleness


def deadline(floor: Version, rules: Rules) -> int:
    """The last step in which no token of a group of this floor is older than η: step s trains version s, so its lag
    there is at most s - floor."""
    return floor + rules.max_staleness


def batches_wait(rules: Rules) -> bool:
    """Whether a batch has to pass the batch test; where it doesn't, any B ready groups may be the next step."""
    return rules.when_older == "wait"


def groups_are_dropped(rules: Rules) -> bool:
    """Whether an outstanding group is stopped when its deadline has passed."""
    return rules.when_older == "drop"


def mask_below(step: int, rules: Rules) -> Version:
    """Tokens of versions below it get no gradient in this step; 0 where age takes no token's gradient."""
    return max(step - rules.max_staleness, 0) if rules.when_older == "mask" else 0


def oldest_allowed(step: int, rules: Rules) -> Version:
    """No token of an older version may have a gradient in this step; 0 where every age may (`train`)."""
    return 0 if rules.when_older == "train" else step - rules.max_staleness


def overdue(outstanding: Mapping[int, int], batch: Mapping[int, int], *, step: int, batch_groups: int) -> int | None:
    """The batch test. None if `batch` may become step `step`; else the first deadline up to which too many stay behind.

    outstanding, batch: how many groups have each deadline (the outstanding ones include the batch). Of the groups that
    stay behind at most k · B may have their deadline at or before step + k, for every k >= 0: those k steps are all
    that is left for them.
    """
    behind = 0
    for last in sorted(outstanding):
        behind += outstanding[last] - batch.get(last, 0)
        if behind > max(last - step, 0) * batch_groups:
            return last
    return None


def blockers(outstanding: Iterable[AnyGroup], batch: Container[GroupId], *, step: int, rules: Rules) -> list[AnyGroup]:
    """Groups that forbid `batch` to become step `step`, empty if it may: what a waiting trainer waits for."""
    if not batches_wait(rules):
        return []
    groups = list(outstanding)
    everyone: dict[int, int] = {}
    chosen: dict[int, int] = {}
    for group in groups:
        everyone[group.deadline] = everyone.get(group.deadline, 0) + 1
        if group.id in batch:
            chosen[group.deadline] = chosen.get(group.deadline, 0) + 1
    last = overdue(everyone, chosen, step=step, batch_groups=rules.batch_groups)
    if last is None:
        return []
    return [group for group in groups if group.deadline <= last and group.id not in batch]
