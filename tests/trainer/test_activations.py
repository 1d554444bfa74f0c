"""Activations that are computed again: the same numbers, and no dropout though layers are in training mode."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Dropout
from transformers import OPTConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from areal_async.engines.deepspeed.losses import log_probs
from areal_async.engines.deepspeed.model import load_model, save_activations
from areal_async.engines.deepspeed.packed import packed_logits, packing_of
from areal_async.errors import TrainerError

from .world import CONFIGS, SHAPE, VOCABULARY, save_tiny_model

CPU = torch.device("cpu")
LENGTHS = [1, 9, 4, 30, 2, 13]
OPT = OPTConfig(
    **SHAPE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.1, pad_token_id=0,
    bos_token_id=0, eos_token_id=1,
)  # fmt: skip


def gradient(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a packed row's tokens, and the gradient of their sum."""
    torch.manual_seed(1)
    row = torch.randint(0, VOCABULARY, (sum(LENGTHS),))
    packing = packing_of(LENGTHS, CPU)
    places = (packing.positions > 0).nonzero()[:, 0]
    result, _ = log_probs(packed_logits(model, row, packing, places - 1), row[places], 1.0)
    model.zero_grad()
    result.sum().backward()
    return result.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_the_same_and_layers_run_twice(name: str, tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path, CONFIGS[name])), "float32", CPU)
    expected, right = gradient(model)
    save_activations(model, "m")
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    runs: list[Any] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: runs.append(1))
    values, found = gradient(model)
    assert len(runs) == 2 * len(layers)
    assert torch.equal(values, expected)
    assert float((found - right).abs().max() / right.abs().max()) < 1e-6
    assert not any(module.training for module in model.modules() if isinstance(module, Dropout))


def test_nothing_is_kept_between_layers(tmp_path: Path) -> None:
    """What autograd holds on to between forward and backward shrinks to the layers' inputs and the last logits."""
    model = load_model(str(save_tiny_model(tmp_path, CONFIGS["llama"])), "float32", CPU)
    held = []
    for prepare in (lambda: None, lambda: save_activations(model, "m")):
        prepare()
        sizes: list[int] = []
        parameters = {p.data_ptr() for p in model.parameters()}

        def pack(tensor: Tensor, sizes: list[int] = sizes, parameters: set[int] = parameters) -> Tensor:
            if tensor.data_ptr() not in parameters:
                sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            row = torch.arange(300) % VOCABULARY
            packed_logits(model, row, packing_of([300], CPU), torch.arange(300)).sum()
        held.append(sum(sizes))
    assert held[1] < held[0] / 4


def test_a_layer_that_drops_by_itself_is_refused(tmp_path: Path) -> None:
    """OPT's layers drop by their own training flag; in evaluation mode the model is fine."""
    model = load_model(str(save_tiny_model(tmp_path, OPT)), "float32", CPU)
    with pytest.raises(TrainerError, match=r"the layers of OPTForCausalLM compute something else in training mode"):
        save_activations(model, "m")


def test_a_model_that_can_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(save_tiny_model(tmp_path, CONFIGS["llama"])), "float32", CPU)
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(TrainerError, match="does not support gradient checkpointing"):
        save_activations(model, "m")
