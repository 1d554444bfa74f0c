"""Which groups are filtered, and what becomes of answers that were cut."""

import math

import pytest

from areal_async.messages import Fail, Finish, Forget, Scored, StartSample, Train

from .checkpoints import BACK
from .world import World, make_rules

Rewards = list[float | None]


def scored(rewards: Rewards, **changes: object) -> World:
    """One group with these rewards; further ones are asked for as far as the rules allow."""
    rules = make_rules(**{"batch_groups": 1, "group_size": len(rewards), "steps": 1, **changes})
    world = World(rules).start().settle("publish", "swap", "read")
    for member, reward in enumerate(rewards):
        world.answer(("sample", f"0.{member}", "0"))
        world.answer(("score", f"0.{member}", "0"), reward)
    return world


def was_cut(number: int, member: int) -> bool:
    """As `World` makes it."""
    return (number + 2 * member) % 3 == 0


@pytest.mark.parametrize(
    ("rewards", "share"),
    [([0.0, 0.0, 0.0, 0.0], 0.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([1.0, 1.0, 1.0, 0.0], 0.75), ([1.0] * 4, 1.0)],
)
def test_a_group_is_filtered_outside_the_bounds_of_success_and_kept_on_them(rewards: Rewards, share: float) -> None:
    for low, high in ((0.25, 1.0), (0.0, 0.75), (0.25, 0.75), (0.5, 0.5), (0.0, 1.0)):
        world = scored(rewards, success_min=low, success_max=high)
        assert (world.core.balance()["filtered"] == 1) == (not low <= share <= high)
        assert bool(world.find("train")) == (low <= share <= high)


def test_p12_only_members_with_a_reward_count_for_success() -> None:
    """Of [1, nan, 0, 1] two in three succeeded."""
    for high, kept in ((0.6, False), (0.7, True)):
        assert bool(scored([1.0, math.nan, 0.0, 1.0], success_max=high).find("train")) == kept


def test_p12_a_group_with_a_single_reward_gives_no_signal() -> None:
    """[nan, nan, nan, 0]: filtered where more members are needed, or no gradient is not wanted; else advantage 0."""
    rewards: Rewards = [math.nan, math.nan, math.nan, 0.0]
    assert scored(rewards, min_group=2).core.balance()["filtered"] == 1
    assert scored(rewards, drop_equal=True).core.balance()["filtered"] == 1
    (train,) = scored(rewards).history
    assert [(sample.sample, sample.advantage) for sample in train.samples] == [("0.3", 0.0)]


def test_p12_a_member_without_a_reward_is_left_out_and_the_others_are_finite() -> None:
    """[1, nan, 0, 1]: the nan takes no part in the mean, nor in the step."""
    (train,) = scored([1.0, math.nan, 0.0, 1.0], advantage="dr_grpo").history
    assert [(sample.sample, sample.advantage) for sample in train.samples] == [
        ("0.0", pytest.approx(1 / 3)), ("0.2", pytest.approx(-2 / 3)), ("0.3", pytest.approx(1 / 3)),
    ]  # fmt: skip
    (part,) = train.minibatches
    assert part.divisor == 3 * train_length(train)


def train_length(train: Train) -> int:
    """Loss tokens of an answer of the first group, as `World` makes it: they are all of a length."""
    return 1 + train.groups[0] % 7


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "areal_paper"])
@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_p12_a_batch_of_equal_rewards_has_no_gradient_and_the_run_goes_on(reward: float, advantage: str) -> None:
    """[1, 1, 1, 1] in every group: advantages of exactly 0, a divisor that isn't 0, and the next step."""
    world = World(make_rules(group_size=4, steps=3, advantage=advantage)).start()
    assert world.run_out(outcome=reward) == Finish(reason="steps_done")
    assert len(world.history) == 3
    for train in world.history:
        assert [sample.advantage for sample in train.samples] == [0.0] * 8
        assert all(part.divisor > 0 for part in train.minibatches)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"drop_equal": True}, "all 4 rewards are equal"), ({"min_group": 2}, "1 members have a reward, 2 are needed")],
)
def test_p12_where_no_group_has_a_signal_the_run_ends_after_so_many_groups(
    changes: dict[str, object], said: str
) -> None:
    """Every group is all-equal, or has no reward but one: another is asked for in its place, a bounded number of
    times."""
    world = World(make_rules(group_size=4, max_filtered=5, **changes)).start()
    for _ in range(6):
        world.settle("publish", "swap", "read", "sample")
        for key in world.find("score")[:4]:
            world.answer(key, 1.0 if "drop_equal" in changes or key[1].endswith(".3") else math.nan)
    assert isinstance(world.end, Fail)
    assert "6 groups in a row were filtered, and rollout.max_filtered is 5" in world.end.why
    assert said in world.end.why
    assert not world.history


def test_an_answer_of_a_length_that_is_not_wanted_is_left_out_of_its_group() -> None:
    """Groups' answers have 1, 2, 3, … tokens: the first has too few. A workflow's own reward is none either."""
    world = World(make_rules(batch_groups=1, group_size=2, min_tokens=2, max_tokens=3, steps=1)).start()
    world.settle("publish", "swap", "read")
    world.answer(("sample", "0.0", "0"), "given")
    world.settle("sample", "score", "read", outcome="mixed")
    assert world.core.balance()["filtered"] == 1
    (train,) = world.history
    assert [(sample.sample, sample.advantage < 0) for sample in train.samples] == [("1.0", True), ("1.1", False)]


def test_p10_a_group_that_is_short_of_a_member_is_replaced_and_the_step_completes() -> None:
    """One of 8 raises in every attempt; all are needed: its group fails, visibly, and another one takes its place."""
    world = World(make_rules(batch_groups=1, group_size=8, min_group=8, retries=1, max_failures=1, steps=1))
    world.start().settle("publish", "swap")
    asked = len(world.groups)
    world.settle("read")
    for attempt in ("0", "1"):
        world.answer(("sample", "0.5", attempt), "failed")
    assert world.core.balance()["failed"] == 1
    assert len(world.groups) == asked + 1
    tries = [command.attempt for command in world.commands if isinstance(command, StartSample)]
    assert max(tries) == 1
    assert world.run_out() == Finish(reason="steps_done")
    assert 0 not in world.history[0].groups


def test_a_filtered_group_is_refilled_at_once() -> None:
    world = World(make_rules(batch_groups=4, max_staleness=0, success_min=0.5, steps=1)).start()
    world.settle("publish", "swap", "read", "sample")
    for count in range(10):
        world.settle("read", "sample")
        world.answer(world.find("score")[0], 0.0)
        assert len(world.groups) == 4 + count + 1
        assert world.core.balance()["outstanding"] == 4


def test_one_group_that_is_kept_ends_the_row_of_filtered_ones() -> None:
    world = World(make_rules(batch_groups=1, max_filtered=2, success_min=0.5, steps=4)).start()
    for reward in (0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0):
        world.settle("train", "publish", "swap", "read", "sample")
        world.answer(world.find("score")[0], reward)
        assert world.end is None
    world.settle("read", "sample")
    world.answer(world.find("score")[0], 0.0)
    assert isinstance(world.end, Fail)
    assert "3 groups in a row were filtered, and rollout.max_filtered is 2" in world.end.why
    assert "a share of 0.0 succeeded, wanted is 0.5 to 1.0" in world.end.why


def test_filters_of_success_look_at_what_the_check_gave_and_advantages_at_what_is_left() -> None:
    """Members 0 and 3 are cut: the right one is still right, and worth less than the other."""
    world = scored([1.0, 1.0, 0.0, 0.0], truncated="penalize", truncated_penalty=2.0, success_min=0.5, success_max=0.5)
    (train,) = world.history
    assert [was_cut(0, member) for member in range(4)] == [True, False, False, True]
    low, high, middle, lowest = (sample.advantage for sample in train.samples)
    assert lowest < low < 0 < middle < high


@pytest.mark.parametrize(("truncated", "kept"), [("penalize", True), ("train", False)])
def test_equal_rewards_are_those_that_are_equal_after_their_penalties(truncated: str, kept: bool) -> None:
    world = scored([1.0, 1.0], drop_equal=True, truncated=truncated, truncated_penalty=0.5)
    assert bool(world.find("train")) == kept


def test_a_cut_answer_counts_in_the_baseline_and_isn_t_trained() -> None:
    world = scored([1.0, 1.0, 0.0, 0.0], truncated="mask", advantage="dr_grpo")
    (train,) = world.history
    assert [(sample.sample, sample.advantage) for sample in train.samples] == [("0.1", 0.5), ("0.2", -0.5)]
    (part,) = train.minibatches
    assert part.divisor == 2 * world.done["0.1"].loss_tokens
    balance = world.core.balance()
    assert (balance["samples_training"], balance["samples_filtered"]) == (2, 2)
    world.settle("train")
    (forget,) = (command for command in world.commands if isinstance(command, Forget))
    assert forget.samples == ("0.0", "0.1", "0.2", "0.3")
    assert world.core.balance()["samples_trained"] == 2


def test_a_group_of_which_everything_was_cut_is_filtered() -> None:
    """Members 0 and 3 are cut, and the others have no reward."""
    world = scored([1.0, None, None, 0.0], truncated="mask")
    assert world.core.balance()["filtered"] == 1
    assert not world.find("train")
    assert "all 2 answers with a reward were cut" not in world.core.waiting(world.clock)


def test_going_back_leaves_out_the_same_answers() -> None:
    world = scored([1.0, 1.0, 0.0, 0.0], truncated="mask", steps=3, **BACK)
    world.settle("train")
    world.roll_back(to=0)
    world.settle("publish")
    trains = [command for command in world.commands if isinstance(command, Train)]
    assert [train.samples for train in trains] == [trains[0].samples] * 2
    assert isinstance(world.run_out(outcome="mixed"), Finish)


def test_a_check_that_is_told_after_its_group_was_filtered_changes_nothing() -> None:
    world = scored([0.0, 0.0], success_min=0.5)
    assert world.send(Scored(at=99.0, sample="0.0", attempt=0, verdict="right", reward=1.0)) == []
