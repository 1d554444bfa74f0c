"""What workers are started with: a JSON file each; the run's secret comes by the environment."""

from typing import Literal, TypeAlias

import msgspec

from areal_async.messages.rules import Aggregation

Loss: TypeAlias = Literal["decoupled_ppo", "ppo", "gspo"]
Transport: TypeAlias = Literal["shm", "disk", "nccl"]


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer rank is started with (a JSON file; the secret comes by the environment).

    dtype: of the forward and backward pass; optimiser and master weights are float32. temperature: logits are divided
    by it, as the servers do. transport: how weights reach the servers; for `shm` and `disk` published files are
    `<publish_folder>/<shm_prefix>-v<version>.safetensors`. publish_dtype: of the published tensors.
    lr_schedule: after the warm-up the rate stays, or falls to lr × min_lr_share at optimiser step `updates`.
    clip_low, clip_high, dual_clip, weight_cap, over_cap, aggregation: see `engines.deepspeed.losses.Objective`.
    checkpoint: folder of a checkpoint that the ranks begin with; "": the model in `model_path`, version 0.
    kl_coef: β of the distance to the model in `reference_path` (0: no reference model is loaded); kl_in: whether the
    estimate is added to the loss or taken from each token's advantage. keep_prox: `StepDone` is to have log π_prox
    beside it.
    """

    model_path: str
    dtype: Literal["bfloat16", "float32"]
    publish_dtype: Literal["bfloat16", "float32"]
    temperature: float
    seed: int
    zero_stage: Literal[0, 1, 2, 3]
    lr: float
    warmup_steps: int
    weight_decay: float
    betas: tuple[float, float]
    adam_eps: float
    max_grad_norm: float
    loss: Loss
    clip_low: float
    clip_high: float
    dual_clip: float | None
    weight_cap: float | None
    over_cap: Literal["mask", "clamp"]
    aggregation: Aggregation
    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_in: Literal["loss", "reward"]
    reference_path: str
    lr_schedule: Literal["constant", "linear", "cosine"]
    min_lr_share: float
    updates: int
    gradient_checkpointing: bool
    transport: Transport
    publish_folder: str
    shm_prefix: str
    checkpoint: str = ""
    keep_prox: bool = False


class TrainerConnection(msgspec.Struct, frozen=True, kw_only=True):
    """`connect.json` of the run folder: what a trainer rank on another host needs to know. Readable by its owner only.

    protocol: that the controller speaks. address: its encrypted ZeroMQ address. public_key: of that address.
    """

    protocol: int
    address: str
    public_key: str
    secret: str
    ranks: int
    spec: TrainerSpec

    def __repr__(self) -> str:
        return f"TrainerConnection(address={self.address!r}, ranks={self.ranks})"  # never the secret
