"""The roofline's formulas, with numbers worked out by hand."""

from dataclasses import replace

import pytest

from areal_async.simulate import hardware
from areal_async.simulate.hardware import GPUS, SHAPES, Gpu, Shape

H800 = Gpu(989.4e12, 3350e9, 80e9)
SMALL = SHAPES["r1-distill-qwen-1.5b"]
SHARES = {"bandwidth_share": 1.0, "decode_mfu": 1.0, "prefill_mfu": 1.0, "overhead_s": 0.0}
MLP = {"1.5b": 8960, "7b": 18944, "14b": 13824, "32b": 27648}  # intermediate_size of each config.json


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_follow_from_the_shapes(name):
    """Qwen2: attention with biases on q, k and v, a gated MLP, two norms a layer and one at the end."""
    shape = SHAPES[name]
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * shape.hidden * q + q + 2 * (shape.hidden * kv + kv)
    layer = attention + 3 * shape.hidden * MLP[name.rpartition("-")[2]] + 2 * shape.hidden
    assert shape.parameters == shape.layers * layer + shape.hidden + 2 * shape.vocabulary * shape.hidden


def test_of_the_small_model():
    assert SMALL.multiplied == 1_543_714_304  # Qwen2.5-1.5B's 1.54 B, whose embeddings are tied
    assert SMALL.kv == 28 * 1024  # configs/areal-paper-1.5b.yaml: 28 KiB of KV cache a token
    assert replace(SMALL, tied=True).multiplied == SMALL.parameters
    assert hardware.cache_tokens(H800, SMALL, gpus=1, memory_share=0.9) == 2_387_200  # (72 GB - 3.554 GB) / 28 KiB


def test_a_server_on_one_h800():
    server = hardware.server_model(H800, SMALL, gpus=1, context=0.0, max_running=8, cache=9, **SHARES)
    assert server.weights_s == pytest.approx(0.92162e-3, rel=1e-4)  # 3.0874 GB / 3350 GB/s
    assert server.context_s == pytest.approx(8.5588e-9, rel=1e-4)  # 28,672 B / 3350 GB/s
    assert server.sequence_s == pytest.approx(3.1205e-6, rel=1e-4)  # 2 · 1.5437e9 / 989.4e12
    assert server.prefill_s == server.sequence_s
    # with short contexts arithmetic takes over at peak FLOP/s over bandwidth sequences: the ridge of two bytes a weight
    ridge = 989.4e12 / 3350e9
    assert server.weights_s / server.sequence_s == pytest.approx(ridge)
    assert server.step_s(int(ridge) + 1, 0) > server.step_s(int(ridge), 0) == server.weights_s


def test_a_server_of_several_gpus_shares_everything_but_the_overhead():
    kwargs = {**SHARES, "overhead_s": 0.5}
    one, four = (
        hardware.server_model(H800, SMALL, gpus=gpus, context=100.0, max_running=8, cache=9, **kwargs)
        for gpus in (1, 4)
    )
    assert four.overhead_s == one.overhead_s == 0.5
    for name in ("weights_s", "context_s", "sequence_s", "prefill_s"):
        assert getattr(one, name) == pytest.approx(4 * getattr(four, name))


def test_shares_of_the_peak_divide():
    half = {"bandwidth_share": 0.5, "decode_mfu": 0.25, "prefill_mfu": 0.1, "overhead_s": 0.0}
    full, slow = (
        hardware.server_model(H800, SMALL, gpus=1, context=0.0, max_running=8, cache=9, **kwargs)
        for kwargs in (SHARES, half)
    )
    assert slow.weights_s == pytest.approx(2 * full.weights_s)
    assert slow.context_s == pytest.approx(2 * full.context_s)
    assert slow.sequence_s == pytest.approx(4 * full.sequence_s)
    assert slow.prefill_s == pytest.approx(10 * full.prefill_s)


def test_prefill_has_attention():
    """4 · layers · width operations for each token before: 172,032; 10,000 of them are 56 % of 2 · 1.54e9."""
    near, far = (
        hardware.server_model(H800, SMALL, gpus=1, context=context, max_running=8, cache=9, **SHARES)
        for context in (0.0, 10_000.0)
    )
    assert far.prefill_s / near.prefill_s == pytest.approx(1 + 172_032e4 / (2 * 1_543_714_304))


def train(**changes):
    values = {
        "ranks": 8, "gpus_per_rank": 1, "mfu": 0.5, "minibatches": 1, "checkpointing": False, "zero": 0, "link": None,
        "step_s": 0.0, "microbatch_s": 0.0, "publish_s": 0.0, "checkpoint_s": 0.0,
    } | changes  # fmt: skip
    return hardware.trainer_model(H800, SMALL, **values)


def test_a_trainer():
    model = train()
    assert model.token_s == pytest.approx(18.7232e-6, rel=1e-4)  # 6 · 1.5437e9 / (989.4e12 · 0.5)
    assert model.pair_s == pytest.approx(3 * 0.5 * 172_032 / (989.4e12 * 0.5))
    assert model.minibatch_s == pytest.approx(1_777_088_000 * 30 / (8 * 3350e9))  # AdamW's 30 bytes a parameter
    assert model.prox_share == 0.0
    assert train(gpus_per_rank=2).token_s == pytest.approx(model.token_s / 2)


def test_a_trainer_with_more_passes():
    model, again = train(minibatches=4), train(minibatches=4, checkpointing=True)
    assert model.prox_share == pytest.approx(1 / 3)
    assert again.prox_share == pytest.approx(1 / 4)
    assert again.token_s == pytest.approx(model.token_s * 4 / 3)
    assert again.token_s * again.prox_share == pytest.approx(model.token_s * model.prox_share)  # one forward pass


def test_ranks_wait_where_gradients_are_summed():
    assert [train(zero=stage).ranks_wait for stage in range(4)] == [
        "minibatch",
        "minibatch",
        "microbatch",
        "microbatch",
    ]


def test_gradients_travel_in_a_ring():
    """Two halves, each (n − 1) / n of 3.554 GB over 50 GB/s: 124 ms."""
    assert train(link=50e9).minibatch_s - train().minibatch_s == pytest.approx(0.12440, rel=1e-4)
    assert train(link=50e9, ranks=1).minibatch_s == train(ranks=1).minibatch_s


def test_a_model_of_ones_own():
    shape = Shape(1e6, 2, 64, 4, 4, 16, 100, True, weight_bytes=4, kv_bytes=4)
    assert shape.weights == 4e6
    assert shape.kv == 2 * 2 * 4 * 16 * 4
    assert hardware.moved_s(shape, gpus=2, bytes_per_s=1e6) == 2.0


def test_data_sheets():
    assert {name: sheet[1] for name, sheet in GPUS.items()} == {"A100": 2039, "H100": 3350, "H200": 4800, "H800": 3350}
    assert GPUS["H800"] == GPUS["H100"]
