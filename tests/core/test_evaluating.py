"""Evaluations during a run: when they are due, on which server, and what they may not hold up."""

from areal_async.messages import (
    Evaluate,
    EvaluationDone,
    Fail,
    Failed,
    Finish,
    Rules,
    StopRequested,
    Swap,
    Train,
)

from .checkpoints import BACK
from .world import World, make_rules


def begin(rules: Rules, servers: int = 1, prompts: int | None = None) -> World:
    """Events follow each other quickly, so that pauses are long."""
    world = World(rules, servers=servers, prompts=prompts)
    world.pace_s = 0.01
    return world.start().settle("publish", "swap")


def train(world: World, *steps: int) -> None:
    """These steps, and the swaps that follow, as far as nothing holds them back."""
    for step in steps:
        world.settle("read", "sample", "score")
        world.answer(("train", str(step)))
        world.settle("publish", "swap")


def evaluated(world: World) -> list[int]:
    """Versions that were asked for, in this order."""
    return [command.version for command in world.commands if isinstance(command, Evaluate)]


def test_every_so_many_steps_and_after_the_last() -> None:
    world = World(make_rules(batch_groups=1, steps=7, eval_every=3)).start()
    assert world.run_out() == Finish(reason="steps_done")
    assert evaluated(world) == [3, 6, 7]


def test_none_is_asked_for_where_none_is_wanted() -> None:
    world = World(make_rules(batch_groups=1, steps=7)).start()
    assert world.run_out() == Finish(reason="steps_done")
    assert evaluated(world) == []


def test_it_holds_its_own_server_at_its_version_and_nothing_else() -> None:
    world = begin(make_rules(batch_groups=1, steps=9, max_staleness=3, eval_every=2, wave=2), servers=2)
    train(world, 0, 1)
    assert world.find("evaluate") == [("evaluate", "server0")]
    taken = world.core.balance()["admitted"]
    train(world, 2)
    assert world.servers["server0"].holds == (0, 2)
    assert world.servers["server1"].holds == (0, 3)
    assert world.core.balance()["admitted"] > taken  # rollouts go on
    assert "server server0 gets version 3 when version 2 is evaluated" in world.core.waiting(world.clock)
    commands = world.answer(("evaluate", "server0"))
    assert Swap(server="server0", version=3, branch=0, location="0/3") in commands
    assert world.run_out() == Finish(reason="steps_done")


def test_without_staleness_and_with_one_server_training_waits_for_it_and_goes_on() -> None:
    world = begin(make_rules(batch_groups=2, steps=4, max_staleness=0, eval_every=2))
    train(world, 0, 1)
    world.settle("read", "sample", "score", "train", "publish", "swap")
    (evaluation,) = world.find("evaluate")  # step 2 is sampled beside it; what follows needs version 3
    assert list(world.pending) == [evaluation]
    assert world.core.waiting(world.clock) == (
        "step 3 waits for 2 more ready groups, but none is running: a group needs a server of version 3 or newer, the"
        " newest holds 2; server server0 gets version 3 when version 2 is evaluated"
    )
    world.answer(evaluation)
    assert world.run_out() == Finish(reason="steps_done")
    assert evaluated(world) == [2, 4]


def test_of_several_that_became_due_only_the_newest_is_done() -> None:
    world = begin(make_rules(batch_groups=1, steps=9, max_staleness=8, eval_every=2), servers=2)
    train(world, 0, 1, 2, 3, 4, 5, 6)  # 2, 4 and 6 were due
    world.answer(("evaluate", "server0"))
    world.settle("swap")
    assert evaluated(world) == [2, 7]  # 7 is the newest of those that were served since 6


def test_it_is_asked_of_the_server_with_the_newest_version() -> None:
    world = begin(make_rules(batch_groups=2, steps=9, max_staleness=4, eval_every=1, wave=3), servers=3)
    world.settle("read", "sample", "score")
    world.answer(("train", "0"))
    world.settle("publish")
    world.answer(("swap", "server2"))
    assert world.find("evaluate") == [("evaluate", "server2")]


def test_of_servers_with_the_same_version_the_least_loaded_is_asked() -> None:
    world = begin(make_rules(batch_groups=2, steps=9, max_staleness=4, eval_every=2, wave=3), servers=3)
    train(world, 0, 1)
    world.core._parts.fleet.servers["server1"].load = 5  # server0 runs 2 samples, server2 none
    world.answer(("evaluate", "server0"), "failed")
    world.wake()
    assert world.find("evaluate") == [("evaluate", "server2")]


def test_the_end_waits_for_the_last_version_only() -> None:
    world = begin(make_rules(batch_groups=1, steps=4, max_staleness=4, eval_every=2, wave=1))
    train(world, 0, 1, 2, 3)
    assert world.end is None
    assert evaluated(world) == [2]
    assert not world.find("swap")
    assert world.core.waiting(world.clock) == (
        "the run waits for its last evaluation, of version 4: server server0 evaluates version 2, for 0.0 s;"
        " server server0 gets version 4 when version 2 is evaluated"
    ).replace("0.19", f"{world.core._parts.evaluations.under_way.at:.1f}")  # type: ignore[union-attr]
    world.answer(("evaluate", "server0"))
    world.settle("swap")
    assert world.find("evaluate") == [("evaluate", "server0")]
    commands = world.answer(("evaluate", "server0"))
    assert commands == [Finish(reason="steps_done")]
    assert evaluated(world) == [2, 4]


def test_where_the_data_end_the_last_version_is_evaluated_too() -> None:
    world = begin(make_rules(batch_groups=1, steps=40, eval_every=10), prompts=3)
    assert world.run_out() == Finish(reason="data_ended")
    assert evaluated(world) == [3]


def test_a_stop_begins_none_and_waits_for_none() -> None:
    world = begin(make_rules(batch_groups=1, steps=9, eval_every=1, max_staleness=3))
    train(world, 0)
    assert world.find("evaluate")
    world.settle("read", "sample", "score")
    world.send(StopRequested(at=world.tick()))
    world.settle("train", "publish")
    assert world.end == Finish(reason="stopped")
    assert evaluated(world) == [1]


def test_one_that_failed_is_due_again_after_a_pause_elsewhere() -> None:
    world = begin(make_rules(batch_groups=1, steps=9, eval_every=2, wave=2, max_staleness=9), servers=2)
    train(world, 0, 1)
    world.answer(("evaluate", "server0"), "failed")
    assert not world.find("evaluate")
    world.wake()
    assert world.find("evaluate") == [("evaluate", "server1")]
    world.answer(("evaluate", "server1"))
    assert world.run_out() == Finish(reason="steps_done")


def test_the_last_one_that_failed_is_done_again_on_the_same_server() -> None:
    world = begin(make_rules(batch_groups=1, steps=1, eval_every=5))
    train(world, 0)
    world.answer(("evaluate", "server0"), "failed")
    assert "it failed and is tried again in" in world.core.waiting(world.clock)
    world.wake()
    assert world.run_out() == Finish(reason="steps_done")
    assert evaluated(world) == [1, 1]


def test_three_in_a_row_that_fail_end_the_run() -> None:
    world = begin(make_rules(batch_groups=1, steps=1, eval_every=1))
    train(world, 0)
    for _ in range(3):
        if not world.find("evaluate"):
            world.wake()
        world.answer(("evaluate", "server0"), "failed")
    assert isinstance(world.end, Fail)
    assert "3 evaluations in a row failed, the last one of version 1 on server server0: no data" in world.end.why


def test_the_loss_of_its_server_is_a_failure_and_another_does_it() -> None:
    world = begin(make_rules(batch_groups=1, steps=9, eval_every=2, wave=2, max_staleness=9), servers=2)
    train(world, 0, 1)
    world.lose("server0")
    assert not world.find("evaluate")
    for event in world.late:
        world.send(event)
    assert not world.find("evaluate")
    world.wake()
    assert world.find("evaluate") == [("evaluate", "server1")]
    assert world.run_out() == Finish(reason="steps_done")


def test_the_last_one_is_left_out_where_no_server_is_left() -> None:
    world = begin(make_rules(batch_groups=1, steps=1, eval_every=1, max_restarts=0))
    train(world, 0)
    commands = world.lose("server0")
    assert commands == [Finish(reason="steps_done")]


def test_after_a_rollback_what_was_under_way_counts_for_nothing() -> None:
    world = begin(make_rules(batch_groups=1, steps=6, eval_every=2, max_staleness=3, **BACK))
    train(world, 0, 1, 2)
    assert world.find("evaluate")
    world.roll_back(to=1)
    world.settle("publish", "train")
    assert not world.find("swap")  # its server stays as it is until it has answered
    world.answer(("evaluate", "server0"))
    assert world.run_out() == Finish(reason="steps_done")
    assert evaluated(world)[0] == 2
    again = [command.version for command in world.commands if isinstance(command, Evaluate)][1:]
    assert again[0] >= 2  # due again
    assert again[-1] == 6
    assert [command.step for command in world.commands if isinstance(command, Train)].count(1) == 2


def test_a_rollback_to_a_later_version_leaves_it_as_it_is() -> None:
    world = begin(make_rules(batch_groups=1, steps=6, eval_every=2, max_staleness=5, **BACK))
    train(world, 0, 1, 2)
    world.roll_back(to=3)
    world.answer(("evaluate", "server0"))
    assert world.run_out() == Finish(reason="steps_done")
    assert evaluated(world) == [2, 4, 6]


def test_what_is_told_again_or_was_never_asked_changes_nothing() -> None:
    world = begin(make_rules(batch_groups=1, steps=9, eval_every=2, max_staleness=3))
    train(world, 0, 1)
    world.answer(("evaluate", "server0"))
    done = world.told[-1]
    assert isinstance(done, EvaluationDone)
    assert world.send(done) == []
    world.settle("swap")
    train(world, 2, 3)
    assert world.find("evaluate")
    assert world.send(done) == []
    assert world.send(Failed(at=done.at, of="evaluation", id="4", why="late")) == []
    assert world.send(Failed(at=world.tick(), of="evaluation", id="2", why="late")) == []
    assert world.find("evaluate")
    assert world.run_out() == Finish(reason="steps_done")
    assert evaluated(world) == [2, 4, 6, 8, 9]


def test_a_run_that_begins_later_does_not_evaluate_what_was_before() -> None:
    world = World(make_rules(batch_groups=1, steps=12, eval_every=4)).start(version=8)
    assert world.run_out() == Finish(reason="steps_done")
    assert evaluated(world) == [12]
