"""Servers that are lost, restarted, swapped in vain, left alone: what becomes of them and of what ran on them."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_async.core import fleet
from areal_async.core.evaluating import Evaluations
from areal_async.core.fleet import Fleet, Server
from areal_async.core.groups import Groups
from areal_async.core.orchestrator import Orchestrator
from areal_async.errors import IllegalTransition
from areal_async.messages import (
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

from .test_broken_rules import numbers
from .world import Broken, World, hold, make_rules

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
    assert (load(world, "server0"), load(world, "server1")) == (16, 0)
    world.lose("server0")
    assert load(world, "server0") == 0
    for key in world.find("sample")[:6]:
        world.answer(key)
    world.answer(world.find("sample")[0], "failed")
    assert (load(world, "server0"), load(world, "server1")) == (0, 1)
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
    assert "4 samples look for a server of version 0 or newer" in world.core.waiting()
    assert "server server0 is lost (exit code -9) and starts again at" in world.core.waiting()
    assert world.run_out() == Finish(reason="steps_done")


def test_a_lost_server_gets_the_newest_weights_before_anything_else() -> None:
    world = begin(make_rules(batch_groups=1, steps=20, max_staleness=9), servers=2).settle(*EARLY)
    for step in range(3):
        world.settle("read", "sample", "score")
        world.answer(("train", str(step)))
        world.settle(*EARLY)
    world.lose("server0")
    world.wake()
    assert given(world, Restart) == [Restart(server="server0", why="exit code -9")]
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
    assert "server server0 is left alone after 8 restarts (exit code -9)" in world.core.waiting()
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
    since = world.servers["server0"].serves_since
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
    world.servers["server1"] = type(world.servers["server0"])()
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
    world = begin(make_rules(steps=6, max_staleness=2), servers=2)
    for step in range(2):
        world.settle(*EARLY, "read", "sample", "score")
        world.answer(("train", str(step)))
    world.lose("server1")
    world.roll_back(to=1)
    world.wake()
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
    assert "server server0 is swapped again at" in world.core.waiting()
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


# --------------------------------------------------------------------------------------------------- whatever the order


def check_loads(world: World) -> None:
    """A server's load is the samples on it that are under way, and those that wait for their prompt."""
    if world.end is not None:
        return
    under_way = [world.placed[key[1], int(key[2])] for key in world.find("sample")]
    placed = {name: under_way.count((name, book.lives)) for name, book in world.servers.items()}
    loads = {name: load(world, name) for name in world.servers}
    hold(all(loads[name] >= placed[name] for name in loads), f"loads {loads}, placed {placed}")
    hold(loads == placed or bool(world.find("read")), f"loads {loads}, placed {placed}")


def check_end(world: World, end: Finish | Fail) -> None:
    """A run that could go on doesn't fail."""
    if isinstance(end, Fail):
        hold(world.stranded or world.evaluations.failures >= 3, end.why)


class LosingServers(RuleBasedStateMachine):
    """Servers die at any moment, come back or don't, swaps and evaluations fail, training goes back. `World` checks at
    every event: nothing on a lost server while another could take it, never below the floor, waves, no version freed
    that somebody loads, restarts in time, the ledger's balance. At the end of each walk the run must reach its end
    while a server can come back."""

    world: World

    @initialize(
        batch=st.integers(1, 3),
        eta=st.integers(0, 3),
        size=st.integers(1, 3),
        servers=st.integers(1, 3),
        wave=st.integers(1, 3),
        restarts=st.integers(0, 3),
        every=st.integers(0, 3),
        prompts=st.one_of(st.none(), st.integers(1, 20)),
        seed=st.integers(0, 99),
    )
    def begin(
        self,
        batch: int,
        eta: int,
        size: int,
        servers: int,
        wave: int,
        restarts: int,
        every: int,
        prompts: int | None,
        seed: int,
    ) -> None:
        rules = make_rules(
            seed=seed,
            steps=5,
            batch_groups=batch,
            group_size=size,
            max_staleness=eta,
            max_concurrent=size * (1 + seed % 12),
            retries=seed % 3,
            min_group=1 + seed % size,
            max_failures=10_000,
            wave=wave,
            servers=servers,
            max_restarts=restarts,
            eval_every=every,
        )
        self.world = World(rules, servers=servers, prompts=prompts)
        self.seed = seed
        self.world.start()

    def _running(self) -> bool:
        return self.world.end is None

    @precondition(lambda self: self._running() and self.world.pending)
    @rule(which=st.integers(0, 10_000), outcome=st.sampled_from([1.0, 1.0, 0.0, None, "failed", "given"]))
    def answer(self, which: int, outcome: float | str | None) -> None:
        keys = list(self.world.pending)
        self.world.answer(keys[which % len(keys)], outcome)

    @precondition(lambda self: self._running() and self.world.pending)
    @rule(count=st.integers(1, 25), newest=st.booleans())
    def go_on(self, count: int, newest: bool) -> None:
        for _ in range(count):
            keys = [key for key in self.world.pending if self.world.can_be_done(key)]
            if self.world.end is None and keys:
                self.world.answer(keys[-1 if newest else 0])

    @precondition(_running)
    @rule(which=st.integers(0, 2))
    def a_server_dies(self, which: int) -> None:
        names = [name for name, book in self.world.servers.items() if book.due is None and not book.gone]
        if names:
            self.world.lose(names[which % len(names)])

    @precondition(_running)
    @rule(
        kind=st.sampled_from(["swap", "evaluate", "restart", "sample"]),
        which=st.integers(0, 2),
        outcome=st.sampled_from(["failed", "failed", 1.0]),
    )
    def one_of_a_kind(self, kind: str, which: int, outcome: float | str) -> None:
        keys = self.world.find(kind)
        if keys:
            self.world.answer(keys[which % len(keys)], outcome)

    @precondition(lambda self: self._running() and self.world.core.next_wakeup() is not None)
    @rule()
    def time_passes(self) -> None:
        self.world.wake()

    @precondition(_running)
    @rule(back=st.integers(0, 4))
    def go_back(self, back: int) -> None:
        if self.world.branch < 3:
            self.world.roll_back(max(self.world.trained - back, 0))

    @precondition(lambda self: self._running() and self.world.told)
    @rule(which=st.integers(0, 10_000))
    def tell_again(self, which: int) -> None:
        assert self.world.send(self.world.told[-1 - which % len(self.world.told)]) == []

    @precondition(lambda self: self._running() and self.world.late)
    @rule(which=st.integers(0, 10_000))
    def tell_late(self, which: int) -> None:
        wakeup = self.world.core.next_wakeup()
        if wakeup is not None and wakeup <= self.world.clock:
            self.world.wake()
        assert self.world.send(self.world.late[which % len(self.world.late)]) == []

    @rule()
    def nothing_happens(self) -> None:
        """After the end no other rule applies."""

    @invariant()
    def loads_are_what_is_placed(self) -> None:
        if hasattr(self, "world"):
            check_loads(self.world)

    @invariant()
    def someone_can_say_who_waits(self) -> None:
        if hasattr(self, "world"):
            assert self.world.core.waiting()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        check_end(self.world, self.world.run_out(self.seed, outcome="mixed"))


LosingServers.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)
TestLosingServers = LosingServers.TestCase


# ------------------------------------------------------------------------------------------------ broken on purpose

WALKS = 60


def walk(seed: int) -> None:
    """One run to its end, in which servers die, swaps and evaluations fail, and what was told is told again."""
    pick = numbers(seed)
    servers = 1 + next(pick) % 3
    rules = make_rules(
        steps=5,
        batch_groups=1 + next(pick) % 2,
        max_staleness=next(pick) % 3,
        max_failures=10_000,
        retries=1,
        wave=1 + next(pick) % 2,
        servers=servers,
        max_restarts=next(pick) % 4,
        eval_every=next(pick) % 3,
    )
    world = World(rules, servers=servers).start()
    for _ in range(150):
        if world.end is not None:
            break
        chance = next(pick) % 30
        names = [name for name, book in world.servers.items() if book.due is None and not book.gone]
        if chance == 0 and names:
            world.lose(names[next(pick) % len(names)])
        elif chance == 1 and world.branch < 2:
            world.roll_back(max(world.trained - next(pick) % 3, 0))
        elif chance < 4 and world.told:
            hold(world.send(world.told[-1 - next(pick) % min(len(world.told), 9)]) == [], "told again")
        elif keys := [key for key in world.pending if world.can_be_done(key)]:
            key = keys[-1 - next(pick) % min(len(keys), 4)]
            fails = key[0] in ("swap", "restart", "evaluate") and next(pick) % 3 == 0
            world.answer(key, "failed" if fails else 1.0)
        elif world.core.next_wakeup() is not None:
            world.wake()
        check_loads(world)
    check_end(world, world.run_out(next(pick)))


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


def the_load_of_an_earlier_life_counts(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Fleet, name: str, incarnation: int) -> None:
        self.servers[name].load -= 1

    patch.setattr(Fleet, "leave", leave)


def a_lost_server_stays_open(patch: pytest.MonkeyPatch) -> None:
    whole = Server.empty

    def empty(self: Server, why: str) -> None:
        held = self.branch, self.version
        whole(self, why)
        self.branch, self.version = held

    patch.setattr(Server, "empty", empty)


def a_lost_server_keeps_its_place_in_the_wave(patch: pytest.MonkeyPatch) -> None:
    whole = Fleet._empty

    def empty(self: Fleet, server: Server, at: float, why: str) -> None:
        loading = self._loading
        whole(self, server, at, why)
        self._loading = loading

    patch.setattr(Fleet, "_empty", empty)


def a_failed_swap_keeps_its_place_in_the_wave(patch: pytest.MonkeyPatch) -> None:
    whole = Fleet.swap_failed

    def swap_failed(self: Fleet, event: Failed) -> None:
        loading = self._loading
        whole(self, event)
        self._loading = loading

    patch.setattr(Fleet, "swap_failed", swap_failed)


def weights_are_freed_while_a_server_loads_them(patch: pytest.MonkeyPatch) -> None:
    def free(self: Fleet) -> tuple[int, ...]:
        useless = tuple(version for version in self._published if version != self.newest)
        for version in useless:
            del self._published[version]
        return useless

    patch.setattr(Fleet, "free", free)


def nobody_asks_to_be_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Orchestrator, "next_wakeup", lambda _self: None)


def restarts_come_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fleet, "FIRST_RESTART_S", 0.0)


def restarts_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Server, "forgive", lambda self, _at: setattr(self, "restarts", 0))


def a_server_left_alone_is_hoped_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "is_alive", property(lambda _self: True))


def the_past_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Server, "since", property(lambda _self: -1.0, lambda _self, _at: None))


def a_server_is_swapped_while_it_evaluates(patch: pytest.MonkeyPatch) -> None:
    def may_swap(server: Server) -> bool:
        return server.state in ("starting", "serving") and server.retry_at is None

    patch.setattr(fleet, "_may_swap", may_swap)


def the_end_does_not_wait_for_the_last_evaluation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evaluations, "is_concluded", lambda _self, _last: True)


def an_evaluation_never_lets_its_server_go(patch: pytest.MonkeyPatch) -> None:
    def close(self: Evaluations, at: float, why: str, *words: object) -> None:
        self.under_way = None

    patch.setattr(Evaluations, "_close", close)


def an_evaluation_outlives_its_server(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evaluations, "lost", lambda _self, _event: [])


def a_rollback_leaves_what_was_evaluated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evaluations, "roll_back", lambda _self, _to: None)


def a_new_attempt_goes_to_the_groups_own_server(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "_server_for", lambda self, group: self._fleet.servers[group.server])


@pytest.mark.parametrize(
    "break_it",
    [
        the_load_of_an_earlier_life_counts,
        a_lost_server_stays_open,
        a_lost_server_keeps_its_place_in_the_wave,
        a_failed_swap_keeps_its_place_in_the_wave,
        weights_are_freed_while_a_server_loads_them,
        nobody_asks_to_be_woken,
        restarts_come_at_once,
        restarts_never_end,
        a_server_left_alone_is_hoped_for,
        the_past_is_believed,
        a_server_is_swapped_while_it_evaluates,
        the_end_does_not_wait_for_the_last_evaluation,
        an_evaluation_never_lets_its_server_go,
        an_evaluation_outlives_its_server,
        a_rollback_leaves_what_was_evaluated,
        a_new_attempt_goes_to_the_groups_own_server,
    ],
    ids=lambda rule: rule.__name__,
)
def test_a_broken_rule_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert caught() > 0
