"""What the parts of a run are told of its configuration: the structs that workers and servers are started with.

What always holds: pure functions of the configuration; nothing heavy is loaded (`areal-async check` uses them too).
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Final

from areal_async.config import Config
from areal_async.errors import ConfigError
from areal_async.messages import RewardOptions, RewardSpec, TrainerSpec
from areal_async.rollout.text import Text
from areal_async.rollout.types import ModelIdentity, Sampling

SHM_FOLDER: Final = "/dev/shm"  # where weights are published on one host


def trainer_spec(config: Config, shm_prefix: str) -> TrainerSpec:
    train = config.train
    return TrainerSpec(
        model_path=config.model.path,
        dtype=train.dtype or config.model.dtype,
        publish_dtype=config.model.dtype,
        temperature=config.rollout.temperature,
        seed=config.seed,
        zero_stage=train.zero_stage,
        lr=train.lr,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        betas=train.betas,
        adam_eps=train.adam_eps,
        max_grad_norm=train.max_grad_norm,
        loss=train.loss,
        clip_low=train.clip_eps,
        clip_high=train.clip_eps if train.clip_eps_high is None else train.clip_eps_high,
        dual_clip=train.dual_clip,
        weight_cap=train.weight_cap,
        over_cap=train.over_cap,
        aggregation=train.aggregation,
        kl_coef=train.kl_coef,
        kl_estimator=train.kl_estimator,
        kl_in=train.kl_in,
        reference_path=train.reference_path or config.model.path,
        lr_schedule=train.lr_schedule,
        min_lr_share=train.min_lr_share,
        updates=train.steps * train.minibatches,
        gradient_checkpointing=train.gradient_checkpointing,
        transport=config.weights.transport,
        publish_folder=config.weights.folder or SHM_FOLDER,
        shm_prefix=shm_prefix,
        keep_prox=train.keep_prox,
    )


def reward_spec(config: Config, reward: Callable[..., object] | None) -> RewardSpec:
    """What the reward workers are started with. Errors: ConfigError where `reward` can't be imported by them."""
    function = config.reward.function
    folders: tuple[str, ...] = (config.import_path,)
    if reward is not None:
        function, folder = import_path(reward)
        folders = (folder, *folders)
    options = {name: getattr(config.reward, name) for name in RewardOptions.__struct_fields__}
    return RewardSpec(**(options | {"function": function}), model_path=config.model.path, import_paths=folders)


def import_path(function: Callable[..., object]) -> tuple[str, str]:
    """(`module:function`, folder to import it from) of a function at the top of a module, the main script's too."""
    name, source = getattr(function, "__qualname__", ""), inspect.getsourcefile(function)
    if not name.isidentifier() or source is None:
        raise ConfigError(
            f"reward: {function!r} can't be imported by the reward workers; pass a function defined at the top of a "
            f"module"
        )
    module = function.__module__
    path = Path(source).resolve()
    if module == "__main__":
        return f"{path.stem}:{name}", str(path.parent)
    return f"{module}:{name}", str(path.parents[module.count(".")])


def run_sampling(config: Config, text: Text) -> Sampling:
    stops = sorted({*text.eos_token_ids, *config.rollout.stop_token_ids})
    return Sampling(
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_new_tokens,
        stop_token_ids=tuple(stops),
    )


def server_identity(config: Config, text: Text) -> ModelIdentity:
    """What the run's servers must be."""
    return ModelIdentity(
        vocab_size=text.vocab_size,
        context_tokens=min(text.context, config.server.max_model_len or text.context),
        dtype=config.model.dtype,
        backend="nccl" if config.weights.transport == "nccl" else "areal_file",
    )
