"""DeepSpeed: its configuration, its start, the learning rate, and one optimiser step with a verdict of all ranks.

What always holds: gradients are accumulated by hand (DeepSpeed counts no micro-batches), averaged over ranks by
DeepSpeed, clipped to `max_grad_norm`; an update whose gradient is not finite is not applied on any rank and leaves no
gradient behind. Optimiser states, master weights, sums over micro-batches and sums over ranks are float32.

Which optimiser runs: float32 with ZeRO 0 is torch's AdamW as it is. Float32 with ZeRO 1 and 2, and bfloat16 with ZeRO
2, is DeepSpeed's `DeepSpeedZeroOptimizer`; ZeRO 3 is its `DeepSpeedZeroOptimizer_Stage3`, in both precisions. bfloat16
with ZeRO 0 and 1 is `BF16_Optimizer`, the only one there that accumulates micro-batches in float32; it shards the
states over the ranks, as stage 1 does: a saving of memory, not another result. All of them drive torch's AdamW.
"""

import logging
import math
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import Parameter
from transformers import PreTrainedModel

from areal_async.messages import TrainerSpec

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# ZeRO 3 gathers a parameter whenever it is used; one with at most this many numbers (norms, biases) stays gathered.
RESIDENT_NUMBERS: Final = 1 << 14
# Gradients are reduced in buckets of this many numbers; DeepSpeed allocates one whole, however small the model is.
BUCKET_NUMBERS: Final = 1 << 28
# How long a rank waits for the others in a collective call; the controller's own deadline of a step comes first.
COLLECTIVE_TIMEOUT: Final = timedelta(hours=2)


def start_ranks(device: torch.device) -> None:
    """Join the other ranks (torchrun's environment says who they are), over gloo on the CPU and nccl on GPUs."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device.type == "cuda" else "cpu")
    import deepspeed  # 2 s: not before it is needed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        # DeepSpeed would try compilers for all of its extensions and build one for its own shared-memory all-reduce
        # (20 s, and g++ has to be there). Its list of extensions that can be built, made empty: gloo does the work.
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT, verbose=False
    )


def open_engine(model: PreTrainedModel, spec: TrainerSpec) -> "DeepSpeedEngine":
    """The model under DeepSpeed, with AdamW. With ZeRO 3 its parameters are split over the ranks from here on: what
    needs them whole calls the engine (all ranks together) or `model.whole_tensors`."""
    import deepspeed

    optimizer = torch.optim.AdamW(
        _parameter_groups(model, spec.weight_decay), lr=spec.lr, betas=spec.betas, eps=spec.adam_eps, fused=True
    )
    numbers = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_configuration(spec, numbers))
    return engine


def learning_rate(spec: TrainerSpec, update: int) -> float:
    """Of optimiser step `update` (from 0): grows linearly over `warmup_steps`, then stays, or falls along a line or
    half a cosine to `lr` × `min_lr_share` at step `updates` (and stays there)."""
    if update < spec.warmup_steps:
        return spec.lr * (update + 1) / (spec.warmup_steps + 1)
    way = min(1.0, (update - spec.warmup_steps) / max(1, spec.updates - spec.warmup_steps))
    match spec.lr_schedule:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - way
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * way))
    return spec.lr * (spec.min_lr_share + (1.0 - spec.min_lr_share) * left)


def apply_update(engine: "DeepSpeedEngine", spec: TrainerSpec, lr: float) -> float | None:
    """One optimiser step with what was accumulated: the gradient's norm before clipping, or None if it was not finite;
    then the weights are as before. Every rank gets the same answer."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    if not _deepspeed_clips(spec):  # every rank holds the whole averaged gradient
        norm = float(torch.nn.utils.clip_grad_norm_(engine.module.parameters(), spec.max_grad_norm))
        if not math.isfinite(norm):
            engine.zero_grad()
            return None
        engine.step()
        return norm
    engine.step()
    norm = engine.get_global_grad_norm()
    return float(norm) if engine.was_step_applied() and math.isfinite(norm) else None


def _deepspeed_clips(spec: TrainerSpec) -> bool:
    """Float32 without ZeRO is a bare optimiser for DeepSpeed: it would apply NaNs, and keeps the norm to itself."""
    return spec.dtype == "bfloat16" or spec.zero_stage > 0


def _configuration(spec: TrainerSpec, numbers: int) -> dict[str, object]:
    """numbers: of the model's parameters."""
    half = spec.dtype == "bfloat16"
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # by hand: `set_gradient_accumulation_boundary`
        "gradient_clipping": spec.max_grad_norm if _deepspeed_clips(spec) else 0.0,
        "zero_optimization": {
            "stage": max(1, spec.zero_stage) if half else spec.zero_stage,
            "reduce_bucket_size": min(BUCKET_NUMBERS, numbers),
            "stage3_param_persistence_threshold": RESIDENT_NUMBERS,
        },
        "bf16": {"enabled": half},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }


def _parameter_groups(model: PreTrainedModel, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; biases and norms' gains (one dimension) don't, as is usual."""
    matrices: list[Parameter] = [p for p in model.parameters() if p.ndim > 1]
    vectors: list[Parameter] = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
