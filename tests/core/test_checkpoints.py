"""Checkpoints, losses of the trainer, going back and resuming, with a script."""

import msgspec
import pytest
from msgspec.structs import replace

from areal_async.config import Config
from areal_async.core.resuming import CHANGEABLE, WHY, refusals
from areal_async.errors import IllegalTransition
from areal_async.messages import (
    AnyCommand,
    Cancel,
    Checkpoint,
    Fail,
    Failed,
    Finish,
    Forget,
    Joined,
    Lost,
    Publish,
    Release,
    Restart,
    RolledBack,
    Rules,
    Score,
    StartSample,
    StopRequested,
    Train,
)

from .checkpoints import BACK
from .world import World, make_rules

EARLY = ("publish", "swap")
ALL = (*EARLY, "read", "sample", "score")


def begin(**changes: object) -> World:
    """A run before its first step; checkpoints are answered by the test."""
    world = World(make_rules(**{"batch_groups": 1, "steps": 20, **changes})).start()
    world.instant_checkpoints = False
    return world.settle(*EARLY)


def train(world: World, steps: int) -> World:
    """Steps are trained, published and loaded by servers; a checkpoint that is asked for stays pending."""
    for _ in range(steps):
        world.settle(*ALL)
        world.answer(world.find("train")[0])
        world.settle(*EARLY)
    return world


def of_kind(commands: list[AnyCommand], kind: type) -> list[AnyCommand]:
    return [command for command in commands if isinstance(command, kind)]


# ----------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_comes_after_its_version_is_published_and_only_training_waits() -> None:
    world = train(begin(checkpoint_steps=2, max_staleness=3), 1)
    assert not of_kind(world.commands, Checkpoint)
    world.settle(*ALL)
    world.answer(("train", "1"))
    commands = world.answer(("publish", "2"))
    assert [type(command).__name__ for command in commands] == ["Checkpoint", "Swap"]
    assert commands[0] == Checkpoint(version=2, branch=0, keep=())
    world.settle("swap", "read", "sample", "score")
    assert world.core.balance()["outstanding"] >= 3  # rollouts go on
    assert not world.find("train")
    assert "the trainer writes the checkpoint of version 2, for 4.0 s" in world.core.waiting(world.clock)
    assert [type(command) for command in world.answer(("checkpoint", "2"))] == [Release, Train]


@pytest.mark.slow
def test_a_checkpoint_is_due_after_a_while_too() -> None:
    world = begin(checkpoint_s=50.0, max_staleness=0)
    while not world.find("checkpoint"):
        train(world, 1)
    train(world.settle("checkpoint"), 2)
    due = [command.version for command in of_kind(world.commands, Checkpoint) if isinstance(command, Checkpoint)]
    assert len(due) == 1
    (time,) = (event.at for event, commands in world.log if of_kind(commands, Checkpoint))
    assert 50 <= time - 1 < 60  # the trainer joined at 1 s


def test_the_newest_are_kept_and_what_only_older_ones_need_is_released() -> None:
    world = begin(checkpoint_steps=2, checkpoint_keep=2, max_staleness=0)
    for version in (2, 4, 6, 8):
        train(world, 2)
        world.answer(("checkpoint", str(version)))
    assert [command.keep for command in world.commands if isinstance(command, Checkpoint)] == [(), (2,), (4,), (6,)]
    released = [command.samples for command in world.commands if isinstance(command, Release)]
    assert released == [("0.0", "1.0"), ("2.0", "3.0"), ("4.0", "5.0")]
    assert world.core.returns == (8, 6)


def test_a_checkpoint_that_failed_is_no_end_and_comes_again_after_the_next_step() -> None:
    world = train(begin(checkpoint_steps=2), 2)
    world.answer(("checkpoint", "2"), "failed")
    assert "1 checkpoints in a row could not be written (no space left on device)" in world.core.waiting(world.clock)
    train(world, 1)
    assert world.find("checkpoint") == [("checkpoint", "3")]
    assert world.core.returns == (0,)
    world.answer(("checkpoint", "3"))
    assert world.core.returns == (3,)
    assert "could not be written" not in world.core.waiting(world.clock)


def test_what_is_told_of_a_checkpoint_twice_changes_nothing() -> None:
    world = train(begin(checkpoint_steps=1), 1)
    world.answer(("checkpoint", "1"))
    assert world.send(world.told[-1]) == []
    assert world.send(Failed(at=world.tick(), of="checkpoint", id="1", why="late")) == []
    assert world.core.returns == (1,)


def test_a_run_that_is_stopped_has_a_checkpoint_of_its_last_version() -> None:
    world = train(begin(checkpoint_steps=9), 2)
    world.settle(*ALL)
    world.send(StopRequested(at=world.tick()))
    world.answer(("train", "2"))
    commands = world.answer(("publish", "3"))
    assert Checkpoint(version=3, branch=0, keep=()) in commands
    assert world.end is None
    assert world.answer(("checkpoint", "3"))[-1] == Finish(reason="stopped")


@pytest.mark.parametrize("fails", [False, True])
def test_a_stop_while_nothing_is_trained_waits_for_a_checkpoint_once(fails: bool) -> None:
    world = train(begin(checkpoint_steps=9, max_staleness=0), 1)
    assert world.send(StopRequested(at=world.tick())) == [Checkpoint(version=1, branch=0, keep=())]
    assert world.answer(("checkpoint", "1"), "failed" if fails else 1.0)[-1] == Finish(reason="stopped")


def test_the_last_version_needs_no_checkpoint() -> None:
    world = World(make_rules(steps=3, checkpoint_steps=1)).start()
    assert world.run_out() == Finish(reason="steps_done")
    assert [command.version for command in world.commands if isinstance(command, Checkpoint)] == [1, 2]


def test_without_checkpoints_everything_is_released_at_once_and_nothing_is_kept() -> None:
    world = train(begin(), 3)
    assert not of_kind(world.commands, Checkpoint)
    forgotten = [command.samples for command in world.commands if isinstance(command, Forget)]
    assert forgotten == [command.samples for command in world.commands if isinstance(command, Release)]
    assert world.core.returns == ()
    assert not world.core._parts.trainer._plans or list(world.core._parts.trainer._plans) == [3]


@pytest.mark.slow
def test_the_core_keeps_no_more_of_a_long_run_than_its_checkpoints_need() -> None:
    world = World(make_rules(batch_groups=1, steps=300, checkpoint_steps=10, checkpoint_keep=2)).start()
    most = 0
    while world.end is None:
        world.answer(next(iter(world.pending)))
        most = max(most, len(world.core._parts.trainer._plans))
    assert most <= 30


# -------------------------------------------------------------------------------------------------- a lost trainer


def test_a_lost_trainer_starts_again_with_the_newest_checkpoint() -> None:
    world = train(begin(checkpoint_steps=2, max_staleness=4), 2)
    world.answer(("checkpoint", "2"))
    world.settle(*ALL)
    assert world.find("train")
    before = list(world.history)
    assert world.lose_trainer() == []
    assert world.core.waiting(world.clock).startswith("the trainer is lost (exit code -9) and starts again in ")
    assert "from the checkpoint of version 2" in world.core.waiting(world.clock)
    assert world.wake()[0] == Restart(peer="trainer", id="trainer", why="exit code -9", version=2)
    assert "the trainer starts again, for " in world.core.waiting(world.clock)
    assert not of_kind(world.go_back(2), Publish)
    assert "the trainer's ranks start with version 2, for " in world.core.waiting(world.clock)
    assert of_kind(world.answer(("joining", "trainer")), Publish) == [Publish(version=2, branch=1, free=(1, 2))]
    world.settle("publish")
    assert world.history == before
    assert world.formed[2].groups == before[2].groups
    assert world.run_out() == Finish(reason="steps_done")


def test_rollouts_go_on_while_the_trainer_is_lost() -> None:
    world = train(begin(checkpoint_steps=1, max_staleness=4), 1)
    world.answer(("checkpoint", "1"))
    world.lose_trainer()
    ready = world.core.balance()["outstanding"]
    world.settle("read", "sample", "score")
    assert world.core.view().ready == ready


@pytest.mark.parametrize("of", ["train", "publish"])
def test_ranks_out_of_step_are_a_loss(of: str) -> None:
    world = begin(checkpoint_steps=1).settle("read", "sample", "score")
    if of == "publish":
        world.answer(("train", "0"))
    world.answer(world.find(of)[0], "broken")
    assert world.end is None
    (restart,) = of_kind(world.wake(), Restart)
    assert isinstance(restart, Restart)
    assert restart.version == 0
    assert restart.why == f"{of} {int(of == 'publish')} failed: rank 1 timed out"
    assert world.run_out() == Finish(reason="steps_done")


def test_losses_beyond_the_budget_end_the_run_with_the_first_and_the_last_cause() -> None:
    world = begin(checkpoint_steps=1, max_trainer_restarts=2)
    for cause in ("the first cause", "another", "the last cause"):
        world.settle("restart", "joining", *ALL)
        world.lose_trainer(cause)
        if world.end is None:
            world.wake()
    assert isinstance(world.end, Fail)
    assert "the trainer was lost once more after 2 restarts (train.max_restarts)" in world.end.why
    assert "the first cause" in world.end.why
    assert "The last one: the last cause" in world.end.why


def test_who_gets_no_further_is_not_forgiven_however_long_it_takes() -> None:
    """The step at which it is always lost comes half an hour after each restart."""
    world = begin(checkpoint_steps=1, max_trainer_restarts=3)
    for count in range(4):
        assert world.end is None
        world.settle("restart", "joining", *ALL)
        world.clock += 1800
        world.lose_trainer(f"loss {count}")
        if count < 3:
            world.wake()
    assert isinstance(world.end, Fail)


def test_who_gets_further_is_forgiven_after_ten_minutes_of_work() -> None:
    world = begin(checkpoint_steps=1, max_trainer_restarts=1)
    for _ in range(6):
        train(world, 1)
        world.settle("checkpoint")
        world.clock += 600
        world.lose_trainer()
        world.wake()
        world.settle("restart", "joining", *EARLY)
    assert world.end is None


def test_a_trainer_that_can_not_start_is_lost_again_and_one_that_never_came_is_too() -> None:
    world = World(make_rules(checkpoint_steps=1, max_trainer_restarts=2))
    world.lose_trainer("out of memory")
    world.wake()
    world.answer(("restart", "trainer"), "failed")
    assert "starts again in" in world.core.waiting(world.clock)
    world.wake()
    world.go_back(0)
    world.lose_trainer("out of memory")
    assert isinstance(world.end, Fail)


def test_training_goes_back_only_to_where_it_can() -> None:
    world = train(begin(checkpoint_steps=2), 2)
    world.answer(("checkpoint", "2"))
    with pytest.raises(IllegalTransition, match="not told to start again"):
        world.core.handle(RolledBack(at=world.tick(), to=2, why=""))
    world.lose_trainer()
    world.wake()
    with pytest.raises(IllegalTransition, match="can't go back to version 1, only to 2"):
        world.core.handle(RolledBack(at=world.tick(), to=1, why=""))
    world.go_back(2)
    with pytest.raises(IllegalTransition, match="joined with version 0, but training went back to 2"):
        world.core.handle(Joined(at=world.tick(), peer="trainer", id="trainer", version=0))


@pytest.mark.parametrize("lost", [True, False])
def test_a_stop_while_the_trainer_is_not_there_ends_at_once(lost: bool) -> None:
    world = train(begin(checkpoint_steps=1), 1)
    world.answer(("checkpoint", "1"))
    world.lose_trainer()
    if not lost:
        world.wake()
        world.go_back(1)
    assert world.send(StopRequested(at=world.tick()))[-1] == Finish(reason="stopped")
    assert world.core.next_wakeup() is None


# ------------------------------------------------------------------------------------------ groups, when it goes back


def two_groups() -> tuple[World, int, int]:
    """Two groups of floor 1 or more, while the newest to go back to is version 0. The first: member 0 has its outcome,
    member 1 is being checked, member 2 runs. The second: member 0 is being checked, the others run."""
    world = World(
        make_rules(
            batch_groups=1, group_size=3, max_concurrent=9, max_staleness=2, steps=9, **BACK | {"checkpoint_steps": 9}
        )
    ).start()
    world.settle("publish", "swap", "read", "sample", "score")
    world.settle("train", "publish", "swap")
    numbers = sorted({int(key[1]) for key in world.find("read")})
    world.settle("read")
    first, second = numbers[:2]
    for name in (f"{first}.0", f"{first}.1", f"{second}.0"):
        world.answer(("sample", name, "0"))
    world.answer(("score", f"{first}.0", "0"))
    return world, first, second


def test_what_has_an_outcome_is_kept_and_the_rest_of_its_group_waits_for_its_floor() -> None:
    world, first, second = two_groups()
    floor = world.groups[first].floor
    assert floor
    before = world.core.balance()
    world.lose_trainer()
    world.wake()
    commands = world.go_back(0)
    assert Cancel(sample=f"{first}.2", attempt=0) in commands
    assert not [c for c in of_kind(commands, Cancel) if isinstance(c, Cancel) and c.sample == f"{first}.1"]
    assert Release(samples=(f"{second}.0",)) in commands  # nothing of that group had an outcome
    assert world.core.balance()["cancelled"] > before["cancelled"]
    world.answer(("score", f"{first}.1", "0"))  # its check went on
    assert f"1 samples start again when a server holds version {floor} or newer" in world.core.waiting(world.clock)
    world.settle("joining", "publish", "swap")
    while not world.find("sample", f"{first}.2"):
        world.answer(world.find("train")[0])
        world.settle("publish", "swap")
    (start,) = [c for c in world.commands if isinstance(c, StartSample) and c.sample == f"{first}.2" and c.attempt == 1]
    assert start.floor == floor
    assert world.run_out(outcome="mixed") == Finish(reason="steps_done")


def test_a_resume_has_checks_made_again_and_cancels_nothing() -> None:
    world, first, _ = two_groups()
    commands = world.resume()
    assert of_kind(commands, Score) == [Score(sample=f"{first}.1", attempt=0)]
    assert not of_kind(commands, Cancel)
    assert world.run_out(outcome="mixed") == Finish(reason="steps_done")


def test_a_held_sample_has_all_its_attempts() -> None:
    world, first, _ = two_groups()
    world.answer(("sample", f"{first}.2", "0"), "failed")
    world.answer(("sample", f"{first}.2", "1"), "failed")
    world.roll_back(0)
    while not world.find("sample", f"{first}.2"):
        world.settle("publish", "swap")
        world.answer(world.find("train")[0])
    world.answer(("sample", f"{first}.2", "3"))
    assert world.core.balance()["samples_failed"] == 0


# ---------------------------------------------------------------------------------------------------------- a resume


@pytest.mark.slow
def test_p02_after_a_resume_at_version_100_there_is_room_for_16_groups() -> None:
    world = World(make_rules(batch_groups=8, steps=200, checkpoint_steps=50)).start()
    while world.trained < 100:
        world.answer(next(iter(world.pending)))
    world.settle("publish", "checkpoint")
    world.resume()
    world.settle("joining", "publish", "swap")
    balance = world.core.balance()
    assert balance["outstanding"] + balance["training"] == 16
    assert world.core.step * 8 - balance["training"] == 800


def test_p08_after_a_resume_every_prompt_is_trained_once() -> None:
    world = World(make_rules(batch_groups=2, steps=10, checkpoint_steps=1), prompts=8).start().settle(*EARLY)
    world.settle("read", "sample", "score")
    world.answer(world.find("train")[0])
    world.settle("publish", "checkpoint")  # prompts 0 and 1 are trained, 2 and 3 are handed to step 1 or wait for it
    world.resume()
    assert world.run_out() == Finish(reason="data_ended")
    positions = [world.groups[group].position for train in world.history for group in train.groups]
    assert positions == list(range(8))


def test_a_stopped_run_goes_on_where_it_was() -> None:
    rules = make_rules(batch_groups=2, steps=6, max_staleness=0, checkpoint_steps=4)
    whole = World(rules).start()
    whole.run_out()
    world = World(rules).start()
    while world.trained < 3:
        world.answer(next(iter(world.pending)))
    world.send(StopRequested(at=world.tick()))
    assert world.run_out() == Finish(reason="stopped")
    world.resume()
    assert world.run_out() == Finish(reason="steps_done")
    order = [[w.groups[group].position for train in w.history for group in train.groups] for w in (world, whole)]
    assert order[0] == order[1]


def test_a_resume_may_have_other_ranks_and_other_microbatches() -> None:
    world = World(make_rules(batch_groups=4, steps=6, ranks=2, checkpoint_steps=9)).start()
    while world.trained < 2:
        world.answer(next(iter(world.pending)))
    world.resume(ranks=1, max_tokens_per_microbatch=12, steps=7)
    assert world.run_out() == Finish(reason="steps_done")
    again = [c for c in world.commands if isinstance(c, Train) and c.step == 0]
    assert [len(train.minibatches[0].ranks) for train in again] == [2, 1]
    assert again[0].samples == again[1].samples
    assert world.trained == 7


def test_an_answer_that_fits_no_longer_is_named() -> None:
    world = World(make_rules(batch_groups=4, steps=6, checkpoint_steps=9)).start()
    while world.trained < 2:
        world.answer(next(iter(world.pending)))
    core, event = world.core, RolledBack(at=world.tick(), to=0, why="", resumed=replace(world.rules, ranks=1))
    assert event.resumed is not None
    (*_, fail) = core.handle(replace(event, resumed=replace(event.resumed, max_tokens_per_microbatch=9)))
    assert isinstance(fail, Fail)
    assert "resume with at least 10" in fail.why
    assert not of_kind(core.handle(event), Fail)  # and the next one does


def test_a_run_that_failed_goes_on_after_a_resume() -> None:
    world = World(make_rules(retries=0, checkpoint_steps=1)).start().settle(*EARLY, "read")
    world.answer(world.find("sample")[0], "failed")
    assert isinstance(world.end, Fail)
    world.resume(max_failures=5)
    assert world.run_out() == Finish(reason="steps_done")


def test_without_checkpoints_a_loss_ends_the_run_and_a_resume_has_nothing_to_go_back_to() -> None:
    world = train(begin(), 1)
    world.send(Lost(at=world.tick(), peer="trainer", id="trainer", why="exit code -9"))
    assert isinstance(world.end, Fail)
    with pytest.raises(IllegalTransition, match="only to none"):
        world.core.handle(RolledBack(at=world.tick(), to=0, why="", resumed=world.rules))


def test_every_rule_may_change_or_says_why_it_may_not() -> None:
    assert {*WHY} | CHANGEABLE == {*Rules.__struct_fields__}
    assert not {*WHY} & CHANGEABLE
    for key, _ in WHY.values():
        section, _, name = key.partition(".")
        field = {f.name: f.type for f in msgspec.structs.fields(Config)}[section]
        assert not name or name in {f.name for f in msgspec.structs.fields(field)}, key


def test_what_may_not_change_is_named_with_both_values_and_the_reason() -> None:
    old = make_rules(steps=10)
    assert refusals(old, replace(old, ranks=4, steps=12, checkpoint_keep=9)) == []
    assert refusals(old, replace(old, batch_groups=3, steps=9)) == [
        "train.batch_groups was 2 and can't become 3 by a resume: every step so far took that many groups, and capacity"
        " is counted in steps",
        "train.steps was 10 and can't become 9 by a resume: there can only be more",
    ]
    with pytest.raises(ValueError, match=r"rollout\.max_staleness was 1 and can't become 2"):
        train(begin(checkpoint_steps=1), 1).resume(max_staleness=2)
