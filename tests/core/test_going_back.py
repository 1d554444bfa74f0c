"""Checkpoints, losses of the trainer, going back and resuming, in any order: nothing is lost, nothing trained twice.

`World` checks at every event: checkpoints when they are due and what they keep; the same batches after going back; what
has an outcome is never generated again, and what ran is held until its floor is back; what is released is never asked
for, and all is released that can't be; a resume comes to where the log ends. At the end of each walk the run must reach
its end, or something could have stuck.
"""

from typing import ClassVar, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from areal_async.messages import Finish, StopRequested, WhenOlder

from .machine import WorldMachine
from .world import World, make_rules

MOVES: Final = ("read", "sample", "score", "train", "publish", "swap", "checkpoint", "restart", "joining")
BACKS: Final = 5  # in one walk


class GoingBack(WorldMachine):
    policy: ClassVar[WhenOlder] = "wait"

    @initialize(
        batch=st.integers(1, 3),
        eta=st.integers(0, 3),
        size=st.integers(1, 4),
        places=st.integers(0, 20),
        servers=st.integers(1, 3),
        every=st.integers(0, 3),
        every_s=st.sampled_from([0.0, 0.0, 20.0, 60.0]),
        keep=st.integers(1, 3),
        evaluate=st.integers(0, 3),
        prompts=st.one_of(st.none(), st.integers(1, 20)),
        seed=st.integers(0, 99),
        answered=st.integers(0, 80),
    )
    def begin(
        self,
        batch: int,
        eta: int,
        size: int,
        places: int,
        servers: int,
        every: int,
        every_s: float,
        keep: int,
        evaluate: int,
        prompts: int | None,
        seed: int,
        answered: int,
    ) -> None:
        rules = make_rules(
            seed=seed,
            steps=6,
            batch_groups=batch,
            group_size=size,
            max_staleness=eta,
            max_concurrent=size + places,
            minibatches=batch if seed % 2 else 1,
            ranks=1 + seed % 3,
            max_tokens_per_microbatch=10 + seed % 20,
            retries=seed % 3,
            min_group=1 + seed % size,
            max_failures=10_000,
            servers=servers,
            max_restarts=10_000,
            max_worker_restarts=10_000,
            max_trainer_restarts=10_000,
            checkpoint_steps=every,
            checkpoint_s=every_s if every else every_s or 30.0,
            checkpoint_keep=keep,
            eval_every=evaluate,
            when_older=self.policy,
            requeue=bool(seed % 2),
            truncated="mask" if seed % 3 == 0 else "train",
            success_max=0.7 if size > 1 and seed % 5 == 0 else 1.0,
        )
        self.world = World(rules, servers=servers, workers=1 + seed % 2, prompts=prompts)
        self.world.instant_checkpoints = seed % 4 == 0
        self.seed = seed
        self.backs = 0
        self.world.start()
        for _ in range(answered):
            self.answer_one(seed % 3, "mixed")

    def answer_one(self, which: int, outcome: float | str | None) -> None:
        keys = [key for key in self.world.pending if self.world.can_be_done(key)]
        if keys and self.world.end is None:
            key = keys[which % len(keys)]
            self.world.answer(key, "mixed" if outcome == 1.0 and key[0] == "score" else outcome)

    @precondition(lambda self: self._running())
    @rule(which=st.integers(0, 10_000), outcome=st.sampled_from([1.0, 0.0, 1.0, None, "failed", "given"]))
    def answer(self, which: int, outcome: float | str | None) -> None:
        self.answer_one(which, outcome)

    @precondition(lambda self: self._running())
    @rule(count=st.integers(1, 60), newest=st.booleans(), but=st.sampled_from(["", "checkpoint", "sample", "swap"]))
    def go_on(self, count: int, newest: bool, but: str) -> None:
        for _ in range(count):
            keys = [key for key in self.world.pending if self.world.can_be_done(key) and key[0] != but]
            if self.world.end is None and keys:
                key = keys[-1 if newest else 0]
                self.world.answer(key, "mixed" if key[0] == "score" else 1.0)

    @precondition(lambda self: self._running())
    @rule(kind=st.sampled_from(MOVES), count=st.integers(1, 12))
    def answer_many_of_a_kind(self, kind: str, count: int) -> None:
        for key in self.world.find(kind)[:count]:
            if key in self.world.pending and self.world.end is None:
                self.world.answer(key, "mixed" if kind == "score" else 1.0)

    @precondition(lambda self: self._running() and self.world.trainer.may_be_lost and self.backs < BACKS)
    @rule()
    def the_trainer_dies(self) -> None:
        self.backs += 1
        self.world.lose_trainer()

    @precondition(lambda self: self._running() and (self.world.find("train") or self.world.find("publish")))
    @rule()
    def a_rank_is_out_of_step(self) -> None:
        if self.backs < BACKS:
            self.backs += 1
            self.world.answer([*self.world.find("train"), *self.world.find("publish")][0], "broken")

    @precondition(lambda self: self._running() and self.world.find("restart", "trainer"))
    @rule(which=st.integers(0, 3))
    def it_goes_back(self, which: int) -> None:
        points = self.world.checkpoints.points
        self.world.go_back(points[-1 - which % len(points)])

    @precondition(lambda self: self._running() and self.world.find("checkpoint"))
    @rule()
    def a_checkpoint_fails(self) -> None:
        self.world.answer(self.world.find("checkpoint")[0], "failed")

    @precondition(lambda self: self._running())
    @rule(which=st.integers(0, 4))
    def a_server_or_reward_worker_dies(self, which: int) -> None:
        if self.backs < BACKS:
            self.backs += self.lose_one(self.world.peers, which)

    @precondition(lambda self: self.backs < BACKS and self.world.checkpoints.points)
    @rule(ranks=st.integers(1, 3), tokens=st.integers(10, 40), places=st.integers(0, 9), servers=st.integers(1, 3))
    def the_controller_is_killed(self, ranks: int, tokens: int, places: int, servers: int) -> None:
        """Or has ended the run before: a new one goes on from the log."""
        self.backs += 1
        rules = self.world.rules
        self.world.resume(
            ranks=ranks,
            max_tokens_per_microbatch=tokens,
            max_concurrent=rules.group_size + places,
            servers=min(servers, len(self.world._servers)),
        )

    @precondition(lambda self: self._running())
    @rule(chance=st.integers(0, 4))
    def it_is_stopped(self, chance: int) -> None:
        if not chance:
            self.world.send(StopRequested(at=self.world.tick()))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        end = self.world.run_out(self.seed, outcome="mixed")
        assert isinstance(end, Finish), end
        if end.reason == "stopped":
            self.world.resume()
            end = self.world.run_out(self.seed, outcome="mixed")
            assert isinstance(end, Finish), end
        assert end.reason in ("steps_done", "data_ended")


class GoingBackTrain(GoingBack):
    policy = "train"


class GoingBackMask(GoingBack):
    policy = "mask"


class GoingBackDrop(GoingBack):
    policy = "drop"


ORDERS = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)

for machine in (GoingBack, GoingBackTrain, GoingBackMask, GoingBackDrop):
    machine.TestCase.settings = ORDERS
TestWait = pytest.mark.slow(GoingBack.TestCase)
TestTrain = pytest.mark.slow(GoingBackTrain.TestCase)
TestMask = pytest.mark.slow(GoingBackMask.TestCase)
TestDrop = pytest.mark.slow(GoingBackDrop.TestCase)
