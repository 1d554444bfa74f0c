"""The part of the configuration that the core decides by: numbers and names, the first record of a decision log."""

from typing import Literal, TypeAlias

import msgspec

WhenOlder: TypeAlias = Literal["wait", "mask", "train", "drop"]
Advantage: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "areal_paper"]
Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "constant"]
Truncated: TypeAlias = Literal["train", "mask", "penalize"]


class Rules(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="rules"):
    """What the core needs to know of the configuration.

    batch_groups: groups per training step (B). group_size: samples per group (n). max_staleness: η.
    max_concurrent: samples in flight over all servers. when_older: what becomes of tokens that get older than η
    (`wait`: batches wait so that none does; `mask`: no gradient; `train`: trained and counted; `drop`: their group is
    stopped, and with `requeue` its prompt starts again). retries: further attempts of a sample that failed.
    min_group: members with a reward that a group needs to be trained. max_failures: failed groups that the run
    tolerates in all. nan_budget: steps whose update may be left out (loss or gradient not finite).
    drop_equal: filter groups whose rewards are all equal (they have no gradient under `grpo`). success_min,
    success_max: filter groups whose share of members with a reward over `success_above` lies outside. max_filtered:
    groups that may be filtered in a row. ranks: data-parallel trainer ranks. max_tokens_per_microbatch: prompt +
    response tokens, the capacity of packing. wave: how many servers swap weights at the same time. steps: training
    steps of the whole run. aggregation: what the divisor of a minibatch counts. max_new_tokens: longest answer;
    the divisor per sample of `constant`, and what `overlong_tokens` counts back from. truncated: answers that were cut
    are trained, get no gradient (`mask`), or `truncated_penalty` is taken from their reward (`penalize`).
    reward_scale, reward_bias: what advantages are made of is scale × reward + bias. min_tokens, max_tokens: answers
    outside have no reward. overlong_tokens, overlong_penalty: over the last so many tokens before max_new_tokens the
    reward falls linearly by up to the penalty (arXiv 2503.14476, eq. 13). servers: how many join at the start of the
    run. max_restarts: restarts of one server before it is left alone. max_worker_restarts: restarts of one reward
    worker before the run ends. max_trainer_restarts: restarts of the trainer before the run ends. checkpoint_steps,
    checkpoint_s: a checkpoint after so many steps, and after so many seconds of the run clock, at the next step's end;
    0: not for that reason; neither: none are made, and only a resume from the first weights is possible.
    checkpoint_keep: how many of the newest are kept. eval_every: steps between evaluations, 0: none.
    """

    seed: int
    steps: int
    batch_groups: int
    group_size: int
    max_staleness: int
    max_concurrent: int
    minibatches: int
    ranks: int
    max_tokens_per_microbatch: int
    max_new_tokens: int
    when_older: WhenOlder = "wait"
    requeue: bool = False
    retries: int = 2
    min_group: int = 1
    max_failures: int = 0
    nan_budget: int = 0
    drop_equal: bool = False
    success_min: float = 0.0
    success_max: float = 1.0
    success_above: float = 0.0
    max_filtered: int = 1000
    advantage: Advantage = "grpo"
    advantage_eps: float = 1e-6
    aggregation: Aggregation = "token_mean"
    truncated: Truncated = "train"
    reward_scale: float = 1.0
    reward_bias: float = 0.0
    min_tokens: int = 0
    max_tokens: int | None = None
    truncated_penalty: float = 0.0
    overlong_tokens: int = 0
    overlong_penalty: float = 0.0
    wave: int = 1
    servers: int = 1
    max_restarts: int = 5
    max_trainer_restarts: int = 3
    checkpoint_steps: int = 0
    checkpoint_s: float = 0.0
    checkpoint_keep: int = 2
    max_worker_restarts: int = 5
    eval_every: int = 0
