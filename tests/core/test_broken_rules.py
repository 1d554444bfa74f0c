"""Each rule of the core, broken on purpose: the checks must notice, or they would not notice a mistake either."""

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from areal_async.core import admission, batches, groups, shaping
from areal_async.core.fleet import Fleet
from areal_async.core.ledger import Group, Ledger
from areal_async.core.lifecycle import Happening, Thing
from areal_async.core.trainer import Trainer
from areal_async.errors import IllegalTransition
from areal_async.messages import Fail, Finish, Forget, Publish, StepDone

from .checkpoints import BACK
from .world import Broken, World, make_rules

WALKS = 40
WAIT = {"when_older": "wait"}
TRAIN = {"when_older": "train"}
MASK = {"when_older": "mask"}
DROP = {"when_older": "drop"}
REQUEUE = {"when_older": "drop", "requeue": True}
CUT = {"truncated": "mask", "aggregation": "sequence_mean"}
SHAPED = {"truncated": "penalize", "truncated_penalty": 0.5, "drop_equal": True, "group_size": 2, "min_group": 2}
SCALED = SHAPED | {"truncated_penalty": 10.0, "reward_scale": 10.0, "reward_bias": -5.0}
LENGTHS = {"min_tokens": 2, "max_tokens": 6}
SUCCESS = {"success_min": 0.3, "success_max": 0.5, "success_above": 0.4, "group_size": 2}
OUTCOMES = (1.0, 0.0, 1.0, 1.0, None, "failed", "given")


def numbers(seed: int) -> Iterator[int]:
    """A stated generator (Knuth's MMIX constants), so that the walks stay the same."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def walk(seed: int, changes: dict[str, object]) -> None:
    """One adversarial run to its end: newest answers first, failures, filtered groups, servers behind, rollbacks."""
    pick = numbers(seed)
    base: dict[str, object] = {
        "steps": 5,
        "batch_groups": 1 + next(pick) % 3,
        "group_size": 1 + next(pick) % 2,
        "max_staleness": next(pick) % 3,
        "max_failures": 10_000,
        "retries": 1,
        **BACK | {"checkpoint_steps": 1 + seed % 2 * 99},  # in every second walk none comes, so that it goes back far
    }
    rules = make_rules(**{**base, **changes})
    world = World(rules, servers=1 + next(pick) % 3).start()
    for _ in range(300):
        if world.end is not None or not world.pending:
            break
        keys = list(world.pending)
        recent = keys[-1 - next(pick) % min(len(keys), 4)]
        world.answer(recent, OUTCOMES[next(pick) % len(OUTCOMES)])
        if next(pick) % 60 == 0 and world.end is None and world.branch < 3:
            world.roll_back(max(world.trained - next(pick) % 3, 0))
    end = world.run_out(next(pick), "mixed" if rules.group_size > 1 else 1.0)
    if not isinstance(end, Finish):
        raise Broken(end.why)


def caught(changes: dict[str, object]) -> int:
    """In how many walks something was noticed."""
    count = 0
    for seed in range(WALKS):
        try:
            walk(seed, changes)
        except (Broken, IllegalTransition):
            count += 1
    return count


@pytest.mark.parametrize("changes", [WAIT, TRAIN, MASK, DROP, REQUEUE, CUT, SHAPED, SCALED, LENGTHS, SUCCESS], ids=repr)
@pytest.mark.slow
def test_with_its_rules_whole_nothing_is_noticed(changes: dict[str, object]) -> None:
    for seed in range(WALKS):
        walk(seed, changes)


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

    def happen(self: Thing, happening: Happening) -> None:
        self.state = happening[1]

    patch.setattr(Thing, "happen", happen)


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
    patch.setattr(groups.Groups, "roll_back", lambda _self, _at, _why: [])


def a_retry_may_go_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(groups, "least_loaded", lambda servers, _floor: next(iter(servers), None))


def a_failed_sample_keeps_its_group_waiting(patch: pytest.MonkeyPatch) -> None:
    whole = groups.Groups._failed

    def failed(self: groups.Groups, sample: groups.Sample, at: float, why: str) -> list[groups.GroupCommand]:
        return whole(self, sample, at, why) if sample.attempt < self._rules.retries else []

    patch.setattr(groups.Groups, "_failed", failed)


def late_groups_run_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(groups.Groups, "stop_late", lambda _self, _at: [])


def late_groups_run_on_and_no_last_look(patch: pytest.MonkeyPatch) -> None:
    late_groups_run_on(patch)
    patch.setattr(Trainer, "_check_fresh", lambda *_: None)


def ready_groups_are_never_late(patch: pytest.MonkeyPatch) -> None:
    whole = Ledger.late
    patch.setattr(Ledger, "late", lambda self: [group for group in whole(self) if group.state != "ready"])
    patch.setattr(Trainer, "_check_fresh", lambda *_: None)


def groups_are_dropped_a_step_early(patch: pytest.MonkeyPatch) -> None:
    def late(self: Ledger) -> list[Group]:
        return [group for group in self.outstanding_groups() if group.deadline <= self.step]

    patch.setattr(Ledger, "late", late)


def a_stale_group_keeps_its_place(patch: pytest.MonkeyPatch) -> None:
    whole = Ledger.outstanding.fget
    assert whole is not None
    patch.setattr(Ledger, "outstanding", property(lambda self: whole(self) + self._counts["stale"]))


def a_stale_prompt_is_not_asked_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(groups.Groups, "_ask_again", lambda _self, _group: None)


def new_prompts_come_before_stale_ones(patch: pytest.MonkeyPatch) -> None:
    def take(self: groups.Groups) -> int:
        self._position += 1
        return self._position - 1

    patch.setattr(groups.Groups, "_take_position", take)


def the_mask_is_a_version_too_low(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "mask_below", lambda step, rules: max(step - rules.max_staleness - 1, 0))


def the_mask_is_a_version_too_high(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "mask_below", lambda step, rules: max(step - rules.max_staleness + 1, 0))


def everybody_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "batches_wait", lambda _rules: True)


def late_deadlines_come_first(patch: pytest.MonkeyPatch) -> None:
    def choose(self: Ledger) -> list[Group]:
        ready = [group for last in sorted(self._ready, reverse=True) for group in self._ready[last].values()]
        count = self.rules.batch_groups
        return sorted(ready[:count], key=lambda group: group.id) if len(ready) >= count else []

    patch.setattr(Ledger, "choose_batch", choose)


def cut_answers_are_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shaping, "masked", lambda _done, _rules: False)


def cut_answers_are_never_forgotten(patch: pytest.MonkeyPatch) -> None:
    whole = Trainer.step_done

    def done(self: Trainer, event: StepDone) -> list[Forget | Publish | Fail]:
        batch = self._plans.get(event.step, ())
        commands = whole(self, event)
        names = tuple(sample.id for group in batch for sample in group.samples if sample.state == "trained")
        return [Forget(samples=names) if isinstance(command, Forget) else command for command in commands]

    patch.setattr(Trainer, "step_done", done)


def the_divisor_counts_tokens_whatever_is_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batches, "divisor", lambda losses, _rules: float(sum(losses)))


def filters_look_at_raw_rewards_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shaping, "shaped", lambda reward, _done, _rules: reward)


def rewards_are_not_scaled(patch: pytest.MonkeyPatch) -> None:
    whole = shaping.shaped
    patch.setattr(shaping, "shaped", lambda reward, done, rules: whole(reward, done, replace(rules, reward_scale=1.0)))


def every_length_is_wanted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shaping, "has_wanted_length", lambda _length, _rules: True)


def the_bounds_of_a_length_are_not_wanted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shaping, "has_wanted_length", lambda n, rules: rules.min_tokens < n < (rules.max_tokens or 1 << 30))


def the_bounds_of_success_are_not_allowed(patch: pytest.MonkeyPatch) -> None:
    whole = shaping.success_share
    patch.setattr(shaping, "success_share", lambda rewards, rules: whole(rewards, rules) + 1e-9)


@pytest.mark.parametrize(
    ("break_it", "changes"),
    [
        (no_batch_test, WAIT),
        (no_batch_test_and_no_last_look, WAIT),
        (filtered_groups_count_as_accepted, WAIT),
        (a_filtered_group_keeps_its_deadline, WAIT),
        (a_batch_is_trained_twice, WAIT),
        (a_batch_is_trained_twice_and_tables_are_not_looked_at, WAIT),
        *((one_more_version_is_allowed, changes) for changes in (WAIT, TRAIN, MASK, DROP)),
        (deadlines_are_one_step_late, WAIT),
        (deadlines_are_one_step_late, DROP),
        (old_branches_are_forgotten, WAIT),
        (a_rollback_lets_everything_run_on, WAIT),
        (a_retry_may_go_anywhere, WAIT),
        (a_failed_sample_keeps_its_group_waiting, WAIT),
        (late_groups_run_on, DROP),
        (late_groups_run_on_and_no_last_look, DROP),
        (ready_groups_are_never_late, DROP | {"max_staleness": 3, "batch_groups": 1, "group_size": 1}),
        (groups_are_dropped_a_step_early, DROP),
        (a_stale_group_keeps_its_place, DROP),
        (a_stale_prompt_is_not_asked_again, REQUEUE),
        (new_prompts_come_before_stale_ones, REQUEUE),
        (the_mask_is_a_version_too_low, MASK),
        (the_mask_is_a_version_too_high, MASK),
        (everybody_waits, TRAIN),
        (everybody_waits, MASK),
        (late_deadlines_come_first, TRAIN),
        (late_deadlines_come_first, DROP),
        (cut_answers_are_trained, CUT),
        (cut_answers_are_never_forgotten, CUT),
        (the_divisor_counts_tokens_whatever_is_asked, CUT),
        (filters_look_at_raw_rewards_only, SHAPED),
        (rewards_are_not_scaled, SCALED),
        (every_length_is_wanted, LENGTHS),
        (the_bounds_of_a_length_are_not_wanted, LENGTHS),
        (the_bounds_of_success_are_not_allowed, SUCCESS),
    ],
    ids=lambda value: getattr(
        value, "__name__", "-".join(str(part) for part in value.values()) if isinstance(value, dict) else ""
    ),
)
@pytest.mark.slow
def test_a_broken_rule_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None], changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert caught(changes) > 0
