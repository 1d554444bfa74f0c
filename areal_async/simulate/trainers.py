"""How long the trainer takes for a step, from the very batch that the core has formed.

What always holds: pure; a micro-batch, or a whole minibatch (`ranks_wait`), takes as long as the rank that has most to
do in it, since gradients are summed over all of them; a micro-batch without a sequence takes `microbatch_s` alone.
"""

from collections.abc import Sequence
from itertools import pairwise, zip_longest

from areal_async.messages import Minibatch, Train
from areal_async.simulate.models import TrainerModel


class Work:
    """A step that is under way, and slower while servers generate.

    command: that asked for it. seconds: that it takes if no server generates. beside: times as long while all of them
    do; with a share of them in between. due: number of the happening at which it ends; older ones are void.
    """

    __slots__ = ("_at", "_beside", "_left", "_share", "command", "due")

    def __init__(self, command: Train, seconds: float, beside: float, now: float) -> None:
        self.command = command
        self._left = seconds
        self._beside = beside
        self._at = now
        self._share = 0.0
        self.due = -1

    def end(self, now: float, share: float) -> float:
        """When it ends, if this share of the servers generates from now on."""
        self._left = max(0.0, self._left - (now - self._at) / self._slower)
        self._at, self._share = now, share
        return now + self._left * self._slower

    @property
    def _slower(self) -> float:
        return 1 + (self._beside - 1) * self._share


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
