"""Servers and reward workers die, come back or don't, swaps and evaluations fail, in any order; each of their rules,
broken on purpose.

`World` checks at every event: nothing on a lost server while another could take it, never below the floor, waves, no
version freed that somebody loads, restarts in time, evaluations of one version, the ledger's balance. At the end of
each walk the run must reach its end while a server can come back and no reward worker was lost too often.
"""

import copy
from collections.abc import Callable, Hashable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from areal_async.core import fleet, restarts
from areal_async.core.evaluating import Evaluations
from areal_async.core.fleet import Fleet, Server
from areal_async.core.groups import Groups
from areal_async.core.orchestrator import Orchestrator
from areal_async.core.restarts import Restarted
from areal_async.core.workers import Worker, Workers
from areal_async.errors import IllegalTransition
from areal_async.messages import Fail, Failed, Finish

from .checkpoints import BACK
from .machine import WorldMachine
from .test_all_orders import look
from .test_broken_rules import numbers
from .world import Broken, World, hold, make_rules


def check_loads(world: World) -> None:
    """A server's load is the samples on it that are under way, and those that wait for their prompt."""
    if world.end is not None:
        return
    under_way = [world.placed[key[1], int(key[2])] for key in world.find("sample")]
    placed = {name: under_way.count((name, book.lives)) for name, book in world.servers.items()}
    loads = {name: world.core._parts.fleet.servers[name].load for name in world.servers}
    hold(all(loads[name] >= placed[name] for name in loads), f"loads {loads}, placed {placed}")
    hold(loads == placed or bool(world.find("read")), f"loads {loads}, placed {placed}")


def check_end(world: World, end: Finish | Fail) -> None:
    """A run that could go on doesn't fail."""
    if isinstance(end, Fail):
        hold(world.stranded or world.unchecked or world.evaluations.failures >= 3, end.why)


class LosingServers(WorldMachine):
    _running = WorldMachine._running  # a name for the conditions below

    @initialize(
        batch=st.integers(1, 3),
        eta=st.integers(0, 3),
        size=st.integers(1, 3),
        servers=st.integers(1, 3),
        workers=st.integers(1, 2),
        wave=st.integers(1, 3),
        restarts=st.integers(0, 3),
        every=st.integers(0, 3),
        prompts=st.one_of(st.none(), st.integers(1, 20)),
        seed=st.integers(0, 99),
        answered=st.integers(0, 120),
    )
    def begin(
        self,
        batch: int,
        eta: int,
        size: int,
        servers: int,
        workers: int,
        wave: int,
        restarts: int,
        every: int,
        prompts: int | None,
        seed: int,
        answered: int,
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
            max_worker_restarts=restarts + 1,
            eval_every=every,
            **BACK | {"checkpoint_steps": 1 + seed % 3},
        )
        self.world = World(rules, servers=servers, workers=workers, prompts=prompts)
        self.seed = seed
        self.world.start()
        if answered > 20:
            self.go_on(count=answered, newest=False, but="evaluate")

    @precondition(lambda self: self._running() and self.world.pending)
    @rule(which=st.integers(0, 10_000), outcome=st.sampled_from([1.0, 1.0, 0.0, None, "failed", "given"]))
    def answer(self, which: int, outcome: float | str | None) -> None:
        keys = list(self.world.pending)
        self.world.answer(keys[which % len(keys)], outcome)

    @precondition(lambda self: self._running() and self.world.pending)
    @rule(count=st.integers(1, 40), newest=st.booleans(), but=st.sampled_from(["", "evaluate", "evaluate", "swap"]))
    def go_on(self, count: int, newest: bool, but: str) -> None:
        for _ in range(count):
            keys = [key for key in self.world.pending if self.world.can_be_done(key) and key[0] != but]
            if self.world.end is None and keys:
                self.world.answer(keys[-1 if newest else 0])

    @precondition(_running)
    @rule(which=st.integers(0, 2))
    def a_server_dies(self, which: int) -> None:
        self.lose_one(self.world.servers, which)

    @precondition(_running)
    @rule(which=st.integers(0, 1))
    def a_reward_worker_dies(self, which: int) -> None:
        self.lose_one(self.world.workers, which)

    @precondition(lambda self: self._running() and (self.world.find("swap") or self.world.find("restart")))
    @rule(which=st.integers(0, 2), outcome=st.sampled_from(["failed", "failed", 1.0]))
    def a_swap_or_restart_ends(self, which: int, outcome: float | str) -> None:
        keys = [*self.world.find("restart"), *self.world.find("swap")]
        self.world.answer(keys[which % len(keys)], outcome)

    @precondition(lambda self: self._running() and self.world.find("evaluate"))
    @rule(outcome=st.sampled_from(["failed", "failed", 1.0]))
    def an_evaluation_ends(self, outcome: float | str) -> None:
        self.world.answer(self.world.find("evaluate")[0], outcome)

    @precondition(_running)
    @rule(back=st.integers(0, 4))
    def go_back(self, back: int) -> None:
        if self.world.branch < 3:
            self.world.roll_back(max(self.world.trained - back, 0))

    @invariant()
    def loads_are_what_is_placed(self) -> None:
        if hasattr(self, "world"):
            check_loads(self.world)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        check_end(self.world, self.world.run_out(self.seed, outcome="mixed"))


LosingServers.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)
TestLosingServers = pytest.mark.slow(LosingServers.TestCase)


# --------------------------------------------------------------------------------------------- all orders of small runs


def look_closer(world: World) -> Hashable:
    """`look`, and what decides about servers and evaluations."""
    parts = world.core._parts
    evaluations = parts.evaluations
    return (
        look(world),
        tuple(
            (
                s.state,
                s.incarnation,
                s.restarts,
                s.restart_at is None,
                s.retry_at is None,
                s.swap_failures,
                s.evaluating,
            )
            for s in parts.fleet.servers.values()
        ),
        tuple((sample.incarnation, sample.server) for sample in parts.ledger.samples.values()),
        tuple((w.state, w.restarts, w.restart_at is None) for w in parts.rewards.workers.values()),
        (evaluations.under_way is None, evaluations._evaluated, evaluations._void, evaluations._failures),
        evaluations.wakeup is None,
    )


Move = tuple[str, tuple[str, ...]]


def moves(world: World, losses: int, failures: int, rollbacks: int) -> list[Move]:
    """What can happen next. losses: of servers that may still come. failures: of swaps and evaluations."""
    found: list[Move] = [("answer", key) for key in world.pending if world.can_be_done(key)]
    if world.core.next_wakeup() is not None:
        found.append(("wake", ()))
    assert found, f"stuck: {world.core.waiting(world.clock)}"
    if failures:
        found += [("fail", key) for key in world.pending if key[0] in ("swap", "evaluate")]
    if losses:
        found += [("lose", (name,)) for name, book in world.peers.items() if book.due is None]
    if rollbacks and world.find("train"):
        found += [("roll back", (str(to),)) for to in world.checkpoints.points]
    return found


def do(world: World, move: Move) -> None:
    what, key = move
    if what == "wake":
        world.wake()
    elif what == "lose":
        world.lose(key[0])
    elif what == "roll back":
        world.roll_back(int(key[0]))
    else:
        world.answer(key, "failed" if what == "fail" else 1.0)


@pytest.mark.parametrize(
    ("eta", "servers", "losses", "failures", "rollbacks", "every"),
    [(0, 1, 1, 1, 0, 1), (1, 1, 1, 0, 1, 0), (1, 1, 0, 1, 1, 1), (0, 2, 1, 0, 0, 1), (0, 2, 1, 1, 0, 0)],
)
@pytest.mark.slow
def test_every_order_with_losses_reaches_the_end(
    eta: int, servers: int, losses: int, failures: int, rollbacks: int, every: int
) -> None:
    rules = make_rules(batch_groups=1, max_staleness=eta, steps=2, retries=0, max_failures=9, eval_every=every, **BACK)
    start = World(rules, servers=servers).start()
    seen, waiting, ends = {(look_closer(start), losses, failures)}, [(start, losses, failures)], 0
    while waiting:
        world, more_losses, more_failures = waiting.pop()
        if world.end is not None:
            ends += 1
            assert isinstance(world.end, Finish), world.end
            continue
        for move in moves(world, more_losses, more_failures, rollbacks - world.branch):
            other = copy.deepcopy(world, {id(command): command for command in world.pending.values()})
            do(other, move)
            check_loads(other)
            # nobody reads them here, and they would be copied
            other.commands, other.told, other.late, other.log = [], [], [], []
            left = more_losses - (move[0] == "lose"), more_failures - (move[0] == "fail")
            if (look_closer(other), *left) not in seen:
                seen.add((look_closer(other), *left))
                waiting.append((other, *left))
    assert ends > 0
    assert len(seen) > 50


# ------------------------------------------------------------------------------------------------ broken on purpose

WALKS = 60  # in which servers are lost
ALL_WALKS = 90  # in the last ones reward workers are lost too


def walk(seed: int) -> None:
    """One run to its end, in which servers (and reward workers) die, swaps and evaluations fail, and what was told is
    told again."""
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
        max_worker_restarts=1 + seed % 3,
        **BACK | {"checkpoint_steps": 1 + seed % 3},
    )
    world = World(rules, servers=servers, workers=1 + seed % 2).start()
    for _ in range(150):
        if world.end is not None:
            break
        chance = next(pick) % 30
        peers = world.servers if seed < WALKS else world.peers
        names = [name for name, book in peers.items() if book.may_be_lost]
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
    for seed in range(ALL_WALKS):
        try:
            walk(seed)
        except (Broken, IllegalTransition):
            count += 1
    return count


@pytest.mark.slow
def test_with_its_rules_whole_nothing_is_noticed() -> None:
    for seed in range(ALL_WALKS):
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
    patch.setattr(restarts, "FIRST_RESTART_S", 0.0)


def restarts_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restarted, "forgive", lambda self, _at: setattr(self, "restarts", 0))


def a_worker_may_be_lost_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "forgive", lambda self, _at: setattr(self, "restarts", 0))


def nobody_wakes_for_a_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "_refresh", lambda _self: None)


def a_worker_is_given_up_a_loss_early(patch: pytest.MonkeyPatch) -> None:
    whole = Workers.__init__
    patch.setattr(Workers, "__init__", lambda self, max_restarts: whole(self, max_restarts - 1))


def a_worker_that_is_given_up_is_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "given_up", property(lambda _self: "", lambda _self, _why: None), raising=False)


def a_worker_that_starts_again_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    whole = Workers.wake
    patch.setattr(Workers, "wake", lambda self, at: whole(self, at) * 2)


def a_server_left_alone_is_hoped_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "is_alive", property(lambda _self: True))


def the_past_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restarted, "since", property(lambda _self: -1.0, lambda _self, _at: None))


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


@pytest.mark.slow
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
        a_worker_may_be_lost_for_ever,
        nobody_wakes_for_a_worker,
        a_worker_is_given_up_a_loss_early,
        a_worker_that_is_given_up_is_no_end,
        a_worker_that_starts_again_is_told_twice,
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
