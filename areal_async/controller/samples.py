"""The samples of a run: finished answers that are being checked, wait for their batch, or are trained.

What always holds: what is in memory is in the payload log too, so what leaves memory isn't lost: it is read again
where it is asked for (training went back, the run was resumed), with the same arrays bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from areal_async.errors import LogError
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Failed,
    FinishReason,
    Release,
    RolledBack,
    Rules,
    SampleDone,
    SampleId,
    Scored,
    StartSample,
    Train,
    TrainSample,
    Version,
)
from areal_async.rollout.workflow import Prompt, Sample
from areal_async.wire.arrays import Array


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


@dataclass(slots=True)
class _Outline:
    """A finished answer without its arrays."""

    attempt: int
    position: int
    prompt_tokens: int
    finish: FinishReason
    reward: float | None


class Samples(dict[SampleId, Kept]):
    """Finished answers by id. The dict holds those in memory (`in`, `pop`); `samples[id]` also has those that have
    left it, until they are released.

    read: the arrays of a sample's attempt, from the log. prompt_at: the prompt at a position of the data order.
    """

    def __init__(self, read: Callable[[SampleId, int], list[Array]], prompt_at: Callable[[int], Prompt | None]) -> None:
        super().__init__()
        self._read = read
        self._prompt_at = prompt_at
        self._started: dict[SampleId, tuple[int, int]] = {}  # attempt and position
        self._outlines: dict[SampleId, _Outline] = {}

    def can_be_read(self, sample: SampleId) -> bool:
        """It has ended and was not released."""
        return sample in self._outlines

    def seen(self, event: AnyEvent, commands: Sequence[AnyCommand]) -> None:
        """An event has been handled and gave these commands: now, or before a resume."""
        match event:
            case SampleDone():
                attempt, position = self._started.get(event.sample, (-1, -1))
                if attempt == event.attempt:
                    del self._started[event.sample]
                    self._outlines[event.sample] = _Outline(
                        attempt, position, event.prompt_tokens, event.finish, event.reward
                    )
            case Scored():
                outline = self._outlines.get(event.sample)
                if outline is not None and outline.attempt == event.attempt:
                    outline.reward = event.reward
            case Failed(of="sample"):
                if self._started.get(event.id, (-1, -1))[0] == event.attempt:
                    del self._started[event.id]
            case RolledBack(resumed=Rules()):
                self._started.clear()  # nobody is at work on them any more
        for command in commands:
            match command:
                case StartSample():
                    self._started[command.sample] = command.attempt, command.position
                case Cancel():
                    self._started.pop(command.sample, None)
                case Release():
                    for sample in command.samples:
                        self._outlines.pop(sample, None)

    def drop(self, samples: Iterable[SampleId]) -> None:
        """Their arrays leave memory."""
        for sample in samples:
            self.pop(sample, None)

    def __missing__(self, sample: SampleId) -> Kept:
        """Read it again, and have it in memory until it is popped. Raises LogError."""
        outline = self._outlines.get(sample)
        prompt = self._prompt_at(outline.position) if outline is not None else None
        if outline is None or prompt is None:
            raise LogError(f"sample {sample} is asked for, but it never ended, or was released for good")
        answer = from_log(self._read(sample, outline.attempt), outline.prompt_tokens, outline.finish)
        kept = self[sample] = Kept(answer, outline.attempt, prompt, outline.reward)
        return kept

    def of(self, command: Train) -> list[Kept]:
        """The samples of a batch, in its order."""
        return [self[entry.sample] for entry in command.samples]

    def part(self, command: Train, rank: int) -> list[npt.NDArray[np.generic]]:
        """The five arrays of one rank's part of a batch, as `messages.Train` describes them."""
        return joined([self[sample.sample].sample for sample in of_rank(command, rank)])


def of_rank(command: Train, rank: int) -> Iterator[TrainSample]:
    """The samples of one rank's part, in the order of its arrays."""
    for minibatch in command.minibatches:
        for microbatch in minibatch.ranks[rank]:
            for index in microbatch:
                yield command.samples[index]


def from_log(arrays: Sequence[Array], prompt_tokens: int, finish: FinishReason) -> Sample:
    """An answer again, of its arrays in the payload log."""
    token_ids, loss_mask, logprobs, versions = arrays
    return Sample(
        token_ids.astype(np.int32, copy=False),
        loss_mask.astype(np.uint8, copy=False),
        logprobs.astype(np.float32, copy=False),
        versions.astype(np.int32, copy=False),
        prompt_tokens,
        finish,
    )


def joined(samples: Sequence[Sample]) -> list[Array]:
    """The five arrays of `messages.Train` for these samples."""
    if not samples:
        return [np.zeros(0, dtype) for dtype in (np.int32, np.int32, np.uint8, np.float32, np.int32)]
    return [
        np.array([len(sample.token_ids) for sample in samples], np.int32),
        np.concatenate([sample.token_ids for sample in samples]),
        np.concatenate([sample.loss_mask for sample in samples]),
        np.concatenate([sample.logprobs for sample in samples]),
        np.concatenate([sample.versions for sample in samples]),
    ]
