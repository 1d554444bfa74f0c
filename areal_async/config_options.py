"""Whether the options of a configuration go together, without a look at files or machines. Part of `config_check`.

What always holds: a pure function of the configuration; an option that would do nothing, or can't be right with the
others, is named together with what to set instead.
"""

import re
from collections.abc import Iterator
from typing import Final, TypeAlias

from areal_async.config import Config

Finding: TypeAlias = tuple[str, str]
"""Key of the option to change, and what is wrong with it."""

IMPORT_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

# Arguments of the vLLM command that the run sets itself: another value would break what the trainer relies on.
_OUR_ARGUMENTS: Final = {
    "--uds": "",
    "--host": "",
    "--port": "",
    "--model": "model.path",
    "--dtype": "model.dtype",
    "--max-model-len": "server.max_model_len",
    "--max-num-seqs": "server.max_num_seqs",
    "--stream-interval": "server.stream_interval",
    "--seed": "seed",
    "--logprobs-mode": "",
    "--weight-transfer-config": "",
    "--generation-config": "",
}


def findings(config: Config) -> Iterator[Finding]:
    yield from _data_flow(config)
    yield from _servers(config)
    yield from _age_and_filters(config)
    yield from _data_options(config)
    yield from _optimiser(config)
    yield from _objective(config)
    yield from _lengths_of_answers(config)
    yield from _imports(config)


def _data_flow(config: Config) -> Iterator[Finding]:
    """Groups, batches and their parts."""
    rollout, train = config.rollout, config.train
    if train.batch_groups % train.minibatches:
        what = f"{train.minibatches} does not divide train.batch_groups ({train.batch_groups})"
        yield "train.minibatches", f"{what}; try {near_divisors(train.batch_groups, train.minibatches)}"
    else:
        samples = train.batch_groups // train.minibatches * rollout.group_size
        if train.ranks > samples:
            what = f"{train.ranks} ranks, but a minibatch has only {samples} samples"
            yield "train.ranks", f"{what} (groups × rollout.group_size / train.minibatches); try {samples}"
    if rollout.group_size == 1 and train.advantage in ("grpo", "dr_grpo", "rloo"):
        what = f"1: under {train.advantage} a sample alone has no advantage and nothing is learned"
        yield "rollout.group_size", f"{what}; try 8"
    if rollout.min_group is not None and rollout.min_group > rollout.group_size:
        what = f"{rollout.min_group} is more than rollout.group_size ({rollout.group_size})"
        yield "rollout.min_group", f"{what}; try {rollout.group_size}"
    if rollout.max_concurrent < rollout.group_size:
        what = f"{rollout.max_concurrent} is less than one group (rollout.group_size is {rollout.group_size})"
        yield "rollout.max_concurrent", f"{what}; try {rollout.group_size * train.batch_groups}"


def _servers(config: Config) -> Iterator[Finding]:
    servers, urls = config.own_servers + len(config.rollout.urls), config.rollout.urls
    if not servers:
        yield "rollout.servers", "0, and there are no rollout.urls: nobody would answer; try 1"
        return
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        yield "rollout.urls", f"{twice[0]} is named twice; keep one of them"
    if config.weights.wave > servers:
        yield "weights.wave", f"{config.weights.wave} is more than there are servers ({servers}); try {servers}"


def _age_and_filters(config: Config) -> Iterator[Finding]:
    rollout = config.rollout
    if rollout.requeue and rollout.when_older != "drop":
        yield "rollout.requeue", f"true: nothing is dropped with rollout.when_older {rollout.when_older}; try false"
    if rollout.success_min > rollout.success_max:
        what = f"{rollout.success_min:g} is more than rollout.success_max ({rollout.success_max:g}): no group passes"
        yield "rollout.success_min", f"{what}; try {rollout.success_max:g} or less"


def _data_options(config: Config) -> Iterator[Finding]:
    data = config.data
    if data.weights and len(data.weights) != len(data.train):
        what = f"{len(data.weights)} shares for {len(data.train)} files of data.train"
        yield "data.weights", f"{what}; write one for each, or leave it out"
    if config.eval.every_steps is not None and data.eval is None:
        yield "eval.every_steps", "there is nothing to evaluate on; name a file of held-out problems in data.eval"


def _objective(config: Config) -> Iterator[Finding]:
    """The loss and what belongs to it."""
    train = config.train
    if train.loss == "gspo":
        if train.aggregation != "sequence_mean":
            yield "train.aggregation", f"{train.aggregation}: gspo has one ratio for an answer; try sequence_mean"
        if train.dual_clip is not None:
            yield "train.dual_clip", "is not for gspo, whose ratios are those of whole answers; leave it out"
    if train.weight_cap is not None and train.loss == "ppo":
        yield "train.weight_cap", "ppo has no behaviour weight to cap; leave it out, or try train.loss decoupled_ppo"
    if train.reference_path is not None and not train.kl_coef:
        yield (
            "train.reference_path",
            "with train.kl_coef 0 no reference model is loaded; leave it out",
        )


def _lengths_of_answers(config: Config) -> Iterator[Finding]:
    """What becomes of answers that are cut, or nearly; and of those that are too short or too long."""
    reward, longest = config.reward, config.rollout.max_new_tokens
    if reward.min_tokens > longest:
        what = f"{reward.min_tokens} is more than rollout.max_new_tokens ({longest}): no answer would have a reward"
        yield "reward.min_tokens", f"{what}; try {longest // 10}"
    if reward.max_tokens is not None and not reward.min_tokens <= reward.max_tokens <= longest:
        what = f"must lie between reward.min_tokens ({reward.min_tokens}) and rollout.max_new_tokens ({longest})"
        yield "reward.max_tokens", f"{what}, not {reward.max_tokens}; try {longest}, or null"
    if config.train.advantage == "areal_paper" and (reward.scale, reward.bias) != (1, 0):
        yield "reward.scale", "areal_paper has its own ±5 in place of 1 and 0; leave scale and bias out"
    if config.train.truncated == "penalize" and not reward.truncated_penalty:
        yield "reward.truncated_penalty", "0: train.truncated is penalize, and nothing would be taken; try 1"
    if reward.overlong_tokens >= longest:
        what = f"{reward.overlong_tokens} is the whole answer (rollout.max_new_tokens is {longest})"
        yield "reward.overlong_tokens", f"{what}; try {max(longest // 4, 0)}"
    elif reward.overlong_tokens and not reward.overlong_penalty:
        yield "reward.overlong_penalty", "0: reward.overlong_tokens would do nothing; try 1, or leave both out"


def near_divisors(whole: int, wanted: int) -> str:
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    below = [str(d) for d in divisors if d < wanted][-1:]
    above = [str(d) for d in divisors if d > wanted][:1]
    return " or ".join(below + above)


def _optimiser(config: Config) -> Iterator[Finding]:
    train = config.train
    if train.lr > 1:
        # AdamW moves each weight by about lr a step: above 1 it can only be a slip, such as 1e6 for 1e-6
        yield "train.lr", f"{train.lr:g} is no learning rate; it must be at most 1; try {1 / train.lr:g}"
    for number, beta in enumerate(train.betas):
        if not 0 <= beta < 1:
            yield f"train.betas[{number}]", f"must be ≥ 0 and < 1, not {beta:g}; try {(0.9, 0.95)[number]}"
    updates = train.steps * train.minibatches
    if train.warmup_steps > updates:
        what = f"{train.warmup_steps} is more than the run has optimiser steps ({updates}): the rate is never reached"
        yield "train.warmup_steps", f"{what}; try {updates // 10}"
    if train.min_lr_share and train.lr_schedule == "constant":
        yield "train.min_lr_share", f"{train.min_lr_share:g}: with lr_schedule constant the rate never falls; try 0"


def _imports(config: Config) -> Iterator[Finding]:
    """Import paths by their form; what stands behind them is loaded when the run starts."""
    yield from _import_path("rollout.workflow", config.rollout.workflow, "single_turn", "Class")
    for argument in config.server.extra_args:
        name = argument.partition("=")[0]
        if name in _OUR_ARGUMENTS:
            instead = f"; set {_OUR_ARGUMENTS[name]} instead" if _OUR_ARGUMENTS[name] else "; leave it out"
            yield "server.extra_args", f"{name} is set by the run itself{instead}"


def _import_path(key: str, value: str, builtin: str, kind: str) -> Iterator[Finding]:
    if value == builtin or IMPORT_PATH.fullmatch(value):
        return
    module, _, name = value.replace("/", ".").replace(".py:", ":").rpartition(":" if ":" in value else ".")
    nearest = f"{module}:{name}" if IMPORT_PATH.fullmatch(f"{module}:{name}") else builtin
    yield key, f"must be {builtin}, or an import path module:{kind}, not {value!r}; try {nearest}"
