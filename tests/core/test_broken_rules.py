"""Each rule of the core, broken on purpose: the checks must notice, or they would not notice a mistake either."""

from collections.abc import Callable, Iterator

import pytest

from areal_async.core import admission, groups
from areal_async.core.fleet import Fleet
from areal_async.core.ledger import Group, Ledger
from areal_async.core.lifecycle import Thing
from areal_async.core.trainer import Trainer
from areal_async.errors import IllegalTransition
from areal_async.messages import Finish

from .world import Broken, World, make_rules

WALKS = 40
OUTCOMES = (1.0, 0.0, 1.0, 1.0, None, "failed", "given")


def numbers(seed: int) -> Iterator[int]:
    """A stated generator (Knuth's MMIX constants), so that the walks stay the same."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def walk(seed: int) -> None:
    """One adversarial run to its end: newest answers first, failures, filtered groups, servers behind, rollbacks."""
    pick = numbers(seed)
    rules = make_rules(
        steps=5,
        batch_groups=1 + next(pick) % 3,
        group_size=1 + next(pick) % 2,
        max_staleness=next(pick) % 3,
        max_failures=10_000,
        retries=1,
    )
    world = World(rules, servers=1 + next(pick) % 3).start()
    for _ in range(300):
        if world.end is not None or not world.pending:
            break
        keys = list(world.pending)
        recent = keys[-1 - next(pick) % min(len(keys), 4)]
        world.answer(recent, OUTCOMES[next(pick) % len(OUTCOMES)])
        if next(pick) % 60 == 0 and world.end is None and world.branch < 3:
            world.roll_back(max(world.trained - next(pick) % 3, 0))
    end = world.run_out(next(pick))
    if not isinstance(end, Finish):
        raise Broken(end.why)


def caught() -> int:
    """In how many walks something was noticed."""
    count = 0
    for seed in range(WALKS):
        try:
            walk(seed)
        except (Broken, IllegalTransition):
            count += 1
    return count


def test_with_its_rules_whole_nothing_is_noticed() -> None:
    for seed in range(WALKS):
        walk(seed)


def no_batch_test(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "overdue", lambda *_args, **_named: None)


def no_batch_test_and_no_last_look(patch: pytest.MonkeyPatch) -> None:
    no_batch_test(patch)
    patch.setattr(Trainer, "_check_fresh", lambda *_: None)


def filtered_groups_count_as_accepted(patch: pytest.MonkeyPatch) -> None:
    whole = Ledger.outstanding.fget
    assert whole is not None
    patch.setattr(Ledger, "outstanding", property(lambda self: whole(self) + self._counts["filtered"]))


def a_filtered_group_keeps_its_deadline(patch: pytest.MonkeyPatch) -> None:
    whole = Ledger._leave
    patch.setattr(Ledger, "_leave", lambda self, group: None if group.state == "filtered" else whole(self, group))


def a_batch_is_trained_twice(patch: pytest.MonkeyPatch) -> None:
    whole = Ledger.choose_batch
    batches: list[list[Group]] = []

    def choose(self: Ledger) -> list[Group]:
        batch = whole(self)
        if batch and not self.step:
            batches.append(batch)
        return batches[-1] if batch else batch

    patch.setattr(Ledger, "choose_batch", choose)


def a_batch_is_trained_twice_and_tables_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    a_batch_is_trained_twice(patch)

    def move(self: Thing, state: str, at: float, why: str = "", *words: str | int | float | None) -> None:
        self.state = state

    patch.setattr(Thing, "move", move)


def one_more_version_is_allowed(patch: pytest.MonkeyPatch) -> None:
    capacity, lowest_floor = admission.capacity, admission.lowest_floor
    patch.setattr(admission, "capacity", lambda version, taken, rules: capacity(version + 1, taken, rules))
    patch.setattr(admission, "lowest_floor", lambda taken, rules: lowest_floor(taken, rules) - 1)


def deadlines_are_one_step_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "deadline", lambda floor, rules: floor + rules.max_staleness + 1)
    patch.setattr(Trainer, "_check_fresh", lambda *_: None)


def old_branches_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def refresh(self: Fleet) -> None:
        self.open = [server for server in self.servers.values() if server.version >= 0]
        self.newest_open = max((server.version for server in self.open), default=None)

    patch.setattr(Fleet, "_refresh", refresh)


def a_rollback_lets_everything_run_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(groups.Groups, "start_again", lambda _self, _at, _why: [])


def a_retry_may_go_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(groups, "least_loaded", lambda servers, _floor: next(iter(servers), None))


def a_failed_sample_keeps_its_group_waiting(patch: pytest.MonkeyPatch) -> None:
    whole = groups.Groups._failed

    def failed(self: groups.Groups, sample: groups.Sample, at: float, why: str) -> list[groups.GroupCommand]:
        return whole(self, sample, at, why) if sample.attempt < self._rules.retries else []

    patch.setattr(groups.Groups, "_failed", failed)


@pytest.mark.parametrize(
    "break_it",
    [
        no_batch_test,
        no_batch_test_and_no_last_look,
        filtered_groups_count_as_accepted,
        a_filtered_group_keeps_its_deadline,
        a_batch_is_trained_twice,
        a_batch_is_trained_twice_and_tables_are_not_looked_at,
        one_more_version_is_allowed,
        deadlines_are_one_step_late,
        old_branches_are_forgotten,
        a_rollback_lets_everything_run_on,
        a_retry_may_go_anywhere,
        a_failed_sample_keeps_its_group_waiting,
    ],
    ids=lambda rule: rule.__name__,
)
def test_a_broken_rule_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert caught() > 0
