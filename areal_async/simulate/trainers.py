"""How long the trainer takes for a step, from the very batch that the core has formed.

What always holds: pure; a micro-batch, or a whole minibatch (`ranks_wait`), takes as long as the rank that has most to
do in it, since gradients are summed over all of them; a micro-batch without a sequence takes `microbatch_s` alone.
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
        took = [[model.microbatch_s + sum(map(costs.__getitem__, micro)) for micro in rank] for rank in ranks]
        if model.ranks_wait == "microbatch":
            seconds += passes * sum(max(at_once) for at_once in zip_longest(*took, fillvalue=model.microbatch_s))
        else:
            seconds += passes * max(map(sum, took))
    return seconds


def _fixed(rank: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], ...]:
    """A rank's part of a minibatch in `count` micro-batches of equally many sequences, in the order of the batch."""
    if count < 1:
        raise ValueError(f"fixed_microbatches is {count}: with fixed micro-batches each rank needs at least 1")
    indices = sorted(index for micro in rank for index in micro)
    edges = [len(indices) * place // count for place in range(count + 1)]
    return tuple(tuple(indices[start:end]) for start, end in pairwise(edges))
