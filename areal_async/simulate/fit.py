"""Models of service times fitted to a recorded run, so that a run with other rules can be predicted from it.

    fitted = fit(folder)                       # of the log
    figures = simulate(fitted.rules, fitted.cluster)

What always holds: nothing but the log is read, and the same log gives the same models; what a fault, a start or a
rollback has disturbed doesn't count (`observed`); what a log can't tell has a default that is said in `assumed`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from pathlib import Path
from typing import Final

import numpy as np

from areal_async.errors import ConfigError
from areal_async.messages import Rules
from areal_async.simulate.models import Answer, Cluster, RewardModel, ServerModel, SwapModel, TrainerModel
from areal_async.simulate.observed import Observed, Seen, Step, observe
from areal_async.simulate.speed import Array, Speed, fewest, fit_speed, generating, least_squares

LEAST_STEPS: Final = 5  # of training, undisturbed: fewer tell more of chance than of the trainer
PROX_SHARE: Final = 1 / 3  # a forward pass beside forward and backward ones: 2 of 6 operations a parameter and token
SLOWER: Final = tuple(1 + place / 50 for place in range(51))  # what is tried: 1 to 2 times as long (speed.MOST_SLOWER)
MOST_WORKERS: Final = 32  # that make checks; more than a run's checks could tell
TOKENS: Final = 3  # place of token_s: steps that are all alike don't tell it from a fixed time, but it is there
ROOMY: Final = 1 << 40  # tokens: of a cache whose size the log doesn't tell; none was too small for the run
STRIDE: Final = 7919  # groups from one attempt's answers to the next one's: a prime, so that all come up


@dataclass(frozen=True, slots=True)
class RecordedAnswers:
    """What the model answered in a run, given again in the same order.

    groups: its answers, by group. batch_groups: how many of these went into a step. asked_groups: how many go into a
    step of the run that asks.

    Answers change while the policy learns, so a group gets those of a recorded group that was as many **steps** from
    the beginning: where a step takes half as many groups, those of every second one. Members of a group stay together,
    since answers to one prompt are alike. A further attempt gets answers from elsewhere. After the last group the last
    quarter comes again and again.
    """

    groups: tuple[tuple[Answer, ...], ...]
    batch_groups: int
    asked_groups: int

    def answer(self, group: int, member: int, attempt: int) -> Answer:
        count = len(self.groups)
        place = group * self.batch_groups // self.asked_groups + attempt * STRIDE
        if place >= count:
            last = max(count // 4, 1)
            place = count - last + (place - count) % last
        members = self.groups[place]
        return members[member % len(members)]

    def asked_by(self, rules: Rules) -> "RecordedAnswers":
        """The same for a run by these rules."""
        return replace(self, asked_groups=rules.batch_groups)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A recorded run: its rules, and models of how long everything took in it.

    server_error, trainer_error: of an answer's, a step's time: root of the mean square of what the models leave, as a
    share of the mean. answers, steps: how many these rest on. assumed: what the log didn't tell, and what was taken, in
    words.
    """

    rules: Rules
    cluster: Cluster
    server_error: float = 0.0
    trainer_error: float = 0.0
    answers: int = 0
    steps: int = 0
    assumed: tuple[str, ...] = ()


def fit(folder: Path) -> Fitted:
    """folder: of the log. Errors: LogError; ConfigError where too little was recorded."""
    seen = observe(folder)
    assumed: list[str] = []
    try:
        speed = fit_speed(seen.lives, [(step.began, step.ended) for step in seen.steps])
        trainer, trainer_error = _trainer(seen, assumed)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
    rules = seen.rules
    cluster = Cluster(
        servers=rules.servers,
        server=_server(speed, assumed),
        swap=_swap(seen, assumed),
        trainer=trainer,
        rewards=_rewards(seen.checks, assumed),
        answers=RecordedAnswers(_answers(seen), rules.batch_groups, rules.batch_groups),
        start_s=seen.began,
    )
    return Fitted(rules, cluster, speed.error, trainer_error, speed.answers, len(seen.steps), tuple(assumed))


def _server(speed: Speed, assumed: list[str]) -> ServerModel:
    assumed.append(f"a server writes at most {speed.most} answers at a time: the most that one had in the run")
    assumed.append("the KV cache of a server holds whatever runs there")
    return ServerModel(
        overhead_s=speed.overhead_s,
        weights_s=0.0,
        context_s=speed.context_s,
        sequence_s=speed.sequence_s,
        prefill_s=speed.prefill_s,
        max_running=speed.most,
        cache=ROOMY,
        request_s=speed.request_s,
        beside_training=speed.beside_training,
    )


def _swap(seen: Observed, assumed: list[str]) -> SwapModel:
    pauses = [pause for life in seen.lives for pause in life.pauses]
    if not pauses:
        assumed.append("a swap takes no time: the run had none that nothing disturbed")
        return SwapModel(load_s=0.0)
    columns = np.array([(1.0, pause.running) for pause in pauses])
    load_s, answer_s = least_squares(columns, np.array([pause.ended - pause.began for pause in pauses])).tolist()
    return SwapModel(load_s=load_s, answer_s=answer_s)


def _trainer(seen: Observed, assumed: list[str]) -> tuple[TrainerModel, float]:
    """The trainer's model, and the error of a step."""
    if len(seen.steps) < LEAST_STEPS:
        raise ConfigError(
            f"only {len(seen.steps)} steps were trained that nothing disturbed, and {LEAST_STEPS} are needed to fit"
            " how fast the trainer is; name a longer run"
        )
    several = seen.rules.minibatches > 1
    passes = 1 + PROX_SHARE if several else 1.0
    if several:
        assumed.append(f"the proximal policy's pass takes {PROX_SHARE:.0%} of a micro-batch: the log has their sum")
    rows = [_row(step, passes) for step in seen.steps]
    names = ("minibatch_s", "microbatch_s", "step_s", "token_s", "pair_s")  # of those alike the first one gets it
    assert names[TOKENS] == "token_s"
    columns = np.array([[row[name] for name in names] for row in rows])
    spans = [(step.began, step.ended) for step in seen.steps]
    took = np.array([ended - began for began, ended in spans])
    share = generating(seen.lives, seen.rules.servers, spans)
    beside = _beside_generation(columns, took, share)
    slower = 1 + (beside - 1) * share
    times = fewest(columns, took / slower, [TOKENS])
    rest = columns @ times * slower - took
    minibatch_s, microbatch_s, step_s, token_s, pair_s = (float(time) for time in times)
    if not seen.checkpoints and seen.rules.checkpoint_steps:
        assumed.append("a checkpoint takes no time: the run wrote none")
    model = TrainerModel(
        step_s=step_s,
        minibatch_s=minibatch_s,
        microbatch_s=microbatch_s,
        token_s=token_s,
        pair_s=pair_s,
        publish_s=_mean(seen.publish),
        prox_share=PROX_SHARE,
        checkpoint_s=_mean(seen.checkpoints),
        beside_generation=beside,
    )
    return model, float(np.sqrt(np.mean(rest * rest)) / np.mean(took))


def _beside_generation(columns: Array, took: Array, share: Array) -> float:
    """How much longer steps took while all servers generated, 1 if nothing explains the steps better. share: of each
    step's time in which they did."""

    def cost(beside: float) -> float:
        slower = 1 + (beside - 1) * share
        rest = columns @ fewest(columns, took / slower, [TOKENS]) * slower - took
        return len(took) * math.log(max(float(rest @ rest), 1e-300))

    return min(SLOWER, key=cost)


def _row(step: Step, passes: float) -> dict[str, float]:
    """What each time of the model is multiplied by. Of ranks' micro-batches the one with most tokens counts."""
    micros = tokens = pairs = 0
    for minibatch in step.microbatches:
        for place in range(max(len(rank) for rank in minibatch)):
            longest = max((rank[place] for rank in minibatch if place < len(rank)), key=sum)
            micros += 1
            tokens += sum(longest)
            pairs += sum(length * length for length in longest)
    return {
        "minibatch_s": len(step.microbatches),
        "microbatch_s": micros * passes,
        "step_s": 1.0,
        "token_s": tokens * passes,
        "pair_s": pairs * passes,
    }


def _rewards(checks: Sequence[tuple[float, float]], assumed: list[str]) -> RewardModel:
    """A check that met no other one takes check_s (the median of these). As many workers as explain best how long all
    of them took, if each begins with the first check that waits."""
    if not checks:
        assumed.append("a check takes no time: the run made none")
        return RewardModel(check_s=0.0, workers=1)
    checks = sorted(checks)
    alone, until = [], -math.inf
    for asked, ended in checks:
        if asked >= until:
            alone.append(ended - asked)
        until = max(until, ended)
    check_s = float(np.median(alone))
    workers = min(range(1, MOST_WORKERS + 1), key=lambda count: _unexplained_s(checks, check_s, count))
    return RewardModel(check_s, workers)


def _unexplained_s(checks: Sequence[tuple[float, float]], check_s: float, workers: int) -> float:
    """By how much the ends of all checks differ from those of so many workers, sum."""
    free = [-math.inf] * workers  # from when on each worker is, the earliest first
    differ = 0.0
    for asked, ended in checks:
        end = max(asked, free[0]) + check_s
        heapreplace(free, end)
        differ += abs(end - ended)
    return differ


def _answers(seen: Observed) -> tuple[tuple[Answer, ...], ...]:
    return tuple(tuple(_answer(answer) for answer in group) for group in seen.groups)


def _answer(seen: Seen) -> Answer:
    done = seen.done
    assert done is not None, f"{seen.sample} has not come"
    return Answer(done.prompt_tokens, done.length, done.finish == "length", seen.reward)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
