"""The lives of groups and samples that `trace` reads from a log are those that the core's ledger counts."""

from typing import get_args

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from areal_async.messages import WhenOlder

from ..audit_lies import records, true_log
from ..core.test_any_order import AnyOrder
from ..core.test_going_back import GoingBack
from ..core.world import World
from .written import followed, outcomes

STATES = ("trained", "filtered", "stale", "failed", "cancelled", "outstanding", "training")


def check(world: World) -> None:
    """Whatever happened: as many samples and groups of each fate as the ledger has, and the steps of each. (Of a group
    whose deadline passes before its prompt is read the log doesn't tell; if training goes back in that very moment, it
    is taken for cancelled.)"""
    balance = world.core.balance()
    lives, groups = followed(records(world))
    found = outcomes(groups)
    unread = sum(len(group.samples) for group in groups if group.state == "cancelled" and group.row is None)
    unclear = balance["samples_stale"] - found["stale"]
    assert 0 <= unclear <= (unread if world.rules.when_older == "drop" else 0)
    found.update(stale=unclear, cancelled=-unclear)
    assert {name: found[name] for name in STATES} == {name: balance[f"samples_{name}"] for name in STATES}
    assert len(groups) == lives.admitted == balance["admitted"]
    assert len({group.id for group in groups}) == len(groups)
    view = world.core.view()
    assert (lives.version, lives.branch, lives.step) == (view.version, view.branch, world.core.step)
    trained = {group.id: group.step for group in groups if group.state in ("trained", "training")}
    assert trained == {number: step for number, step in world.step_of.items() if step < world.core.step}


class Walk(AnyOrder):
    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            check(self.world)


class WalkBack(GoingBack):
    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            check(self.world)


WALKS = settings(
    max_examples=30, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(WhenOlder))
@pytest.mark.parametrize("walk", [Walk, WalkBack])
def test_lives_are_as_the_ledger_counts(walk: type[Walk | WalkBack], policy: WhenOlder) -> None:
    run_state_machine_as_test(type(f"{walk.__name__}{policy}", (walk,), {"policy": policy}), settings=WALKS)


def test_lives_of_a_log() -> None:
    lives, groups = followed(true_log())
    assert outcomes(groups) == {"trained": 24, "filtered": 2, "cancelled": 4}
    by_id = {group.id: group for group in groups}
    assert (by_id[1].state, by_id[1].why) == ("filtered", "all 2 rewards are equal")
    assert by_id[0].samples[0].attempt == 1
    assert (by_id[0].step, by_id[0].samples[0].advantage is not None) == (1, True)
    assert {by_id[number].branch for number in by_id if by_id[number].step == 2} == {1}
    assert (lives.version, lives.branch, lives.step) == (6, 1, 6)


def test_a_group_leaves_when_nothing_may_ask_for_it() -> None:
    """At each moment of the log, what is kept is what lives, or may be trained again."""
    log = true_log()
    for length in range(2, len(log), 7):
        lives, _ = followed(log[:length])
        assert all(group.state not in ("filtered", "stale", "failed", "cancelled") for group in lives.groups.values())
    lives, groups = followed(log)
    assert {group.step for group in lives.groups.values()} == {4, 5}  # the checkpoint of version 4 is kept
    assert len(groups) == 15
