"""Packed rows: sequences one after another in one row of tokens, with no padding in any linear layer.

The attention function `areal_packed`, registered with transformers' `AttentionInterface`, keeps them apart: on a GPU
in half precision by torch's variable-length flash attention, elsewhere by padding inside the attention alone, where
sequences of similar length share a padded batch.

What always holds: no token sees another sequence or a later token; position ids start at 0 in each sequence; the
result is that of each sequence alone. Models whose layers mix tokens in another way (state spaces, learned
convolutions, attention of their own) don't satisfy this: `model.check_packing` finds them before training begins.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from areal_async.errors import TrainerError

ATTENTION: Final = "areal_packed"

# Sequences share a padded batch if the shortest has at least this share of the longest's tokens: then at most
# three quarters of the batch's score matrix are padding, and there are few batches.
BUCKET_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length. tokens: int64, their places in the packed row; slots: the places of the same tokens
    in a padded batch of `count` × `longest`."""

    count: int
    longest: int
    tokens: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences lie in a row of T tokens.

    starts: int32 [S + 1], first token of each sequence, then T. positions: int64 [T], place within the sequence.
    longest: tokens of the longest sequence. buckets: all sequences, grouped by length; for the padded attention only.
    """

    starts: Tensor
    positions: Tensor
    longest: int
    buckets: tuple[Bucket, ...]


def packing_of(lengths: list[int], device: torch.device) -> Packing:
    """How sequences of these lengths (at least one, each at least 1 token) lie in a row, in the given order."""
    size = torch.tensor(lengths, dtype=torch.int64)
    ends = size.cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    positions = torch.arange(int(ends[-1])) - starts[:-1].repeat_interleave(size)
    return Packing(
        starts=starts.to(torch.int32).to(device),
        positions=positions.to(device),
        longest=max(lengths),
        buckets=tuple(_bucket(members, size, starts, device) for members in _by_length(lengths)),
    )


def packed_logits(model: Module, token_ids: Tensor, packing: Packing, rows: Tensor) -> Tensor:
    """Logits [N, vocabulary] that follow the tokens at `rows` (int64 [N]) of the packed row token_ids (int64 [T])."""
    output = model(
        input_ids=token_ids[None],
        position_ids=packing.positions[None],
        logits_to_keep=rows,
        use_cache=False,
        packing=packing,
    )
    logits: Tensor = output.logits[0]
    return logits


def register() -> None:
    """Make `areal_packed` known to transformers. Without a mask function of that name, it builds no masks for it."""
    AttentionInterface.register(ATTENTION, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row, as transformers calls it.

    query [1, heads, T, d], key and value [1, key heads, T, d] -> [1, T, heads, d]. Raises TrainerError for what it
    doesn't have: soft-capped scores, sinks, dropout, or a model that doesn't hand its arguments on to its attention.
    """
    if packing is None or softcap is not None or s_aux is not None or dropout:
        lacks = "hand its arguments on to its attention" if packing is None else "attend without softcap/sinks/dropout"
        raise TrainerError(
            f"{type(module).__name__} does not {lacks}, so it can't be trained packed: use another model"
        )
    window = sliding_window if sliding_window is not None and sliding_window < packing.longest else None
    rows = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _variable_length(*rows, packing, scaling, window)[None], None
    return _padded(*rows, packing, scaling, window)[None], None


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # CUDA only

    before = -1 if window is None else window - 1
    result = varlen_attn(
        query, key, value, packing.starts, packing.starts, packing.longest, packing.longest,
        scale=scaling, window_size=(before, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(result, Tensor)
    return result


def _padded(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """query [T, heads, d], key and value [T, key heads, d] -> [T, heads, d]."""
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for bucket in packing.buckets:
        # Padding stands behind the tokens, so the causal mask hides it from them.
        result = scaled_dot_product_attention(
            _Pad.apply(query, bucket), _Pad.apply(key, bucket), _Pad.apply(value, bucket),
            attn_mask=None if window is None else _window_mask(bucket.longest, window, query.device),
            is_causal=window is None, scale=scaling, enable_gqa=grouped,
        )  # fmt: skip
        parts.append(result)
    joined: Tensor = _Unpad.apply(query.shape, packing.buckets, *parts)
    return joined


class _Pad(torch.autograd.Function):
    """Row [T, heads, d] -> padded batch [count, heads, longest, d]. Its gradient is a plain gather; autograd's own
    (an accumulating scatter) takes several times as long."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, row: Tensor, bucket: Bucket) -> Tensor:
        ctx.bucket, ctx.tokens = bucket, len(row)
        batch = row.new_zeros(bucket.count * bucket.longest, *row.shape[1:])
        batch[bucket.slots] = row[bucket.tokens]
        return batch.unflatten(0, (bucket.count, bucket.longest)).transpose(1, 2)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        flat = grad.transpose(1, 2).flatten(0, 1)
        row = flat.new_zeros(ctx.tokens, *flat.shape[1:])
        row[ctx.bucket.tokens] = flat[ctx.bucket.slots]
        return row, None


class _Unpad(torch.autograd.Function):
    """Padded batches [count, heads, longest, d] of all buckets -> the row [T, heads, d]."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, shape: torch.Size, buckets: tuple[Bucket, ...], *parts: Tensor
    ) -> Tensor:
        ctx.buckets = buckets
        row = parts[0].new_empty(shape)
        for bucket, part in zip(buckets, parts, strict=True):
            row[bucket.tokens] = part.transpose(1, 2).flatten(0, 1)[bucket.slots]
        return row

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = []
        for bucket in ctx.buckets:
            batch = grad.new_zeros(bucket.count * bucket.longest, *grad.shape[1:])
            batch[bucket.slots] = grad[bucket.tokens]
            parts.append(batch.unflatten(0, (bucket.count, bucket.longest)).transpose(1, 2))
        return None, None, *parts


def _by_length(lengths: list[int]) -> list[list[int]]:
    """Numbers of the sequences, longest first, in groups of similar length."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[index] < BUCKET_SHARE * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(index)
    return groups


def _bucket(members: list[int], size: Tensor, starts: Tensor, device: torch.device) -> Bucket:
    index = torch.tensor(members)
    longest = int(size[index].max())
    place = torch.arange(longest).expand(len(members), longest)
    real = place < size[index, None]
    tokens = (place + starts[index, None])[real]
    slots = (place + torch.arange(len(members))[:, None] * longest)[real]
    return Bucket(len(members), longest, tokens.to(device), slots.to(device))


def _window_mask(longest: int, window: int, device: torch.device) -> Tensor:
    """bool [longest, longest]: each token sees itself and the window − 1 before it."""
    ones = torch.ones(longest, longest, dtype=torch.bool, device=device)
    return ones.tril() & ~ones.tril(-window)
