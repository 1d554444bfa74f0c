"""Models fitted to a log: those by which the log was made are found again, and what isn't there isn't made up.

The logs are of simulated runs, so that the right answer is known; noise is added where it is said.
"""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec
import numpy as np
import pytest

from areal_async.core.orchestrator import Orchestrator
from areal_async.errors import ConfigError
from areal_async.log.writer import RunLog
from areal_async.messages import AnyCommand, AnyEvent, Lost, Rules
from areal_async.simulate import engine
from areal_async.simulate.figures import Figures
from areal_async.simulate.fit import Fitted, RecordedAnswers, fit
from areal_async.simulate.happened import happened
from areal_async.simulate.models import Answer, Cluster, FailureModel, RewardModel, ServerModel, SwapModel, TrainerModel
from areal_async.simulate.speed import fewest, least_squares
from areal_async.simulate.validate import validate

SERVER = ServerModel(
    overhead_s=0.01, weights_s=0.0, context_s=0.0, sequence_s=2e-4, prefill_s=5e-5, max_running=64, cache=1 << 30
)
TRAINER = TrainerModel(
    step_s=0.0, minibatch_s=0.05, microbatch_s=0.0, token_s=1e-4, pair_s=0.0, publish_s=0.02, prox_share=1 / 3,
    checkpoint_s=0.5,
)  # fmt: skip
RULES = Rules(
    seed=1, steps=14, batch_groups=8, group_size=4, max_staleness=2, max_concurrent=48, minibatches=2, ranks=1,
    max_tokens_per_microbatch=2048, max_new_tokens=400, checkpoint_steps=5,
)  # fmt: skip


REQUEST_ERROR_S = 0.005  # of answers that take about a second


class Drawn:
    """Lengths from 5 to 400, and prompts from 10 to 90 tokens."""

    def answer(self, group: int, member: int, attempt: int) -> Answer:
        prompt = Random(f"{group}").randint(10, 90)
        length = min(int(Random(f"{group}.{member}.{attempt}").lognormvariate(3.5, 0.7)) + 5, 400)
        return Answer(prompt, length, length == 400, float(length % 2))


@dataclass(frozen=True)
class Learning:
    """Answers that get longer with each step."""

    batch_groups: int

    def answer(self, group: int, member: int, attempt: int) -> Answer:
        return Answer(20, 20 + 10 * group // self.batch_groups + member, False, 1.0)


CLUSTER = Cluster(
    servers=1, server=SERVER, swap=SwapModel(0.1), trainer=TRAINER, rewards=RewardModel(0.004, 2), answers=Drawn(),
    start_s=20.0,
)  # fmt: skip


class Record(Protocol):
    def __call__(
        self,
        cluster: Cluster = CLUSTER,
        rules: Rules = RULES,
        told: Callable[[AnyEvent], AnyEvent] | None = None,
    ) -> tuple[Path, Figures]: ...


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Simulates a run and writes its log as a run does. told: what the log says in place of an event."""

    def write(
        cluster: Cluster = CLUSTER, rules: Rules = RULES, told: Callable[[AnyEvent], AnyEvent] | None = None
    ) -> tuple[Path, Figures]:
        folder = tmp_path / f"log-{len(list(tmp_path.iterdir()))}"
        rules = msgspec.structs.replace(rules, servers=cluster.servers)
        with closing(RunLog(folder, 1 << 30)) as log:

            class Recorded(Orchestrator):
                def handle(self, event: AnyEvent) -> list[AnyCommand]:
                    commands = super().handle(event)
                    log.append(told(event) if told else event)
                    for command in commands:
                        log.append(command)
                    return commands

            log.append(rules)
            with monkeypatch.context() as patched:
                patched.setattr(engine, "Orchestrator", Recorded)
                figures = engine.simulate(rules, cluster)
            log.flush()
        return folder, figures

    return write


def near(found: Fitted, cluster: Cluster, rel: float) -> None:
    """The same models, within a share of each of their times."""
    for name in ("server", "swap", "trainer", "rewards"):
        mine, right = getattr(found.cluster, name), getattr(cluster, name)
        for field in right.__dataclass_fields__:
            if field in ("max_running", "cache") or isinstance(getattr(right, field), str):
                continue
            wanted = getattr(right, field)
            least = REQUEST_ERROR_S if field == "request_s" else 1e-9
            assert getattr(mine, field) == pytest.approx(wanted, rel=rel, abs=least), f"{name}.{field}"


def test_the_models_of_a_run_are_found_again(record: Record) -> None:
    folder, figures = record()
    found = fit(folder)
    near(found, CLUSTER, 0.01)
    assert any("at most 48 answers" in text for text in found.assumed)
    assert found.cluster.server.max_running == 48
    assert found.cluster.start_s == pytest.approx(20.12)
    assert (found.answers, found.steps) == (14 * 8 * 4, 14)
    assert found.rules == msgspec.structs.replace(RULES, servers=1)
    again = engine.simulate(found.rules, replace(found.cluster, start_s=20.0))
    assert again.seconds == pytest.approx(figures.seconds, rel=0.005)
    assert again.response_len_mean == figures.response_len_mean


@pytest.mark.slow
@pytest.mark.parametrize(
    "cluster",
    [
        replace(CLUSTER, server=replace(SERVER, sequence_s=0.0, context_s=6e-6)),
        replace(CLUSTER, server=replace(SERVER, request_s=0.2)),
        replace(CLUSTER, servers=3, swap=SwapModel(0.3), rewards=RewardModel(0.02, 5)),
    ],
    ids=["limited by memory", "slow requests", "three servers"],
)
def test_other_models_are_found_again(record: Record, cluster: Cluster) -> None:
    rules = msgspec.structs.replace(RULES, steps=25, max_concurrent=48 * cluster.servers)
    folder, _ = record(cluster, rules)
    near(fit(folder), cluster, 0.06)


@pytest.mark.slow
def test_what_slows_the_other_down_is_found_again(record: Record) -> None:
    server = replace(SERVER, beside_training=1.3)
    cluster = replace(CLUSTER, server=server, trainer=replace(TRAINER, beside_generation=1.4, token_s=5e-4))
    folder, _ = record(cluster, msgspec.structs.replace(RULES, steps=25))
    found = fit(folder).cluster
    assert found.server.beside_training == pytest.approx(1.3, rel=0.05)
    assert found.trainer.beside_generation == pytest.approx(1.4, rel=0.05)
    for name in ("overhead_s", "sequence_s"):
        assert getattr(found.server, name) == pytest.approx(getattr(server, name), rel=0.06), name
    assert found.trainer.token_s == pytest.approx(5e-4, rel=0.06)
    alone, _ = record(cluster, msgspec.structs.replace(RULES, steps=25, max_staleness=0))
    assert validate(alone, found).line("step").error == pytest.approx(0, abs=0.02), "of a run with another η"
    fewer, _ = record(cluster, msgspec.structs.replace(RULES, steps=25, batch_groups=4))
    assert validate(fewer, found).line("step").error == pytest.approx(0, abs=0.05), "of a run with another batch"


@pytest.mark.slow
def test_of_noise_the_mean_is_found(record: Record) -> None:
    random = Random(1)
    latest = [0.0]

    def late(event: AnyEvent) -> AnyEvent:
        """Each event up to 20 ms later: events of the log stay in their order."""
        latest[0] = max(latest[0], event.at + random.random() * 0.02)
        return msgspec.structs.replace(event, at=latest[0])

    folder, figures = record(told=late)
    found = fit(folder)
    again = engine.simulate(found.rules, replace(found.cluster, start_s=20.0))
    assert again.seconds - 20 == pytest.approx(figures.seconds - 20, rel=0.05)
    assert found.cluster.server.overhead_s == pytest.approx(SERVER.overhead_s, rel=0.1)


@pytest.mark.slow
def test_where_the_machine_is_slower_at_times_the_mean_is_found(record: Record) -> None:
    """Its clock runs at 0.2 to 1.8 times the speed, so that no model is right at any moment."""

    def warped(event: AnyEvent) -> AnyEvent:
        return msgspec.structs.replace(event, at=event.at + 1.6 * (1 - math.cos(event.at / 2)))

    folder, _ = record(told=warped, rules=msgspec.structs.replace(RULES, steps=25))
    assert validate(folder, fit(folder).cluster).line("step").error == pytest.approx(0, abs=0.05)


@pytest.mark.slow
def test_what_a_lost_server_disturbed_does_not_count(record: Record) -> None:
    cluster = replace(CLUSTER, failures=FailureModel(server_hours=0.004, restart_s=5.0))
    rules = msgspec.structs.replace(RULES, max_restarts=100)
    folder, figures = record(cluster, rules)
    assert figures.restarts, "the test loses servers"
    near(fit(folder), replace(cluster, failures=FailureModel()), 0.03)


@pytest.mark.parametrize(("steps", "words"), [(1, "are needed to fit"), (3, "steps were trained that nothing")])
def test_a_run_that_is_too_short_is_refused(record: Record, steps: int, words: str) -> None:
    few = msgspec.structs.replace(RULES, steps=steps, group_size=4 if steps > 1 else 2)
    folder, _ = record(rules=few)
    with pytest.raises(ConfigError, match=words) as refused:
        fit(folder)
    assert str(folder) in str(refused.value)
    assert "name a longer run" in str(refused.value)


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path / "log", 1 << 30)) as log:
        log.append(RULES)
        log.append(Lost(at=1.0, peer="trainer", id="trainer", why="test"))
        log.flush()
    for read in (fit, happened):
        with pytest.raises(ConfigError, match="has trained no step"):
            read(tmp_path / "log")


def test_answers_come_by_step_whole_groups_and_the_last_ones_again() -> None:
    groups = tuple(tuple(Answer(group, member, False, 1.0) for member in range(2)) for group in range(16))
    answers = RecordedAnswers(groups, batch_groups=4, asked_groups=4)
    assert [answers.answer(group, 1, 0) for group in range(16)] == [group[1] for group in groups]
    half = answers.asked_by(msgspec.structs.replace(RULES, batch_groups=2))
    assert [half.answer(group, 0, 0).prompt_tokens for group in range(8)] == [0, 2, 4, 6, 8, 10, 12, 14]
    twice = answers.asked_by(msgspec.structs.replace(RULES, batch_groups=8))
    assert [twice.answer(group, 0, 0).prompt_tokens for group in range(4)] == [0, 0, 1, 1]
    assert [answers.answer(group, 0, 0).prompt_tokens for group in range(16, 22)] == [12, 13, 14, 15, 12, 13]
    assert answers.answer(3, 5, 0) == groups[3][1], "a larger group begins again"
    assert answers.answer(3, 0, 1) != answers.answer(3, 0, 0), "another attempt, another answer"


# ------------------------------------------------------------------------------------------------------- what happened


def test_what_happened_is_told_in_the_words_of_a_simulation(record: Record) -> None:
    """A simulated run's log read as a real one has the figures that the simulation has."""
    folder, figures = record()
    real = happened(folder)
    seconds = sum(figures.step_s) - 20.12  # from the first answer on
    assert real.steps == 14
    assert real.seconds == pytest.approx(seconds)
    assert real.train_s == pytest.approx(figures.train_s)
    assert real.samples == figures.samples
    assert real.tokens_generated == figures.tokens_generated
    assert real.busy_s == pytest.approx((1 - figures.rollout_idle_share) * figures.seconds)
    assert real.both_s == pytest.approx(figures.both_busy_share * figures.seconds)
    assert real.mixed / real.samples == pytest.approx(figures.mixed_share)
    first_swap_s = 0.1  # before the first answer
    assert real.trainer_wait_s == pytest.approx(figures.trainer_wait_s - first_swap_s)
    assert sum(real.lag_tokens.values()) == figures.tokens_trained
    mean = sum(lag * tokens for lag, tokens in real.lag_tokens.items()) / figures.tokens_trained
    assert mean == pytest.approx(figures.lag_mean, rel=0.05), "without arrays, versions of an answer are spread evenly"
    assert real.disturbed == []


@pytest.mark.slow
def test_a_run_validates_itself(record: Record) -> None:
    """Where nothing is left out of the time, prediction and truth are one."""
    folder, _ = record()
    compared = validate(folder, replace(CLUSTER, answers=fit(folder).cluster.answers))
    for name in ("step", "training of a step", "generated", "answer's length"):
        assert compared.line(name).error == pytest.approx(0, abs=0.01), name
    assert abs(compared.line("servers idle").error) < 0.02


@pytest.mark.slow
def test_a_run_with_other_batches_is_predicted_with_the_lengths_of_the_same_steps(record: Record) -> None:
    folder, _ = record(replace(CLUSTER, answers=Learning(8)))
    fewer, figures = record(replace(CLUSTER, answers=Learning(4)), msgspec.structs.replace(RULES, batch_groups=4))
    line = validate(fewer, fit(folder).cluster).line("answer's length")
    assert line.real == figures.response_len_mean
    assert line.error == pytest.approx(0, abs=0.02)


# ------------------------------------------------------------------------------------------------------- least squares


def test_least_squares_has_no_negative_time_and_no_needless_one() -> None:
    random = np.random.default_rng(0)
    columns = random.uniform(0, 1, (200, 3))
    exact = columns @ np.array([2.0, 0.0, 3.0])
    assert least_squares(columns, exact) == pytest.approx([2.0, 0.0, 3.0])
    assert least_squares(columns, columns @ np.array([2.0, -0.5, 3.0]))[1] == 0
    noisy = exact + random.normal(0, 0.1, 200)
    assert least_squares(columns, noisy)[1] == 0
    twins = np.column_stack([columns[:, 0], 2 * columns[:, 0]])
    assert least_squares(twins, columns[:, 0]) == pytest.approx([1.0, 0.0])


def test_of_times_that_wait_for_the_same_things_a_small_gain_is_no_reason() -> None:
    """A server gets slower in proportion to what runs there, and what runs there hardly changes. All answers of an hour
    have waited for the same things, so that their noise is one number, a thousand times: a fixed time explains it a
    little, and would be wrong where less runs."""
    random = np.random.default_rng(1)
    hours = random.uniform(170, 190, 40)
    noise = -0.01 * (hours - 180) + random.normal(0, 0.3, 40)
    running = np.repeat(hours, 1000)
    took = np.repeat(0.15 * hours + noise, 1000)
    columns = np.column_stack([np.ones_like(running), running])
    assert least_squares(columns, took)[0] > 0
    alone = fewest(columns, took, [0, 1])
    assert alone[0] == 0
    assert alone[1] == pytest.approx(0.15, rel=0.01)
    assert fewest(columns, 20 + 0.15 * running, [0, 1]) == pytest.approx([20, 0.15])
