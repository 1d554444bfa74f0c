"""The colocated baseline: times worked out by hand, and the same samples as in the engine."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.messages import Rules
from areal_async.simulate import colocated, engine
from areal_async.simulate.models import Answer, Cluster, RewardModel, ServerModel, SwapModel, TrainerModel

RULES = Rules(
    seed=1, steps=3, batch_groups=2, group_size=2, max_staleness=0, max_concurrent=64, minibatches=1, ranks=1,
    max_tokens_per_microbatch=1000, max_new_tokens=100, servers=2, min_group=2,
)  # fmt: skip


class Listed:
    """Lengths by member; a group's answers are 10 · (group + 1) longer. 100 tokens are cut."""

    def answer(self, group: int, member: int, attempt: int) -> Answer:
        length = min(10 * (group + 1) + 40 * member + attempt, 100)  # the first attempt is 0
        return Answer(5, length, length == 100, 1.0)


CLUSTER = Cluster(
    servers=2,
    server=ServerModel(1.0, 0.0, 0.0, 0.0, 0.1, 8, 10_000),
    swap=SwapModel(0.0),
    trainer=TrainerModel(2.0, 3.0, 0.5, 0.01, 0.0, 99.0),
    rewards=RewardModel(0.0, 1),
    answers=Listed(),
    server_gpus=2,
    trainer_gpus=2,
)


def test_a_step_by_hand():
    """Step 0: a second a token; server 1 has group 1 with 20 and 60 tokens behind a prompt of 0.5 s: 60.5 s. One
    micro-batch of 4 · 5 + 10 + 50 + 20 + 60 = 160 tokens: 2 + 3 + 0.5 + 1.6 s; 4 s for each way between the two."""
    figures = colocated.simulate(RULES, CLUSTER, 4.0)
    assert figures.train_s[0] == pytest.approx(7.1)
    assert figures.step_s == pytest.approx([60.5 + 7.1 + 8, 80.5 + 7.9 + 8, 100.5 + 8.7 + 8])
    assert figures.seconds == pytest.approx(sum(figures.step_s))
    assert figures.tokens_generated == figures.tokens_trained == 60 + 80 + 100 + 120 + 140 + 160
    assert figures.lag_tokens == {0: figures.tokens_trained}
    assert figures.gpu_hours == pytest.approx(2 * figures.seconds / 3600)
    assert figures.rollout_idle_share == pytest.approx(
        1 - (50.5 + 60.5 + 70.5 + 80.5 + 90.5 + 100.5) / 2 / figures.seconds
    )
    assert figures.trainer_idle_share == pytest.approx(1 - sum(figures.train_s) / figures.seconds)
    assert figures.truncated_share == 1 / 12


def test_cut_answers_may_be_left_out():
    masked = colocated.simulate(msgspec.structs.replace(RULES, truncated="mask"), CLUSTER, 4.0)
    whole = colocated.simulate(RULES, CLUSTER, 4.0)
    assert masked.tokens_trained == whole.tokens_trained - 100 == masked.tokens_generated - 100
    assert masked.train_s[2] == pytest.approx(whole.train_s[2] - 1.05)  # 105 tokens
    assert (masked.samples, masked.truncated_share) == (11, 0)


def test_checks_may_be_what_is_waited_for():
    """Of step 0's answers, ended at 10.5, 20.5, 50.5 and 60.5 s, each check takes 100 s."""
    one, two = (
        colocated.simulate(msgspec.structs.replace(RULES, steps=1), replace(CLUSTER, rewards=RewardModel(100.0, n)), 0)
        for n in (1, 2)
    )
    assert one.step_s[0] == pytest.approx(410.5 + 7.1)
    assert two.step_s[0] == pytest.approx(220.5 + 7.1)


def test_answers_wait_for_a_place():
    """Server 1 has room for one: 20 and then 60 tokens, the prompt before them."""
    cluster = replace(CLUSTER, server=replace(CLUSTER.server, max_running=1))
    figures = colocated.simulate(msgspec.structs.replace(RULES, steps=1), cluster, 0)
    assert figures.step_s[0] - figures.train_s[0] == pytest.approx(0.5 + 20 + 0.5 + 60)


def test_starts_and_checkpoints_take_time():
    rules = msgspec.structs.replace(RULES, checkpoint_steps=2)
    cluster = replace(CLUSTER, start_s=30.0, trainer=replace(CLUSTER.trainer, checkpoint_s=7.0))
    with_both, plain = colocated.simulate(rules, cluster, 0.0), colocated.simulate(RULES, CLUSTER, 0.0)
    assert [a - b for a, b in zip(with_both.step_s, plain.step_s, strict=True)] == pytest.approx([30.0, 7.0, 0.0])


def test_progress_is_told():
    told = []
    figures = colocated.simulate(RULES, CLUSTER, 0.0, lambda steps, seconds: told.append((steps, seconds)))
    assert [steps for steps, _ in told] == [1, 2, 3]
    assert told[-1][1] == figures.seconds


def test_ranks_wait_for_each_other_in_micro_batches_or_at_their_end():
    """Two ranks; balanced, the one has 65 (60 + 5) and 15 tokens, the other 55 and 25: 65 + 25, or 80."""
    rules = msgspec.structs.replace(RULES, steps=1, ranks=2, max_tokens_per_microbatch=70)
    each, end = (
        colocated.simulate(rules, replace(CLUSTER, trainer=replace(CLUSTER.trainer, ranks_wait=wait)), 0).train_s[0]
        for wait in ("microbatch", "minibatch")
    )
    assert each == pytest.approx(2 + 3 + 2 * 0.5 + 0.65 + 0.25)
    assert end == pytest.approx(2 + 3 + 2 * 0.5 + 0.80)


@settings(max_examples=8, deadline=None)
@given(
    servers=st.integers(1, 4), groups=st.integers(1, 6), minibatches=st.sampled_from([1, 2]),
    checks=st.floats(0, 3), reshard=st.floats(0, 9),
)  # fmt: skip
def test_it_trains_what_the_engine_trains(servers, groups, minibatches, checks, reshard):
    """The same samples, in steps of their own; and never faster than its parts."""
    rules = msgspec.structs.replace(
        RULES, batch_groups=groups * minibatches, minibatches=minibatches, servers=servers, wave=servers, ranks=2
    )
    cluster = replace(CLUSTER, servers=servers, rewards=RewardModel(checks, 2))
    ours, theirs = colocated.simulate(rules, cluster, reshard), engine.simulate(rules, cluster)
    assert ours.tokens_trained == theirs.tokens_trained
    assert ours.samples == theirs.samples
    assert sum(ours.train_s) == pytest.approx(sum(theirs.train_s))
    assert ours.seconds >= sum(ours.train_s) + 2 * reshard * rules.steps
    assert ours.truncated_share == theirs.truncated_share
    assert 0 <= ours.rollout_idle_share <= 1
