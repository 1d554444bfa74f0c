"""The configuration: typed structs, one field an option, each with its unit, its limits and its meaning.

What always holds: a `Config` that exists is well-formed (types, ranges); that it also makes sense as a whole, with
the files it names, is what `config_check.problems` finds. `config_file.load_config` reads YAML into it and is the only
way in. docs/configuration.md is drawn from these definitions, so an option without a description doesn't exist.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from areal_async.messages import Rules

Count: TypeAlias = Annotated[int, Meta(ge=1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level of the configuration file."""


class ModelConfig(Section, frozen=True, kw_only=True):
    path: Annotated[
        str,
        Meta(
            description="Folder of a causal language model in Hugging Face form, with its tokenizer. "
            "Relative paths count from the configuration file's folder."
        ),
    ]
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        Meta(description="Precision of the servers' weights and of the trainer's forward pass."),
    ] = "bfloat16"


class DataConfig(Section, frozen=True, kw_only=True):
    train: Annotated[str, Meta(description="JSONL file of training problems, a line each.")]
    eval: Annotated[str | None, Meta(description="JSONL file of held-out problems, for `areal-async eval`.")] = None
    prompt_key: Annotated[str, Meta(description="Column with the prompt: a string, or a list of messages.")] = "prompt"
    answer_key: Annotated[str, Meta(description="Column with the right answer, given to the reward.")] = "answer"
    chat_template: Annotated[
        Literal["auto", "plain"],
        Meta(
            description="auto: messages, and strings as one user message, go through the tokenizer's chat template; "
            "plain: a string is the prompt as it stands."
        ),
    ] = "auto"
    epochs: Annotated[
        Count | None, Meta(description="How often the data may be gone through; none: as often as the steps need.")
    ] = None
    shuffle: Annotated[bool, Meta(description="A new order for each epoch, made from `seed`.")] = True


class RolloutConfig(Section, frozen=True, kw_only=True):
    servers: Annotated[Count, Meta(description="vLLM servers that the run starts on this host.")] = 1
    group_size: Annotated[Count, Meta(description="Samples of one prompt; their rewards are compared.")] = 8
    max_new_tokens: Annotated[Count, Meta(description="Longest answer, in tokens; what is longer is cut.")] = 1024
    temperature: Annotated[
        float, Meta(gt=0, le=10, description="Sampling temperature; the trainer divides logits by the same.")
    ] = 1.0
    stop_token_ids: Annotated[
        tuple[int, ...], Meta(description="Further tokens that end an answer, beside the model's own end of sequence.")
    ] = ()
    max_staleness: Annotated[
        int, Meta(ge=0, description="η: no trained token is older than this many steps. 0 is synchronous training.")
    ] = 4
    max_concurrent: Annotated[Count, Meta(description="Samples in flight at a time, over all servers.")] = 256
    when_older: Annotated[
        Literal["wait"],
        Meta(
            description="What to do so that no token gets older than η. wait: a batch waits for the groups that would."
        ),
    ] = "wait"
    workflow: Annotated[
        str,
        Meta(
            description="How a sample comes about: `single_turn`, or a class by import path "
            "`module:Class` with the `Workflow` protocol."
        ),
    ] = "single_turn"
    retries: Annotated[int, Meta(ge=0, description="Further attempts of a sample that failed.")] = 2
    min_group: Annotated[
        Count | None,
        Meta(description="Fewest members with a reward that a group is trained with; none: all of them."),
    ] = None
    max_failures: Annotated[
        int,
        Meta(ge=0, description="Failed groups that the run tolerates in all; one more stops it with the first error."),
    ] = 0
    drop_equal: Annotated[
        bool, Meta(description="Filter groups whose rewards are all equal: they teach nothing under `grpo`.")
    ] = False
    sample_timeout_s: Annotated[Seconds, Meta(description="Deadline of one attempt of a sample.")] = 1800.0


class ServerConfig(Section, frozen=True, kw_only=True):
    cores: Annotated[
        str | None,
        Meta(
            description="CPU cores of each vLLM server, such as `0` or `0-3`, several "
            "servers separated by `|`. None: vLLM chooses."
        ),
    ] = None
    kv_cache_gib: Annotated[Count, Meta(description="Memory for the KV cache of a CPU server, GiB.")] = 2
    max_model_len: Annotated[
        Annotated[int, Meta(ge=16)] | None, Meta(description="Context in tokens. None: the model's own.")
    ] = None
    max_num_seqs: Annotated[Count, Meta(description="Answers that a server writes at the same time.")] = 256
    stream_interval: Annotated[Count, Meta(description="Tokens per streamed chunk.")] = 16
    enforce_eager: Annotated[bool, Meta(description="Start without compiling the model: starts sooner.")] = True
    start_timeout_s: Annotated[Seconds, Meta(description="Deadline of a server's start.")] = 600.0
    extra_args: Annotated[tuple[str, ...], Meta(description="Further arguments of the vLLM command.")] = ()


class RewardConfig(Section, frozen=True, kw_only=True):
    function: Annotated[
        str, Meta(description="`exact`, or a function by import path `module:function`, sync or async.")
    ] = "exact"
    exact_after: Annotated[
        str | None, Meta(description="For `exact`: compare only what follows the last occurrence of this text.")
    ] = None
    workers: Annotated[Count, Meta(description="Processes that run checks.")] = 1
    concurrent: Annotated[Count, Meta(description="Checks that one worker runs at the same time.")] = 4
    timeout_s: Annotated[Seconds, Meta(description="Deadline of a check; then it is killed, with all it started.")] = (
        10.0
    )


class TrainConfig(Section, frozen=True, kw_only=True):
    steps: Annotated[Count, Meta(description="Training steps of the whole run.")]
    batch_groups: Annotated[Count, Meta(description="B: groups (prompts) per training step.")]
    minibatches: Annotated[Count, Meta(description="Optimiser steps per training step; divides `batch_groups`.")] = 1
    ranks: Annotated[Count, Meta(description="Trainer processes (data parallel), started by torchrun.")] = 1
    cores: Annotated[
        str | None, Meta(description="CPU cores of the trainer ranks, such as `1`, several ranks separated by `|`.")
    ] = None
    lr: Annotated[float, Meta(gt=0, description="Learning rate after the warm-up.")] = 1e-6
    warmup_steps: Annotated[int, Meta(ge=0, description="Optimiser steps over which the rate grows from 0.")] = 0
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's decoupled weight decay.")] = 0.01
    betas: Annotated[tuple[float, float], Meta(description="AdamW's β1 and β2.")] = (0.9, 0.95)
    adam_eps: Annotated[float, Meta(gt=0, description="AdamW's ε.")] = 1e-8
    max_grad_norm: Annotated[float, Meta(gt=0, description="Gradients are clipped to this norm.")] = 1.0
    max_tokens_per_microbatch: Annotated[
        Count, Meta(description="Prompt and answer tokens that go through the model at once, per rank.")
    ] = 16384
    advantage: Annotated[
        Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "areal_paper"],
        Meta(
            description="grpo: (reward − group mean) / (std + ε). dr_grpo: reward − group mean. rloo: reward − mean of "
            "the other members. reinforce_pp: (reward − mean) / (std + ε) over the batch's tokens. areal_paper: the "
            "same with rewards of ±5 in place of 1 and 0."
        ),
    ] = "grpo"
    advantage_eps: Annotated[float, Meta(ge=0, description="ε of the advantage's division.")] = 1e-6
    loss: Annotated[Literal["decoupled_ppo"], Meta(description="Eq. 5 of the AReaL paper.")] = "decoupled_ppo"
    aggregation: Annotated[
        Literal["token_mean"], Meta(description="token_mean: every loss-mask token of a minibatch weighs the same.")
    ] = "token_mean"
    clip_eps: Annotated[float, Meta(gt=0, lt=1, description="ε of the clipped objective.")] = 0.2
    zero_stage: Annotated[Literal[0, 1], Meta(description="DeepSpeed ZeRO: 0 nothing sharded, 1 optimiser states.")] = 0
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, Meta(description="Precision of the trainer; none: `model.dtype`.")
    ] = None
    nan_budget: Annotated[
        int, Meta(ge=0, description="Updates that may be skipped because the loss or the gradient is not finite.")
    ] = 3
    step_timeout_s: Annotated[Seconds, Meta(description="Deadline of one training step.")] = 3600.0
    start_timeout_s: Annotated[Seconds, Meta(description="Deadline of the trainer's start.")] = 600.0


class WeightsConfig(Section, frozen=True, kw_only=True):
    transport: Annotated[Literal["shm"], Meta(description="shm: through shared memory, on one host.")] = "shm"
    wave: Annotated[Count, Meta(description="Servers that swap weights at the same time.")] = 1
    swap_timeout_s: Annotated[Seconds, Meta(description="Deadline of each call of a swap.")] = 300.0


class EvalConfig(Section, frozen=True, kw_only=True):
    temperature: Annotated[float, Meta(ge=0, le=10, description="Sampling temperature; 0 is greedy.")] = 1.0
    samples: Annotated[Count, Meta(description="Answers per problem; the score is their mean.")] = 1
    limit: Annotated[Count | None, Meta(description="Only the first so many problems.")] = None
    max_new_tokens: Annotated[Count | None, Meta(description="Longest answer; none: as in `rollout`.")] = None


class LogConfig(Section, frozen=True, kw_only=True):
    segment_bytes: Annotated[
        int, Meta(ge=1 << 16, description="Size at which a payload segment is closed and the next begun, bytes.")
    ] = 256 << 20


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
            description="Name of the run; its folder is `runs/NAME-TIME/`.",
        ),
    ]
    seed: Annotated[int, Meta(ge=0, description="Of data order, sampling and batches.")] = 0
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    server: ServerConfig = ServerConfig()
    reward: RewardConfig = RewardConfig()
    train: TrainConfig
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    import_path: Annotated[
        str,
        Meta(
            description="Folder that `reward.function` and `rollout.workflow` are imported from, before the usual "
            "places; relative to the configuration file's folder, which it is if it is left out."
        ),
    ] = "."
    runs_dir: Annotated[
        str, Meta(description="Folder under which run folders are made; relative to the working directory.")
    ] = "runs"
    runtime_dir: Annotated[
        str | None,
        Meta(
            description="Folder for sockets, which only the user may enter; none: a new one under the temporary "
            "folder. Its path must be short: a socket's path has 107 bytes."
        ),
    ] = None

    @property
    def rules(self) -> Rules:
        """What the core needs to know."""
        rollout, train = self.rollout, self.train
        return Rules(
            seed=self.seed,
            steps=train.steps,
            batch_groups=train.batch_groups,
            group_size=rollout.group_size,
            max_staleness=rollout.max_staleness,
            max_concurrent=rollout.max_concurrent,
            minibatches=train.minibatches,
            ranks=train.ranks,
            max_tokens_per_microbatch=train.max_tokens_per_microbatch,
            when_older=rollout.when_older,
            retries=rollout.retries,
            min_group=rollout.group_size if rollout.min_group is None else rollout.min_group,
            max_failures=rollout.max_failures,
            nan_budget=train.nan_budget,
            drop_equal=rollout.drop_equal,
            advantage=train.advantage,
            advantage_eps=train.advantage_eps,
            wave=self.weights.wave,
        )
