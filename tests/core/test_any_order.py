"""Whatever the order: answers, checks, swaps and publications come early or late, things fail, training goes back.

`World` checks each rule at every event: no lag over η, a balanced ledger for groups and samples, nothing trained twice
in the surviving history. Here hypothesis picks the order, and at the end of each walk everything that is pending is
delivered: then the run must reach its end, or something could have stuck.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_async.messages import Finish

from .world import World, make_rules

OUTCOMES = st.sampled_from([1.0, 0.0, 1.0, 0.5, float("nan"), None, "failed", "given"])
GOOD = st.sampled_from([1.0, 0.0])


class AnyOrder(RuleBasedStateMachine):
    world: World

    @initialize(
        batch=st.integers(1, 4),
        eta=st.integers(0, 4),
        size=st.integers(1, 3),
        places=st.integers(0, 30),
        servers=st.integers(1, 3),
        wave=st.integers(1, 2),
        retries=st.integers(0, 2),
        drop_equal=st.booleans(),
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
        drop_equal: bool,
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
            drop_equal=drop_equal and size > 1,
            wave=wave,
        )
        self.world = World(rules, servers=servers, prompts=prompts)
        self.seed = seed
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
                self.world.answer(key, float(hash(key[-1]) % 2) if first == "score" else 1.0)

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

    @precondition(lambda self: self._running() and self.world.told)
    @rule(which=st.integers(0, 10_000))
    def tell_again(self, which: int) -> None:
        assert self.world.send(self.world.told[-1 - which % len(self.world.told)]) == []

    @precondition(lambda self: self._running() and self.world.late)
    @rule(which=st.integers(0, 10_000))
    def tell_late(self, which: int) -> None:
        assert self.world.send(self.world.late[which % len(self.world.late)]) == []

    @rule()
    def nothing_happens(self) -> None:
        """After the end no other rule applies."""

    @invariant()
    def someone_can_say_who_waits(self) -> None:
        if hasattr(self, "world"):
            assert self.world.core.waiting()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            given = self.seed % 5 == 0 and not self.world.rules.drop_equal
            end = self.world.run_out(self.seed, outcome="given" if given else "mixed")
            assert isinstance(end, Finish), end


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None, derandomize=True)
TestAnyOrder = AnyOrder.TestCase
