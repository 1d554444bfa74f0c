"""The reference model: what the policy is kept near to, where `train.kl_coef` asks for it.

What always holds: it never changes, has no optimiser and no gradients, computes in the trainer's precision at the
sampling temperature, and is whole on each rank whatever the ZeRO stage (its forward needs no other rank): parameters ×
2 bytes (bfloat16) or × 4 (float32) on every rank, and the activations of one forward without a backward.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_async.engines.deepspeed.batch import MicroBatch
from areal_async.engines.deepspeed.losses import log_probs
from areal_async.engines.deepspeed.model import load_model
from areal_async.engines.deepspeed.packed import packed_logits
from areal_async.errors import TrainerError
from areal_async.messages import TrainerSpec


class Reference:
    """A frozen model."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        self._model = model.requires_grad_(False)
        self._temperature = temperature

    @torch.no_grad()
    def log_probs(self, part: MicroBatch) -> Tensor:
        """float32 [N]: of the micro-batch's loss tokens."""
        logits = packed_logits(self._model, part.token_ids, part.packing, part.rows)
        return log_probs(logits, part.targets, self._temperature)[0]


def load_reference(spec: TrainerSpec, policy: PreTrainedModel, device: torch.device) -> Reference:
    """The model in `spec.reference_path`. Raises TrainerError if it doesn't speak the policy's tokens."""
    model = load_model(spec.reference_path, spec.dtype, device)
    words, own = (m.get_input_embeddings().num_embeddings for m in (model, policy))
    if words != own:
        raise TrainerError(
            f"train.reference_path: {spec.reference_path} has {words} tokens in its vocabulary, the model that is "
            f"trained ({spec.model_path}) {own}; use a reference with the same tokenizer"
        )
    return Reference(model, spec.temperature)
