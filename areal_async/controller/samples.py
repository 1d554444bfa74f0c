"""The samples in memory: finished answers that are being checked, wait for their batch, or are trained.

What always holds: what is in here is in the payload log too, so what leaves memory isn't lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from areal_async.messages import SampleId, Train, Version
from areal_async.rollout.workflow import Prompt, Sample


@dataclass(slots=True)
class Kept:
    """A finished answer. reward: once it is known. by_version: how many of its trained tokens each version drew;
    counted once, when it comes, so that a step of millions of tokens needn't look at them."""

    sample: Sample
    attempt: int
    prompt: Prompt
    reward: float | None = None
    by_version: dict[Version, int] = field(init=False)

    def __post_init__(self) -> None:
        self.by_version = tokens_by_version(self.sample)

    @property
    def length(self) -> int:
        """Response tokens."""
        return len(self.sample.token_ids) - self.sample.prompt_tokens


def tokens_by_version(sample: Sample) -> dict[Version, int]:
    """Runs of equal versions are added up: an answer has few of them."""
    versions = sample.versions[sample.loss_mask != 0]
    firsts = np.flatnonzero(np.diff(versions, prepend=-1))
    counts: dict[Version, int] = {}
    for version, tokens in zip(versions[firsts].tolist(), np.diff(firsts, append=len(versions)).tolist(), strict=True):
        counts[version] = counts.get(version, 0) + tokens
    return counts


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
