"""Each rule of checkpoints, of going back and of resuming, broken on purpose: the checks must notice."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from areal_async.core import restarts
from areal_async.core.evaluating import Evaluations
from areal_async.core.fleet import Fleet
from areal_async.core.groups import Groups
from areal_async.core.ledger import Group
from areal_async.core.restarts import Restarted
from areal_async.core.trainer import Trainer
from areal_async.errors import IllegalTransition
from areal_async.messages import CheckpointDone, Finish, RolledBack, Rules, StartSample, StopRequested

from .test_broken_rules import numbers
from .test_losing_servers import check_loads
from .world import Broken, World, hold, make_rules

WALKS = 80
OUTCOMES = (1.0, 0.0, 1.0, 1.0, None, "failed", "given")


def walk(seed: int) -> None:
    """One run to its end, in which the trainer and the controller die, checkpoints fail, and what was told is told
    again."""
    pick = numbers(seed)
    size = 1 + next(pick) % 3
    rules = make_rules(
        steps=5,
        batch_groups=1 + next(pick) % 2,
        group_size=size,
        max_staleness=next(pick) % 3,
        max_concurrent=size * (1 + next(pick) % 6),
        max_failures=10_000,
        retries=seed % 2,
        ranks=2,
        checkpoint_steps=1 + next(pick) % 3,
        checkpoint_s=60.0 * (next(pick) % 2),
        checkpoint_keep=1 + next(pick) % 2,
        max_trainer_restarts=10_000,
        eval_every=next(pick) % 3,
    )
    world = World(rules, servers=1 + next(pick) % 2).start()
    world.instant_checkpoints = seed % 3 == 0
    for _ in range(150):
        chance, points = next(pick) % 40, world.checkpoints.points
        if chance == 0 and world.branch < 4:
            world.resume(ranks=1 + next(pick) % 3, max_concurrent=size * (1 + next(pick) % 4))
        elif world.end is not None:
            break
        elif chance < 3 and world.branch < 4 and world.trainer.may_be_lost:
            world.lose_trainer()
        elif chance == 3 and world.branch < 4 and world.find("train"):
            world.answer(world.find("train")[0], "broken")
        elif world.find("restart", "trainer"):
            world.go_back(points[-1 - next(pick) % len(points)])
        elif chance == 4 and world.branch < 4 and seed % 4 == 0:
            world.send(StopRequested(at=world.tick()))
        elif chance < 8 and world.told:
            hold(world.send(world.told[-1 - next(pick) % min(len(world.told), 9)]) == [], "told again")
        elif chance < 10 and world.late and (world.core.next_wakeup() or 1e9) > world.clock:
            hold(world.send(world.late[-1 - next(pick) % min(len(world.late), 9)]) == [], "told late")
        elif keys := [key for key in world.pending if world.can_be_done(key)]:
            key = keys[-1 - next(pick) % min(len(keys), 4)]
            fails = key[0] == "checkpoint" and next(pick) % 3 == 0
            world.answer(key, "failed" if fails else OUTCOMES[next(pick) % len(OUTCOMES)] if size > 1 else 1.0)
        elif world.core.next_wakeup() is not None:
            world.wake()
        check_loads(world)
    end = world.run_out(next(pick), "mixed" if size > 1 else 1.0)
    if end == Finish(reason="stopped"):
        world.resume()
        end = world.run_out(next(pick), "mixed" if size > 1 else 1.0)
    hold(isinstance(end, Finish), f"{end}")


def caught() -> int:
    """In how many walks something was noticed."""
    count = 0
    for seed in range(WALKS):
        try:
            walk(seed)
        except (Broken, IllegalTransition, KeyError, ValueError):
            count += 1
    return count


@pytest.mark.slow
def test_with_its_rules_whole_nothing_is_noticed() -> None:
    for seed in range(WALKS):
        walk(seed)


def a_checkpoint_is_always_due(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trainer, "_is_due", lambda self, _at: self._has_news)


def checkpoints_are_a_step_late(patch: pytest.MonkeyPatch) -> None:
    whole = Trainer._is_due
    patch.setattr(Trainer, "_is_due", lambda self, at: whole(self, at) and self.version > 2)


def a_checkpoint_that_failed_counts(patch: pytest.MonkeyPatch) -> None:
    whole = Trainer.checkpoint_failed

    def failed(self: Trainer, event: object) -> None:
        self._checkpoints.append(self.version)
        whole(self, event)  # type: ignore[arg-type]

    patch.setattr(Trainer, "checkpoint_failed", failed)


def a_stop_writes_no_checkpoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trainer, "checkpoint_at_stop", lambda _self, _at: [])


def one_more_checkpoint_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trainer, "_others", lambda self: self._checkpoints[-self._rules.checkpoint_keep :])


def checkpoints_of_another_history_count(patch: pytest.MonkeyPatch) -> None:
    whole = Trainer.roll_back

    def roll_back(self: Trainer, event: RolledBack) -> None:
        before = list(self._checkpoints)
        whole(self, event)
        self._checkpoints = before

    patch.setattr(Trainer, "roll_back", roll_back)


def nothing_is_ever_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trainer, "_drop_plans", lambda _self, _before: [])


def the_oldest_checkpoint_loses_its_samples(patch: pytest.MonkeyPatch) -> None:
    whole = Trainer.checkpoint_done

    def done(self: Trainer, event: CheckpointDone) -> list[object]:
        commands = whole(self, event)
        return [*commands, *(self._drop_plans(self._checkpoints[0] + 1) if commands else [])]

    patch.setattr(Trainer, "checkpoint_done", done)


def samples_of_stopped_groups_stay_on_the_disk(patch: pytest.MonkeyPatch) -> None:
    whole = Groups._close

    def close(self: Groups, group: Group, *words: object) -> list[object]:
        return [command for command in whole(self, group, *words) if type(command).__name__ != "Release"]  # type: ignore[arg-type]

    patch.setattr(Groups, "_close", close)


def everything_unready_is_asked_again(patch: pytest.MonkeyPatch) -> None:
    def hold_group(self: Groups, group: Group, at: float, why: str) -> list[object]:
        self._ask_again(group)
        return list(self._close(group, "cancelled", at, why))

    patch.setattr(Groups, "_hold", hold_group)


def everything_unready_runs_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "_hold", lambda _self, _group, _at, _why: [])


def held_samples_start_at_once(patch: pytest.MonkeyPatch) -> None:
    whole = Groups._place

    def place(self: Groups, group: Group, samples: list[object]) -> None:
        if self._fleet.open:
            whole(self, group, samples)  # type: ignore[arg-type]

    patch.setattr(Groups, "_place", place)
    patch.setattr(Groups, "_server_for", lambda self, group: next(iter(self._fleet.servers.values())))
    patch.setattr(Groups, "_held_may_start", lambda self: bool(self._held) and self._fleet.newest_open is not None)


def held_samples_never_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "_held_may_start", lambda _self: False)


def held_samples_take_no_heed_of_places(patch: pytest.MonkeyPatch) -> None:
    whole = Groups.start_held

    def start(self: Groups, at: float) -> list[StartSample]:
        rules, self._rules = self._rules, replace(self._rules, max_concurrent=10_000)
        commands = whole(self, at)
        self._rules = rules
        return commands

    patch.setattr(Groups, "start_held", start)


def a_held_sample_has_failed_once(patch: pytest.MonkeyPatch) -> None:
    whole = Groups._hold

    def hold_group(self: Groups, group: Group, at: float, why: str) -> list[object]:
        commands = whole(self, group, at, why)
        for sample in group.samples:
            sample.failures += sample.state == "held"
        return list(commands)

    patch.setattr(Groups, "_hold", hold_group)


def a_held_sample_keeps_its_attempt(patch: pytest.MonkeyPatch) -> None:
    whole = Groups._hold

    def hold_group(self: Groups, group: Group, at: float, why: str) -> list[object]:
        attempts = [(sample, sample.attempt) for sample in group.samples]
        commands = whole(self, group, at, why)
        for sample, attempt in attempts:
            sample.attempt = attempt
        return list(commands)

    patch.setattr(Groups, "_hold", hold_group)


def checks_of_before_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "check_again", lambda _self: [])


def servers_of_before_are_counted_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "resume", lambda _self, _rules: None)


def batches_are_split_for_the_ranks_of_before(patch: pytest.MonkeyPatch) -> None:
    whole = Trainer.resume

    def resume(self: Trainer, rules: Rules) -> None:
        before = self._rules
        whole(self, rules)
        self._rules = before

    patch.setattr(Trainer, "resume", resume)


def servers_load_what_the_lost_trainer_published(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "forget_published", lambda _self: None)


def the_past_of_the_trainer_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restarted, "since", property(lambda _self: -1.0, lambda _self, _at: None))


def the_trainer_is_started_again_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restarts, "FIRST_RESTART_S", 0.0)


def the_trainer_is_never_started_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trainer, "wake", lambda _self, _at: [])


def evaluations_of_before_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evaluations, "resume", lambda _self, _rules: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "break_it",
    [
        a_checkpoint_is_always_due,
        checkpoints_are_a_step_late,
        a_checkpoint_that_failed_counts,
        a_stop_writes_no_checkpoint,
        one_more_checkpoint_is_kept,
        checkpoints_of_another_history_count,
        nothing_is_ever_released,
        the_oldest_checkpoint_loses_its_samples,
        samples_of_stopped_groups_stay_on_the_disk,
        everything_unready_is_asked_again,
        everything_unready_runs_on,
        held_samples_start_at_once,
        held_samples_never_start,
        held_samples_take_no_heed_of_places,
        a_held_sample_has_failed_once,
        a_held_sample_keeps_its_attempt,
        checks_of_before_are_waited_for,
        servers_of_before_are_counted_on,
        batches_are_split_for_the_ranks_of_before,
        servers_load_what_the_lost_trainer_published,
        the_past_of_the_trainer_is_believed,
        the_trainer_is_started_again_at_once,
        the_trainer_is_never_started_again,
        evaluations_of_before_are_waited_for,
    ],
    ids=lambda rule: rule.__name__,
)
def test_a_broken_rule_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert caught() > 0
