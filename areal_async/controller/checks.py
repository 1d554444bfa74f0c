"""The pool of reward workers: starts and replaces them, and gives each check to the least busy one.

What always holds:
- each check ends in exactly one `ScoreResult`; one that ends as `infrastructure` (its worker was lost, or could not
  make it) is made again, on another worker where there is one, `reward.retries` times, unless it is settled (a judge
  may have read it); then that is its result: no reward at all, never a wrong one. The last try shares its worker with
  no other last try: a check that ends its worker or its sandbox each time takes those beside it with it, but none of
  them to the end. A check that was cancelled is not made again;
- a worker never has more checks than it has places, those included that were cancelled and that it is still busy with;
  checks that wait for a place get one in the order of asking, those that are made again before younger ones;
- a worker that is gone, that nothing is heard of, or that has not answered a check long after its deadline, is told as
  lost, once; it is started again when somebody says so, the core of a run or `KeptPool`, and its checks don't wait for
  that where another is there.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.config import RewardConfig
from areal_async.controller.crew import Crew
from areal_async.controller.starting import wait_for_start
from areal_async.core.workers import Workers
from areal_async.errors import ArealError, LaunchError, WireError
from areal_async.launch.child import Child, ChildSpec
from areal_async.launch.recipes import Recipes
from areal_async.messages import Hello, Joined, Lost, RewardSpec, ScoreResult, ScoreTask
from areal_async.wire.router import Router

logger = logging.getLogger("areal_async")

START_TIMEOUT_S: Final = 330.0  # a worker imports the user's function, and says itself when that takes 300 s
STOP_GRACE_S: Final = 1.0  # a worker has nothing to save
ANSWER_S: Final = 60.0  # from a check's deadline to its answer: killing is quick, but the machine may be swapping
TOLD: Final = 3  # checks that are made again of which the log tells; the rest is in the counts of metrics.jsonl

Tokens = npt.NDArray[np.int32]


class _Life:
    """One life of a worker, from its start to its loss. there: it has joined. places: checks that it runs at a time.
    asking: the checks that it has. gone: it is lost, or was never there."""

    def __init__(self, name: str, child: Child) -> None:
        self.name = name
        self.child = child
        self.there = asyncio.Event()
        self.places = 0
        self.asking: dict[asyncio.Task[None], _Try] = {}
        self.gone = False

    @property
    def works(self) -> bool:
        return self.there.is_set() and not self.gone

    @property
    def is_free(self) -> bool:
        return self.works and len(self.asking) < self.places

    @property
    def has_last_try(self) -> bool:
        return any(attempt.last for attempt in self.asking.values())


class _Try:
    """One try at a check. number: of the check; a smaller one was asked for before. result: what its asker waits for.
    not_by: the worker that the try before failed at, "" for the first. last: it failed before, and isn't made again."""

    def __init__(self, number: int, task: ScoreTask, tokens: Tokens, not_by: str, *, last: bool) -> None:
        self.number = number
        self.task = task
        self.tokens = tokens
        self.not_by = not_by
        self.last = last
        self.by = ""
        self.result: asyncio.Future[ScoreResult] = asyncio.get_running_loop().create_future()

    def end(self, result: ScoreResult) -> None:
        if not self.result.done():  # who asked may have gone
            self.result.set_result(result)

    def failed(self, why: str) -> None:
        task = self.task
        self.end(ScoreResult(sample=task.sample, attempt=task.attempt, verdict="infrastructure", reward=None, why=why))


class Pool:
    """The reward workers of a run. joined: told of a worker that is there. lost: told of one that is gone, and why;
    `restart` starts it again.

    `start` before anything else; `on_joined` and `on_lost` are to be called by who owns the router. repeated: checks
    that were made again.
    """

    def __init__(
        self,
        config: RewardConfig,
        spec: RewardSpec,
        recipes: Recipes,
        router: Router,
        crew: Crew,
        *,
        joined: Callable[[str], None],
        lost: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._spec = spec
        self._recipes = recipes
        self._router = router
        self._crew = crew
        self._joined = joined
        self._lost = lost
        self._lives: dict[str, _Life] = {}
        self._starting: dict[str, Hello | None] = {}  # until it is known that they run, which they may say sooner
        self._waiting: dict[tuple[str, bool], OrderedDict[int, _Try]] = {}  # by `not_by`, `last`; then by number
        self._checks = self._tries = 0
        self.repeated = 0

    # ---------------------------------------------------------------------------------------------------- the workers

    async def start(
        self, stack: AsyncExitStack, address: str, secret: str, folder: Path, stderr: Callable[[str], Path]
    ) -> None:
        """Start all workers and wait until they are there. Errors: LaunchError with the tail of a worker's stderr."""
        self._stack, self._address, self._secret, self._stderr = stack, address, secret, stderr
        self._spec_path = folder / "rewards.json"
        self._spec_path.write_bytes(msgspec.json.encode(self._spec))
        for number in range(self._config.workers):
            await self._begin(f"rewards.{number}")
        for life in list(self._lives.values()):
            await self._until_there(life)

    def restart(self, name: str) -> None:
        """Start a lost worker again; it is told as joined, or as lost once more."""
        logger.warning("reward worker %s is started again", name)
        self._crew.start(self._restart(name), f"restart of {name}")

    def on_joined(self, hello: Hello) -> str | None:
        """A worker says Hello; answers why it isn't taken in, or None."""
        if hello.name in self._starting:
            self._starting[hello.name] = hello
            return None
        life = self._lives.get(hello.name)
        if life is None:
            return f"this run has no reward worker {hello.name}; it has {', '.join(self._lives)}"
        if life.gone or life.there.is_set():
            return f"reward worker {hello.name} was given up, or another of this name is there"
        self._take_in(life, hello)
        return None

    def _take_in(self, life: _Life, hello: Hello) -> None:
        life.places = hello.credits
        life.there.set()
        self._joined(life.name)
        self._hand_out()

    def on_lost(self, name: str, why: str) -> None:
        """The wire hears nothing of a worker any more."""
        life = self._lives.get(name)
        if life is not None and life.works:
            self._lose(life, f"{why}. {life.child.why()}")

    async def _begin(self, name: str) -> _Life:
        argv, env = self._recipes.rewards(connect=self._address, spec=str(self._spec_path), name=name)
        spec = ChildSpec(
            name=name,
            argv=tuple(argv),
            env=env | {"AREAL_ASYNC_SECRET": self._secret},
            stderr_path=self._stderr(name),
            scratch=self._spec_path.parent,
        )
        self._starting[name] = None
        try:
            child = await Child.start(spec)
        finally:
            hello = self._starting.pop(name)
        self._stack.push_async_callback(child.stop, STOP_GRACE_S)
        life = self._lives[name] = _Life(name, child)
        if hello is not None:
            self._take_in(life, hello)
        return life

    async def _until_there(self, life: _Life) -> None:
        await wait_for_start(life.child, life.there.wait(), START_TIMEOUT_S, "a reward worker's time to start")
        self._crew.start(self._watch(life), f"watch {life.name}")

    async def _restart(self, name: str) -> None:
        life = self._lives[name]
        await life.child.stop(STOP_GRACE_S)
        try:
            life = await self._begin(name)
            await self._until_there(life)
        except (ArealError, OSError) as error:
            life.gone = True
            self._lost(name, f"it could not be started again: {error}")

    async def _watch(self, life: _Life) -> None:
        await life.child.wait()
        self._lose(life, life.child.why())

    def _lose(self, life: _Life, why: str) -> None:
        """Tell that a life has ended, unless that was told; what it was asked goes on elsewhere."""
        if life.gone:
            return
        life.gone = True
        self._router.goodbye(life.name)
        for asking in life.asking:
            asking.cancel()
        self._hand_out()  # the worker that is left may take what it could not while there was another
        self._lost(life.name, why)

    # ----------------------------------------------------------------------------------------------------- the checks

    async def check(self, task: ScoreTask, tokens: Tokens) -> ScoreResult:
        """Have one answer checked. tokens: of the response, int32 [n]; empty where the task brings it as text."""
        number = self._checks
        self._checks += 1
        not_by = ""
        for left in reversed(range(self._config.retries + 1)):
            attempt = _Try(number, task, tokens, not_by, last=bool(not_by) and not left)
            result = await self._made(attempt)
            if result.verdict != "infrastructure" or result.settled or not left:
                return result
            self._tell_again(task, attempt.by, result.why)
            not_by = attempt.by
        raise AssertionError("the last try returns")

    @property
    def places(self) -> int:
        """Checks that all workers that are there may have at a time."""
        return sum(life.places for life in self._lives.values() if life.works)

    def waits(self) -> str:
        """How many checks wait for a place, and where; "" if none does."""
        count = sum(map(len, self._waiting.values()))
        if not count:
            return ""
        there = sum(life.works for life in self._lives.values())
        return f"{count} checks wait for a place in {there} of {len(self._lives)} reward workers ({self.places} places)"

    async def _made(self, attempt: _Try) -> ScoreResult:
        queue = self._waiting.setdefault((attempt.not_by, attempt.last), OrderedDict())
        queue[attempt.number] = attempt
        try:
            self._hand_out()
            return await attempt.result
        finally:
            queue.pop(attempt.number, None)  # it was cancelled before it had a place

    def _hand_out(self) -> None:
        """Give checks that wait to workers that have places, the least busy one first."""
        while (found := self._next()) is not None:
            life, attempt = found
            self._tries += 1
            attempt.by = life.name
            asking = self._crew.start(self._ask(life, attempt, self._tries), f"check of sample {attempt.task.sample}")
            life.asking[asking] = attempt
            asking.add_done_callback(partial(self._asked, life))

    def _next(self) -> tuple[_Life, _Try] | None:
        """The check that has waited longest, of those that the least busy worker with a place may take."""
        alone = sum(life.works for life in self._lives.values()) == 1
        free = [life for life in self._lives.values() if life.is_free]
        for life in sorted(free, key=lambda life: len(life.asking)):
            queues = [
                queue
                for (not_by, last), queue in self._waiting.items()
                if queue and (alone or not_by != life.name) and not (last and life.has_last_try)
            ]
            if queues:
                _, attempt = min(queues, key=lambda queue: next(iter(queue))).popitem(last=False)
                return life, attempt
        return None

    async def _ask(self, life: _Life, attempt: _Try, number: int) -> None:
        """Ends when the worker has answered, also where nobody waits for that: it is busy with it until then."""
        task, limit_s = attempt.task, self._config.timeout_s + ANSWER_S
        try:
            async with asyncio.timeout(limit_s):
                answer, _ = await self._router.request(
                    life.name,
                    task,
                    [attempt.tokens],
                    id=f"score {task.sample} {task.attempt} {number}",  # each try by its own: workers remember answers
                    deadline_s=2 * limit_s,
                )
        except TimeoutError:
            why = f"{life.name} has not answered the check of sample {task.sample} within {limit_s:g} s"
            attempt.failed(why)
            self._lose(life, f"{why} (reward.timeout_s and {ANSWER_S:g} s). {life.child.why()}")
        except WireError as error:
            attempt.failed(str(error))
        else:
            assert isinstance(answer, ScoreResult), f"{life.name} answered a check with {type(answer).__name__}"
            attempt.end(answer)

    def _asked(self, life: _Life, asking: asyncio.Task[None]) -> None:
        attempt = life.asking.pop(asking)
        if asking.cancelled() and life.gone:
            attempt.failed(f"{life.name} was lost while it had the check")
        elif asking.cancelled():  # everything ends
            attempt.result.cancel()
        self._hand_out()

    def _tell_again(self, task: ScoreTask, worker: str, why: str) -> None:
        self.repeated += 1
        if self.repeated <= TOLD:
            logger.warning("the check of sample %s by %s could not be made, and is made again: %s",
                           task.sample, worker, why)  # fmt: skip


class Half:
    """At most half of a pool's places, one at least: for evaluations, so that training's checks find the other half."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._under_way = 0
        self._ended = asyncio.Condition()

    async def check(self, task: ScoreTask, tokens: Tokens) -> ScoreResult:
        """As `Pool.check`."""
        async with self._ended:
            await self._ended.wait_for(lambda: self._under_way < max(1, self._pool.places // 2))
            self._under_way += 1
        try:
            return await self._pool.check(task, tokens)
        finally:
            self._under_way -= 1
            async with self._ended:
                self._ended.notify_all()


class KeptPool(Pool):
    """A pool that replaces its own workers, by the rule of a run's core: where there is none. A worker that is lost too
    often ends the crew's task group with a LaunchError that has the first loss and the last."""

    def __init__(self, config: RewardConfig, spec: RewardSpec, recipes: Recipes, router: Router, crew: Crew) -> None:
        super().__init__(config, spec, recipes, router, crew, joined=self._is_there, lost=self._is_lost)
        self._rule = Workers(config.max_restarts)

    def _is_there(self, name: str) -> None:
        self._rule.join(Joined(at=time.monotonic(), peer="rewards", id=name))

    def _is_lost(self, name: str, why: str) -> None:
        logger.warning("reward worker %s is lost: %s", name, why)
        self._rule.lost(Lost(at=time.monotonic(), peer="rewards", id=name, why=why))
        self._crew.start(self._replace(), f"replacement of {name}")

    async def _replace(self) -> None:
        if self._rule.given_up:
            raise LaunchError(self._rule.given_up)
        if self._rule.wakeup is not None:
            await asyncio.sleep(self._rule.wakeup - time.monotonic())
        for command in self._rule.wake(time.monotonic()):
            self.restart(command.id)
