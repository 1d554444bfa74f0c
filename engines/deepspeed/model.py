"""The model that is trained: loading it, what it publishes, saving it in Hugging Face form.

What always holds: the model is an ordinary transformers one from a local folder (nothing is looked up anywhere, no code
of the folder is run), always without dropout (its log-probabilities are those of the servers), and one that has been
seen to compute packed sequences like single ones. With ZeRO 3 parameters are gathered one at a time, on all ranks
together, and only rank 0 keeps what was gathered.
"""

import inspect
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

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


def save_activations(model: PreTrainedModel, path: str) -> None:
    """Have the layers' activations computed again in the backward pass: less memory, more work, the same numbers.

    transformers does so only in layers in training mode; so these get the flag, and nothing inside of them does, where
    dropout would look for it. Raises TrainerError if the model can't, or if numbers change.
    """
    tokens = _made_up_tokens(model)
    before = _sequence_log_probs(model, tokens, list(PROBE_TOKENS))
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise TrainerError(f"model {path}: train.gradient_checkpointing: {error}; turn it off") from error
    if not layers:
        raise TrainerError(f"model {path}: train.gradient_checkpointing: {type(model).__name__} has no layers for it")
    for layer in layers:
        layer.training = True
    if not torch.equal(_sequence_log_probs(model, tokens, list(PROBE_TOKENS)), before):
        raise TrainerError(
            f"model {path}: train.gradient_checkpointing: the layers of {type(model).__name__} compute something else "
            f"in training mode (dropout, most likely); set it to 0 in the model's config.json, or turn "
            f"train.gradient_checkpointing off"
        )


def check_packing(model: PreTrainedModel, path: str) -> None:
    """Raise TrainerError unless sequences packed into one row come out as each alone."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise TrainerError(f"model {path}: {type(model).__name__} has no `logits_to_keep`; use a model that has it")
    tokens = _made_up_tokens(model)
    together = _sequence_log_probs(model, tokens, list(PROBE_TOKENS))
    alone = torch.cat([_sequence_log_probs(model, part, [len(part)]) for part in tokens.split(list(PROBE_TOKENS))])
    difference = float((together - alone).abs().mean())
    if not difference <= PACKING_TOLERANCE[model.dtype]:
        raise TrainerError(
            f"model {path}: packed sequences come out {difference:.3g} nats off from single ones, so tokens of "
            f"{type(model).__name__} see other sequences; use a model with causal attention only"
        )


def _made_up_tokens(model: PreTrainedModel) -> Tensor:
    """int64 [sum(PROBE_TOKENS)], spread over the vocabulary."""
    vocabulary = model.get_input_embeddings().num_embeddings
    return torch.arange(1, sum(PROBE_TOKENS) + 1, device=model.device) * 7919 % vocabulary


def sequence_log_probs(model: Module, token_ids: Tensor, temperature: float) -> Tensor:
    """float32 [n]: log-probability of each token of one sequence (int64 [n]) given those before it; element 0 is 0.

    model: the model, or the engine around it (with ZeRO 3 it has to be the engine, on all ranks together).
    """
    return torch.cat(
        [torch.zeros(1, device=token_ids.device), _sequence_log_probs(model, token_ids, [len(token_ids)], temperature)]
    )


@torch.no_grad()
def _sequence_log_probs(model: Module, row: Tensor, lengths: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities of all tokens but the first of each sequence of a packed row, float32."""
    packing = packed.packing_of(lengths, row.device)
    places = (packing.positions > 0).nonzero().squeeze(1)
    if not len(places):
        return torch.zeros(0, device=row.device)
    logits = packed.packed_logits(model, row, packing, places - 1)
    return log_probs(logits, row[places], temperature)[0]


def whole_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its Hugging Face name, tied ones once: whole, where it lies, in the model's precision.

    With ZeRO 3 all ranks iterate together, and a tensor holds its numbers only until the next one is asked for.
    """
    for name, parameter in model.named_parameters():
        with _whole(parameter):
            yield name, parameter.detach()


def published_tensors(model: PreTrainedModel, dtype: str) -> dict[str, Tensor]:
    """What servers are sent, on the CPU in `dtype`. With ZeRO 3 the other ranks call `pass_tensors` meanwhile."""
    return dict(_kept_tensors(model, DTYPES[dtype]))


def pass_tensors(model: PreTrainedModel) -> None:
    """Take part in the gathering of all tensors and keep none."""
    for _ in whole_tensors(model):
        pass


def manifest(model: PreTrainedModel, dtype: str) -> tuple[ParameterInfo, ...]:
    """Names, shapes and dtypes of `published_tensors`."""
    return tuple(
        ParameterInfo(name, tuple(getattr(parameter, "ds_shape", parameter.shape)), SAFETENSORS_NAMES[dtype])
        for name, parameter in model.named_parameters()
    )


def save_model(model: PreTrainedModel, source: Path, target: Path) -> None:
    """Write the model to folder `target`, with tokenizer and generation configuration of `source`.

    `target` appears complete or not at all; what was there before is replaced. With ZeRO 3 the other ranks call
    `pass_tensors` meanwhile. Raises TrainerError.
    """
    tensors = dict(_kept_tensors(model, model.dtype))
    partial = target.with_name(f"{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial, state_dict=tensors)
        for file in sorted(source.iterdir()):
            kept = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json") or file.name == WRITTEN_BY_US
            if file.is_file() and not kept:
                shutil.copyfile(file, partial / file.name)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        raise TrainerError(f"model could not be saved to {target}: {error}; make room there and save again") from error


def _kept_tensors(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """On the CPU in `dtype`; whole also after the next one was asked for."""
    split = any(_is_split(parameter) for parameter in model.parameters())
    for name, tensor in whole_tensors(model):
        yield name, tensor.to("cpu", dtype, copy=split).contiguous()


def _is_split(parameter: Parameter) -> bool:
    """Has ZeRO 3 split it over the ranks?"""
    return hasattr(parameter, "ds_id")


def _whole(parameter: Parameter) -> AbstractContextManager[object]:
    if not _is_split(parameter):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[object] = deepspeed.zero.GatheredParameters([parameter])
    return gathered
