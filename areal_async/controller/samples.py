"""The samples in memory: finished answers that are being checked, wait for their batch, or are trained.

What always holds: what is in here is in the payload log too, so what leaves memory isn't lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_async.messages import SampleId, Train
from areal_async.rollout.workflow import Prompt, Sample


@dataclass(slots=True)
class Kept:
    """A finished answer. reward: once it is known."""

    sample: Sample
    attempt: int
    prompt: Prompt
    reward: float | None = None

    @property
    def length(self) -> int:
        """Response tokens."""
        return len(self.sample.token_ids) - self.sample.prompt_tokens


class Samples(dict[SampleId, Kept]):
    """Finished answers by id."""

    def of(self, command: Train) -> list[Kept]:
        """The samples of a batch, in its order."""
        return [self[entry.sample] for entry in command.samples]

    def part(self, command: Train, rank: int) -> list[npt.NDArray[np.generic]]:
        """The five arrays of one rank's part of a batch, as `messages.Train` describes them."""
        mine = [self[command.samples[index].sample].sample for index in _indices(command, rank)]
        if not mine:
            return [np.zeros(0, dtype) for dtype in (np.int32, np.int32, np.uint8, np.float32, np.int32)]
        return [
            np.array([len(sample.token_ids) for sample in mine], np.int32),
            np.concatenate([sample.token_ids for sample in mine]),
            np.concatenate([sample.loss_mask for sample in mine]),
            np.concatenate([sample.logprobs for sample in mine]),
            np.concatenate([sample.versions for sample in mine]),
        ]


def _indices(command: Train, rank: int) -> Iterator[int]:
    for minibatch in command.minibatches:
        for microbatch in minibatch.ranks[rank]:
            yield from microbatch
