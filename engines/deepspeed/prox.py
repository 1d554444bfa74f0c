"""log π_prox of a step's tokens, put back to where they stand in the arrays that came: for people, who look at it.

What always holds: it only takes what the step has computed for its loss; nothing is computed for it, and no gradient,
loss or figure depends on it. Packing is undone: entry t of the array is of token t of `messages.Train`'s arrays, and
NaN where nobody has it (no loss token, or no pass under the step's first weights).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_async.engines.deepspeed.batch import Array, MicroBatch


class Kept:
    """Of one step. lengths: of this rank's samples, as they came."""

    def __init__(self, lengths: Array) -> None:
        self._lengths = lengths
        self._parts: list[tuple[MicroBatch, Tensor]] = []

    def add(self, part: MicroBatch, prox: Tensor) -> None:
        """prox: [N], without gradient. Its device isn't waited for."""
        self._parts.append((part, prox))

    def arrays(self) -> tuple[Array, Array]:
        """Those of `messages.StepDone`: lengths int32 [S], log π_prox float32 [T]."""
        lengths = self._lengths.astype(np.int32, copy=False)
        whole = np.full(int(lengths.sum()), np.nan, dtype=np.float32)
        if self._parts:
            real = _joined([part.mask for part, _ in self._parts])
            places = _joined([part.begin + part.rows + 1 for part, _ in self._parts])
            prox = _joined([prox.to(torch.float32) for _, prox in self._parts])
            whole[places[real]] = prox[real]
        return lengths, whole


def _joined(tensors: Sequence[Tensor]) -> npt.NDArray[np.generic]:
    """On the CPU, by one transfer."""
    found: npt.NDArray[np.generic] = torch.cat(list(tensors)).cpu().numpy()
    return found
