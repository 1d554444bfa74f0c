"""What must come out, computed once more and in another way: fates of groups, who is trained, shaped rewards, divisors.

What always holds: nothing here calls the core; the books of `world` compare the core with it at every event.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

from areal_async.messages import Rules, SampleDone

Outcomes: TypeAlias = Mapping[int, float | str | None]
"""Of members whose outcome is known: a reward, None (no reward), or "failed"."""


def fate(rules: Rules, outcomes: Outcomes, answers: Mapping[int, SampleDone]) -> str:
    """What a group is with these outcomes: open, ready, filtered or failed."""
    if rules.group_size - sum(outcome == "failed" for outcome in outcomes.values()) < rules.min_group:
        return "failed"
    if len(outcomes) < rules.group_size:
        return "open"
    rewards = {member: outcome for member, outcome in outcomes.items() if isinstance(outcome, float)}
    if len(rewards) < rules.min_group:
        return "filtered"
    right = Fraction(len([reward for reward in rewards.values() if reward > rules.success_above]), len(rewards))
    unwanted = right < Fraction(rules.success_min) or right > Fraction(rules.success_max)
    equal = len({shaped(rules, reward, answers[member]) for member, reward in rewards.items()}) == 1
    if unwanted or not trained(rules, outcomes, answers) or (rules.drop_equal and equal):
        return "filtered"
    return "ready"


def usable(rules: Rules, reward: float | None, answer: SampleDone) -> float | None:
    """The reward that counts: a number that can be computed with, of an answer whose length is wanted."""
    longest = answer.length if rules.max_tokens is None else rules.max_tokens
    wanted = answer.length in range(rules.min_tokens, longest + 1)
    return reward if wanted and reward is not None and abs(reward) <= 1e100 else None


def trained(rules: Rules, outcomes: Outcomes, answers: Mapping[int, SampleDone]) -> list[int]:
    """The members that are trained if their group is."""
    known = [member for member, outcome in sorted(outcomes.items()) if isinstance(outcome, float)]
    return [member for member in known if rules.truncated != "mask" or answers[member].finish == "stop"]


def shaped(rules: Rules, reward: float, answer: SampleDone) -> Fraction:
    """Scale × reward + bias, less the penalties, exactly."""
    value = Fraction(rules.reward_scale) * Fraction(reward) + Fraction(rules.reward_bias)
    if rules.truncated == "penalize" and answer.finish == "length":
        value -= Fraction(rules.truncated_penalty)
    begin = rules.max_new_tokens - rules.overlong_tokens
    if rules.overlong_tokens and answer.length > begin:
        into = min(answer.length, rules.max_new_tokens) - begin
        value -= Fraction(rules.overlong_penalty) * Fraction(into, rules.overlong_tokens)
    return value


def divisor(rules: Rules, answers: Sequence[SampleDone]) -> int:
    """Of a minibatch of these answers."""
    counts = {
        "token_mean": sum(answer.loss_tokens for answer in answers),
        "sequence_mean": len([answer for answer in answers if answer.loss_tokens]),
        "constant": len(answers) * rules.max_new_tokens,
    }
    return counts[rules.aggregation] or 1
