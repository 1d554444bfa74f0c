"""Whatever the order: answers, checks, swaps and publications come early or late, things fail, training goes back,
servers and reward workers are lost and come back.

`World` checks each rule at every event: what `when_older` promises on age, Eq. 3 at each admission, a balanced ledger
for groups and samples, nothing trained twice in the surviving history, nothing in memory of what is over. Here
hypothesis picks the order, for each policy, and at the end of each walk everything that is pending is delivered: then
the run must reach its end, or something could have stuck.
"""

from typing import ClassVar, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from areal_async.messages import Finish, WhenOlder

from .checkpoints import BACK
from .machine import WorldMachine
from .world import World, make_rules

OUTCOMES = st.sampled_from([1.0, 0.0, 1.0, 0.5, float("nan"), None, "failed", "given"])
LOSSES: Final = 3  # of servers and reward workers in one walk
FILTERS: tuple[dict[str, object], ...] = (
    {},
    {"drop_equal": True},
    {"success_max": 0.7},
    {"success_min": 0.3, "success_max": 0.9, "success_above": 0.4},
)
SHAPES: tuple[dict[str, object], ...] = (
    {},
    {"truncated": "mask", "aggregation": "sequence_mean"},
    {"truncated": "penalize", "truncated_penalty": 0.5, "aggregation": "constant"},
    {"max_new_tokens": 6, "overlong_tokens": 4, "overlong_penalty": 0.75},
    {"reward_scale": 10.0, "reward_bias": -5.0, "truncated": "penalize", "truncated_penalty": 10.0},
    {"min_tokens": 2, "max_tokens": 6},
)


class AnyOrder(WorldMachine):
    policy: ClassVar[WhenOlder] = "wait"

    @initialize(
        batch=st.integers(1, 4),
        eta=st.integers(0, 4),
        size=st.integers(1, 3),
        places=st.integers(0, 30),
        servers=st.integers(1, 3),
        wave=st.integers(1, 2),
        retries=st.integers(0, 2),
        filters=st.sampled_from(FILTERS),
        shape=st.sampled_from(SHAPES),
        prompts=st.one_of(st.none(), st.integers(0, 20)),
        seed=st.integers(0, 99),
    )
    def begin(
        self,
        batch: int,
        eta: int,
        size: int,
        places: int,
        servers: int,
        wave: int,
        retries: int,
        filters: dict[str, object],
        shape: dict[str, object],
        prompts: int | None,
        seed: int,
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
            retries=retries,
            min_group=1 + seed % size,
            max_failures=10_000,
            servers=servers,
            wave=min(wave, servers),
            max_restarts=10_000,
            max_worker_restarts=10_000,
            when_older=self.policy,
            requeue=bool(seed % 2),
            **(filters if size > 1 else {}),
            **shape,
            **BACK | {"checkpoint_steps": 1 + seed % 3},
        )
        self.world = World(rules, servers=servers, workers=1 + seed % 2, prompts=prompts)
        self.order = seed
        self.losses = 0
        self.given = seed % 5 == 0 and not filters
        self.world.start()

    def _running(self) -> bool:
        return self.world.end is None and bool(self.world.pending)

    @precondition(_running)
    @rule(which=st.integers(0, 10_000), outcome=OUTCOMES)
    def answer(self, which: int, outcome: float | str | None) -> None:
        keys = list(self.world.pending)
        self.world.answer(keys[which % len(keys)], outcome)

    @precondition(_running)
    @rule(first=st.sampled_from(["read", "sample", "score", "train", "publish", "swap"]), count=st.integers(1, 12))
    def answer_many_of_a_kind(self, first: str, count: int) -> None:
        for key in self.world.find(first)[:count]:
            if key in self.world.pending and self.world.end is None:
                self.world.answer(key, "mixed" if first == "score" else 1.0)

    @precondition(_running)
    @rule(laps=st.integers(1, 5))
    def the_newest_overtake_the_rest(self, laps: int) -> None:
        """Steps go by while what was begun first is still being written."""
        for _ in range(laps):
            for kind in ("publish", "swap", "read", "sample", "score", "train"):
                for key in self.world.find(kind)[-2 * self.world.rules.batch_groups :]:
                    if key in self.world.pending and self.world.end is None:
                        self.world.answer(key, "mixed" if kind == "score" else 1.0)

    @precondition(_running)
    @rule(which=st.integers(0, 100))
    def refuse_a_prompt(self, which: int) -> None:
        keys = self.world.find("read")
        if keys:
            self.world.answer(keys[which % len(keys)], "refused")

    @precondition(_running)
    @rule(back=st.integers(0, 6))
    def go_back(self, back: int) -> None:
        if self.world.branch < 4:
            self.world.roll_back(max(self.world.trained - back, 0))

    @precondition(_running)
    @rule(which=st.integers(0, 4))
    def a_server_or_reward_worker_dies(self, which: int) -> None:
        if self.losses < LOSSES:
            self.losses += self.lose_one(self.world.peers, which)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            end = self.world.run_out(self.order, outcome="given" if self.given else "mixed")
            assert isinstance(end, Finish), end


class AnyOrderTrain(AnyOrder):
    policy = "train"


class AnyOrderMask(AnyOrder):
    policy = "mask"


class AnyOrderDrop(AnyOrder):
    policy = "drop"


ORDERS = settings(max_examples=60, stateful_step_count=60, deadline=None, derandomize=True)

TestWait = AnyOrder.TestCase
TestWait.settings = ORDERS
TestTrain = pytest.mark.slow(AnyOrderTrain.TestCase)
TestTrain.settings = ORDERS
TestMask = pytest.mark.slow(AnyOrderMask.TestCase)
TestMask.settings = ORDERS
TestDrop = pytest.mark.slow(AnyOrderDrop.TestCase)
TestDrop.settings = ORDERS
