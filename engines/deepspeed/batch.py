"""What a rank is sent for a step, checked and turned into packed micro-batches.

What always holds: loss tokens are found by the mask and the lengths that came with the batch, never by token values; a
micro-batch has at least one row of logits, so that an empty one (a dummy) or one without loss tokens takes part in
forward and backward like any other, with nothing in its loss; nothing of a batch that can't be right is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_async.engines.deepspeed.packed import Packing, packing_of
from areal_async.errors import TrainerError
from areal_async.messages import Train

Array: TypeAlias = npt.NDArray[np.generic]
Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int32]

ARRAYS: Final = {  # of `messages.Train`, in their order
    "lengths": np.dtype(np.int32),
    "token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of T tokens, of which N are loss tokens (or one that `mask` leaves out, if there are none).

    token_ids int64 [T]. rows int64 [N]: places whose logits predict the loss tokens; targets int64 [N]: these tokens.
    behav, advantage float32 [N]; versions, sequence int64 [N]; mask bool [N]. begin: place of its first token in the
    arrays that came.
    """

    token_ids: Tensor
    packing: Packing
    rows: Tensor
    targets: Tensor
    mask: Tensor
    behav: Tensor
    advantage: Tensor
    versions: Tensor
    sequence: Tensor
    begin: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's arrays, and where each of its samples begins (one more entry: the end)."""

    lengths: Integers
    token_ids: Integers
    loss_mask: npt.NDArray[np.bool_]
    logprobs: Floats
    versions: Integers
    starts: npt.NDArray[np.int64]


def micro_batches(train: Train, rank: int, arrays: Sequence[Array], device: torch.device) -> list[list[MicroBatch]]:
    """This rank's micro-batches, minibatch by minibatch. Raises TrainerError if header and arrays don't fit."""
    part = _part(train, rank, arrays)
    result, position = [], 0
    for minibatch in train.minibatches:
        own = []
        for indices in minibatch.ranks[rank]:
            advantages = np.array([train.samples[i].advantage for i in indices], dtype=np.float32)
            own.append(_micro_batch(part, position, advantages, device) if indices else _dummy(device))
            position += len(indices)
        result.append(own)
    return result


def _part(train: Train, rank: int, arrays: Sequence[Array]) -> _Part:
    where = f"step {train.step}, rank {rank}"
    if [array.dtype for array in arrays] != list(ARRAYS.values()):
        raise TrainerError(f"{where}: arrays of {[str(a.dtype) for a in arrays]} came, not {', '.join(ARRAYS)}")
    ids = [train.samples[i].sample for m in train.minibatches for indices in m.ranks[rank] for i in indices]
    lengths, token_ids, versions = (arrays[i].astype(np.int32, copy=False) for i in (0, 1, 4))
    loss_mask, logprobs = arrays[2].astype(bool), arrays[3].astype(np.float32, copy=False)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if len(lengths) != len(ids) or np.any(lengths < 1) or any(len(array) != starts[-1] for array in arrays[1:]):
        raise TrainerError(
            f"{where}: the header names {len(ids)} samples, the arrays hold {len(lengths)} with {starts[-1]} tokens "
            f"(arrays of {[len(array) for array in arrays[1:]]})"
        )
    first = np.isin(np.arange(len(loss_mask)), starts)
    unknown = (versions < 0) | (versions > train.step)
    wrong = {
        "the loss mask is set for its first token, which nothing predicts": loss_mask & first,
        "a log-probability of the sampling policy is not finite": loss_mask & ~np.isfinite(logprobs),
        f"a token is of a version that step {train.step} can't know": loss_mask & unknown,
    }
    for what, places in wrong.items():
        if places.any():
            sample = ids[int(np.searchsorted(starts, np.flatnonzero(places)[0], side="right")) - 1]
            raise TrainerError(f"{where}, sample {sample}: {what}. Nothing was trained with this batch")
    return _Part(lengths, token_ids, loss_mask, logprobs, versions, starts)


def _micro_batch(part: _Part, first: int, advantages: Floats, device: torch.device) -> MicroBatch:
    """Samples first … first + len(advantages) − 1 of the part as one packed row."""
    last = first + len(advantages)
    span = slice(part.starts[first], part.starts[last])
    lengths = part.lengths[first:last]
    places = np.flatnonzero(part.loss_mask[span])
    real = np.ones(len(places), dtype=bool)
    if not len(places):
        places, real = np.array([min(1, int(lengths.sum()) - 1)]), np.array([False])
    sequence = np.repeat(np.arange(len(advantages)), lengths)[places]
    token_ids = part.token_ids[span].astype(np.int64)

    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        token_ids=tensor(token_ids),
        packing=packing_of(lengths.tolist(), device),
        rows=tensor(np.maximum(places - 1, 0)),
        targets=tensor(token_ids[places]),
        mask=tensor(real),
        behav=tensor(part.logprobs[span][places]),
        advantage=tensor(advantages[sequence]),
        versions=tensor(part.versions[span][places].astype(np.int64)),
        sequence=tensor(sequence),
        begin=int(part.starts[first]),
    )


def _dummy(device: torch.device) -> MicroBatch:
    """A row of one token whose loss is masked: it costs next to nothing and makes the same calls as a real one."""
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    nothing = torch.zeros(1, dtype=torch.float32, device=device)
    return MicroBatch(
        token_ids=zeros, packing=packing_of([1], device), rows=zeros, targets=zeros, mask=zeros.bool(),
        behav=nothing, advantage=nothing, versions=zeros, sequence=zeros, begin=0,
    )  # fmt: skip
