"""Simulated runs: times that can be computed by hand, and what holds for every run."""

import gc
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest

from areal_async.errors import RunFailed
from areal_async.messages import Minibatch
from areal_async.simulate.engine import simulate
from areal_async.simulate.figures import Figures
from areal_async.simulate.models import FailureModel, RewardModel, SwapModel, TrainerModel
from areal_async.simulate.trainers import train_s

from .models import FREE, STEADY, Told, cluster, rules, scattered

ROOT = Path(__file__).resolve().parents[2]
ONE = {"batch_groups": 1, "group_size": 1}
TRAINER = TrainerModel(step_s=4.0, minibatch_s=1.0, microbatch_s=0.25, token_s=0.01, pair_s=0.0, publish_s=2.0)


# -------------------------------------------------------------------------------------------------------------- by hand


def test_one_server_one_answer() -> None:
    figures = simulate(
        rules(steps=1, **ONE),
        cluster(
            servers=1,
            server=replace(STEADY, prefill_s=0.001),
            swap=SwapModel(3.0),
            trainer=TRAINER,
            rewards=RewardModel(0.5, 1),
            answers=Told(lambda group, member: 100, prompt=200),
            start_s=10.0,
        ),
    )
    published, loaded = 10.0 + 2.0, 15.0
    scored = loaded + 200 * 0.001 + 100 * 0.01 + 0.5
    trained = scored + 4.0 + 1.0 + 0.25 + 300 * 0.01
    assert figures.train_s == pytest.approx([trained - scored])
    assert figures.step_s == pytest.approx([trained])
    assert figures.seconds == pytest.approx(trained + 2.0)
    assert figures.trainer_wait_s == pytest.approx(scored - published)
    assert figures.trainer_idle_share == pytest.approx(1 - (trained + 2.0 - scored) / figures.seconds)
    assert figures.rollout_idle_share == pytest.approx(1 - 1.2 / figures.seconds)
    assert figures.both_busy_share == 0
    assert (figures.tokens_generated, figures.tokens_trained, figures.lag_tokens) == (100, 100, {0: 100})
    assert figures.swap_pause_s == 3.0


def test_synchronous_training_adds_up_generation_scoring_training_publication_and_swap() -> None:
    longest = [100, 300, 200, 250, 50]
    figures = simulate(
        rules(steps=5, max_staleness=0, wave=2),
        cluster(
            swap=SwapModel(3.0),
            trainer=TRAINER,
            rewards=RewardModel(0.5, 8),
            answers=Told(lambda group, member: longest[group // 4] if group % 4 == 2 and member else 10),
        ),
    )
    for most, taken in zip(longest, figures.step_s, strict=True):
        training = 4.0 + 1.0 + 0.25 + (most + 7 * 10) * 0.01
        assert taken == pytest.approx(2.0 + 3.0 + most * 0.01 + 0.5 + training)
    assert figures.lag_max == 0


@pytest.mark.parametrize(("generation_s", "staleness"), [(1.0, 1), (9.0, 1), (9.0, 4), (20.0, 3)])
def test_asynchronous_training_takes_as_long_as_the_slower_side(generation_s: float, staleness: int) -> None:
    """All answers take equally long, and there is room for exactly one step's answers at a time."""
    figures = simulate(
        rules(steps=12, max_staleness=staleness, max_concurrent=8),
        cluster(
            servers=1,
            trainer=TrainerModel(6.0, 0, 0, 0, 0, publish_s=1.0),
            answers=Told(lambda group, member: int(generation_s * 100)),
        ),
    )
    assert figures.step_s[3:] == pytest.approx([max(generation_s, 7.0)] * 9)


def test_waiting_checks_are_made_in_their_order() -> None:
    figures = simulate(
        rules(steps=1, batch_groups=1, group_size=5),
        cluster(rewards=RewardModel(1.0, 2), answers=Told(lambda group, member: 100)),
    )
    assert figures.seconds == pytest.approx(1.0 + 3.0)


def test_a_server_that_is_not_interruptible_drains_first() -> None:
    """Version 1 comes after a second; what runs then needs two more. Interrupted, it waits for the weights alone."""
    trainer = TrainerModel(0.0, 0, 0, 0, 0, publish_s=1.0)
    answers = Told(lambda group, member: 100 if group == 0 else 300)
    seconds = {
        stops: simulate(
            rules(steps=2, max_staleness=1, **ONE),
            cluster(servers=1, trainer=trainer, answers=answers, swap=SwapModel(0.5, stops)),
        )
        for stops in (True, False)
    }
    whole = 1.0 + 0.5 + 3.0
    assert seconds[True].step_s == pytest.approx([1.0 + 0.5 + 1.0, whole + 0.5 - 2.5])
    assert seconds[False].step_s == pytest.approx([1.0 + 0.5 + 1.0, whole - 2.5])
    assert [seconds[stops].mixed_share for stops in (True, False)] == [0.5, 0]
    assert [seconds[stops].lag_tokens for stops in (True, False)] == [{0: 200, 1: 200}, {0: 100, 1: 300}]
    assert [seconds[stops].swap_pause_s for stops in (True, False)] == [1.0, 1.0]


def test_servers_and_a_trainer_that_share_cores_slow_each_other_down() -> None:
    """Step 0 is trained from 1 s on, at half its speed, since the only server generates: until 3 s, in which that makes
    100 tokens instead of 200; the other 100 take another second, and step 1 has the cores for itself."""
    told = cluster(
        servers=1,
        server=replace(STEADY, beside_training=2.0),
        trainer=TrainerModel(1.0, 0, 0, 0, 0, 0, beside_generation=2.0),
        answers=Told(lambda group, member: 100 if group == 0 else 300),
    )
    figures = simulate(rules(steps=2, max_staleness=1, **ONE), told)
    assert figures.step_s == pytest.approx([3.0, 2.0])
    assert figures.train_s == pytest.approx([2.0, 1.0])
    slow = replace(told, server=replace(STEADY, request_s=0.5), trainer=TrainerModel(1.0, 0, 0, 0, 0, 0))
    figures = simulate(rules(steps=2, max_staleness=1, **ONE), slow)
    assert figures.step_s == pytest.approx([1.5 + 1.0, 3.5 + 1.0 - 2.5])


def test_a_micro_batch_takes_as_long_as_its_heaviest_rank() -> None:
    minibatches = [Minibatch(1.0, (((0, 1), (2,)), ((3,), ()))), Minibatch(1.0, (((4,),), ((5,),)))]
    lengths = [10, 20, 30, 25, 7, 8]
    model = TrainerModel(step_s=1.0, minibatch_s=0.5, microbatch_s=0.25, token_s=0.01, pair_s=0.001, publish_s=9.0)
    first = max(0.30 + 0.5, 0.25 + 0.625), 0.30 + 0.9
    expected = 1.0 + 2 * 0.5 + 3 * 0.25 + first[0] + first[1] + 0.08 + 0.064
    assert train_s(model, minibatches, lengths) == pytest.approx(expected)
    longer = replace(model, prox_share=0.5)
    assert train_s(longer, minibatches, lengths) == pytest.approx(2.0 + 1.5 * (expected - 2.0))
    assert train_s(longer, minibatches[:1], lengths) == pytest.approx(1.5 + 2 * 0.25 + first[0] + first[1])
    alone = max(0.6 + 1.4, 0.25 + 0.625), max(0.07 + 0.049, 0.08 + 0.064)
    once = replace(model, ranks_wait="minibatch")
    assert train_s(once, minibatches, lengths) == pytest.approx(1.0 + 2 * 0.5 + 3 * 0.25 + sum(alone))
    fixed = replace(model, microbatches="fixed", fixed_microbatches=3)
    ranks = 0.1 + 0.1, 0.25 + 0.625
    assert train_s(fixed, minibatches[:1], lengths) == pytest.approx(
        1.5 + 3 * 0.25 + ranks[0] + 0.2 + 0.4 + max(0.3 + 0.9, ranks[1])
    )
    mixed = [Minibatch(1.0, (((3, 0), (2, 1)), ((4, 5), ())))]
    halves = replace(fixed, fixed_microbatches=2, pair_s=0.0)
    assert train_s(halves, mixed, [10, 20, 30, 25, 40, 0]) == pytest.approx(1.0 + 0.5 + 2 * 0.25 + 0.4 + 0.55)
    with pytest.raises(ValueError, match="at least 1"):
        train_s(replace(fixed, fixed_microbatches=0), minibatches, lengths)


# ------------------------------------------------------------------------------------------------------ for every run


def balanced(figures: Figures, max_staleness: int, when_older: str = "wait") -> None:
    ledger = figures.ledger
    for of in ("", "samples_"):
        fates = ("trained", "filtered", "stale", "failed", "cancelled", "outstanding", "training")
        assert ledger[f"{of}admitted"] == sum(ledger[of + fate] for fate in fates)
    assert figures.samples == ledger["samples_trained"]
    stale = figures.tokens_stale if when_older == "drop" else 0
    assert (figures.samples_stale > 0) == (figures.tokens_stale > 0)
    assert (figures.samples_stale + figures.tokens_masked > 0) == (sum(figures.lost_by_length) > 0)
    spent = figures.tokens_trained + figures.tokens_masked + figures.tokens_discarded + figures.tokens_left
    assert spent <= figures.tokens_generated <= spent + stale
    assert sum(figures.lag_tokens.values()) == figures.tokens_trained
    if when_older == "train":
        assert figures.tokens_older == sum(n for lag, n in figures.lag_tokens.items() if lag > max_staleness)
    else:
        assert figures.lag_max <= max_staleness
        assert figures.tokens_older == 0
    assert figures.steps == len(figures.step_s) == len(figures.train_s)
    assert sum(figures.step_s) <= figures.seconds + 1e-9
    for share in (figures.trainer_idle_share, figures.rollout_idle_share, figures.both_busy_share):
        assert 0 <= share <= 1


@pytest.mark.parametrize("when_older", ["wait", "mask", "train", "drop"])
@pytest.mark.parametrize("failures", [FailureModel(), FailureModel(20 / 3600, 3.0)], ids=["alive", "lost"])
def test_whatever_happens_the_ledger_balances_and_lag_is_bounded(when_older: str, failures: FailureModel) -> None:
    for staleness, requeue in product((0, 2), (False, True)):
        if requeue and when_older != "drop":
            continue
        figures = simulate(
            rules(
                steps=10, max_staleness=staleness, when_older=when_older, requeue=requeue, drop_equal=True,
                checkpoint_steps=3, eval_every=4, max_restarts=100,
            ),
            cluster(
                servers=3,
                swap=SwapModel(0.3),
                trainer=TrainerModel(0.5, 0, 0, 0, 0, publish_s=0.1, checkpoint_s=0.2),
                rewards=RewardModel(0.01, 3),
                answers=Told(scattered, 20, lambda group, member: None if group % 9 == 7 else group * member % 3.0),
                failures=failures,
            ),
        )  # fmt: skip
        assert (figures.end, figures.steps) == ("steps_done", 10)
        balanced(figures, staleness, when_older)
        if failures.server_hours:
            assert figures.restarts > 0
        else:
            assert figures.tokens_inferred == figures.restarts == figures.continued == 0


def test_an_answer_that_is_dropped_while_it_is_checked_has_all_its_tokens() -> None:
    """Answers take 1 or 5 s, their checks 10, so that whoever is too late is in one."""
    figures = simulate(
        rules(steps=40, max_staleness=1, when_older="drop", group_size=1),
        cluster(rewards=RewardModel(10.0, 64), answers=Told(lambda group, member: 500 if group % 17 == 2 else 100)),
    )
    assert (figures.end, figures.steps) == ("steps_done", 40)
    balanced(figures, 1, "drop")
    assert figures.samples_stale > 0
    assert figures.tokens_unfinished == 0, "all that were dropped had their length"
    assert figures.tokens_stale == figures.tokens_generated - figures.tokens_trained


def test_what_a_lost_server_had_given_is_not_decoded_again() -> None:
    """Both servers decode; one is lost and comes back: all that was decoded was trained, or stopped at the end."""
    told = cluster(
        trainer=TrainerModel(1.0, 0, 0, 0, 0, publish_s=0.1),
        failures=FailureModel(30 / 3600, 5.0),
        answers=Told(lambda group, member: 1000),
    )
    lost = simulate(rules(steps=20, max_restarts=100), told, seed=3)
    assert lost.continued > 3
    assert lost.tokens_inferred > 1000
    assert lost.tokens_trained == 20 * 8 * 1000
    assert simulate(rules(steps=20, max_restarts=100), told, seed=3) == lost
    assert simulate(rules(steps=20, max_restarts=100), told, seed=4) != lost
    balanced(lost, 2)
    away = simulate(rules(steps=20, max_restarts=100), replace(told, failures=FailureModel(30 / 3600, 25.0)), seed=3)
    assert away.rollout_idle_share > lost.rollout_idle_share + 0.1, "it is away for 20 s longer"


def test_a_run_that_fails_says_when_and_why() -> None:
    always = FailureModel(1e-9, 1.0)
    with pytest.raises(RunFailed, match=r"s of the simulated run: no rollout server is left"):
        simulate(rules(max_restarts=1), cluster(failures=always))
    with pytest.raises(ValueError, match="no room for a group"):
        simulate(rules(max_concurrent=1), cluster())


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures_whatever_hashes_are() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulate.one_run"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1234")
    ]
    assert told[0] == told[1]
    assert msgspec.json.decode(told[0], type=Figures).continued > 0


def test_figures_travel_as_json_and_the_garbage_collector_is_as_it_was() -> None:
    seen: list[tuple[int, float]] = []
    figures = simulate(rules(), cluster(server=FREE), progress=lambda step, seconds: seen.append((step, seconds)))
    assert msgspec.json.decode(msgspec.json.encode(figures), type=Figures) == figures
    assert seen == [(step + 1, 0.0) for step in range(6)]
    assert gc.isenabled()
