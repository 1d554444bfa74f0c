"""What a plan comes to: rules for the core and models for the cluster, from data sheets or from a recorded run.

What always holds: a pure function of the plan (and of what was fitted); all that is wrong with it as a whole is told
at once, with the line of the option to change and what to set instead; an option that would do nothing is wrong.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, TypeAlias, TypeVar

import msgspec

from areal_async.config_file import Sources
from areal_async.config_options import near_divisors
from areal_async.errors import ConfigError
from areal_async.messages import Rules
from areal_async.simulate import hardware, lengths
from areal_async.simulate.fit import Fitted, RecordedAnswers
from areal_async.simulate.hardware import Gpu, Shape
from areal_async.simulate.lengths import Drawn, Empirical, Histogram, Lengths, LogNormal
from areal_async.simulate.models import (
    Answers,
    Cluster,
    FailureModel,
    RewardModel,
    ServerModel,
    SwapModel,
    TrainerModel,
)
from areal_async.simulate.plan import Plan

Finding: TypeAlias = tuple[str, str]
"""Key of the option to change, and what is wrong with it."""

# What only data sheets need: beside `from_run` it would do nothing.
_HARDWARE: Final = (
    "model.name", "model.parameters", "model.layers", "model.hidden", "model.heads", "model.kv_heads", "model.head_dim",
    "model.vocabulary", "model.tied", "model.weight_bytes", "model.kv_bytes", "gpu.name", "gpu.tflops",
    "gpu.bandwidth_gb_s", "gpu.memory_gb", "servers.memory_share", "servers.bandwidth_share", "servers.decode_mfu",
    "servers.prefill_mfu", "train.gradient_checkpointing", "train.zero_stage", "trainer.mfu",
    "trainer.link_gb_s", "swap.gb_s",
)  # fmt: skip
# More is a slip of the pen: it would not fit into this machine's memory, or take more than a day (docs/simulate.md).
MOST_PARTS: Final = 100_000  # servers; trainer ranks
MOST_OF_STEP: Final = 1_000_000  # samples
MOST_OF_RUN: Final = 1_000_000_000  # samples
_GIGA: Final = 1e9
_TERA: Final = 1e12


@dataclass(frozen=True, slots=True)
class Scenario:
    """Ready to be simulated. gpus: of servers and trainer. reshard_s: of `system: colocated`, each way; there both are
    the same GPUs. assumed: what the recorded run didn't tell, and what was taken, in words."""

    rules: Rules
    cluster: Cluster
    gpus: int
    reshard_s: float = 0.0
    assumed: tuple[str, ...] = ()


def scenario(plan: Plan, sources: Sources, fitted: Fitted | None = None) -> Scenario:
    """fitted: what `plan.from_run` has told. Raises ConfigError with all that is wrong."""
    wrong = list(_findings(plan, sources, fitted))
    sizes = _Sizes(0, 0)
    if not wrong:
        sizes, wrong = _sizes(plan, fitted)
    if not wrong:
        rules = _rules(plan, sources, sizes, fitted)
        wrong = list(_rules_findings(plan, rules, fitted is None or sources.given("answers")))
    if not wrong:
        try:
            built = _from_run(plan, sources, rules, sizes, fitted) if fitted else _from_sheets(plan, rules, sizes)
        except _Wrong as error:
            wrong = [error.finding]
    if wrong:
        raise ConfigError("\n".join(f"{sources.where(key)}: {key}: {what}" for key, what in wrong))
    return built


class _Wrong(Exception):
    def __init__(self, key: str, what: str) -> None:
        super().__init__(what)
        self.finding: Finding = (key, what)


# ---------------------------------------------------------------------------------------------- what can't be together


def _findings(plan: Plan, sources: Sources, fitted: Fitted | None) -> Iterator[Finding]:
    if fitted is None:
        for key, value in (("train.steps", plan.train.steps), ("train.batch_groups", plan.train.batch_groups)):
            if value is None:
                yield key, "missing; write it, or name a run in from_run"
    else:
        if sources.given("rollout.max_new_tokens") and not sources.given("answers"):
            yield (
                "rollout.max_new_tokens",
                "the run's answers were cut where it had its limit; describe others in answers",
            )
        for key in _HARDWARE:
            if sources.given(key):
                yield key, "does nothing beside from_run, whose run was measured; leave it out"
        if plan.trainer.microbatches == "fixed" and plan.trainer.fixed_microbatches is None:
            yield "trainer.fixed_microbatches", "missing: beside from_run nobody knows how many sequences fit"
        if plan.system == "colocated":
            yield "system", "colocated: a recorded run has servers and trainer apart; try async or sync"
    if plan.system == "colocated":
        if plan.rollout.drop_equal:
            yield "rollout.drop_equal", "true: colocated has a batch made in one go; try false"
        if plan.failures.server_hours:
            yield "failures.server_hours", "has no meaning with colocated, where nothing goes on without a part; try 0"
    if plan.rollout.requeue and plan.rollout.when_older != "drop":
        yield "rollout.requeue", f"true: nothing is dropped with rollout.when_older {plan.rollout.when_older}"
    trainer = plan.trainer
    if trainer.fixed_microbatches is not None and trainer.microbatches == "dynamic":
        yield "trainer.fixed_microbatches", "does nothing with trainer.microbatches dynamic; leave it out, or try fixed"
    yield from _answers_findings(plan, fitted)


def _answers_findings(plan: Plan, fitted: Fitted | None) -> Iterator[Finding]:
    """One distribution, and all of it."""
    answers = plan.answers
    kinds = {
        "answers.mean_tokens": answers.mean_tokens is not None,
        "answers.median_tokens": answers.median_tokens is not None,
        "answers.lengths": bool(answers.lengths),
        "answers.bins": bool(answers.bins),
    }
    given = [key for key, there in kinds.items() if there]
    if not given and fitted is None:
        yield "answers.mean_tokens", f"missing; write it, or one of {', '.join(list(kinds)[1:])}"
    elif len(given) > 1:
        yield given[1], f"there is {given[0]} already, and lengths have one distribution; leave one out"
    if (answers.median_tokens is None) != (answers.p95_tokens is None):
        missing = "answers.p95_tokens" if answers.p95_tokens is None else "answers.median_tokens"
        yield missing, "missing: median_tokens and p95_tokens give a distribution together"
    if answers.shares and not answers.bins:
        yield "answers.bins", "missing: shares says how much falls into each of them"
    if answers.measured_at is not None and answers.mean_tokens is None:
        yield "answers.measured_at", "does nothing without answers.mean_tokens; leave it out"


def _rules_findings(plan: Plan, rules: Rules, drawn: bool) -> Iterator[Finding]:
    """drawn: prompts are the plan's, too."""
    yield from _slips(plan, rules)
    least = plan.warm_up + rules.max_staleness + 2
    if plan.warm_up and rules.steps < least:
        yield "warm_up", f"{plan.warm_up} and the last η + 1 of {rules.steps} steps leave none; try train.steps {least}"
    if rules.batch_groups % rules.minibatches:
        what = f"{rules.minibatches} does not divide train.batch_groups ({rules.batch_groups})"
        yield "train.minibatches", f"{what}; try {near_divisors(rules.batch_groups, rules.minibatches)}"
        return
    samples = rules.batch_groups // rules.minibatches * rules.group_size
    if rules.ranks > samples:
        what = f"{rules.ranks} ranks, but a minibatch has only {samples} samples"
        yield "trainer.gpus", f"{what} (groups × rollout.group_size / train.minibatches)"
    if rules.max_concurrent < rules.group_size:
        what = f"{rules.max_concurrent} is less than one group (rollout.group_size is {rules.group_size})"
        yield "rollout.max_concurrent", f"{what}; try {rules.group_size * rules.batch_groups}"
    if rules.wave > rules.servers:
        yield "weights.wave", f"{rules.wave} is more than there are servers ({rules.servers}); try {rules.servers}"
    longest = rules.max_new_tokens + (plan.answers.max_prompt_tokens or plan.answers.prompt_tokens)
    if drawn and longest > rules.max_tokens_per_microbatch:
        what = f"{rules.max_tokens_per_microbatch} doesn't hold the longest sample, of {longest} tokens"
        yield "train.max_tokens_per_microbatch", f"{what}; try {longest}"


def _slips(plan: Plan, rules: Rules) -> Iterator[Finding]:
    """Numbers that nobody means."""
    for key, count, what in (("servers.count", rules.servers, "servers"), ("trainer.gpus", rules.ranks, "ranks")):
        if count > MOST_PARTS:
            yield key, f"{count:,} {what}; at most {MOST_PARTS:,} are simulated"
    samples = rules.batch_groups * rules.group_size
    if samples > MOST_OF_STEP:
        what = f"{rules.batch_groups:,} × rollout.group_size ({rules.group_size:,}) are {samples:,} samples a step"
        yield "train.batch_groups", f"{what}; at most {MOST_OF_STEP:,} are simulated"
    elif rules.steps * samples > MOST_OF_RUN:
        what = f"{rules.steps:,} × {samples:,} samples would take days; at most {MOST_OF_RUN:,} samples are simulated"
        yield "train.steps", f"{what}; try {MOST_OF_RUN // samples}"
    fixed, part = plan.trainer.fixed_microbatches, -(-samples // (rules.minibatches * rules.ranks))
    if fixed is not None and fixed > part:
        what = f"{fixed:,}, but a rank's part of a minibatch has at most {part:,} samples"
        yield "trainer.fixed_microbatches", f"{what}; try {part}"


# ------------------------------------------------------------------------------------------------------- sizes, rules


@dataclass(frozen=True, slots=True)
class _Sizes:
    servers: int
    ranks: int


def _sizes(plan: Plan, fitted: Fitted | None) -> tuple[_Sizes, list[Finding]]:
    """Servers and ranks: given, or what `cluster.gpus` leaves; colocated: as many of each as all GPUs make."""
    total, each, rank = plan.cluster.gpus, plan.servers.gpus, plan.trainer.gpus_per_rank
    count, gpus = plan.servers.count, plan.trainer.gpus
    if fitted is not None and total is None:
        servers = fitted.cluster.servers if count is None else count
        if gpus is None:
            return _Sizes(servers, fitted.rules.ranks), []
        return _Sizes(servers, gpus // rank), list(_whole_ranks(gpus, rank))
    if plan.system == "colocated":
        whole = total if total is not None else (count or 0) * each + (gpus or 0)
        if whole % each or whole % rank or not whole:
            what = f"{whole} GPUs don't make whole servers of {each} and whole ranks of {rank}"
            return _Sizes(0, 0), [("cluster.gpus", what)]
        return _Sizes(whole // each, whole // rank), []
    if total is None and (count is None or gpus is None):
        key = "servers.count" if count is None else "trainer.gpus"
        return _Sizes(0, 0), [(key, "missing; write it, or cluster.gpus, whose rest it gets")]
    if total is not None and count is not None and gpus is not None and count * each + gpus != total:
        what = (
            f"{total}, but servers.count × servers.gpus + trainer.gpus is {count * each + gpus}; leave one of them out"
        )
        return _Sizes(0, 0), [("cluster.gpus", what)]
    if total is not None and count is None:
        if gpus is None:
            count = min(max(1, round(total * plan.cluster.rollout_share / each)), max(0, (total - rank) // each))
        else:
            count = (total - gpus) // each
    assert count is not None
    if gpus is None:
        assert total is not None
        gpus = total - count * each
    wrong: list[Finding] = []
    if total is not None and count * each + gpus != total:
        wrong.append(("trainer.gpus", f"{gpus} of {total} GPUs leave no whole servers of {each}"))
    wrong += _whole_ranks(gpus, rank)
    if count < 1:
        wrong.append(("servers.count", f"{count}: there would be no server; give it some of the GPUs"))
    return _Sizes(count, gpus // rank), wrong


def _whole_ranks(gpus: int, rank: int) -> Iterator[Finding]:
    if gpus < rank or gpus % rank:
        yield "trainer.gpus", f"{gpus} GPUs don't make whole ranks of trainer.gpus_per_rank ({rank})"


# Options that stand under the same name in `Rules`.
_RULES: Final = {
    "seed": "seed",
    "rollout.group_size": "group_size",
    "rollout.max_new_tokens": "max_new_tokens",
    "rollout.max_staleness": "max_staleness",
    "rollout.max_concurrent": "max_concurrent",
    "rollout.when_older": "when_older",
    "rollout.requeue": "requeue",
    "rollout.drop_equal": "drop_equal",
    "rollout.max_filtered": "max_filtered",
    "train.steps": "steps",
    "train.batch_groups": "batch_groups",
    "train.minibatches": "minibatches",
    "train.max_tokens_per_microbatch": "max_tokens_per_microbatch",
    "train.truncated": "truncated",
    "weights.wave": "wave",
    "checkpoint.every_steps": "checkpoint_steps",
}


def _rules(plan: Plan, sources: Sources, sizes: _Sizes, fitted: Fitted | None) -> Rules:
    """Of the run with what the plan says beside; or the plan's."""
    values = {}
    for key, name in _RULES.items():
        section, _, leaf = key.rpartition(".")
        value = getattr(getattr(plan, section) if section else plan, leaf)
        if fitted is None or sources.given(key):
            values[name] = value
    if values.get("max_concurrent", 0) is None:
        values["max_concurrent"] = sizes.servers * plan.servers.max_running
    if values.get("wave", 0) is None:
        values["wave"] = sizes.servers
    if values.get("checkpoint_steps", 0) is None:
        values["checkpoint_steps"] = 0
    values |= {"servers": sizes.servers, "ranks": sizes.ranks}
    if plan.system != "async":
        values["max_staleness"] = 0
    if fitted is None:
        return Rules(**values, min_group=plan.rollout.group_size)
    if "group_size" in values:
        values["min_group"] = values["group_size"]
    values.setdefault("wave", min(fitted.rules.wave, sizes.servers))
    # what a simulation doesn't have: evaluations
    return msgspec.structs.replace(fitted.rules, **values, eval_every=0)


# ------------------------------------------------------------------------------------------------------- the cluster


def _from_sheets(plan: Plan, rules: Rules, sizes: _Sizes) -> Scenario:
    gpu, shape = _gpu(plan), _shape(plan)
    drawn = _answers(plan, rules)
    _, context = lengths.means(drawn.lengths, rules.max_new_tokens)
    servers, trainer = plan.servers, plan.trainer
    cache = servers.cache_tokens
    if cache is None:
        cache = hardware.cache_tokens(gpu, shape, gpus=servers.gpus, memory_share=servers.memory_share)
    longest = rules.max_new_tokens + drawn.prompt_limit
    if cache < longest:
        what = (
            f"the KV cache of {servers.gpus} GPU(s) holds {max(cache, 0)} tokens beside the weights, and the longest "
        )
        least = ceil((shape.weights + longest * shape.kv) / (gpu.memory * servers.memory_share))
        raise _Wrong("servers.gpus", f"{what}sample has {longest}; try {max(least, servers.gpus + 1)}")
    speed = plan.swap.gb_s * _GIGA
    load_s = plan.swap.load_s
    if load_s is None:
        load_s = hardware.moved_s(shape, gpus=servers.gpus, bytes_per_s=speed)
    publish_s = trainer.publish_s
    if publish_s is None:
        publish_s = hardware.moved_s(shape, gpus=trainer.gpus_per_rank, bytes_per_s=speed)
    model = hardware.trainer_model(
        gpu, shape, ranks=sizes.ranks, gpus_per_rank=trainer.gpus_per_rank, mfu=trainer.mfu,
        minibatches=rules.minibatches, checkpointing=plan.train.gradient_checkpointing,
        zero=plan.train.zero_stage,
        link=None if trainer.link_gb_s is None else trainer.link_gb_s * _GIGA, step_s=trainer.step_s,
        microbatch_s=trainer.microbatch_s, publish_s=publish_s, checkpoint_s=trainer.checkpoint_s,
    )  # fmt: skip
    cluster = Cluster(
        servers=sizes.servers,
        server=hardware.server_model(
            gpu, shape, gpus=servers.gpus, context=plan.answers.prompt_tokens + context,
            bandwidth_share=servers.bandwidth_share, decode_mfu=servers.decode_mfu, prefill_mfu=servers.prefill_mfu,
            overhead_s=servers.overhead_s, max_running=servers.max_running, cache=cache,
        ),
        swap=SwapModel(load_s, plan.swap.interruptible),
        trainer=_microbatches(plan, rules, model, longest),
        rewards=RewardModel(plan.reward.check_s, plan.reward.workers),
        answers=drawn,
        failures=FailureModel(plan.failures.server_hours, plan.failures.restart_s),
        start_s=plan.cluster.start_s,
        server_gpus=sizes.servers * servers.gpus,
        trainer_gpus=sizes.ranks * trainer.gpus_per_rank,
    )  # fmt: skip
    reshard_s = plan.colocated.reshard_s
    if reshard_s is None:
        reshard_s = hardware.moved_s(shape, gpus=servers.gpus, bytes_per_s=speed)
    both = cluster.server_gpus + cluster.trainer_gpus
    return Scenario(rules, cluster, cluster.server_gpus if plan.system == "colocated" else both, reshard_s)


def _from_run(plan: Plan, sources: Sources, rules: Rules, sizes: _Sizes, fitted: Fitted) -> Scenario:
    """What was fitted, and in it what the plan gives."""
    cluster = fitted.cluster
    answers: Answers = cluster.answers
    if sources.given("answers"):
        answers = _answers(plan, rules)
    elif isinstance(answers, RecordedAnswers):
        answers = answers.asked_by(rules)
    cluster = replace(
        cluster,
        servers=sizes.servers,
        server=_with(cluster.server, plan, sources, {
            "servers.overhead_s": "overhead_s", "servers.max_running": "max_running", "servers.cache_tokens": "cache",
        }),
        swap=_with(cluster.swap, plan, sources, {"swap.load_s": "load_s", "swap.interruptible": "interruptible"}),
        trainer=_microbatches(plan, rules, _with(cluster.trainer, plan, sources, {
            "trainer.step_s": "step_s", "trainer.microbatch_s": "microbatch_s", "trainer.publish_s": "publish_s",
            "trainer.checkpoint_s": "checkpoint_s",
        }), 1),
        rewards=_with(cluster.rewards, plan, sources, {"reward.check_s": "check_s", "reward.workers": "workers"}),
        failures=_with(cluster.failures, plan, sources, {
            "failures.server_hours": "server_hours", "failures.restart_s": "restart_s",
        }),
        answers=answers,
        start_s=plan.cluster.start_s if sources.given("cluster.start_s") else cluster.start_s,
        server_gpus=sizes.servers * plan.servers.gpus,
        trainer_gpus=sizes.ranks * plan.trainer.gpus_per_rank,
    )  # fmt: skip
    return Scenario(rules, cluster, cluster.server_gpus + cluster.trainer_gpus, assumed=fitted.assumed)


Model = TypeVar("Model", ServerModel, SwapModel, TrainerModel, RewardModel, FailureModel)


def _with(model: Model, plan: Plan, sources: Sources, names: Mapping[str, str]) -> Model:
    """The model, and in it what the plan gives. names: the model's field of each option."""
    given = {}
    for key, name in names.items():
        section, _, leaf = key.partition(".")
        value = getattr(getattr(plan, section), leaf)
        if sources.given(key) and value is not None:
            given[name] = value
    return replace(model, **given)


def _microbatches(plan: Plan, rules: Rules, model: TrainerModel, longest: int) -> TrainerModel:
    """longest: sample, in tokens: so that as many as fit into a fixed micro-batch fit in any case."""
    if plan.trainer.microbatches == "dynamic":
        return model
    count = plan.trainer.fixed_microbatches
    if count is None:
        sequences = ceil(rules.batch_groups * rules.group_size / rules.minibatches / rules.ranks)
        count = ceil(sequences / max(1, rules.max_tokens_per_microbatch // longest))
    return replace(model, microbatches="fixed", fixed_microbatches=count)


def _gpu(plan: Plan) -> Gpu:
    gpu = plan.gpu
    known = hardware.GPUS[gpu.name] if gpu.name is not None else (None, None, None)
    values = {}
    for key, value, default, unit in (
        ("tflops", gpu.tflops, known[0], _TERA),
        ("bandwidth_gb_s", gpu.bandwidth_gb_s, known[1], _GIGA),
        ("memory_gb", gpu.memory_gb, known[2], _GIGA),
    ):
        chosen = default if value is None else value
        if chosen is None:
            raise _Wrong(f"gpu.{key}", f"missing; write it, or gpu.name: {', '.join(hardware.GPUS)}")
        values[key] = chosen * unit
    return Gpu(values["tflops"], values["bandwidth_gb_s"], values["memory_gb"])


def _shape(plan: Plan) -> Shape:
    model = plan.model
    known = hardware.SHAPES[model.name] if model.name is not None else None

    def chosen(key: str) -> int:
        value: float | None = getattr(model, key)
        if value is None and known is not None:
            value = getattr(known, key)
        if value is None:
            raise _Wrong(f"model.{key}", f"missing; write it, or model.name: {', '.join(hardware.SHAPES)}")
        return int(value)

    hidden, heads = chosen("hidden"), chosen("heads")
    by_name = known is not None
    shape = Shape(
        parameters=chosen("parameters"),
        layers=chosen("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=chosen("kv_heads") if by_name or model.kv_heads is not None else heads,
        head_dim=chosen("head_dim") if by_name or model.head_dim is not None else hidden // heads,
        vocabulary=chosen("vocabulary"),
        tied=bool(chosen("tied")) if by_name or model.tied is not None else False,
        weight_bytes=model.weight_bytes,
        kv_bytes=model.kv_bytes,
    )
    if not shape.head_dim:
        raise _Wrong("model.hidden", f"{hidden} is less than model.heads ({heads}): heads would have no width")
    if shape.multiplied <= 0:
        embedding = f"the input embedding alone (model.vocabulary × model.hidden = {shape.vocabulary * hidden:,})"
        raise _Wrong("model.parameters", f"{shape.parameters:,} are not more than {embedding}")
    return shape


def _answers(plan: Plan, rules: Rules) -> Drawn:
    answers = plan.answers
    limit = answers.max_prompt_tokens
    if limit is None:  # what fits into a micro-batch beside the longest answer
        limit = (
            rules.max_tokens_per_microbatch - rules.max_new_tokens if answers.prompt_spread else answers.prompt_tokens
        )
    return Drawn(
        seed=rules.seed,
        lengths=_lengths(plan),
        prompt=LogNormal.of_mean(answers.prompt_tokens, answers.prompt_spread),
        prompt_limit=limit,
        max_new_tokens=rules.max_new_tokens,
        alike=answers.group_correlation,
        growth=answers.growth_per_step,
        batch_groups=rules.batch_groups,
        success=answers.success_rate,
    )


def _lengths(plan: Plan) -> Lengths:
    answers = plan.answers
    key = "answers.mean_tokens"
    try:
        if answers.lengths:
            return Empirical(answers.lengths)
        if answers.bins:
            key = "answers.shares"
            return Histogram(answers.bins, answers.shares)
        if answers.median_tokens is not None and answers.p95_tokens is not None:
            key = "answers.p95_tokens"
            return LogNormal.of_percentiles(answers.median_tokens, answers.p95_tokens)
        assert answers.mean_tokens is not None
        return LogNormal.of_mean(answers.mean_tokens, answers.spread, answers.measured_at)
    except ValueError as error:
        raise _Wrong(key, str(error)) from error
