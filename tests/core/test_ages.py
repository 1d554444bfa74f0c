"""The policies of `when_older`, each with the same late group."""

from typing import get_args

import pytest

from areal_async.core.trainer import Trainer
from areal_async.errors import IllegalTransition
from areal_async.messages import Cancel, Finish, Forget, ReadGroup, Train, WhenOlder

from . import promises
from .checkpoints import BACK
from .world import World, make_rules

POLICIES: tuple[WhenOlder, ...] = get_args(WhenOlder)


def answer(world: World, *numbers: int) -> None:
    """These groups are read, generated and scored."""
    for number in numbers:
        names = [f"{number}.{member}" for member in range(world.rules.group_size)]
        rest = [(kind, name, "0") for kind in ("sample", "score") for name in names]
        for key in (("read", str(number)), *rest):
            if key in world.pending:
                world.answer(key)


def next_version(world: World) -> None:
    """The step that is under way ends, and the servers follow."""
    world.settle("train")
    world.settle("publish", "swap")


def at_step_4(policy: WhenOlder, **changes: object) -> World:
    """B = 2, η = 1. Group 0 began at version 2 and group 5 at version 3; both are still running when step 3, the last
    one for group 0, has been handed over without it."""
    world = World(make_rules(when_older=policy, steps=9, **changes)).start(version=2).settle("publish", "swap")
    assert list(world.groups) == [0, 1, 2, 3]
    world.answer(("read", "0"))
    answer(world, 1, 2)
    next_version(world)
    assert list(world.groups) == [0, 1, 2, 3, 4, 5]
    world.answer(("read", "5"))
    answer(world, 3, 4)
    return world


@pytest.mark.parametrize("policy", ["train", "mask", "drop"])
def test_p01_a_difference_equal_to_the_bound_is_allowed_and_one_more_is_not(policy: WhenOlder) -> None:
    """A sample that began at version 3 is trained in step 4; one that began at version 2 as its policy says."""
    world = at_step_4(policy)
    assert world.core.step == 4
    next_version(world)
    answer(world, 5)
    answer(world, *((6,) if policy == "drop" else (0,)))
    train = world.history[-1]
    assert (train.step, [world.done[f"{number}.0"].oldest for number in train.groups]) == (
        (4, [3, 4]) if policy == "drop" else (4, [2, 3])
    )
    assert train.mask_below == (3 if policy == "mask" else 0)  # the token of version 3 keeps its gradient
    assert world.fates("stale") == (policy == "drop")
    assert isinstance(world.run_out(), Finish)


def test_p01_a_batch_waits_rather_than_be_older_than_the_bound() -> None:
    world = at_step_4("wait")
    assert world.core.step == 3
    assert "step 3 waits for group 0 (floor 2, deadline 3)" in world.core.waiting(world.clock)
    answer(world, 0)
    assert world.history[-1].groups == (0, 3)
    assert isinstance(world.run_out(), Finish)


@pytest.mark.parametrize("policy", ["wait", "mask", "drop"])
def test_a_token_over_the_bound_is_seen_before_it_is_trained(
    policy: WhenOlder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.core.admission.batches_wait", lambda _rules: False)
    monkeypatch.setattr("areal_async.core.admission.groups_are_dropped", lambda _rules: False)
    monkeypatch.setattr("areal_async.core.admission.mask_below", lambda _step, _rules: 0)
    monkeypatch.setattr(promises, "age", lambda *_: [])
    monkeypatch.setattr(World, "_drop", lambda *_: None)
    monkeypatch.setattr(World, "_check_going_on", lambda *_: None)
    world = at_step_4(policy)
    next_version(world)
    answer(world, 5)
    with pytest.raises(IllegalTransition, match=rf"step 4 would train sample 0\.0, .* of version 2.*{policy} allow 3"):
        answer(world, 0)


def test_a_token_below_the_floor_is_seen_under_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(make_rules(when_older="train", batch_groups=1)).start(version=2).settle("publish", "swap")
    whole = Trainer._check_fresh

    def look(self: Trainer, groups: list, train: object) -> None:  # type: ignore[type-arg]
        groups[0].floor += 1
        whole(self, groups, train)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_check_fresh", look)
    with pytest.raises(IllegalTransition, match="its group's floor allows 3"):
        answer(world, 0)


def test_a_group_that_is_dropped_gives_its_place_back_in_the_same_moment() -> None:
    world = at_step_4("drop")
    train, *rest = world.commands[-3:]
    assert isinstance(train, Train)
    assert rest == [Cancel(sample="0.0", attempt=0), ReadGroup(group=6, position=6)]
    balance = world.core.balance()
    assert (balance["stale"], balance["samples_stale"], balance["outstanding"]) == (1, 1, 2)
    assert world.send(world.late[0]) == []  # its answer comes all the same


def test_a_ready_group_is_dropped_too_and_leaves_memory() -> None:
    """B = 1, η = 2. Groups 1 and 2 get ready while step 1 trains; step 2 is the last one for both. Member 2.2 was cut
    and isn't to be trained, 2.0 and 2.1 are."""
    cut = {"group_size": 3, "truncated": "mask"}
    world = World(make_rules(when_older="drop", batch_groups=1, max_staleness=2, steps=9, **cut)).start()
    world.settle("publish", "swap")
    answer(world, 0)
    next_version(world)
    answer(world, 3)
    answer(world, 1, 2)
    next_version(world)
    assert world.history[-1].groups == (1,)
    assert world.fates("stale") == 1
    assert (world.core.balance()["samples_stale"], world.done["2.2"].finish) == (2, "length")
    assert Forget(samples=("2.0", "2.1", "2.2")) in world.commands
    assert isinstance(world.run_out(), Finish)


@pytest.mark.parametrize("requeue", [True, False])
def test_the_prompt_of_a_dropped_group_starts_again_before_new_ones_if_asked(requeue: bool) -> None:
    world = at_step_4("drop", requeue=requeue)
    next_version(world)
    assert [world.groups[number].position for number in (6, 7)] == ([0, 6] if requeue else [6, 7])
    assert isinstance(world.run_out(), Finish)


def test_a_group_that_is_masked_all_over_counts_and_is_trained() -> None:
    world = at_step_4("mask")
    next_version(world)
    answer(world, 0, 5)
    train = world.history[-1]
    assert [sample.sample for sample in train.samples] == ["0.0", "5.0"]
    (part,) = train.minibatches
    assert part.divisor == sum(world.done[f"{number}.0"].loss_tokens for number in (0, 5))
    world.settle("train")
    assert world.core.balance()["trained"] == 6


def test_after_going_back_the_same_tokens_are_masked() -> None:
    world = at_step_4("mask", **BACK)
    next_version(world)
    answer(world, 0, 5)
    world.settle("train")
    world.roll_back(to=4)
    world.settle("publish")
    trains = [command for command in world.commands if isinstance(command, Train) and command.step == 4]
    assert [(train.branch, train.mask_below) for train in trains] == [(0, 3), (1, 3)]
    assert isinstance(world.run_out(), Finish)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_staleness_every_policy_is_a_plain_loop(policy: WhenOlder) -> None:
    for order in range(3):
        rules = make_rules(when_older=policy, max_staleness=0, batch_groups=3, group_size=2, steps=4)
        world = World(rules, servers=2).start()
        assert world.run_out(order) == Finish(reason="steps_done")
        assert [train.groups for train in world.history] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
        assert world.core.balance()["stale"] == 0
