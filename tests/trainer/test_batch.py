"""What a rank is sent becomes micro-batches: the right tokens, whatever their values; nothing that can't be right."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from areal_async.engines.deepspeed.batch import MicroBatch, micro_batches
from areal_async.errors import TrainerError
from areal_async.messages import Minibatch, Train, TrainSample

from .world import make_batch

CPU = torch.device("cpu")
A, B, C, EOS, PROMPT = 5, 6, 7, 2, 9


def send(*samples: tuple[list[int], list[int]], micros: tuple[tuple[int, ...], ...]) -> list[MicroBatch]:
    """samples: (prompt, response), all response tokens trained; one minibatch on one rank."""
    train = Train(
        step=0,
        branch=0,
        groups=(0,),
        samples=tuple(TrainSample(f"0.{i}", 0, 1.0 + i) for i in range(len(samples))),
        minibatches=(Minibatch(1.0, (micros,)),),
    )
    mask = np.concatenate([[0] * len(prompt) + [1] * len(response) for prompt, response in samples]).astype(np.uint8)
    arrays = [
        np.array([len(prompt) + len(response) for prompt, response in samples], dtype=np.int32),
        np.concatenate([prompt + response for prompt, response in samples]).astype(np.int32),
        mask,
        np.where(mask, -0.5, 0).astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32),
    ]
    return micro_batches(train, 0, arrays, CPU)[0]


def test_p16_masks_come_from_lengths() -> None:
    [micro] = send(([PROMPT], [A, B, EOS]), ([PROMPT, EOS], [A, B, C]), micros=((0, 1),))
    assert micro.targets.tolist() == [A, B, EOS, A, B, C]  # the sampled EOS counts, one in the prompt doesn't
    assert micro.mask.all()
    assert micro.rows.tolist() == [0, 1, 2, 5, 6, 7]
    assert len(micro.token_ids) == 9  # and there is no padding that could count
    assert micro.sequence.tolist() == [0, 0, 0, 1, 1, 1]
    assert micro.advantage.tolist() == [1, 1, 1, 2, 2, 2]


def test_a_dummy_and_a_sample_without_loss_tokens_take_part_with_nothing() -> None:
    micros = send(([PROMPT, A], []), ([PROMPT], [A]), ([PROMPT], []), micros=((0,), (), (1,), (2,)))
    assert [int(micro.mask.sum()) for micro in micros] == [0, 0, 1, 0]
    for micro in micros:
        assert len(micro.rows) == len(micro.targets) == len(micro.behav) == 1
        assert int(micro.rows.max()) < len(micro.token_ids)


def test_every_loss_token_arrives_once_however_it_is_split() -> None:
    seen = set()
    for ranks, per_micro in ((1, 100), (1, 1), (2, 3), (3, 2)):
        train, arrays = make_batch(samples=12, minibatches=2, ranks=ranks, per_micro=per_micro)
        parts = [p for rank in range(ranks) for m in micro_batches(train, rank, arrays[rank], CPU) for p in m]
        tokens = [
            token
            for part in parts
            for token in zip(part.targets[part.mask].tolist(), part.behav[part.mask].tolist(), strict=True)
        ]
        seen.add(tuple(sorted(tokens)))
        assert len(tokens) == sum(minibatch.divisor for minibatch in train.minibatches)
    assert len(seen) == 1


def first_of_second(arrays: list[np.ndarray]) -> int:
    return int(arrays[0][0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a: a[2].__setitem__(first_of_second(a), 1), r"sample 1\.0: the loss mask is set for its first token"),
        (lambda a: a[3].__setitem__(np.flatnonzero(a[2])[0], np.nan), r"sample 0\.0: .*not finite"),
        (lambda a: a[4].__setitem__(np.flatnonzero(a[2])[-1], 1), r"sample 3\.0: .*version that step 0 can't know"),
        (lambda a: a.__setitem__(1, a[1][:-1]), "the arrays hold 4 with"),
        (lambda a: a.__setitem__(0, a[0][:-1]), "names 4 samples, the arrays hold 3"),
        (lambda a: a.__setitem__(3, a[3].astype(np.float64)), "arrays of .*float64"),
    ],
)
def test_what_can_not_be_right_is_refused(spoil: Callable[[list[np.ndarray]], None], message: str) -> None:
    train, [arrays] = make_batch(samples=4, minibatches=1, ranks=1, per_micro=4)
    spoil(arrays)
    with pytest.raises(TrainerError, match=message):
        micro_batches(train, 0, arrays, CPU)
