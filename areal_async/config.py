"""The configuration: typed structs, one field an option, each with its unit, its limits and its meaning.

What always holds: a `Config` that exists is well-formed (types, ranges); that it also makes sense as a whole, with
the files it names, is what `config_check.problems` finds. `config_file.load_config` reads YAML into it and is the only
way in. docs/configuration.md is drawn from these definitions, so an option without a description doesn't exist.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from areal_async.messages import Advantage, Aggregation, Loss, RewardOptions, Rules, Transport, Truncated, WhenOlder

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
    train: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            description="Training problems: JSONL or Parquet files, or `reasoning_gym:TASK?size=N&seed=S`.",
        ),
    ]
    weights: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...],
        Meta(
            description="Shares of the files in `train` among the prompts that are drawn, in the same order; empty: "
            "every file once an epoch. A file that is drawn more often begins again, in a new order."
        ),
    ] = ()
    eval: Annotated[
        str | None,
        Meta(
            description="Held-out problems, named as those of `train`: for `areal-async eval` and `eval.every_steps`."
        ),
    ] = None
    prompt_key: Annotated[str, Meta(description="Column with the prompt: a string, or a list of messages.")] = "prompt"
    answer_key: Annotated[str, Meta(description="Column with the right answer, given to the reward.")] = "answer"
    chat_template: Annotated[
        Literal["auto", "plain"],
        Meta(
            description="auto: messages, and strings as one user message, go through the tokenizer's chat template; "
            "plain: a string is the prompt as it stands."
        ),
    ] = "auto"
    max_prompt_tokens: Annotated[
        Count | None, Meta(description="Longest prompt in tokens; none: what the context leaves beside one token.")
    ] = None
    long_prompts: Annotated[
        Literal["error", "skip", "cut"],
        Meta(
            description="Training prompts that are longer. error: `check` and the start of a run name them; skip: they "
            "are left out, and counted; cut: their last `max_prompt_tokens` tokens are asked."
        ),
    ] = "error"
    epochs: Annotated[
        Count | None, Meta(description="How often the data may be gone through; none: as often as the steps need.")
    ] = None
    shuffle: Annotated[bool, Meta(description="A new order for each epoch, made from `seed`.")] = True


class RolloutConfig(Section, frozen=True, kw_only=True):
    servers: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="vLLM servers that the run starts on this host; none: 1, or 0 with `urls`."),
    ] = None
    urls: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(https?://[^/\s]+|unix:/\S+)$")], ...],
        Meta(
            description="vLLM servers that run already: `http://HOST:PORT` or `unix:PATH`. Started as docs/servers.md "
            "says; whoever reaches such a port can do anything with the server, so guard the network."
        ),
    ] = ()
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
        WhenOlder,
        Meta(
            description="What to do about tokens that would get older than η. wait: a batch waits for the groups that "
            "would, so none does; mask: they get no gradient, their sample stays; train: they are trained, and counted "
            "(the paper's rule); drop: their group is stopped and counted."
        ),
    ] = "wait"
    requeue: Annotated[
        bool, Meta(description="With `when_older: drop`: the prompt of a dropped group starts again.")
    ] = False
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
    success_min: Annotated[
        float, Meta(ge=0, le=1, description="Filter groups in which a smaller share of the members succeeded.")
    ] = 0.0
    success_max: Annotated[
        float, Meta(ge=0, le=1, description="Filter groups in which a larger share of the members succeeded.")
    ] = 1.0
    success_above: Annotated[
        float, Meta(description="A member with a reward above this succeeded, for `success_min` and `success_max`.")
    ] = 0.0
    max_filtered: Annotated[
        Count, Meta(description="Groups that may be filtered in a row; one more stops the run: nothing can be learned.")
    ] = 1000
    sample_timeout_s: Annotated[Seconds, Meta(description="Deadline of one attempt of a sample.")] = 1800.0


class ServerConfig(Section, frozen=True, kw_only=True):
    cores: Annotated[
        str | None,
        Meta(
            description="CPU cores of each vLLM server, such as `0` or `0-3`, several servers separated by `|`. None: "
            "vLLM chooses; on a machine without GPUs it takes all of them, and controller and trainer wait for a core, "
            "once in a while for seconds."
        ),
    ] = None
    gpus: Annotated[
        str | None,
        Meta(
            description="GPUs of each vLLM server, such as `0` or `0-1`, several servers separated by `|`. None: the "
            "first ones, `tensor_parallel` for each server."
        ),
    ] = None
    tensor_parallel: Annotated[Count, Meta(description="GPUs that share the layers of one server.")] = 1
    gpu_memory: Annotated[
        float, Meta(gt=0, le=1, description="Share of a GPU's memory that a server takes, weights and KV cache.")
    ] = 0.9
    kv_cache_gib: Annotated[Count, Meta(description="Memory for the KV cache of a CPU server, GiB.")] = 2
    max_model_len: Annotated[
        Annotated[int, Meta(ge=16)] | None, Meta(description="Context in tokens. None: the model's own.")
    ] = None
    max_num_seqs: Annotated[Count, Meta(description="Answers that a server writes at the same time.")] = 256
    stream_interval: Annotated[Count, Meta(description="Tokens per streamed chunk.")] = 16
    enforce_eager: Annotated[bool, Meta(description="Start without compiling the model: starts sooner.")] = True
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="How often a server that was lost is started again, with a growing pause, before it is left "
            "alone; forgotten when it has served for ten minutes. The run ends when no server is left.",
        ),
    ] = 5
    start_timeout_s: Annotated[Seconds, Meta(description="Deadline of a server's start.")] = 600.0
    stall_timeout_s: Annotated[
        Seconds,
        Meta(
            description="A server that lives, has requests and sends no token of any of them for so long is given up "
            "and started again; longer than the longest prompt takes it to read."
        ),
    ] = 120.0
    extra_args: Annotated[tuple[str, ...], Meta(description="Further arguments of the vLLM command.")] = ()


class RewardConfig(RewardOptions, frozen=True, kw_only=True):
    workers: Annotated[Count, Meta(description="Processes that run checks.")] = 1
    retries: Annotated[
        int,
        Meta(
            ge=0,
            description="Further checks of an answer whose check could not be made (`infrastructure`); after them the "
            "answer is left out, and counted.",
        ),
    ] = 2
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="How often a worker that was lost is started again, with a growing pause, before the run ends; "
            "forgotten when it has worked for ten minutes.",
        ),
    ] = 5
    scale: Annotated[
        float,
        Meta(gt=0, description="What advantages are made of is `scale` × reward + `bias` (the paper's ±5: 10, −5)."),
    ] = 1.0
    bias: Annotated[float, Meta(description="See `scale`.")] = 0.0
    min_tokens: Annotated[
        int, Meta(ge=0, description="Answers with fewer tokens have no reward: they are left out of their group.")
    ] = 0
    max_tokens: Annotated[
        Count | None, Meta(description="Answers with more tokens have no reward; null: however long they are.")
    ] = None
    truncated_penalty: Annotated[
        float,
        Meta(ge=0, description="With `train.truncated: penalize`: taken from the reward of an answer that was cut."),
    ] = 1.0
    overlong_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Over the last so many tokens before `rollout.max_new_tokens` the reward falls linearly by up "
            "to `overlong_penalty` (DAPO's soft overlong punishment); 0: not at all.",
        ),
    ] = 0
    overlong_penalty: Annotated[float, Meta(ge=0, description="See `overlong_tokens`.")] = 1.0


class TrainConfig(Section, frozen=True, kw_only=True):
    steps: Annotated[Count, Meta(description="Training steps of the whole run.")]
    batch_groups: Annotated[Count, Meta(description="B: groups (prompts) per training step.")]
    minibatches: Annotated[Count, Meta(description="Optimiser steps per training step; divides `batch_groups`.")] = 1
    ranks: Annotated[Count, Meta(description="Trainer processes (data parallel), started by torchrun.")] = 1
    cores: Annotated[
        str | None, Meta(description="CPU cores of the trainer ranks, such as `1`, several ranks separated by `|`.")
    ] = None
    gpus: Annotated[
        str | None,
        Meta(description="GPUs of the trainer ranks on this host, such as `6-7`. None: the last ones."),
    ] = None
    listen: Annotated[
        Annotated[str, Meta(pattern=r"^tcp://\S+:\d+$")] | None,
        Meta(
            description="Where trainer ranks on other hosts reach the controller, such as `tcp://10.0.0.1:5700`. They "
            "are then started by hand, by torchrun and `areal-async worker trainer` (docs/nodes.md), `ranks` in all."
        ),
    ] = None
    lr: Annotated[float, Meta(gt=0, description="Learning rate after the warm-up.")] = 1e-6
    warmup_steps: Annotated[int, Meta(ge=0, description="Optimiser steps over which the rate grows from 0.")] = 0
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Meta(description="How the rate goes on after the warm-up, until the last optimiser step of the run."),
    ] = "constant"
    min_lr_share: Annotated[
        float, Meta(ge=0, le=1, description="Where `linear` and `cosine` end, as a share of `lr`.")
    ] = 0.0
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's decoupled weight decay.")] = 0.01
    betas: Annotated[tuple[float, float], Meta(description="AdamW's β1 and β2.")] = (0.9, 0.95)
    adam_eps: Annotated[float, Meta(gt=0, description="AdamW's ε.")] = 1e-8
    max_grad_norm: Annotated[float, Meta(gt=0, description="Gradients are clipped to this norm.")] = 1.0
    max_tokens_per_microbatch: Annotated[
        Count, Meta(description="Prompt and answer tokens that go through the model at once, per rank.")
    ] = 16384
    advantage: Annotated[
        Advantage,
        Meta(
            description="grpo: (reward − group mean) / (std + ε). dr_grpo: reward − group mean. rloo: reward − mean of "
            "the other members. reinforce_pp: (reward − mean) / (std + ε) over the batch's tokens. areal_paper: the "
            "same with rewards of ±5 in place of 1 and 0."
        ),
    ] = "grpo"
    advantage_eps: Annotated[float, Meta(ge=0, description="ε of the advantage's division.")] = 1e-6
    loss: Annotated[
        Loss,
        Meta(
            description="decoupled_ppo: Eq. 5 of the AReaL paper. ppo: the ratio is taken to the policy that sampled. "
            "gspo: ratios of whole sequences (arXiv 2507.18071), decoupled in the same way."
        ),
    ] = "decoupled_ppo"
    aggregation: Annotated[
        Aggregation,
        Meta(
            description="token_mean: every loss-mask token of a minibatch weighs the same. sequence_mean: every answer "
            "does. constant: the sum of token losses over answers × `rollout.max_new_tokens` (Dr. GRPO)."
        ),
    ] = "token_mean"
    clip_eps: Annotated[float, Meta(gt=0, lt=1, description="ε of the clipped objective.")] = 0.2
    clip_eps_high: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="ε above 1 (DAPO's clip-higher); none: `clip_eps`.")
    ] = None
    dual_clip: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(description="c of dual-clip PPO (arXiv 1912.09729): with A < 0 the objective isn't less than c·A."),
    ] = None
    weight_cap: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Cap on the behaviour weight π_prox/π_behav.")
    ] = None
    over_cap: Annotated[
        Literal["mask", "clamp"],
        Meta(
            description="Tokens over `weight_cap`: no gradient (they stay in the divisor), or the cap as their weight."
        ),
    ] = "mask"
    truncated: Annotated[
        Truncated,
        Meta(
            description="Answers cut at the token limit. train: like any other; mask: their reward counts in the "
            "baseline of their group, their tokens aren't trained; penalize: `reward.truncated_penalty` is taken from "
            "their reward."
        ),
    ] = "train"
    kl_coef: Annotated[float, Meta(ge=0, description="β of the distance to a reference model; 0: none is loaded.")] = (
        0.0
    )
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Meta(description="Estimate of a token's distance, d = log π − log π_ref: d, d²/2, e⁻ᵈ − 1 + d."),
    ] = "k3"
    kl_in: Annotated[
        Literal["loss", "reward"],
        Meta(
            description="loss: β × the estimate is added to each token's loss. reward: each token's advantage is "
            "lowered by β × the estimates from it to the end of its answer, under the policy at the step's start."
        ),
    ] = "loss"
    reference_path: Annotated[
        str | None,
        Meta(description="Folder of the reference model; none: `model.path`, the model that the run starts from."),
    ] = None
    zero_stage: Annotated[
        Literal[0, 1, 2, 3],
        Meta(
            description="DeepSpeed ZeRO, sharded over the ranks: 1 optimiser states, 2 gradients too, 3 parameters too."
        ),
    ] = 0
    gradient_checkpointing: Annotated[
        bool, Meta(description="Compute activations again in the backward pass: less memory, about a third more work.")
    ] = False
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, Meta(description="Precision of the trainer; none: `model.dtype`.")
    ] = None
    keep_prox: Annotated[
        bool,
        Meta(
            description="Keep log π_prox of every trained token in the run folder (`prox/`), for people: 4 bytes a "
            "token of answers and about 230 an answer; of steps that nobody needs any more as much as fits into "
            "`log.segment_bytes`."
        ),
    ] = True
    nan_budget: Annotated[
        int, Meta(ge=0, description="Updates that may be skipped because the loss or the gradient is not finite.")
    ] = 3
    step_timeout_s: Annotated[Seconds, Meta(description="Deadline of one training step.")] = 3600.0
    start_timeout_s: Annotated[Seconds, Meta(description="Deadline of the trainer's start.")] = 600.0
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="How often lost trainer ranks are started again, from the newest checkpoint and with a growing "
            "pause, before the run ends; forgotten when they have worked for ten minutes.",
        ),
    ] = 3


class CheckpointConfig(Section, frozen=True, kw_only=True):
    every_steps: Annotated[Count | None, Meta(description="A checkpoint after so many steps; null: not by steps.")] = (
        None
    )
    every_minutes: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="A checkpoint at the end of the first step after so many minutes; null: not by time."),
    ] = 20.0
    keep: Annotated[Count, Meta(description="How many of the newest checkpoints are kept.")] = 2


class WeightsConfig(Section, frozen=True, kw_only=True):
    transport: Annotated[
        Transport,
        Meta(
            description="shm: through shared memory, on one host. disk: through `folder`, which all hosts see. nccl: "
            "from GPU to GPU; all servers swap at once."
        ),
    ] = "shm"
    folder: Annotated[
        str | None, Meta(description="For `disk`: where weights are written; removed when the run ends.")
    ] = None
    nccl_address: Annotated[
        Annotated[str, Meta(pattern=r"^\S+:\d+$")] | None,
        Meta(description="For `nccl`: HOST:PORT of the meeting point, on the host of trainer rank 0."),
    ] = None
    wave: Annotated[Count, Meta(description="Servers that swap weights at the same time.")] = 1
    swap_timeout_s: Annotated[Seconds, Meta(description="Deadline of each call of a swap.")] = 300.0


class EvalConfig(Section, frozen=True, kw_only=True):
    every_steps: Annotated[
        Count | None,
        Meta(
            description="Evaluate on `data.eval` during the run, every so many steps and after the last; none: never."
        ),
    ] = None
    max_concurrent: Annotated[Count, Meta(description="Answers of an evaluation that a server writes at a time.")] = 64
    temperature: Annotated[float, Meta(ge=0, le=10, description="Sampling temperature; 0 is greedy.")] = 1.0
    samples: Annotated[Count, Meta(description="Answers per problem; the score is their mean.")] = 1
    limit: Annotated[Count | None, Meta(description="Only the first so many problems.")] = None
    max_new_tokens: Annotated[Count | None, Meta(description="Longest answer; none: as in `rollout`.")] = None


class MetricsConfig(Section, frozen=True, kw_only=True):
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Serve Prometheus text at `/metrics` of this port; 0: any free one."),
    ] = None
    host: Annotated[str, Meta(description="Address that `port` is opened on.")] = "127.0.0.1"
    tensorboard: Annotated[
        bool, Meta(description="Write TensorBoard events to `tensorboard/` of the run folder (extra `tensorboard`).")
    ] = False
    wandb: Annotated[
        Literal["off", "offline", "online"],
        Meta(
            description="Hand the numbers of `metrics.jsonl` to Weights & Biases (extra `wandb`). offline: into "
            "`wandb/` of the run folder, for `wandb sync`."
        ),
    ] = "off"
    wandb_project: Annotated[str, Meta(min_length=1, description="Project of the run at Weights & Biases.")] = (
        "areal-async"
    )
    wandb_entity: Annotated[
        str | None, Meta(description="User or team that the project belongs to; none: the account's default.")
    ] = None
    wandb_name: Annotated[str | None, Meta(description="Name of the run; none: that of its folder.")] = None


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
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
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
    def own_servers(self) -> int:
        """Servers that the run starts itself."""
        servers = self.rollout.servers
        return servers if servers is not None else 0 if self.rollout.urls else 1

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
            max_new_tokens=rollout.max_new_tokens,
            when_older=rollout.when_older,
            requeue=rollout.requeue,
            retries=rollout.retries,
            min_group=rollout.group_size if rollout.min_group is None else rollout.min_group,
            max_failures=rollout.max_failures,
            nan_budget=train.nan_budget,
            drop_equal=rollout.drop_equal,
            success_min=rollout.success_min,
            success_max=rollout.success_max,
            success_above=rollout.success_above,
            max_filtered=rollout.max_filtered,
            advantage=train.advantage,
            advantage_eps=train.advantage_eps,
            aggregation=train.aggregation,
            truncated=train.truncated,
            reward_scale=self.reward.scale,
            reward_bias=self.reward.bias,
            min_tokens=self.reward.min_tokens,
            max_tokens=self.reward.max_tokens,
            truncated_penalty=self.reward.truncated_penalty,
            overlong_tokens=self.reward.overlong_tokens,
            overlong_penalty=self.reward.overlong_penalty,
            wave=self.weights.wave,
            servers=self.own_servers + len(self.rollout.urls),
            max_restarts=self.server.max_restarts,
            max_worker_restarts=self.reward.max_restarts,
            max_trainer_restarts=self.train.max_restarts,
            checkpoint_steps=self.checkpoint.every_steps or 0,
            checkpoint_s=(self.checkpoint.every_minutes or 0.0) * 60,
            checkpoint_keep=self.checkpoint.keep,
            eval_every=self.eval.every_steps or 0,
        )
