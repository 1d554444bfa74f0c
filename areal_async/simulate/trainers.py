"""How long the trainer takes for a step, from the very batch that the core has formed.

What always holds: pure; a micro-batch takes as long as the rank that has most to do in it, since the ranks wait for
each other (gradients are summed over all of them); one without a sequence takes `microbatch_s` alone.
"""

from collections.abc import Sequence
from itertools import pairwise, zip_longest

from areal_async.messages import Minibatch
from areal_async.simulate.models import TrainerModel


def train_s(model: TrainerModel, minibatches: Sequence[Minibatch], lengths: Sequence[int]) -> float:
    """Seconds of a step. lengths: prompt + response tokens, in the order of `Train.samples`."""
    costs = [model.token_s * length + model.pair_s * length * length for length in lengths]
    passes = 1 + model.prox_share if len(minibatches) > 1 else 1.0
    seconds = model.step_s
    for minibatch in minibatches:
        ranks = minibatch.ranks
        if model.microbatches == "fixed":
            ranks = tuple(_fixed(rank, model.fixed_microbatches) for rank in ranks)
        seconds += model.minibatch_s
        for at_once in zip_longest(*ranks, fillvalue=()):
            longest = max(sum(map(costs.__getitem__, micro)) for micro in at_once)
            seconds += passes * (model.microbatch_s + longest)
    return seconds


def _fixed(rank: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], ...]:
    """A rank's part of a minibatch in `count` micro-batches of equally many sequences, in the order of the batch."""
    if count < 1:
        raise ValueError(f"fixed_microbatches is {count}: with fixed micro-batches each rank needs at least 1")
    indices = sorted(index for micro in rank for index in micro)
    edges = [len(indices) * place // count for place in range(count + 1)]
    return tuple(tuple(indices[start:end]) for start, end in pairwise(edges))
