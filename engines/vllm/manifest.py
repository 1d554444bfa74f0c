"""What a published weight file holds, and what the server's model expects: compared by name, shape and dtype.

What always holds: the file's header alone is read, so a comparison costs milliseconds and touches no weight; names are
Hugging Face names, since the expected ones come from the same transformers class that the trainer trains.
"""

from typing import Final, NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig

# How safetensors spells the dtypes that a model may be served in.
DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

SHOWN_NAMES: Final = 3  # names an error lists of each kind; a wrong model has hundreds of them


class Entry(NamedTuple):
    """Shape (full, not a shard's) and dtype (as safetensors spells it: F32, BF16, …) of one parameter."""

    shape: tuple[int, ...]
    dtype: str


class Expected(NamedTuple):
    """The parameters a file must hold, and those (tied to another) that it may hold besides."""

    required: dict[str, Entry]
    optional: dict[str, Entry]


class ManifestError(ValueError):
    """A weight file doesn't fit the server's model; nothing of it was loaded."""


def expected_by(hf_config: PretrainedConfig, dtype: torch.dtype) -> Expected:
    """What a weight file for a model with this configuration, served in `dtype`, must and may hold."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    spelled = next(name for name, known in DTYPES.items() if known == dtype)
    required = {name: Entry(tuple(p.shape), spelled) for name, p in model.named_parameters()}
    every = {name: Entry(tuple(p.shape), spelled) for name, p in model.named_parameters(remove_duplicate=False)}
    return Expected(required, {name: entry for name, entry in every.items() if name not in required})


def manifest_of(path: str) -> dict[str, Entry]:
    """Name, shape and dtype of every tensor in a safetensors file.

    Raises ManifestError if the file can't be read or is no safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
            return {name: Entry(tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except Exception as error:  # safetensors raises its own class, FileNotFoundError or OSError, by version
        raise ManifestError(f"{path}: can't be read as a safetensors file: {error}") from error


def compare(path: str, found: dict[str, Entry], expected: Expected) -> None:
    """Raise ManifestError, naming the parameters, unless `found` is what `expected` asks for."""
    allowed = expected.required | expected.optional
    shared = [name for name in found if name in allowed]
    problems = [
        _listed("is missing", [name for name in expected.required if name not in found]),
        _listed("is not in the server's model", [name for name in found if name not in allowed]),
        _listed(
            "has another shape",
            [
                f"{name} (the server has {allowed[name].shape}, the trainer sent {found[name].shape})"
                for name in shared
                if found[name].shape != allowed[name].shape
            ],
        ),
        _listed(
            "has another dtype",
            [
                f"{name} (the server has {allowed[name].dtype}, the trainer sent {found[name].dtype})"
                for name in shared
                if found[name].dtype != allowed[name].dtype
            ],
        ),
    ]
    said = "; ".join(problem for problem in problems if problem)
    if said:
        raise ManifestError(
            f"{path}: {said}. Nothing was loaded. Start server and trainer from the same model, "
            "and publish in the dtype of the server."
        )


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" (and {len(names) - SHOWN_NAMES} more)" if len(names) > SHOWN_NAMES else ""
    return f"{what}: {', '.join(names[:SHOWN_NAMES])}{more}"
