"""What a training step is made of: advantages, order, split over minibatches, ranks and micro-batches, divisors.

What always holds: a function of the groups, the rules and the step alone (no state, no clock, a stated generator for
the order), so a batch can be made again bit for bit; every rank has the same number of micro-batches; the divisor of
a minibatch doesn't depend on how it is split.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

from areal_async.core import admission, packing, shaping
from areal_async.core.advantages import advantages
from areal_async.core.ledger import Group, Sample
from areal_async.messages import Minibatch, Rules, Train, TrainSample

_MASK: Final = (1 << 64) - 1
Item = TypeVar("Item")


def form(groups: Sequence[Group], *, step: int, branch: int, rules: Rules) -> Train:
    """The command that trains these groups as step `step`: their samples in the order of `groups`, then of members.

    Advantages are made of shaped rewards (`shaping`). A cut answer that isn't trained counts in them like any other.
    With one minibatch, nothing is shuffled. With several, the groups are dealt to them in a seeded order, whole groups
    and the same number each.
    """
    samples: list[TrainSample] = []
    tokens: list[int] = []  # prompt + response, of each sample
    losses: list[int] = []  # response tokens with loss mask 1, of each sample
    members: list[list[int]] = []  # indices into `samples`, of each group
    of_groups = advantages(
        rules.advantage,
        [[_shaped(sample, rules) for sample in group.samples] for group in groups],
        [[sample.done.loss_tokens if sample.done else 0 for sample in group.samples] for group in groups],
        rules.advantage_eps,
    )
    for group, of_members in zip(groups, of_groups, strict=True):
        first = len(samples)
        for sample, advantage in zip(group.samples, of_members, strict=True):
            if advantage is None or sample.done is None or shaping.masked(sample.done, rules):
                continue
            samples.append(TrainSample(sample.id, sample.attempt, advantage))
            tokens.append(sample.done.prompt_tokens + sample.done.length)
            losses.append(sample.done.loss_tokens)
        members.append(list(range(first, len(samples))))
    if rules.minibatches > 1:
        members = shuffled(members, rules.seed, step)
    size = len(groups) // rules.minibatches
    parts = [members[start : start + size] for start in range(0, len(groups), size)]
    return Train(
        step=step,
        branch=branch,
        groups=tuple(group.id for group in groups),
        samples=tuple(samples),
        minibatches=tuple(minibatch([i for group in part for i in group], tokens, losses, rules) for part in parts),
        mask_below=admission.mask_below(step, rules),
    )


def divisor(losses: Sequence[int], rules: Rules) -> float:
    """By what a minibatch's sum of token losses is divided. losses: loss-mask tokens of each of its sequences.

    Tokens without a gradient for their age or their weight count like any other. At least 1.
    """
    match rules.aggregation:
        case "token_mean":
            count = sum(losses)
        case "sequence_mean":
            count = sum(tokens > 0 for tokens in losses)
        case "constant":
            count = len(losses) * rules.max_new_tokens
    return float(max(count, 1))


def shuffled(items: Sequence[Item], seed: int, step: int) -> list[Item]:
    """A new order of the items, the same for the same seed and step: Fisher-Yates with SplitMix64.

    (Steele, Lea, Flood 2014. The remainder that picks a place favours low places by less than n / 2^64.)
    """
    order = list(items)
    state = _mix((seed & _MASK) ^ _mix(step))
    for place in range(len(order) - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        other = _mix(state) % (place + 1)
        order[place], order[other] = order[other], order[place]
    return order


def minibatch(indices: Sequence[int], tokens: Sequence[int], losses: Sequence[int], rules: Rules) -> Minibatch:
    """One optimiser step over these samples: ranks get nearly the same number of tokens, and as many passes."""
    shares = [
        [indices[place] for place in share]
        for share in packing.balance([tokens[index] for index in indices], rules.ranks)
    ]
    capacity = rules.max_tokens_per_microbatch
    passes = max(len(packing.pack([tokens[index] for index in share], capacity)) for share in shares)
    ranks = []
    for share in shares:
        packed = packing.pack([tokens[index] for index in share], capacity, max(passes, 1))
        ranks.append(tuple(tuple(share[place] for place in micro) for micro in packed))
    return Minibatch(divisor=divisor([losses[index] for index in indices], rules), ranks=tuple(ranks))


def _shaped(sample: Sample, rules: Rules) -> float | None:
    return None if sample.done is None else shaping.shaped(sample.reward, sample.done, rules)


def _mix(value: int) -> int:
    """The output function of SplitMix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
