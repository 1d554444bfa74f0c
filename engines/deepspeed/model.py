"""The model that is trained: loading it, what it publishes, saving it in Hugging Face form.

What always holds: the model is an ordinary transformers one from a local folder (nothing is looked up anywhere, no code
of the folder is run), always in evaluation mode (no dropout: its log-probabilities are those of the servers), and one
that has been seen to compute packed sequences like single ones.
"""

import inspect
import shutil
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_async.engines.deepspeed import packed
from areal_async.engines.deepspeed.losses import log_probs
from areal_async.errors import TrainerError
from areal_async.messages import ParameterInfo

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAFETENSORS_NAMES: Final = {"float32": "F32", "bfloat16": "BF16"}

# Files of a model folder that hold weights or describe them; all others (tokenizer, chat template, generation
# configuration, licence) are copied to where the trained model is saved.
WEIGHT_SUFFIXES: Final = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
WRITTEN_BY_US: Final = "config.json"

PROBE_TOKENS: Final = (7, 5, 6)  # lengths of the made-up sequences that try the packing
# Mean difference of log-probabilities, packed against alone, nats. A model that lets tokens see another sequence is
# off by 0.01 at least even with random weights; rounding is 1e-6 in float32 and about 0.01 in bfloat16.
PACKING_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def load_model(path: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """The causal language model in folder `path`, in `dtype`, with our packed attention.

    Raises TrainerError if there is none, or if it can't be trained packed.
    """
    packed.register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[dtype], attn_implementation=packed.ATTENTION, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise TrainerError(f"model {path}: transformers can't load it: {error}") from error
    model = model.to(device).eval()
    check_packing(model, path)
    return model


def check_packing(model: PreTrainedModel, path: str) -> None:
    """Raise TrainerError unless sequences packed into one row come out as each alone."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise TrainerError(f"model {path}: {type(model).__name__} has no `logits_to_keep`; use a model that has it")
    device, dtype = model.device, model.dtype
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.arange(1, sum(PROBE_TOKENS) + 1, device=device) * 7919 % vocabulary  # spread over the vocabulary
    together = _sequence_log_probs(model, tokens, list(PROBE_TOKENS))
    alone = torch.cat([_sequence_log_probs(model, part, [len(part)]) for part in tokens.split(list(PROBE_TOKENS))])
    difference = float((together - alone).abs().mean())
    if not difference <= PACKING_TOLERANCE[dtype]:
        raise TrainerError(
            f"model {path}: packed sequences come out {difference:.3g} nats off from single ones, so tokens of "
            f"{type(model).__name__} see other sequences; use a model with causal attention only"
        )


def sequence_log_probs(model: PreTrainedModel, token_ids: Tensor, temperature: float) -> Tensor:
    """float32 [n]: log-probability of each token of one sequence (int64 [n]) given those before it; element 0 is 0."""
    return torch.cat(
        [torch.zeros(1, device=token_ids.device), _sequence_log_probs(model, token_ids, [len(token_ids)], temperature)]
    )


@torch.no_grad()
def _sequence_log_probs(model: PreTrainedModel, row: Tensor, lengths: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities of all tokens but the first of each sequence of a packed row, float32."""
    packing = packed.packing_of(lengths, row.device)
    places = (packing.positions > 0).nonzero().squeeze(1)
    if not len(places):
        return torch.zeros(0, device=row.device)
    logits = packed.packed_logits(model, row, packing, places - 1)
    return log_probs(logits, row[places], temperature)[0]


def published_tensors(model: PreTrainedModel, dtype: str) -> dict[str, Tensor]:
    """What servers are sent: every parameter under its Hugging Face name, tied ones once, on the CPU in `dtype`."""
    return {
        name: parameter.detach().to("cpu", DTYPES[dtype]).contiguous() for name, parameter in model.named_parameters()
    }


def manifest(model: PreTrainedModel, dtype: str) -> tuple[ParameterInfo, ...]:
    """Names, shapes and dtypes of `published_tensors`."""
    return tuple(
        ParameterInfo(name, tuple(parameter.shape), SAFETENSORS_NAMES[dtype])
        for name, parameter in model.named_parameters()
    )


def save_model(model: PreTrainedModel, source: Path, target: Path) -> None:
    """Write the model to folder `target`, with tokenizer and generation configuration of `source`.

    `target` appears complete or not at all; what was there before is replaced. Raises TrainerError.
    """
    partial = target.with_name(f"{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        for file in sorted(source.iterdir()):
            kept = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json") or file.name == WRITTEN_BY_US
            if file.is_file() and not kept:
                shutil.copyfile(file, partial / file.name)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        raise TrainerError(f"model could not be saved to {target}: {error}; make room there and save again") from error
