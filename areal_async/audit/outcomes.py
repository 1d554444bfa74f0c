"""What must become of a group, made once more from what its members' checks gave and from the rules alone.

What always holds: pure functions; nothing of the core is called, so an error of the core is found here.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from areal_async.messages import Rules, SampleDone

Fate: TypeAlias = Literal["ready", "filtered"]


class Answer(NamedTuple):
    """What is left of a `SampleDone`. cut: it ended at the token limit. reward: a usable one, or None."""

    oldest: int
    prompt_tokens: int
    length: int
    loss_tokens: int
    cut: bool
    reward: float | None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.length


def answer(done: SampleDone) -> Answer:
    return Answer(done.oldest, done.prompt_tokens, done.length, done.loss_tokens, done.finish == "length", None)


def usable(reward: float | None, length: int, rules: Rules) -> float | None:
    """The reward, where it counts: a number to compute with, of an answer whose length is wanted."""
    if reward is None or math.isnan(reward) or abs(reward) > 1e100 or length < rules.min_tokens:
        return None
    return None if rules.max_tokens is not None and length > rules.max_tokens else reward


def is_trained(answer: Answer, rules: Rules) -> bool:
    """Whether this member is trained if its group is."""
    return answer.reward is not None and not (answer.cut and rules.truncated == "mask")


def shaped(answer: Answer, rules: Rules) -> float:
    """What advantages are made of; for an answer with a reward."""
    assert answer.reward is not None, "shaped is only what has a reward"
    value = rules.reward_scale * answer.reward + rules.reward_bias
    if answer.cut and rules.truncated == "penalize":
        value -= rules.truncated_penalty
    if rules.overlong_tokens:
        into = answer.length - (rules.max_new_tokens - rules.overlong_tokens)
        value -= rules.overlong_penalty * min(max(into / rules.overlong_tokens, 0.0), 1.0)
    return value


def fate(answers: Sequence[Answer], rules: Rules) -> Fate:
    """Of a group all of whose members have their outcome. answers: of those that didn't fail."""
    known = [each for each in answers if each.reward is not None]
    if len(known) < rules.min_group:
        return "filtered"
    right = sum(each.reward > rules.success_above for each in known if each.reward is not None)
    if not rules.success_min <= right / len(known) <= rules.success_max:
        return "filtered"
    if not any(is_trained(each, rules) for each in known):
        return "filtered"
    if rules.drop_equal and len({shaped(each, rules) for each in known}) == 1:
        return "filtered"
    return "ready"
