"""The lives of groups and samples that `trace` reads from a log are those that the core's ledger counts."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from areal_async.core.orchestrator import Orchestrator
from areal_async.messages import AnyRecord, Event, RolledBack, Rules, SampleDone, StopRequested, WhenOlder

from ..audit_lies import records, true_log
from ..core.test_any_order import AnyOrder
from ..core.test_going_back import GoingBack
from ..core.world import World, make_rules
from .written import followed, outcomes

STATES = ("trained", "filtered", "stale", "failed", "cancelled", "outstanding", "training")


def check(world: World) -> None:
    """Whatever happened: as many samples and groups of each fate as the ledger has, at the end and after going back."""
    log = records(world)
    check_log(log)
    backs = [number for number, record in enumerate(log) if isinstance(record, RolledBack)]
    for back in backs[:3]:
        check_log(log[: next(n for n in range(back + 1, len(log) + 1) if n == len(log) or isinstance(log[n], Event))])


def check_log(log: Sequence[AnyRecord]) -> None:
    """Beside what a core says that hears the same. (Of a group whose deadline passes before its prompt is read the log
    doesn't tell; if training goes back in that very moment, it is taken for cancelled.)"""
    rules = log[0]
    assert isinstance(rules, Rules)
    core = Orchestrator(rules)
    for record in log:
        if isinstance(record, Event):
            core.handle(record)  # type: ignore[arg-type]
    balance, view = core.balance(), core.view()
    lives, groups = followed(log)
    found = outcomes(groups)
    unread = sum(len(group.samples) for group in groups if group.state in ("cancelled", "asked") and group.row is None)
    unclear = balance["samples_stale"] - found["stale"]
    assert 0 <= unclear <= (unread if rules.when_older == "drop" else 0)
    found["stale"] += unclear
    for state in ("cancelled", "outstanding"):
        taken = min(unclear, found[state] - balance[f"samples_{state}"])
        found[state] -= taken
        unclear -= taken
    assert {name: found[name] for name in STATES} == {name: balance[f"samples_{name}"] for name in STATES}
    assert len(groups) == lives.admitted == balance["admitted"]
    assert len({group.id for group in groups}) == len(groups)
    assert (lives.version, lives.branch, lives.step) == (view.version, view.branch, core.step)
    trained = Counter(group.step for group in groups if group.state in ("trained", "training"))
    assert set(trained.values()) <= {rules.batch_groups}
    assert {step for step in trained if step is not None} == set(range(min(trained, default=0), lives.step))


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


def test_what_comes_after_the_end_changes_nothing() -> None:
    one = World(make_rules(group_size=2, checkpoint_steps=1)).start().settle("publish", "swap", "read")
    one.send(StopRequested(at=one.tick()))
    assert type(one.commands[-1]).__name__ == "Finish"
    done = SampleDone(
        **{"at": one.tick(), "sample": "0.0", "attempt": 0, "oldest": 0, "newest": 0, "prompt_tokens": 3},
        **{"length": 2, "loss_tokens": 2, "finish": "stop"},
    )
    _, groups = followed([*records(one), done])
    assert groups[0].samples[0].done is None
    check_log([*records(one), done])
