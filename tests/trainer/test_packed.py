"""Packed rows come out as each sequence alone, for models of several families."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_async.engines.deepspeed import packed
from areal_async.engines.deepspeed.losses import log_probs
from areal_async.engines.deepspeed.model import load_model
from areal_async.errors import TrainerError

from .world import CONFIGS, STATE_SPACE, VOCABULARY, save_tiny_model

CPU = torch.device("cpu")
LENGTHS = [1, 9, 4, 30, 2, 13]


def alone(model: PreTrainedModel, row: Tensor, lengths: list[int]) -> Tensor:
    """Log-probabilities of all tokens but the first of each sequence, by transformers' own attention."""
    parts = []
    for part in row.split(lengths):
        logits = model(input_ids=part[None], use_cache=False).logits[0, :-1]
        parts.append(logits.log_softmax(-1).gather(1, part[1:, None])[:, 0])
    return torch.cat(parts)


def together(model: PreTrainedModel, row: Tensor, lengths: list[int]) -> Tensor:
    packing = packed.packing_of(lengths, CPU)
    places = (packing.positions > 0).nonzero()[:, 0]
    return log_probs(packed.packed_logits(model, row, packing, places - 1), row[places], 1.0)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_is_as_one_by_one(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, CONFIGS[name])
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ours = load_model(str(folder), "float32", CPU)
    torch.manual_seed(1)
    row = torch.randint(0, VOCABULARY, (sum(LENGTHS),))
    weights = torch.randn(sum(LENGTHS) - len(LENGTHS))
    results = [alone(plain, row, LENGTHS), together(ours, row, LENGTHS)]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=2e-5)
    for result in results:
        (result * weights).sum().backward()
    for (where, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=2e-4, msg=lambda m, w=where: f"{w}: {m}")


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_each_token_has_one_slot_and_buckets_are_even(lengths: list[int]) -> None:
    packing = packed.packing_of(lengths, CPU)
    places = torch.cat([bucket.tokens for bucket in packing.buckets])
    assert sorted(places.tolist()) == list(range(sum(lengths)))
    assert packing.positions.tolist() == [p for length in lengths for p in range(length)]
    assert packing.starts.tolist() == [0, *itertools.accumulate(lengths)]
    for bucket in packing.buckets:
        assert len(set(bucket.slots.tolist())) == len(bucket.slots) <= bucket.count * bucket.longest
        # a token's place in its padded row is its place in its sequence
        assert (bucket.slots % bucket.longest == packing.positions[bucket.tokens]).all()
        assert len(bucket.slots) >= packed.BUCKET_SHARE * bucket.count * bucket.longest


def test_a_model_that_mixes_tokens_otherwise_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, STATE_SPACE)
    with pytest.raises(TrainerError, match="Mamba"):
        load_model(str(folder), "float32", CPU)


def test_a_leak_between_sequences_is_seen_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path, CONFIGS["llama"])
    monkeypatch.setattr(
        packed, "_by_length", lambda lengths: [[0]] if len(lengths) == 1 else [list(range(len(lengths)))]
    )
    real = packed._bucket

    def one_long_sequence(members: list[int], size: Tensor, starts: Tensor, device: torch.device) -> packed.Bucket:
        total = int(starts[-1])
        if len(members) == 1:
            return real(members, size, starts, device)
        return packed.Bucket(1, total, torch.arange(total), torch.arange(total))

    monkeypatch.setattr(packed, "_bucket", one_long_sequence)
    with pytest.raises(TrainerError, match="see other sequences"):
        load_model(str(folder), "float32", CPU)


def test_scores_that_we_can_not_compute_are_refused() -> None:
    row = torch.zeros(1, 1, 3, 4)
    packing = packed.packing_of([3], CPU)
    for extra in ({"softcap": 30.0}, {"s_aux": torch.zeros(1)}, {"dropout": 0.1}):
        with pytest.raises(TrainerError, match="packed"):
            packed.packed_attention(torch.nn.Identity(), row, row, row, None, packing=packing, **extra)
    with pytest.raises(TrainerError, match="hand its arguments on"):
        packed.packed_attention(torch.nn.Identity(), row, row, row, None)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5])
def test_variable_length_attention_is_as_the_padded_one(window: int | None) -> None:
    device = torch.device("cuda")
    packing = packed.packing_of(LENGTHS, device)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(sum(LENGTHS), heads, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    results, gradients = [], []
    for function in (packed._variable_length, packed._padded):
        result = function(query, key, value, packing, 0.125, window)
        gradients.append(torch.autograd.grad(result.float().square().sum(), (query, key, value)))
        results.append(result)
    torch.testing.assert_close(results[0], results[1], rtol=0.02, atol=0.02)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.1, atol=0.1)
