"""Servers that live and don't work, that never begin, that have no memory: whole runs with scripted peers."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_async.config import Config
from areal_async.controller import Controller, RunResult, servers
from areal_async.controller.metrics import StepRow
from areal_async.errors import LaunchError, RunFailed
from areal_async.launch.child import Child
from areal_async.launch.recipes import Command, Recipes
from areal_async.log.reader import read_records
from areal_async.messages import Failed, Joined, Lost, Note, Restart, Swapped
from areal_async.rollout import pulse, vllm_http
from areal_async.rollout import session as sessions
from areal_async.testing.recipes import scripted
from areal_async.testing.vllm_server import Order, Slow, Stall, Status

from ..waiting import PATIENCE_S

pytestmark = pytest.mark.slow

Make = Callable[..., Config]
GENERATE = "/inference/v1/generate"
HANDSHAKE_REQUESTS = 5  # a probe and two questions for the vocabulary; two probes against the trainer
FOREVER = 10_000
LONG = (
    "rollout.servers=2", "train.steps=1000", "rollout.max_staleness=3", "rollout.stop_token_ids=[]",
    "server.stall_timeout_s=2", "rollout.retries=0",
)  # fmt: skip


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "LOOK_S", 0.2)
    monkeypatch.setattr(pulse, "SICK_S", 1.0)
    monkeypatch.setattr(vllm_http, "CONTROL_DEADLINE_S", 3.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has a chance to start may take as long as it needs: only the scripts of `starting` have a deadline."""
    wait = servers.wait_for_start

    async def wait_longer(child: Child, ready: Any, timeout_s: float, *words: str) -> None:
        await wait(child, ready, timeout_s if child.spec.argv[0] == "sh" else PATIENCE_S, *words)

    monkeypatch.setattr(servers, "wait_for_start", wait_longer)


def messages(result: RunResult, *kinds: type) -> list[Any]:
    return [record.message for record in read_records(result.folder / "log") if isinstance(record.message, kinds)]


def version_of(run: Controller, name: str) -> int:
    found = run._parts._servers.fleet._live.get(name)
    return found.version if found is not None else -1


async def run_until(run: Controller, enough: Callable[[StepRow], bool]) -> RunResult:
    async with asyncio.timeout(PATIENCE_S):
        async for row in run.steps():
            if enough(row):
                run.stop()
    return run.result()


def back(run: Controller) -> bool:
    """Server 1 serves in another life than its first."""
    lost = any(peer.label == "server 1" and peer.restarts for peer in run._parts._core.view().peers)
    return lost and version_of(run, "1") > 0


def life_of(run: Controller, name: str) -> Any:
    """Its present life, or None while it has not started for the first time, which may take longer than some steps."""
    return run._parts._servers._lives.get(name)


def assert_nothing_is_lost(result: RunResult, config: Config) -> None:
    assert result.reason == "stopped"
    for row in result.rows:
        assert row.ledger["samples_failed"] == row.ledger["failed"] == row.ledger["cancelled"] == 0
        assert row.ledger["trained"] == (row.step + 1) * config.train.batch_groups
        assert row.lag_max <= config.rollout.max_staleness


@pytest.mark.parametrize("how", ["answers", "process"])
async def test_a_server_that_lives_and_is_stuck(make_config: Make, hurry: None, how: str) -> None:
    """Its answers stop, or its process is stopped: noticed in a moment, its answers go on at the other from what had
    arrived, it is ended, started again, and serves."""
    config = make_config(*LONG, "weights.swap_timeout_s=5")  # it may be stopped in the middle of a swap
    stuck = [Order(GENERATE, Stall(8), skip=HANDSHAKE_REQUESTS + 12, times=FOREVER)] if how == "answers" else []
    recipes = scripted(token_s=0.01, step_s=0.1, orders={"server-1": [stuck]})
    async with Controller(config, recipes=recipes) as run:
        stopped = 0

        def look(row: StepRow) -> bool:
            nonlocal stopped
            life = life_of(run, "1")
            in_the_middle = life and any(8 <= answer.length <= 40 for answer, _ in life.client._running.values())
            if how == "process" and row.step >= 1 and not stopped and in_the_middle:
                stopped = life.child.pid
                os.kill(stopped, signal.SIGSTOP)
            return back(run)

        result = await run_until(run, look)
    assert_nothing_is_lost(result, config)
    (lost,) = messages(result, Lost)
    assert lost.id == "1"
    if how == "answers" or "could not take version" not in lost.why:  # a swap may meet the stopped process first
        assert "it is stuck: it lives, but no token of its" in lost.why
        assert "(server.stall_timeout_s = 2)" in lost.why
        assert "server 1 (pid" in lost.why
    after = messages(result, Lost, Restart, Joined)
    assert [type(event) for event in after[after.index(lost) :]] == [Lost, Restart, Joined]
    assert any(note.what == "continued" and note.data["to"] == "0" for note in messages(result, Note))
    assert not stopped or not os.path.exists(f"/proc/{stopped}")  # noqa: ASYNC240


async def test_a_slow_server_is_not_taken_for_a_stuck_one(make_config: Make, hurry: None) -> None:
    """It gets what it can do, in its own time: each of its answers takes longer than a stuck one is waited for."""
    config = make_config(*LONG)
    slow = [Order(GENERATE, Slow(0.2), skip=HANDSHAKE_REQUESTS, times=FOREVER)]
    async with Controller(config, recipes=scripted(token_s=0.005, orders={"server-1": [slow]})) as run:

        def enough(row: StepRow) -> bool:
            life = life_of(run, "1")
            return row.step >= 3 and life is not None and life.client.ended >= HANDSHAKE_REQUESTS + 4

        result = await run_until(run, enough)
    assert_nothing_is_lost(result, config)
    assert not messages(result, Lost)


async def test_a_swap_that_takes_long_is_no_silence(make_config: Make, hurry: None) -> None:
    """It has a deadline of its own."""
    config = make_config(*LONG)
    long_answers = Order(GENERATE, Slow(0.3), skip=HANDSHAKE_REQUESTS, times=4)  # so that there are some to wait for
    slow = [Order("/update_weights", Slow(4.0), skip=1), long_answers]
    async with Controller(config, recipes=scripted(token_s=0.01, step_s=0.1, orders={"server-1": [slow]})) as run:
        result = await run_until(run, lambda row: row.swap_pause_s > 3.9)
    assert_nothing_is_lost(result, config)
    assert not messages(result, Lost)
    assert max(event.pause_s for event in messages(result, Swapped)) > 3.9


async def test_errors_for_a_while_are_a_hiccup(make_config: Make, hurry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "SICK_S", 10.0)  # twelve errors come sooner, also where everything takes longer
    config = make_config(*LONG)
    busy = [Order(GENERATE, Status(503, "busy"), skip=HANDSHAKE_REQUESTS + 8, times=12)]
    async with Controller(config, recipes=scripted(token_s=0.01, orders={"server-1": [busy]})) as run:

        def enough(row: StepRow) -> bool:
            life = life_of(run, "1")
            return row.step >= 4 and life is not None and life.client.errors.total >= 12

        result = await run_until(run, enough)
    assert_nothing_is_lost(result, config)
    assert not messages(result, Lost, Failed)
    assert any("busy" in str(note.data.get("why")) for note in messages(result, Note))


async def test_a_server_that_answers_only_errors_is_started_again(make_config: Make, hurry: None) -> None:
    """It would get every new group, having nothing to do; all its requests go on at the other meanwhile."""
    config = make_config(*LONG)
    sick = [Order(GENERATE, Status(500, "CUDA error: an illegal memory access"), HANDSHAKE_REQUESTS + 8, FOREVER)]
    async with Controller(config, recipes=scripted(token_s=0.01, step_s=0.1, orders={"server-1": [sick]})) as run:
        result = await run_until(run, lambda row: back(run))
    assert_nothing_is_lost(result, config)
    (lost,) = messages(result, Lost)
    assert lost.id == "1"
    assert "it is sick: " in lost.why
    assert "an illegal memory access" in lost.why


async def test_servers_that_answer_only_errors_end_the_run_however_often_samples_may_fail(
    make_config: Make, hurry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: no waiting for ever, also where a thousand failures would be tolerated."""
    monkeypatch.setattr(sessions, "PAUSE_S", 0.05)
    sick = [[Order(GENERATE, Status(500, "CUDA error: an illegal memory access"), HANDSHAKE_REQUESTS, FOREVER)]] * 9
    config = make_config("rollout.retries=1000", "rollout.max_failures=100000", "server.max_restarts=1")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RunFailed, match=r"(?s)no rollout server is left.*it is sick.*illegal memory access"):
            async with Controller(config, recipes=scripted(orders={"server-0": sick})) as run:
                await run.run()


def starting(recipes: Recipes, *lives: str) -> Recipes:
    """Lives of server 1 that are shell scripts in place of servers; "" for one as it should be."""
    begun = 0

    def server(**asked: Any) -> Command:
        nonlocal begun
        if Path(asked["uds"]).stem != "server-1":
            return recipes.server(**asked)
        begun += 1
        script = lives[begun - 1] if begun <= len(lives) else ""
        return (["sh", "-c", script], {}) if script else recipes.server(**asked)

    return Recipes(server=server, trainer=recipes.trainer)


async def test_a_server_that_hangs_at_its_start_is_an_error_with_its_last_words(
    make_config: Make, patient: None
) -> None:
    config = make_config(*LONG, "server.start_timeout_s=2")
    why = r"(?s)server\.start_timeout_s = 2 s: server 1 \(pid \d+\) is alive; the last lines of .*loading shards"
    async with asyncio.timeout(PATIENCE_S):
        hangs = starting(scripted(token_s=0.01), "echo loading shards; exec sleep 100")
        with pytest.raises(LaunchError, match=why):
            async with Controller(config, recipes=hangs) as run:
                await run.run()


async def test_a_server_that_hangs_when_it_is_started_again_is_lost_once_more(
    make_config: Make, hurry: None, patient: None
) -> None:
    config = make_config(*LONG, "server.start_timeout_s=2")
    recipes = starting(scripted(token_s=0.01, step_s=0.1), "", "echo loading shards; exec sleep 100")
    async with Controller(config, recipes=recipes) as run:
        killed = False

        def look(row: StepRow) -> bool:
            nonlocal killed
            if row.step >= 1 and not killed and (life := life_of(run, "1")) is not None:
                os.kill(life.child.pid, signal.SIGKILL)
                killed = True
            return back(run)

        result = await run_until(run, look)
    assert_nothing_is_lost(result, config)
    first, second = messages(result, Lost)
    assert "was ended by SIGKILL" in first.why
    assert "If nobody killed it, the machine ran out of memory" in first.why
    assert "it could not be started again: not ready after server.start_timeout_s = 2 s" in second.why
    assert "loading shards" in second.why


async def test_a_server_without_memory_says_what_to_do(make_config: Make) -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    script = f"echo '{said}' >&2; seq 60 >&2; exit 1"  # the words stand above a long traceback
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(LaunchError, match=r"(?s)exit code 1.*It ran out of memory: .*server\.gpu_memory"):
            async with Controller(make_config(*LONG), recipes=starting(scripted(), script)) as run:
                await run.run()


async def test_a_server_whose_engine_died_in_a_swap_is_found_out(make_config: Make, monkeypatch: Any) -> None:
    """Its process lives and says that it is unwell, and the swap waits for an answer that never comes: it is given up
    long before the swap's deadline, and started again."""
    monkeypatch.setattr(servers, "WATCH_S", 0.5)
    unwell = Order("/health", Status(503), skip=3, times=FOREVER)
    hangs = Order("/pause", Stall(), skip=1, times=FOREVER)
    config = make_config(*LONG)
    async with Controller(config, recipes=scripted(step_s=0.1, orders={"server-1": [[unwell, hangs]]})) as run:
        result = await run_until(run, lambda row: back(run))
    assert_nothing_is_lost(result, config)
    (lost,) = messages(result, Lost)
    assert "server 1 answered 503 to /health" in lost.why
    assert "(pid " in lost.why
    after = messages(result, Lost, Restart, Joined)
    assert [type(event) for event in after[after.index(lost) :]] == [Lost, Restart, Joined]
