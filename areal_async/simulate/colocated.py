"""The other way to do it, as a baseline: all GPUs write a whole batch, wait for its longest answer, and then all train.

What always holds: the same servers, the same trainer and the same answers as in `engine`, only never at the same time,
and nothing is older than the weights that train it. A step is

    generation (the slowest server, checks included) + reshard_s + training + reshard_s

as in verl's and similar systems' default, where weights and optimiser states change places with the engine's memory.
Groups are dealt to the servers before generation begins, the same number each (or one more), and none moves later.
"""

from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple

from areal_async.core.batches import minibatch, shuffled
from areal_async.messages import Rules
from areal_async.simulate.engine import Progress
from areal_async.simulate.figures import Figures
from areal_async.simulate.models import Answer, Cluster
from areal_async.simulate.servers import Answering, Server
from areal_async.simulate.trainers import train_s


class _Generated(NamedTuple):
    """seconds: until the last answer was checked. busy_s: of all servers together. answers: in the order of groups,
    then of members. prefill_s: of all servers together."""

    seconds: float
    busy_s: float
    prefill_s: float
    answers: list[Answer]


def simulate(rules: Rules, cluster: Cluster, reshard_s: float, progress: Progress | None = None) -> Figures:
    """A whole run. reshard_s: from generation to training, and as long back."""
    now = cluster.start_s
    generation_s = busy_s = training_s = prefill_s = 0.0
    steps: list[float] = []
    trainings: list[float] = []
    answers: list[Answer] = []
    trained = samples = 0
    for step in range(rules.steps):
        generated = _generate(rules, cluster, step)
        kept = [answer for answer in generated.answers if not (answer.truncated and rules.truncated == "mask")]
        lasts = _train_s(rules, cluster, step, generated.answers)
        if rules.checkpoint_steps and (step + 1) % rules.checkpoint_steps == 0:
            lasts += cluster.trainer.checkpoint_s
        whole = generated.seconds + lasts + 2 * reshard_s
        steps.append(whole + (cluster.start_s if not step else 0.0))
        trainings.append(lasts)
        now += whole
        generation_s += generated.seconds
        busy_s += generated.busy_s
        prefill_s += generated.prefill_s
        training_s += lasts
        samples += len(kept)
        trained += sum(answer.length for answer in kept)
        answers += generated.answers
        if progress is not None:
            progress(step + 1, now)
    return _figures(rules, cluster, now, reshard_s, steps, trainings, answers, trained, samples, busy_s, prefill_s)


def _generate(rules: Rules, cluster: Cluster, step: int) -> _Generated:
    first = step * rules.batch_groups
    servers = [Server(str(number), cluster.server, cluster.swap) for number in range(cluster.servers)]
    answers: list[Answer] = []
    for server in servers:
        server.join(0.0)
    for group in range(first, first + rules.batch_groups):
        server = servers[(group - first) % len(servers)]
        for member in range(rules.group_size):
            answer = cluster.answers.answer(group, member, 0)
            server.ask(Answering(f"{group}.{member}", 0, group, 0, answer, len(answers)), 0.0)
            answers.append(answer)
    ends: list[float] = []
    busy_s = 0.0
    for server in servers:
        last = 0.0
        while (at := server.next_end()) is not None:
            ends += [at] * len(server.end(at))
            server.begin(at)
            last = at
        busy_s += last
    prefill_s = sum(server.stalled_s for server in servers)
    return _Generated(_checked(cluster, sorted(ends)), busy_s, prefill_s, answers)


def _checked(cluster: Cluster, ends: Sequence[float]) -> float:
    """When the last check is done. ends: of the answers, ascending; each goes to the worker that is free first."""
    workers = [0.0] * cluster.rewards.workers
    last = 0.0
    for end in ends:
        done = max(end, workers[0]) + cluster.rewards.check_s
        heapreplace(workers, done)
        last = max(last, done)
    return last


def _train_s(rules: Rules, cluster: Cluster, step: int, answers: Sequence[Answer]) -> float:
    """As the core would form the step."""
    size = rules.group_size
    groups = [list(range(first, first + size)) for first in range(0, len(answers), size)]
    if rules.truncated == "mask":
        groups = [[index for index in members if not answers[index].truncated] for members in groups]
    if rules.minibatches > 1:
        groups = shuffled(groups, rules.seed, step)
    lengths = [answer.prompt_tokens + answer.length for answer in answers]
    responses = [answer.length for answer in answers]
    each = len(groups) // rules.minibatches
    parts = [groups[first : first + each] for first in range(0, len(groups), each)]
    made = [minibatch([index for group in part for index in group], lengths, responses, rules) for part in parts]
    return train_s(cluster.trainer, made, lengths)


def _figures(
    rules: Rules, cluster: Cluster, now: float, reshard_s: float, steps: list[float], trainings: list[float],
    answers: Sequence[Answer], trained: int, samples: int, busy_s: float, prefill_s: float,
) -> Figures:  # fmt: skip
    """The words of docs/metrics.md; what can't be here (lag, swaps, what age has cost) is 0. GPUs are counted once."""
    seconds = max(now, 1e-12)
    generated = sum(answer.length for answer in answers)
    groups = rules.steps * rules.batch_groups
    training_s = sum(trainings)
    used = [answer for answer in answers if not (answer.truncated and rules.truncated == "mask")]
    return Figures(
        end="steps_done", seconds=now, steps=rules.steps, steps_per_s=rules.steps / seconds, step_s=steps,
        train_s=trainings, samples=samples, tokens_generated=generated, tokens_trained=trained, tokens_masked=0,
        tokens_older=0, tokens_discarded=0, tokens_stale=0, tokens_left=0, tokens_unfinished=0, tokens_inferred=0,
        tokens_recomputed=0, tokens_per_s=generated / seconds, tokens_trained_per_s=trained / seconds,
        lag_tokens={0: trained}, lag_mean=0.0, lag_max=0, mixed_share=0.0,
        response_len_mean=trained / max(samples, 1),
        truncated_share=sum(answer.truncated for answer in used) / max(samples, 1),
        trainer_wait_s=now - training_s, trainer_idle_share=1 - training_s / seconds,
        rollout_idle_share=1 - busy_s / cluster.servers / seconds, both_busy_share=0.0, samples_stale=0,
        lost_by_length=(0.0, 0.0, 0.0, 0.0), swaps=0, swap_pause_s=2 * reshard_s * rules.steps * cluster.servers,
        stalled_s=prefill_s, restarts=0, continued=0,
        gpu_hours=max(cluster.server_gpus, cluster.trainer_gpus) * now / 3600, events=0,
        ledger={"trained": groups, "samples_trained": samples},
    )  # fmt: skip
