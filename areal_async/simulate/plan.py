"""A plan: what is simulated. Typed structs, one field an option, each with its unit, its limits and its meaning.

What always holds: options that a run has too (`rollout`, `train`, `weights`, `checkpoint`) have the run's names,
limits and meaning; a `Plan` that exists is well-formed, and whether it makes sense as a whole is what `scenario` finds.
`plan_file` is the only way in. docs/simulate-options.md is drawn from these definitions.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from areal_async.config import Count, Section
from areal_async.messages import WhenOlder

Positive: TypeAlias = Annotated[float, Meta(gt=0)]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Time: TypeAlias = Annotated[float, Meta(ge=0)]


class ModelPlan(Section, frozen=True, kw_only=True):
    name: Annotated[
        Literal["r1-distill-qwen-1.5b", "r1-distill-qwen-7b", "r1-distill-qwen-14b", "r1-distill-qwen-32b"] | None,
        Meta(description="A known model, from its config.json; what is given beside it counts before that."),
    ] = None
    parameters: Annotated[Positive | None, Meta(description="All parameters, embeddings included.")] = None
    layers: Annotated[Count | None, Meta(description="Transformer layers.")] = None
    hidden: Annotated[Count | None, Meta(description="Width of the hidden state.")] = None
    heads: Annotated[Count | None, Meta(description="Attention heads (of queries).")] = None
    kv_heads: Annotated[Count | None, Meta(description="Heads of keys and values; none: `heads`.")] = None
    head_dim: Annotated[Count | None, Meta(description="Width of a head; none: `hidden` / `heads`.")] = None
    vocabulary: Annotated[Count | None, Meta(description="Tokens of the vocabulary.")] = None
    tied: Annotated[
        bool | None, Meta(description="Whether input and output embeddings are one matrix; none: not, or the model's.")
    ] = None
    weight_bytes: Annotated[Positive, Meta(description="Bytes of a weight on the servers (bfloat16: 2).")] = 2.0
    kv_bytes: Annotated[Positive, Meta(description="Bytes of a number in the KV cache.")] = 2.0


class GpuPlan(Section, frozen=True, kw_only=True):
    name: Annotated[
        Literal["A100", "H100", "H200", "H800"] | None,
        Meta(description="A known GPU (SXM, 80 GB of the A100), by its data sheet; what is given beside it counts."),
    ] = None
    tflops: Annotated[
        Positive | None, Meta(description="Peak arithmetic in the model's precision, dense, TFLOP/s (10¹²).")
    ] = None
    bandwidth_gb_s: Annotated[Positive | None, Meta(description="Peak memory bandwidth, GB/s (10⁹).")] = None
    memory_gb: Annotated[Positive | None, Meta(description="Memory, GB (10⁹).")] = None


class ClusterPlan(Section, frozen=True, kw_only=True):
    gpus: Annotated[
        Count | None,
        Meta(
            description="GPUs of servers and trainer together. With `trainer.gpus` the servers get the rest, with "
            "`servers.count` the trainer does, with neither `rollout_share` splits them. colocated: all do both."
        ),
    ] = None
    rollout_share: Annotated[
        float, Meta(gt=0, lt=1, description="Share of `gpus` that the servers get; the AReaL paper's is 0.75.")
    ] = 0.75
    start_s: Annotated[Time, Meta(description="Until servers and trainer are there, seconds.")] = 0.0


class RolloutPlan(Section, frozen=True, kw_only=True):
    group_size: Annotated[Count, Meta(description="Samples of one prompt; their rewards are compared.")] = 8
    max_new_tokens: Annotated[Count, Meta(description="Longest answer, in tokens; what is longer is cut.")] = 1024
    max_staleness: Annotated[
        int, Meta(ge=0, description="η: no trained token is older than this many steps. 0 is synchronous training.")
    ] = 4
    max_concurrent: Annotated[
        Count | None,
        Meta(description="Samples in flight at a time, over all servers; none: `servers.max_running` for each server."),
    ] = None
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
    drop_equal: Annotated[
        bool, Meta(description="Filter groups whose rewards are all equal: they teach nothing under `grpo`.")
    ] = False
    max_filtered: Annotated[
        Count, Meta(description="Groups that may be filtered in a row; one more stops the run: nothing can be learned.")
    ] = 1000


class ServersPlan(Section, frozen=True, kw_only=True):
    count: Annotated[Count | None, Meta(description="Servers; none: what `cluster` leaves for them.")] = None
    gpus: Annotated[Count, Meta(description="GPUs of each server (tensor parallel).")] = 1
    max_running: Annotated[Count, Meta(description="Answers that a server writes at the same time.")] = 256
    memory_share: Annotated[
        Share, Meta(description="Share of a GPU's memory for weights and KV cache (vLLM's gpu_memory_utilization).")
    ] = 0.9
    cache_tokens: Annotated[
        Count | None,
        Meta(description="Tokens that the KV cache holds; none: what the memory leaves beside the weights."),
    ] = None
    bandwidth_share: Annotated[Share, Meta(description="Share of the peak memory bandwidth that decoding reaches.")] = (
        0.7
    )
    decode_mfu: Annotated[
        Share, Meta(description="Share of the peak arithmetic that decoding reaches where arithmetic limits it.")
    ] = 0.5
    prefill_mfu: Annotated[Share, Meta(description="Share of the peak arithmetic that prefill reaches.")] = 0.5
    overhead_s: Annotated[
        Time, Meta(description="Time of a decoding step beside memory and arithmetic: scheduling, launches, sampling.")
    ] = 0.002


class TrainPlan(Section, frozen=True, kw_only=True):
    steps: Annotated[Count | None, Meta(description="Training steps of the whole run.")] = None
    batch_groups: Annotated[Count | None, Meta(description="B: groups (prompts) per training step.")] = None
    minibatches: Annotated[Count, Meta(description="Optimiser steps per training step; divides `batch_groups`.")] = 1
    max_tokens_per_microbatch: Annotated[
        Count, Meta(description="Prompt and answer tokens that go through the model at once, per rank.")
    ] = 16384
    truncated: Annotated[
        Literal["train", "mask"],
        Meta(
            description="Answers cut at the token limit. train: like any other; mask: their reward counts in the "
            "baseline of their group, their tokens aren't trained."
        ),
    ] = "train"
    zero_stage: Annotated[
        Literal[0, 1, 2, 3],
        Meta(
            description="DeepSpeed ZeRO, sharded over the ranks: 1 optimiser states, 2 gradients too, 3 parameters too."
        ),
    ] = 0
    gradient_checkpointing: Annotated[
        bool, Meta(description="Compute activations again in the backward pass: less memory, about a third more work.")
    ] = False


class TrainerPlan(Section, frozen=True, kw_only=True):
    gpus: Annotated[Count | None, Meta(description="GPUs of the trainer; none: what `cluster` leaves for it.")] = None
    gpus_per_rank: Annotated[
        Count, Meta(description="GPUs that share one data-parallel rank (tensor, pipeline or context parallel).")
    ] = 1
    mfu: Annotated[
        Share, Meta(description="Share of the peak arithmetic that forward and backward passes reach, on all tokens.")
    ] = 0.4
    microbatches: Annotated[
        Literal["dynamic", "fixed"],
        Meta(
            description="dynamic: packed by `train.max_tokens_per_microbatch` (Algorithm 1 of the AReaL paper). fixed: "
            "each rank's part of a minibatch in `fixed_microbatches` micro-batches of equally many sequences."
        ),
    ] = "dynamic"
    fixed_microbatches: Annotated[
        Count | None,
        Meta(
            description="With `fixed`; none: so many that the longest sequences, had each `rollout.max_new_tokens`, "
            "would still fit into `train.max_tokens_per_microbatch`."
        ),
    ] = None
    step_s: Annotated[Time, Meta(description="Time of a step beside its minibatches, seconds.")] = 0.0
    microbatch_s: Annotated[Time, Meta(description="Time of a micro-batch beside its arithmetic, seconds.")] = 0.0
    link_gb_s: Annotated[
        Positive | None,
        Meta(description="Network bandwidth of a GPU in one direction, GB/s, for gradients; none: they cost no time."),
    ] = None
    publish_s: Annotated[
        Time | None, Meta(description="Time to publish the weights; none: their bytes over `swap.gb_s`.")
    ] = None
    checkpoint_s: Annotated[Time, Meta(description="Time to write a checkpoint, seconds.")] = 0.0


class WeightsPlan(Section, frozen=True, kw_only=True):
    wave: Annotated[
        Count | None, Meta(description="Servers that swap weights at the same time; none: all of them.")
    ] = None


class CheckpointPlan(Section, frozen=True, kw_only=True):
    every_steps: Annotated[Count | None, Meta(description="A checkpoint after so many steps; null: not by steps.")] = (
        None
    )


class SwapPlan(Section, frozen=True, kw_only=True):
    load_s: Annotated[
        Time | None,
        Meta(description="How long a server's answers stand still for new weights; none: their bytes over `gb_s`."),
    ] = None
    gb_s: Annotated[Positive, Meta(description="Speed at which weights are published and loaded, GB/s a GPU.")] = 5.0
    interruptible: Annotated[
        bool,
        Meta(
            description="true: answers stop half-way and go on under the new weights, their cache computed again. "
            "false: running answers are finished first, and no answer is begun meanwhile."
        ),
    ] = True


class RewardPlan(Section, frozen=True, kw_only=True):
    check_s: Annotated[Time, Meta(description="Time of one check, seconds.")] = 0.0
    workers: Annotated[Count, Meta(description="Checks that run at the same time.")] = 1


class FailuresPlan(Section, frozen=True, kw_only=True):
    server_hours: Annotated[Time, Meta(description="Mean time between two losses of one server; 0: none is lost.")] = (
        0.0
    )
    restart_s: Annotated[Time, Meta(description="From a server's loss until it has joined again, seconds.")] = 120.0


class AnswersPlan(Section, frozen=True, kw_only=True):
    """One of: mean and spread, median and 95th percentile, lengths, bins and shares."""

    prompt_tokens: Annotated[Count, Meta(description="Mean length of a prompt, tokens.")] = 256
    prompt_spread: Annotated[
        Annotated[float, Meta(ge=0, le=3)], Meta(description="Standard deviation of the logarithm of prompts' lengths.")
    ] = 0.0
    max_prompt_tokens: Annotated[Count | None, Meta(description="Longer prompts are drawn as this long.")] = None
    mean_tokens: Annotated[
        Positive | None, Meta(description="Mean length of an answer, log-normal with `spread`; see `measured_at`.")
    ] = None
    spread: Annotated[
        Annotated[float, Meta(ge=0, le=3)],
        Meta(description="With `mean_tokens`: standard deviation of the logarithm of answers' lengths."),
    ] = 0.8
    median_tokens: Annotated[
        Positive | None, Meta(description="Median of a log-normal that is given by it and `p95_tokens`.")
    ] = None
    p95_tokens: Annotated[Positive | None, Meta(description="With `median_tokens`: 95 % of answers are shorter.")] = (
        None
    )
    measured_at: Annotated[
        Count | None,
        Meta(
            description="Limit at which answers were cut when `mean_tokens` was measured; the log-normal is the one "
            "whose lengths, cut there, have this mean. None: it is the mean of answers that nothing cuts."
        ),
    ] = None
    lengths: Annotated[
        tuple[Count, ...], Meta(description="Lengths as they were seen; answers are drawn from them, each as likely.")
    ] = ()
    bins: Annotated[
        tuple[Count, ...],
        Meta(description="A histogram: longest answer of each bin, ascending; the first begins at 1."),
    ] = ()
    shares: Annotated[
        tuple[Annotated[float, Meta(ge=0)], ...], Meta(description="With `bins`: how much falls into each.")
    ] = ()
    group_correlation: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Meta(
            description="How alike the answers to one prompt are, in length and in success: correlation of the normal "
            "numbers that they are drawn by. 0: each for itself; 1: all equal."
        ),
    ] = 0.0
    growth_per_step: Annotated[
        Annotated[float, Meta(ge=-0.1, le=1)],
        Meta(description="Lengths grow by this share of their first value with each step's worth of prompts."),
    ] = 0.0
    success_rate: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Meta(description="Share of answers with reward 1, of those that aren't cut."),
    ] = 0.5


class ColocatedPlan(Section, frozen=True, kw_only=True):
    reshard_s: Annotated[
        Time | None,
        Meta(
            description="`system: colocated`: from training to generation, and the same back; none: the weights' bytes "
            "over `swap.gb_s`."
        ),
    ] = None


class Plan(Section, frozen=True, kw_only=True):
    """A whole plan. `sweep` isn't in it: it is a table over plans (`plan_file`)."""

    title: Annotated[str | None, Meta(description="Heading of the table and the plot; none: the file's name.")] = None
    seed: Annotated[int, Meta(ge=0, description="Of lengths, rewards, failures and batches.")] = 0
    system: Annotated[
        Literal["async", "sync", "colocated"],
        Meta(
            description="async: servers and trainer apart, by the rules of a run. sync: the same with η = 0. "
            "colocated: all GPUs write the whole batch, wait for the longest answer, and then all of them train."
        ),
    ] = "async"
    from_run: Annotated[
        str | None,
        Meta(
            description="Run folder: its rules, and models fitted to what it took; options that are given beside it "
            "count before that. Relative to the plan's folder."
        ),
    ] = None
    validate: Annotated[
        str | None,
        Meta(
            description="Run folder: this run is predicted (its rules; models of `from_run`, or of itself), and the "
            "prediction compared with what happened. Relative to the plan's folder."
        ),
    ] = None
    warm_up: Annotated[
        int,
        Meta(
            ge=0,
            description="0: times of steps, rates and speed-ups are of the whole run. More: of its middle, without so "
            "many steps at the beginning, and without the last η + 1, in which nothing new is begun.",
        ),
    ] = 0
    baseline: Annotated[
        tuple[str, ...],
        Meta(
            description="What speed-ups are relative to: `key=value` texts of a sweep's keys; each row is compared "
            "with the row that differs from it in these. Empty: the first row."
        ),
    ] = ()
    model: ModelPlan = ModelPlan()
    gpu: GpuPlan = GpuPlan()
    cluster: ClusterPlan = ClusterPlan()
    rollout: RolloutPlan = RolloutPlan()
    servers: ServersPlan = ServersPlan()
    train: TrainPlan = TrainPlan()
    trainer: TrainerPlan = TrainerPlan()
    weights: WeightsPlan = WeightsPlan()
    checkpoint: CheckpointPlan = CheckpointPlan()
    swap: SwapPlan = SwapPlan()
    reward: RewardPlan = RewardPlan()
    failures: FailuresPlan = FailuresPlan()
    answers: AnswersPlan = AnswersPlan()
    colocated: ColocatedPlan = ColocatedPlan()
