"""The pool of reward workers against a wire and processes that a test holds in its hands: whatever the order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.config import RewardConfig
from areal_async.controller import checks
from areal_async.controller.checks import Half, KeptPool, Pool
from areal_async.controller.controller import first_cause
from areal_async.controller.crew import Crew
from areal_async.core import restarts
from areal_async.errors import LaunchError, WireError
from areal_async.launch.recipes import Recipes
from areal_async.messages import Hello, RewardSpec, ScoreResult, ScoreTask, Verdict

from ..waiting import DEADLINE_S, until

TURNS = 12  # of the loop, after which everything that can go on has gone on


@dataclass(eq=False)
class Asked:
    """What the wire was asked: of which life of which worker, under which id."""

    worker: str
    life: "Process"
    task: ScoreTask
    id: str
    answer: asyncio.Future[ScoreResult]

    def say(self, verdict: Verdict, *, settled: bool = False) -> None:
        reward = 1.0 if verdict == "right" else None
        self.answer.set_result(
            ScoreResult(sample=self.task.sample, attempt=0, verdict=verdict, reward=reward, settled=settled)
        )


class Process:
    """Stands in for a `Child`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = asyncio.Event()

    async def wait(self) -> int:
        await self.ended.wait()
        return -9

    async def stop(self, grace_s: float) -> int:
        self.ended.set()
        return -9

    def why(self) -> str:
        return f"{self.name} was ended by SIGKILL"


class Bench:
    """A pool, its processes, and what is asked of them; stands in for the router too. Each life grants `places`.
    early: processes say Hello before it is known that they run."""

    def __init__(self, places: int, joins: bool, early: bool) -> None:
        self.places = places
        self.joins = joins
        self.early = early
        self.lives: dict[str, Process] = {}
        self.asked: list[Asked] = []
        self.ids: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.goodbyes: list[str] = []
        self.pool: Pool

    async def request(self, name: str, message: ScoreTask, arrays: object, *, id: str, deadline_s: float) -> Any:
        asked = Asked(name, self.lives[name], message, id, asyncio.get_running_loop().create_future())
        assert len([other for other in self.asked if other.life is asked.life]) < self.places, "more than its places"
        self.asked.append(asked)
        self.ids.append(id)
        try:
            return await asked.answer, []
        finally:
            self.asked.remove(asked)

    def goodbye(self, name: str) -> None:
        """Of the router."""
        self.goodbyes.append(name)

    async def start_child(self, spec: Any) -> Process:
        process = self.lives[spec.name] = Process(spec.name)
        if self.early:
            assert self.hello(spec.name) is None
            await self.settle()
        elif self.joins:
            asyncio.get_running_loop().call_soon(self.hello, spec.name)
        return process

    def hello(self, name: str) -> str | None:
        return self.pool.on_joined(
            Hello(protocol=1, secret="", worker="reward", name=name, nonce="", credits=self.places)
        )

    def kill(self, name: str) -> None:
        self.lives[name].ended.set()

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)


@asynccontextmanager
async def bench(
    folder: Path,
    *,
    workers: int = 2,
    places: int = 2,
    retries: int = 1,
    joins: bool = True,
    early: bool = False,
    kept: bool = False,
) -> AsyncIterator[Bench]:
    found = Bench(places, joins, early)
    config = RewardConfig(workers=workers, retries=retries, timeout_s=5.0, max_restarts=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks.Child, "start", found.start_child)
        async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
            crew, router = Crew(group), found
            wire: Any = router
            if kept:
                found.pool = KeptPool(config, RewardSpec(), Recipes(), wire, crew)
            else:
                found.pool = Pool(
                    config, RewardSpec(), Recipes(), wire, crew,
                    joined=lambda name: found.events.append(("joined", name)),
                    lost=lambda name, why: found.events.append(("lost", name)),
                )  # fmt: skip
            starting = crew.start(found.pool.start(stack, "", "", folder, lambda name: folder / name), "start")
            if joins:
                await starting
            yield found
            await crew.dismiss()


def check(pool: Pool | Half, name: str) -> asyncio.Task[ScoreResult]:
    task = ScoreTask(sample=name, attempt=0, prompt="", answer=None, finish="stop", columns={}, response="")
    return asyncio.create_task(pool.check(task, checks.np.zeros(0, checks.np.int32)))


async def test_a_check_goes_to_the_least_busy_worker_and_waits_for_a_place_in_turn(tmp_path: Path) -> None:
    async with bench(tmp_path, places=2) as it:
        tasks = [check(it.pool, str(number)) for number in range(7)]
        await it.settle()
        assert [asked.worker for asked in it.asked] == ["rewards.0", "rewards.1", "rewards.0", "rewards.1"]
        assert it.pool.waits() == "3 checks wait for a place in 2 of 2 reward workers (4 places)"
        it.asked[1].say("right")
        await it.settle()
        assert (it.asked[-1].worker, it.asked[-1].task.sample) == ("rewards.1", "4")
        while it.asked:
            it.asked[0].say("wrong")
            await it.settle()
        assert [task.result().verdict for task in tasks] == ["wrong", "right", *["wrong"] * 5]
        assert it.pool.waits() == ""
        assert it.pool.repeated == 0


async def test_a_check_that_could_not_be_made_is_made_again_by_another_worker(tmp_path: Path) -> None:
    async with bench(tmp_path, places=1, retries=2) as it:
        other = check(it.pool, "other")
        task = check(it.pool, "7.0")
        await it.settle()
        assert it.asked[1].worker == "rewards.1"
        it.asked[1].say("infrastructure")
        await it.settle()
        assert [asked.task.sample for asked in it.asked] == ["other"]  # rewards.1 is free, and it isn't given to it
        it.asked[0].say("right")
        await it.settle()
        assert it.asked[0].worker == "rewards.0"
        it.asked[0].answer.set_exception(WireError("rewards.0 failed at ScoreTask"))
        await it.settle()
        assert it.asked[0].worker == "rewards.1"
        it.asked[0].say("right")
        assert (await task).verdict == "right"
        assert (await other).verdict == "right"
        assert it.pool.repeated == 2
        assert len(set(it.ids)) == len(it.ids) == 4  # a worker would answer a repeated id from memory


@pytest.mark.parametrize("retries", [0, 2])
async def test_the_last_try_that_fails_is_the_result(tmp_path: Path, retries: int) -> None:
    async with bench(tmp_path, workers=1, retries=retries) as it:
        task = check(it.pool, "7.0")
        for _ in range(retries + 1):
            await it.settle()
            it.asked[0].say("infrastructure")
        assert ((await task).verdict, (await task).reward) == ("infrastructure", None)
        assert len(it.ids) == retries + 1


async def test_what_may_have_been_read_by_a_judge_is_not_asked_again(tmp_path: Path) -> None:
    async with bench(tmp_path, retries=2) as it:
        task = check(it.pool, "7.0")
        await it.settle()
        it.asked[0].say("infrastructure", settled=True)
        assert (await task).verdict == "infrastructure"
        assert (len(it.ids), it.pool.repeated) == (1, 0)


async def test_what_a_lost_worker_had_goes_to_the_other(tmp_path: Path) -> None:
    async with bench(tmp_path, retries=2) as it:
        tasks = [check(it.pool, str(number)) for number in range(4)]
        await it.settle()
        it.kill("rewards.0")
        await it.settle()
        assert it.events[2:] == [("lost", "rewards.0")]
        assert {asked.worker for asked in it.asked} == {"rewards.1"}
        while it.asked:
            it.asked[0].say("right")
            await it.settle()
        assert [task.result().verdict for task in tasks] == ["right"] * 4
        assert it.pool.repeated == 2


@pytest.mark.parametrize("retries", [1, 2])
async def test_a_check_that_ends_its_worker_each_time_takes_no_other_to_the_end(tmp_path: Path, retries: int) -> None:
    async with bench(tmp_path, workers=1, places=4, retries=retries) as it:
        tasks = [check(it.pool, str(number)) for number in range(7)]
        while not all(task.done() for task in tasks):
            await it.settle()
            if any(asked.task.sample == "2" for asked in it.asked):
                it.kill("rewards.0")
                await it.settle()
                it.pool.restart("rewards.0")
            elif it.asked:
                it.asked[0].say("right")
        assert [task.result().verdict for task in tasks] == ["right"] * 2 + ["infrastructure"] + ["right"] * 4


async def test_a_worker_that_is_lost_at_once_lets_nothing_fall(tmp_path: Path) -> None:
    """In the same turn of the loop in which it was given the check."""
    async with bench(tmp_path, workers=1, retries=0) as it:
        task = check(it.pool, "1")
        asyncio.get_running_loop().call_soon(it.pool.on_lost, "rewards.0", "it broke the protocol")
        async with asyncio.timeout(DEADLINE_S):
            assert (await task).verdict == "infrastructure"
        assert it.ids == []


async def test_while_no_worker_is_there_checks_wait_for_the_next(tmp_path: Path) -> None:
    async with bench(tmp_path, workers=1) as it:
        it.kill("rewards.0")
        await it.settle()
        task = check(it.pool, "7.0")
        await it.settle()
        assert it.pool.waits() == "1 checks wait for a place in 0 of 1 reward workers (0 places)"
        it.pool.restart("rewards.0")
        await it.settle()
        assert it.events[1:] == [("lost", "rewards.0"), ("joined", "rewards.0")]
        it.asked[0].say("right")
        assert (await task).verdict == "right"


async def test_the_end_of_a_life_is_told_once(tmp_path: Path) -> None:
    """The wire has given it up, then its process ends; then what is told of it by the wire comes late."""
    async with bench(tmp_path) as it:
        it.pool.on_lost("rewards.0", "nothing was heard for 16 s")
        it.kill("rewards.0")
        await it.settle()
        it.pool.on_lost("rewards.0", "was replaced")
        assert it.events[2:] == [("lost", "rewards.0")]
        assert "was given up" in str(it.hello("rewards.0"))  # it only stood still, and is back
        it.joins = False
        it.pool.restart("rewards.0")
        await it.settle()
        it.pool.on_lost("rewards.0", "was replaced")
        assert it.hello("rewards.0") is None
        assert it.events[3:] == [("joined", "rewards.0")]


async def test_a_worker_that_does_not_come_back_in_time_is_lost_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as it:
        it.joins = False
        it.kill("rewards.0")
        await it.settle()
        monkeypatch.setattr(checks, "START_TIMEOUT_S", 0.01)
        it.pool.restart("rewards.0")
        await until(lambda: len(it.events) == 4)
        assert it.events[2:] == [("lost", "rewards.0")] * 2
        assert "was given up" in str(it.hello("rewards.0"))


async def test_a_worker_may_be_there_before_it_is_known_that_it_runs(tmp_path: Path) -> None:
    """On a busy machine its guard may say so later than the worker says Hello."""
    async with bench(tmp_path, places=1, early=True) as it:
        assert it.events == [("joined", "rewards.0"), ("joined", "rewards.1")]
        it.kill("rewards.0")
        await it.settle()
        it.pool.restart("rewards.0")
        await until(lambda: len(it.events) == 4)
        assert it.events[2:] == [("lost", "rewards.0"), ("joined", "rewards.0")]
        tasks = [check(it.pool, str(number)) for number in range(2)]
        await it.settle()
        assert {asked.worker for asked in it.asked} == {"rewards.0", "rewards.1"}
        for asked in list(it.asked):
            asked.say("right")
        assert [(await task).verdict for task in tasks] == ["right", "right"]


async def test_a_stranger_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        assert it.hello("rewards.7") == "this run has no reward worker rewards.7; it has rewards.0, rewards.1"
        assert "another of this name is there" in str(it.hello("rewards.1"))


async def test_a_cancelled_check_keeps_its_place_until_the_worker_has_done_with_it(tmp_path: Path) -> None:
    async with bench(tmp_path, workers=1, places=1) as it:
        first, second, third = (check(it.pool, name) for name in ("1", "2", "3"))
        await it.settle()
        first.cancel()
        second.cancel()
        await it.settle()
        assert first.cancelled()
        assert [asked.task.sample for asked in it.asked] == ["1"]
        assert it.pool.waits().startswith("1 checks")
        it.asked[0].say("infrastructure")  # nobody wants it any more: it isn't made again
        await it.settle()
        assert [asked.task.sample for asked in it.asked] == ["3"]
        it.asked[0].say("right")
        assert (await third).verdict == "right"
        assert len(it.ids) == 2


async def test_a_worker_that_does_not_answer_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "ANSWER_S", -4.99)
    async with bench(tmp_path, places=1, retries=0) as it:
        assert (await check(it.pool, "1")).verdict == "infrastructure"
        assert it.events[2:] == [("lost", "rewards.0")]
        assert it.goodbyes == ["rewards.0"]  # the wire hears it no more, although it lives
        monkeypatch.setattr(checks, "ANSWER_S", 60.0)
        old = it.lives["rewards.0"]
        assert not old.ended.is_set()
        it.pool.restart("rewards.0")
        await it.settle()
        assert old.ended.is_set()
        assert it.lives["rewards.0"] is not old


async def test_an_evaluation_takes_half_of_the_places_of_the_workers_that_are_there(tmp_path: Path) -> None:
    async with bench(tmp_path, places=3, retries=0) as it:
        half = Half(it.pool)
        tasks = [check(half, str(number)) for number in range(8)]
        await it.settle()
        assert len(it.asked) == 3
        it.kill("rewards.1")
        await it.settle()  # the checks that it had are over: as many as 1 are under way now
        it.asked[0].say("right")
        await it.settle()
        assert len(it.asked) == 1
        tasks[-1].cancel()
        while it.asked:
            it.asked[0].say("right")
            await it.settle()
        assert [task.result().verdict for task in tasks[:-1]].count("infrastructure") == 1
        assert tasks[-1].cancelled()


# ------------------------------------------------------------------------------------------------- whatever the order

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["check", "check", "right", "right", "infrastructure", "kill", "restart", "cancel"]),
        st.integers(0, 100),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(steps=STEPS, workers=st.integers(1, 3), places=st.integers(1, 3), retries=st.integers(0, 2))
def test_whatever_the_order(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int]],
    workers: int,
    places: int,
    retries: int,
) -> None:
    """Each check ends once, after at most so many tries, each by another worker where there is one; places are kept
    (`Bench.request` looks), and none stays empty while a check could have it; the first tries are made in order."""
    folder = tmp_path_factory.getbasetemp()

    async def walk() -> None:
        async with bench(folder, workers=workers, places=places, retries=retries) as it:
            tasks: list[asyncio.Task[ScoreResult]] = []
            for what, which in steps:
                do(it, tasks, what, which)
                await it.settle()
                look(it, retries)
            for name, life in it.lives.items():
                if life.ended.is_set():
                    it.pool.restart(name)
            for _ in range(len(tasks) * (retries + 1)):
                await it.settle()
                if it.asked:
                    it.asked[0].say("right")
            await it.settle()
            assert all(task.done() for task in tasks), it.pool.waits()
            first = [int(id.split()[1]) for place, id in enumerate(it.ids) if tries(it.ids[:place], id) == 0]
            assert first == sorted(first)

    asyncio.run(walk())


def do(it: Bench, tasks: list[asyncio.Task[ScoreResult]], what: str, which: int) -> None:
    names = [name for name, life in it.lives.items() if life.ended.is_set() == (what == "restart")]
    if what == "check":
        tasks.append(check(it.pool, str(len(tasks))))
    elif what in ("kill", "restart") and names:
        name = names[which % len(names)]
        it.kill(name) if what == "kill" else it.pool.restart(name)
    elif what == "cancel" and tasks:
        tasks[which % len(tasks)].cancel()
    elif what in ("right", "infrastructure") and it.asked:
        it.asked[which % len(it.asked)].say("right" if what == "right" else "infrastructure")


def tries(ids: list[str], id: str) -> int:
    return sum(other.split()[1] == id.split()[1] for other in ids)


def look(it: Bench, retries: int) -> None:
    assert len(set(it.ids)) == len(it.ids)
    assert all(tries(it.ids, id) <= retries + 1 for id in it.ids)
    lives = [life for life in it.lives.values() if not life.ended.is_set()]
    free = [life for life in lives if sum(asked.life is life for asked in it.asked) < it.places]
    waiting = it.pool._waiting
    for life in free:
        last = any(tries(it.ids, asked.id) == retries + 1 > 1 for asked in it.asked if asked.life is life)
        takes = [
            (not_by, is_last)
            for (not_by, is_last), queue in waiting.items()
            if queue and (not_by != life.name or len(lives) == 1) and not (is_last and last)
        ]
        assert not takes, f"{life.name} has a free place, and checks wait that may not be made by {takes}"
    for life in lives:
        last_tries = [asked for asked in it.asked if asked.life is life and tries(it.ids, asked.id) == retries + 1 > 1]
        assert len(last_tries) < 2


# ------------------------------------------------------------------------------------------------------ without a core


async def test_without_a_core_the_pool_replaces_its_workers_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_RESTART_S", 0.01)
    async with bench(tmp_path, workers=1, retries=2, kept=True) as it:

        def is_asked_of_one_that_lives() -> bool:
            return bool(it.asked) and not it.asked[0].life.ended.is_set()

        task = check(it.pool, "1")
        for _ in range(2):
            await until(is_asked_of_one_that_lives)
            it.kill("rewards.0")
        await until(is_asked_of_one_that_lives)
        it.asked[0].say("right")
        assert (await task).verdict == "right"


async def test_without_a_core_a_worker_that_is_lost_too_often_is_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_RESTART_S", 0.001)

    async def lose_it_again_and_again() -> None:
        async with bench(tmp_path, kept=True) as it:
            for _ in range(3):
                await until(lambda: not it.lives["rewards.0"].ended.is_set())
                await it.settle()
                it.kill("rewards.0")
                await it.settle()
            await asyncio.sleep(DEADLINE_S)  # it ends before

    with pytest.raises(ExceptionGroup) as errors:
        await lose_it_again_and_again()
    error = first_cause(errors.value)
    assert isinstance(error, LaunchError)
    assert "rewards.0 was lost once more after 2 restarts" in str(error)
    assert "rewards.0 was ended by SIGKILL" in str(error)
