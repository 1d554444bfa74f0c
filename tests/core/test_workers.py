"""Reward workers: lost, started again, lost too often; and what the run does meanwhile."""

import pytest

from areal_async.core.workers import Workers
from areal_async.errors import IllegalTransition
from areal_async.messages import Fail, Finish, Joined, Lost, Restart, StopRequested

from .world import World, make_rules

EARLY = ("publish", "swap")
GONE = "rewards.0 (pid 7) was ended by SIGKILL\nits last line"


def begin(workers: int = 2, **changes: object) -> World:
    return World(make_rules(**changes), workers=workers).start().settle(*EARLY)


def restarts(world: World) -> list[Restart]:
    return [command for command in world.commands if isinstance(command, Restart)]


def test_a_lost_worker_is_started_again_after_a_pause() -> None:
    world = begin()
    assert world.lose("rewards.0", GONE) == []
    assert "reward worker rewards.0 is lost (rewards.0 (pid 7) was ended by SIGKILL) and starts again in" in (
        world.core.waiting(world.clock)
    )
    lost_at = world.clock
    world.wake()
    assert world.clock - lost_at == 1.0
    assert restarts(world) == [Restart(peer="rewards", id="rewards.0", why=GONE)]
    assert "reward worker rewards.0 starts again, for " in world.core.waiting(world.clock)
    assert world.core.next_wakeup() is None
    world.answer(("restart", "rewards.0"))
    assert "rewards.0" not in world.core.waiting(world.clock)
    assert "told to start again" in world.core.story("rewards.0")
    assert world.run_out() == Finish(reason="steps_done")


def test_groups_are_asked_for_once_the_first_worker_is_there() -> None:
    world = World(make_rules(), workers=0).start().settle(*EARLY)
    assert not world.groups
    assert "the reward workers have yet to join" in world.core.waiting(world.clock)
    world.send(Joined(at=world.tick(), peer="rewards", id="rewards.1"))
    assert world.groups


def test_while_no_worker_is_there_checks_wait_and_it_says_so() -> None:
    world = begin(workers=1, steps=2).settle("read", "sample")
    world.lose("rewards.0", GONE)
    assert "the checks of 4 samples wait for a reward worker" in world.core.waiting(world.clock)
    assert not any(world.can_be_done(key) for key in world.find("score"))
    assert world.run_out() == Finish(reason="steps_done")


def test_restarts_wait_longer_each_time_and_the_run_ends_with_the_first_cause() -> None:
    world = begin(steps=50, max_worker_restarts=7)
    pauses = []
    for count in range(7):
        world.lose("rewards.0", GONE if not count else "exit code 1")
        before = world.clock
        world.wake()
        pauses.append(world.clock - before)
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0])
    assert len(restarts(world)) == 7
    world.lose("rewards.0", "exit code 1")
    assert isinstance(world.end, Fail)
    assert "rewards.0 was lost once more after 7 restarts (reward.max_restarts)" in world.end.why
    assert f"s: {GONE}" in world.end.why
    assert world.end.why.rstrip().endswith("after 7 restarts: exit code 1")


def test_a_restart_that_fails_is_another_loss() -> None:
    world = begin(max_worker_restarts=1)
    world.lose("rewards.1")
    world.wake()
    world.answer(("restart", "rewards.1"), "failed")
    assert isinstance(world.end, Fail)


def test_each_worker_has_a_record_of_its_own_that_is_forgotten_after_ten_minutes() -> None:
    world = begin(steps=50, max_worker_restarts=1)
    for name in ("rewards.0", "rewards.1"):
        world.lose(name)
        world.wake()
        world.answer(("restart", name))
    assert world.end is None
    world.clock += 600.0
    world.lose("rewards.0")
    assert world.end is None
    world.wake()
    world.answer(("restart", "rewards.0"))
    world.lose("rewards.0")
    assert isinstance(world.end, Fail)


def test_without_restarts_the_first_loss_is_the_end() -> None:
    world = begin(max_worker_restarts=0)
    world.lose("rewards.1", GONE)
    assert isinstance(world.end, Fail)
    assert "reward worker rewards.1" in world.end.why


def test_a_run_that_is_asked_to_stop_needs_no_worker() -> None:
    world = begin(workers=1, max_worker_restarts=0).settle("read", "sample", "score")
    world.send(StopRequested(at=world.tick()))
    assert world.lose("rewards.0") == []
    assert world.run_out() == Finish(reason="stopped")


def test_what_can_not_be_true() -> None:
    workers = Workers(5)
    with pytest.raises(IllegalTransition, match=r"rewards\.0, which never joined"):
        workers.lost(Lost(at=1.0, peer="rewards", id="rewards.0", why=""))
    workers.join(Joined(at=1.0, peer="rewards", id="rewards.0"))
    workers.join(Joined(at=1.0, peer="rewards", id="rewards.0"))  # told again
    with pytest.raises(IllegalTransition, match="joined twice"):
        workers.join(Joined(at=2.0, peer="rewards", id="rewards.0"))
