"""Servers that are lost, restarted, swapped in vain, left alone: what becomes of them and of what ran on them."""

import pytest

from areal_async.core.fleet import FAIR_S
from areal_async.errors import IllegalTransition
from areal_async.messages import (
    Evaluate,
    Fail,
    Failed,
    Finish,
    Joined,
    Publish,
    ReadGroup,
    Restart,
    Rules,
    SampleDone,
    StartSample,
    StopRequested,
    Swap,
    Swapped,
    Woke,
)

from .checkpoints import BACK
from .world import World, make_rules

EARLY = ("publish", "swap")


def begin(rules: Rules, servers: int = 1) -> World:
    """Events follow each other quickly, so that pauses are long."""
    world = World(rules, servers=servers)
    world.pace_s = 0.01
    return world.start()


def given(world: World, kind: type) -> list[object]:
    return [command for command in world.commands if isinstance(command, kind)]


def load(world: World, name: str) -> int:
    return world.core._parts.fleet.servers[name].load


def state(world: World, name: str) -> str:
    return world.core._parts.fleet.servers[name].state


def fail_swaps(world: World, name: str, times: int) -> None:
    for _ in range(times):
        while not world.find("swap", name):
            world.settle("swap")
            world.wake()
        world.answer(("swap", name), "failed")


# ----------------------------------------------------------------------------------------------------- a lost server


def test_p22_an_answer_goes_on_elsewhere_and_one_copy_is_taken() -> None:
    """The attempt stays the same, whoever carries it on; what an older attempt still says changes nothing."""
    world = begin(make_rules(batch_groups=2, group_size=2, steps=1, max_staleness=0), servers=2)
    world.settle(*EARLY, "read")
    assert world.lose("server0") == []
    assert len(world.find("sample")) == 4  # nothing was cancelled, nothing started twice
    world.answer(("sample", "0.0", "0"), "failed")  # its session gave up: another attempt, where a server is left
    assert isinstance(world.commands[-1], StartSample)
    assert (world.commands[-1].attempt, world.commands[-1].server) == (1, "server1")
    late = SampleDone(
        at=world.tick(),
        sample="0.0",
        attempt=0,
        oldest=0,
        newest=0,
        prompt_tokens=3,
        length=2,
        loss_tokens=2,
        finish="stop",
    )
    assert world.send(late) == []
    assert world.run_out() == Finish(reason="steps_done")
    assert world.core.balance()["samples_trained"] == 4


def test_p22_the_last_attempt_gives_the_place_back() -> None:
    world = begin(make_rules(batch_groups=1, steps=1, retries=1, max_failures=5, max_staleness=0), servers=2)
    world.settle(*EARLY, "read")
    world.lose("server0")
    for attempt in ("0", "1"):
        world.answer(("sample", "0.0", attempt), "failed")
    assert world.core.balance()["failed"] == 1
    assert world.core.balance()["outstanding"] == 1  # the next group took its place
    assert load(world, "server1") == 1
    assert isinstance(world.run_out(), Finish)


def test_p23_nothing_is_lost_when_weights_come_in_the_middle_of_answers() -> None:
    world = begin(make_rules(batch_groups=1, group_size=16, steps=9, max_staleness=2)).settle(*EARLY, "read")
    for key in world.find("sample")[:16]:
        world.answer(key)
    world.settle("score")
    world.answer(("train", "0"))
    world.settle("publish")  # version 1, while the answers of the next two groups are under way
    running = world.find("sample")
    assert len(running) == 32
    commands = world.answer(("swap", "server0"))
    assert not any(isinstance(command, StartSample) for command in commands)
    assert set(running) <= set(world.find("sample"))
    world.answer(running[0])
    done = world.done[running[0][1]]
    assert (done.oldest, done.newest) == (0, 1)
    assert isinstance(world.run_out(), Finish)


def test_load_counts_what_is_placed_on_this_life_of_a_server() -> None:
    world = begin(make_rules(batch_groups=4, group_size=2, steps=9), servers=2).settle(*EARLY, "read")
    assert (load(world, "server0"), load(world, "server1")) == (8, 8)
    world.lose("server0")
    assert (load(world, "server0"), load(world, "server1")) == (0, 8)
    on_server0 = [key for key in world.find("sample") if world.pending[key].server == "server0"]  # type: ignore[union-attr]
    for key in on_server0[:6]:
        world.answer(key)
    world.answer(on_server0[6], "failed")
    assert (load(world, "server0"), load(world, "server1")) == (0, 9)
    world.wake()
    world.settle("restart", "swap", "sample")
    assert (load(world, "server0"), load(world, "server1")) == (0, 0)


def test_samples_of_a_group_whose_server_is_lost_start_on_one_that_is_left() -> None:
    world = begin(make_rules(batch_groups=2, group_size=3, steps=9), servers=3).settle(*EARLY)
    world.lose("server0")
    world.settle("read")
    started = [command for command in world.commands if isinstance(command, StartSample)]
    assert {command.server for command in started} == {"server1", "server2"}
    by_group = {command.sample.partition(".")[0]: set[str]() for command in started}
    for command in started:
        by_group[command.sample.partition(".")[0]].add(command.server)
    assert all(len(servers) == 1 for servers in by_group.values())  # a group shares one prompt cache
    assert load(world, "server1") + load(world, "server2") == len(started) == 12


def test_while_no_server_is_there_samples_name_their_own_and_wait() -> None:
    world = begin(make_rules(steps=2)).settle(*EARLY)
    world.lose("server0")
    world.settle("read")
    assert {command.server for command in world.commands if isinstance(command, StartSample)} == {"server0"}
    assert "4 samples look for a server of version 0 or newer" in world.core.waiting(world.clock)
    assert "server server0 is lost (exit code -9) and starts again in" in world.core.waiting(world.clock)
    assert world.run_out() == Finish(reason="steps_done")


def test_a_lost_server_gets_the_newest_weights_before_anything_else() -> None:
    world = begin(make_rules(batch_groups=1, steps=20, max_staleness=9), servers=2).settle(*EARLY)
    for step in range(3):
        world.settle("read", "sample", "score")
        world.answer(("train", str(step)))
        world.settle(*EARLY)
    world.lose("server0")
    world.wake()
    assert given(world, Restart) == [Restart(peer="server", id="server0", why="exit code -9")]
    count = len(world.commands)
    commands = world.answer(("restart", "server0"))
    assert commands == [Swap(server="server0", version=3, branch=0, location="0/3")]
    world.settle("read")
    assert all(command.server == "server1" for command in world.commands[count:] if isinstance(command, StartSample))
    world.answer(("swap", "server0"))
    assert state(world, "server0") == "serving"
    assert isinstance(world.run_out(), Finish)


def test_a_swap_under_way_is_over_its_place_and_its_weights_are_free() -> None:
    world = begin(make_rules(batch_groups=1, steps=9, max_staleness=5, wave=1), servers=2).settle("publish")
    assert world.find("swap") == [("swap", "server0")]
    commands = world.lose("server0")
    assert [type(command) for command in commands] == [Swap]  # the wave has room for the other one
    world.settle("swap", "read", "sample", "score")
    world.answer(("train", "0"))
    world.settle("publish")
    world.answer(("train", "1"))
    publish = [command for command in world.commands if isinstance(command, Publish)]
    assert publish[1].free == ()  # 0 is what servers follow, until 1 is there
    assert publish[2].free == (0,)
    for event in world.late:
        assert world.send(event) == []


def test_restarts_wait_longer_each_time_until_the_server_is_left_alone() -> None:
    world = begin(make_rules(steps=50, max_restarts=8), servers=2).settle(*EARLY)
    pauses = []
    for _ in range(8):
        world.lose("server0")
        before = world.clock
        world.wake()
        pauses.append(world.clock - before)
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0])
    world.lose("server0")
    assert state(world, "server0") == "quarantined"
    assert world.core.next_wakeup() is None
    assert "server server0 is left alone after 8 restarts (exit code -9)" in world.core.waiting(world.clock)
    assert len(given(world, Restart)) == 8
    assert world.lose("server0") == []
    assert world.run_out() == Finish(reason="steps_done")


def test_a_restart_that_fails_is_another_loss() -> None:
    world = begin(make_rules(max_restarts=2), servers=2).settle(*EARLY)
    world.lose("server0")
    for _ in range(2):
        world.wake()
        world.answer(("restart", "server0"), "failed")
    assert state(world, "server0") == "quarantined"


def test_restarts_are_forgotten_by_whom_has_served_for_long() -> None:
    world = begin(make_rules(steps=50, max_restarts=1), servers=2).settle(*EARLY)
    world.lose("server0")
    world.wake()
    world.settle("restart", "swap")
    since = world.servers["server0"].works_since
    assert since is not None
    world.clock = since + 600.0
    world.lose("server0")
    assert state(world, "server0") == "lost"
    world.wake()
    world.settle("restart", "swap")
    world.lose("server0")
    assert state(world, "server0") == "quarantined"


def test_the_run_fails_when_no_server_is_left_with_the_first_cause() -> None:
    world = begin(make_rules(max_restarts=1, servers=2), servers=2).settle(*EARLY)
    world.lose("server0", "the first cause\nand its traceback")
    world.lose("server1", "another cause")
    world.wake()
    world.wake()
    for name in ("server1", "server0"):
        world.lose(name, "the last cause")
    assert isinstance(world.end, Fail)
    assert "no rollout server is left at step 0" in world.end.why
    assert "the first cause\nand its traceback" in world.end.why
    assert "quarantined" in world.end.why
    assert "the last cause" in world.end.why


def test_one_server_and_no_restarts_is_the_end() -> None:
    world = begin(make_rules(max_restarts=0)).settle(*EARLY)
    world.lose("server0")
    assert isinstance(world.end, Fail)
    assert "server server0 at" in world.end.why
    assert "exit code -9" in world.end.why


def test_a_server_that_has_yet_to_join_keeps_the_run_alive() -> None:
    world = begin(make_rules(max_restarts=0, servers=2, steps=1)).settle(*EARLY)
    world.lose("server0")
    assert world.end is None
    world.servers["server1"] = type(world.servers["server0"])(0)
    world.send(Joined(at=world.tick(), peer="server", id="server1"))
    assert world.run_out() == Finish(reason="steps_done")


def test_without_a_server_a_run_that_needs_none_finishes() -> None:
    world = begin(make_rules(max_restarts=0, steps=1, max_staleness=0)).settle(*EARLY, "read", "sample")
    world.lose("server0")  # all of the last step is generated, its checks are running
    assert world.run_out() == Finish(reason="steps_done")


def test_without_a_server_a_run_that_comes_to_need_one_fails() -> None:
    world = begin(make_rules(max_restarts=0, steps=1, max_staleness=0)).settle(*EARLY, "read", "sample")
    world.lose("server0")
    world.answer(world.find("score")[0], None)  # filtered: another group would be needed
    assert isinstance(world.end, Fail)
    assert "no rollout server is left" in world.end.why


def test_a_run_that_stops_restarts_nothing() -> None:
    world = begin(make_rules()).settle(*EARLY, "read", "sample", "score")
    world.send(StopRequested(at=world.tick()))
    assert world.lose("server0") == []
    assert world.core.next_wakeup() is None
    assert world.send(Woke(at=world.clock + 100.0)) == []
    assert world.run_out() == Finish(reason="stopped")


def test_who_joins_twice_or_swaps_unasked_is_an_error_after_a_restart_too() -> None:
    world = begin(make_rules(), servers=2).settle(*EARLY)
    world.lose("server0")
    with pytest.raises(IllegalTransition, match="joined twice"):
        world.core.handle(Joined(at=world.tick(), peer="server", id="server0"))  # nobody told it to start again
    world.wake()
    world.settle("restart", "swap")
    with pytest.raises(IllegalTransition, match="not told to load"):
        world.core.handle(Swapped(at=world.tick(), server="server0", version=7, branch=0, pause_s=0.0))


def test_a_rollback_finds_lost_servers_where_they_are() -> None:
    world = begin(make_rules(steps=6, max_staleness=2, **BACK), servers=2)
    for step in range(2):
        world.settle(*EARLY, "read", "sample", "score")
        world.answer(("train", str(step)))
    world.lose("server1")
    world.roll_back(to=1)
    world.settle("restart", "publish", "swap")
    assert {book.holds for book in world.servers.values()} == {(1, 1)}
    assert world.run_out() == Finish(reason="steps_done")


# ----------------------------------------------------------------------------------------------------- failed swaps


def test_a_swap_that_failed_leaves_the_server_as_it_was_and_is_tried_again() -> None:
    world = begin(make_rules(batch_groups=1, steps=9, max_staleness=5), servers=2).settle(*EARLY)
    world.settle("read", "sample", "score")
    world.answer(("train", "0"))
    world.settle("publish")
    assert world.find("swap") == [("swap", "server0")]
    commands = world.answer(("swap", "server0"), "failed")
    assert [c for c in commands if isinstance(c, Swap)] == [Swap(server="server1", version=1, branch=0, location="0/1")]
    assert state(world, "server0") == "serving"
    assert world.servers["server0"].holds == (0, 0)
    assert "server server0 is swapped again in" in world.core.waiting(world.clock)
    world.answer(("swap", "server1"))
    world.settle("read", "sample", "score")
    world.answer(("train", "1"))
    world.settle("publish")  # meanwhile there is a newer version
    world.clock += 1.0
    world.send(Woke(at=world.clock))
    world.settle("swap")
    swaps = [command for command in world.commands if isinstance(command, Swap) and command.server == "server0"]
    assert [swap.version for swap in swaps] == [0, 1, 2]
    assert isinstance(world.run_out(), Finish)


def test_the_first_swap_may_fail_too() -> None:
    world = begin(make_rules(steps=1)).settle("publish")
    world.answer(("swap", "server0"), "failed")
    assert state(world, "server0") == "starting"
    assert not given(world, ReadGroup)
    assert world.run_out() == Finish(reason="steps_done")


def test_three_swaps_in_a_row_that_fail_are_a_loss() -> None:
    world = begin(make_rules(), servers=2).settle(*EARLY, "read")
    world.settle("sample", "score")
    world.answer(("train", "0"))
    world.settle("publish")
    fail_swaps(world, "server0", 2)
    world.wake()
    world.answer(("swap", "server0"))  # in a row
    assert state(world, "server0") == "serving"
    world.settle("swap", "read", "sample", "score")
    world.answer(("train", "1"))
    world.settle("publish")
    fail_swaps(world, "server0", 3)
    assert state(world, "server0") == "lost"
    world.wake()
    (restart,) = given(world, Restart)
    assert isinstance(restart, Restart)
    assert restart.why == "3 swaps in a row failed, the last one with: busy"
    assert isinstance(world.run_out(), Finish)


def test_a_server_with_wrong_numbers_is_left_alone_at_once() -> None:
    world = begin(make_rules(steps=1), servers=2).settle("publish")
    event = Failed(at=world.tick(), of="server", id="server0", why="another model")
    world.pending.pop(("swap", "server0"))
    world.servers["server0"].gone = True
    commands = world.send(event)
    assert [type(command) for command in commands] == [Swap]  # the other one's turn
    assert state(world, "server0") == "quarantined"
    assert world.send(event) == []
    assert world.run_out() == Finish(reason="steps_done")


def test_the_only_server_with_wrong_numbers_ends_the_run_with_that_text() -> None:
    world = begin(make_rules()).settle("publish")
    world.send(Failed(at=world.tick(), of="server", id="server0", why="its numbers differ from the trainer's by 0.5"))
    assert isinstance(world.end, Fail)
    assert "its numbers differ from the trainer's by 0.5" in world.end.why


def test_all_servers_swap_at_once_where_the_wave_has_room() -> None:
    world = begin(make_rules(wave=9), servers=5).settle("publish")
    assert len(world.find("swap")) == 5


@pytest.mark.parametrize("wave", [1, 3])
def test_no_server_gets_every_group_for_being_swapped_first(wave: int) -> None:
    """η = 1, and only what is trained finishes: new groups have room under the newest weights alone."""
    world = begin(make_rules(steps=6, batch_groups=6, wave=wave), servers=3)
    for _ in range(5):
        world.settle("publish", "swap", "read")
        for key in world.find("sample")[:6]:
            world.answer(key)
        world.settle("score", "train")
    placed = [command.server for command in world.commands if isinstance(command, StartSample)]
    counts = [placed.count(name) for name in ("server0", "server1", "server2")]
    assert sum(counts) == 6 * 6
    assert max(counts) - min(counts) <= 2


def test_a_wave_that_takes_long_is_not_waited_for() -> None:
    world = begin(make_rules(steps=9, batch_groups=4, max_staleness=0), servers=2)
    world.settle("publish").answer(("swap", "server0"))
    world.settle("read")
    assert (load(world, "server0"), load(world, "server1")) == (1, 0)
    world.clock += FAIR_S
    world.send(Woke(at=world.tick()))
    assert (load(world, "server0"), load(world, "server1")) == (4, 0)


def test_a_server_that_is_held_back_is_not_waited_for() -> None:
    """While it evaluates it gets no new weights, so others take what it can't."""
    world = begin(make_rules(steps=8, batch_groups=4, eval_every=1, max_staleness=0), servers=2)
    world.settle("publish", "swap", "read").settle("sample", "score").settle("train").settle("publish", "swap", "read")
    (evaluating,) = {command.server for command in world.pending.values() if isinstance(command, Evaluate)}
    world.settle("sample", "score").settle("train").settle("publish", "swap", "read")
    running = [command for command in world.pending.values() if isinstance(command, StartSample)]
    assert len(running) == 4
    assert {command.server for command in running} == {"server0", "server1"} - {evaluating}
