"""A real reward worker, under its guard, at a real wire."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from areal_async.errors import WireError
from areal_async.launch.child import Child, ChildSpec
from areal_async.messages import Hello, HttpOptions, Probe, RewardSpec, ScoreResult, ScoreTask
from areal_async.wire.router import Router

from ..waiting import until
from .judge import serving
from .test_sandbox import alive

SpecOf = Callable[..., RewardSpec]
TaskOf = Callable[..., ScoreTask]
Encode = Callable[[str], bytes]
SECRET = "of the run"
START_S = 120.0  # a worker is there within 2 s on a free machine


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="areal-"))  # a socket's path has 107 bytes; tmp_path may be longer
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def worker_at(folder: Path, spec: RewardSpec, secret: str = SECRET) -> AsyncIterator[tuple[Router, Child]]:
    address = f"ipc://{folder}/wire"
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    argv = [sys.executable, "-m", "areal_async.rewards.worker", "--connect", address]
    argv += ["--spec", str(folder / "spec.json"), "--name", "rewards.0"]
    joined: list[Hello] = []
    async with Router(address, SECRET, on_joined=joined.append, on_lost=lambda name, why: None) as router:
        child = await Child.start(
            ChildSpec(name="rewards.0", argv=argv, env={"AREAL_ASYNC_SECRET": secret}, stderr_path=folder / "stderr")
        )
        async with child:
            yield router, child


def as_text(task: ScoreTask) -> ScoreTask:
    return msgspec.structs.replace(task, response="the response")


async def ask(router: Router, task: ScoreTask, tokens: bytes, number: int = 0) -> ScoreResult:
    array = np.frombuffer(tokens, dtype=np.int32)
    answer, _ = await router.request("rewards.0", task, [array], id=f"score {number}", deadline_s=START_S)
    assert isinstance(answer, ScoreResult)
    return answer


@pytest.mark.slow
async def test_checks_come_back_and_a_slow_one_delays_nobody(
    folder: Path, spec_of: SpecOf, task_of: TaskOf, encode: Encode
) -> None:
    async with worker_at(folder, spec_of("mixed", timeout_s=5.0)) as (router, child):
        slow = asyncio.create_task(ask(router, task_of("1.0"), encode("slow"), 1))
        quick = await asyncio.gather(*(ask(router, task_of(f"2.{i}"), encode("fast"), 2 + i) for i in range(50)))
        assert {(result.sample, result.verdict) for result in quick} == {(f"2.{i}", "given") for i in range(50)}
        assert not slow.done()
        assert (await slow).verdict == "timeout"
        assert child.tail() == ""


@pytest.mark.slow
async def test_it_leaves_at_goodbye(folder: Path, spec_of: SpecOf, task_of: TaskOf, encode: Encode) -> None:
    async with worker_at(folder, spec_of("exact")) as (router, child):
        assert (await ask(router, task_of(), encode("42"))).verdict == "right"
        router.goodbye("rewards.0")
        async with asyncio.timeout(60):
            assert await child.wait() == 0
        assert child.tail() == ""


@pytest.mark.slow
async def test_what_is_no_check_is_answered_with_an_error(
    folder: Path, spec_of: SpecOf, task_of: TaskOf, encode: Encode
) -> None:
    async with worker_at(folder, spec_of("exact")) as (router, _):
        with pytest.raises(WireError, match="takes ScoreTask with one array, not Probe with 0 arrays"):
            await router.request("rewards.0", Probe(id="x"), id="x", deadline_s=START_S)
        with pytest.raises(WireError, match="token ids must be int32, not int64"):
            await router.request("rewards.0", task_of(), [np.zeros(3, np.int64)], id="y", deadline_s=START_S)
        assert (await ask(router, task_of(), encode("42"))).verdict == "right"


@pytest.mark.slow
async def test_a_killed_sandbox_is_replaced_under_the_same_worker(
    folder: Path, spec_of: SpecOf, task_of: TaskOf, encode: Encode
) -> None:
    async with worker_at(folder, spec_of("mixed", timeout_s=600)) as (router, child):
        assert (await ask(router, task_of(), encode("fast"), 0)).reward == 1.0
        (sandbox,) = psutil.Process(child.pid).children()
        lost = asyncio.create_task(ask(router, task_of(), encode("slow"), 1))
        await until(sandbox.children)  # the check runs
        sandbox.kill()
        assert (await lost).verdict == "infrastructure"
        assert (await ask(router, task_of(), encode("fast"), 2)).reward == 1.0


@pytest.mark.slow
async def test_a_judge_alone_has_as_many_checks_as_connections(folder: Path, spec_of: SpecOf, task_of: TaskOf) -> None:
    with serving() as books:
        http = HttpOptions(url=books.url, connections=8)
        spec = msgspec.structs.replace(spec_of("exact", timeout_s=100), function="http", http=http, model_path="")
        async with worker_at(folder, spec) as (router, child):
            asked = [as_text(task_of(f"0.{number}", "hang")) for number in range(7)]
            hanging = [asyncio.create_task(ask(router, task, b"", n)) for n, task in enumerate(asked)]
            for number in range(10, 30):
                found = await ask(router, as_text(task_of(f"{number}.0", "verdict:right")), b"", number)
                assert (found.verdict, found.reward, found.why, found.extracted) == ("right", 1.0, "said so", "42")
            assert not any(task.done() for task in hanging)
            assert psutil.Process(child.pid).children() == []  # no sandbox, which would have nothing to do
            books.release.set()
            assert {result.reward for result in await asyncio.gather(*hanging)} == {1.0}


@pytest.mark.slow
async def test_a_sum_of_what_runs_here_and_a_judge(
    folder: Path, functions: Path, spec_of: SpecOf, task_of: TaskOf, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    (functions / "tokens.py").write_text(
        "import os, misbehaving\n"
        "def seen(response):\n"
        "    return misbehaving.mixed(response) + 10 * ('JUDGE_TOKEN' in os.environ)\n"
    )
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    with serving() as books:
        http = HttpOptions(url=books.url, token_env="JUDGE_TOKEN")
        function = "2*http - 0.5*tokens:seen"
        spec = msgspec.structs.replace(spec_of("exact", timeout_s=4.0), function=function, http=http)
        async with worker_at(folder, spec) as (router, child):
            asked = [("fast", "given:0.75"), ("fast", "404"), ("slow", "given:1"), ("slow", "404"), ("fast", "hang")]
            found = await asyncio.gather(
                *(ask(router, task_of(f"{n}.0", answer), encode(text), n) for n, (text, answer) in enumerate(asked))
            )
            assert [(result.verdict, result.reward) for result in found] == [
                ("given", 1.0),
                ("infrastructure", None),
                ("timeout", 0.0),
                ("infrastructure", None),
                ("infrastructure", None),
            ]
            assert found[0].why == "-0.5 × tokens:seen: given 1; 2 × http: given 0.75, as I see it"
            assert found[2].why.endswith("killed; 2 × http: given 1, as I see it")
            assert found[0].seconds < 4.0 <= found[4].seconds
            assert {asked.headers["Authorization"] for asked in books.asked} == {"Bearer s3cret"}
            assert {asked.form["response"] for asked in books.asked} == {"fast", "slow"}
            assert child.tail() == ""


async def test_a_reward_that_can_not_be_loaded_ends_it_with_the_reason(folder: Path, spec_of: SpecOf) -> None:
    async with worker_at(folder, spec_of("no_such_function")) as (_, child):
        assert await child.wait() == 1
        assert child.tail().startswith("reward worker rewards.0: 'misbehaving:no_such_function': ")


async def test_a_wrong_secret_ends_it_with_the_reason(folder: Path, spec_of: SpecOf) -> None:
    async with worker_at(folder, spec_of("exact"), secret="another") as (_, child):
        assert await child.wait() == 1
        assert "refused rewards.0" in child.tail()


async def test_killed_with_checks_running_it_leaves_nothing(
    folder: Path, tmp_path: Path, spec_of: SpecOf, task_of: TaskOf, encode: Encode
) -> None:
    async with worker_at(folder, spec_of("hangs_with_a_tree", timeout_s=600)) as (router, child):
        task = asyncio.create_task(ask(router, task_of(folder=str(tmp_path)), encode("x")))
        await until(lambda: len(os.listdir(tmp_path)) == 3, 2 * START_S)
        os.kill(child.pid, signal.SIGKILL)
        assert await child.wait() == -9
        assert alive(map(int, os.listdir(tmp_path))) == []
        task.cancel()
