"""What becomes of a server whose swap, health or restart fails: exactly one event tells it, and the right one."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pytest

from areal_async.config import Config
from areal_async.controller import servers as servers_module
from areal_async.controller.crew import Crew
from areal_async.controller.runfolder import RunFolder
from areal_async.controller.servers import Servers
from areal_async.errors import HandshakeError
from areal_async.launch.recipes import Recipes
from areal_async.messages import AnyEvent, Failed, Joined, Lost, Restart, Swap, Swapped
from areal_async.rollout import vllm_http
from areal_async.rollout.types import ModelIdentity, RequestFailed, Sampling, StreamBroken
from areal_async.testing.trainer import VOCAB_SIZE, logprobs_of
from areal_async.testing.vllm_server import Break, Fault, ScriptedServer, Stall, Status

from ..waiting import until

Make = Callable[..., Config]
GENERATE = "/inference/v1/generate"
IDENTITY = ModelIdentity(vocab_size=VOCAB_SIZE, context_tokens=512, dtype="float32")


class Bench:
    """One server by URL, and what is told of it. trainer_at: the version that the trainer is at."""

    def __init__(self, config: Config, folder: RunFolder, scripted: ScriptedServer, crew: Crew) -> None:
        self.scripted = scripted
        self.told: list[AnyEvent] = []
        self.trainer_at = 0
        self.wrong_by = 0.0
        self.probes = 0
        published = Path(scripted.uds).with_name("weights")
        published.touch()
        self.location = str(published)
        self.servers = Servers(
            config, Recipes(), crew, IDENTITY, folder,
            probe_prompts=lambda: [[1, 2], [3]], probe_trainer=self._probe,
            take=self.told.append, now=lambda: 0.0,
        )  # fmt: skip

    async def _probe(self, token_ids: npt.NDArray[np.int32], id: str) -> tuple[npt.NDArray[np.float32], int]:
        self.probes += 1
        return logprobs_of(token_ids, 9) + np.float32(self.wrong_by), self.trainer_at

    async def next(self, kind: type[AnyEvent]) -> AnyEvent:
        """The only event that is told next, and which is of this kind."""
        await until(lambda: self.told)
        await asyncio.sleep(0.03)  # a second one would be a mistake
        assert [type(event) for event in self.told] == [kind], self.told
        return self.told.pop()

    async def swap(self, version: int, kind: type[AnyEvent] = Swapped) -> AnyEvent:
        self.servers.swap(Swap(server="0", version=version, branch=0, location=self.location))
        return await self.next(kind)

    async def restart(self, kind: type[AnyEvent] = Joined) -> AnyEvent:
        self.servers.restart(Restart(peer="server", id="0", why="it was lost"))
        return await self.next(kind)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_http, "CONTROL_DEADLINE_S", 1.0)  # a call that goes well may meet a busy machine
    monkeypatch.setattr(servers_module, "FAILURE_PAUSE_S", 0.05)
    monkeypatch.setattr(servers_module, "WATCH_S", 0.2)
    monkeypatch.setattr(servers_module, "WATCH_AGAIN_S", 0.05)


@pytest.fixture
def uds() -> Iterator[str]:
    with TemporaryDirectory(prefix="aa-") as folder:
        yield str(Path(folder) / "s")


@pytest.fixture
def config(make_config: Make, uds: str) -> Config:
    return make_config(f"rollout.urls=['unix:{uds}']", "weights.swap_timeout_s=1", "server.start_timeout_s=2")


Opened = Callable[[], AbstractAsyncContextManager[Bench]]


@pytest.fixture
def opened(config: Config, uds: str, hurry: None) -> Opened:
    """A server that has joined and holds version 0, for an `async with`."""

    @asynccontextmanager
    async def open_bench() -> AsyncIterator[Bench]:
        folder = RunFolder.create(config, None)
        async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
            scripted = await stack.enter_async_context(ScriptedServer(uds, vocab_size=VOCAB_SIZE))
            crew = Crew(group)
            bench = Bench(config, folder, scripted, crew)
            await bench.servers.start(stack, "0")
            await bench.next(Joined)
            await bench.swap(0)
            try:
                yield bench
            finally:
                await crew.dismiss()
        folder.close()

    return open_bench


async def ask(bench: Bench, tokens: int = 40) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=tokens, stop_token_ids=(), seed=1)
    await bench.servers.clients["0"].generate([1], sampling, "mine", 30.0)


PATHS = {
    "pause": "/pause",
    "start": "/start_weight_update",
    "update": "/update_weights",
    "finish": "/finish_weight_update",
    "resume": "/resume",
}
FAULTS = [
    pytest.param(Status(500, "by script"), id="500"),
    pytest.param(Stall(), id="stall", marks=pytest.mark.slow),
    pytest.param(Break(), id="reset", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", PATHS)
async def test_a_swap_that_fails(opened: Opened, stage: str, fault: Fault) -> None:
    """Before the update began: resumed, and may be tried again. After: its answers break off, it is lost, and is not
    resumed before it was cleaned up by a restart."""
    async with opened() as bench:
        before = stage == "pause" or (stage == "start" and isinstance(fault, Status))
        bench.scripted.order(GENERATE, Stall(16))
        answer = asyncio.create_task(ask(bench))
        await until(lambda: bench.servers.clients["0"].tokens_so_far("mine") == 16)
        bench.scripted.order(PATHS[stage], fault)
        bench.scripted.calls.clear()
        event = await bench.swap(1, Failed if before else Lost)
        if before:
            assert isinstance(event, Failed)
            assert (event.of, event.id) == ("swap", "0")
            assert not bench.scripted.paused
            assert not answer.done()
            answer.cancel()
        else:
            assert isinstance(event, Lost)
            assert f"stage {stage!r}" in event.why
            assert bench.servers.fleet.find("0", 0) is None
            with pytest.raises(StreamBroken, match="after 16 tokens"):
                await answer
            assert "/resume" not in bench.scripted.calls or stage == "resume"
            await bench.restart()
            assert bench.scripted.calls.index("/abort_requests") < len(bench.scripted.calls) - 1
            assert not bench.scripted.paused
        await bench.swap(1)
        assert bench.scripted.label == "1"
        live = bench.servers.fleet.find("0", 1)
        assert live is not None
        assert live.version == 1
        await asyncio.gather(answer, return_exceptions=True)


@pytest.mark.slow
async def test_a_server_that_dies_in_its_swap_is_lost_and_nothing_else(opened: Opened) -> None:
    async with opened() as bench:
        bench.scripted.calls.clear()
        bench.scripted.order("/update_weights", Stall())
        bench.servers.swap(Swap(server="0", version=1, branch=0, location=bench.location))
        await until(lambda: "/update_weights" in bench.scripted.calls)
        await bench.scripted.__aexit__(None, None, None)
        await bench.next(Lost)


@pytest.mark.slow
async def test_a_server_by_url_that_goes_is_noticed_and_taken_back(opened: Opened) -> None:
    async with opened() as bench:
        await bench.scripted.__aexit__(None, None, None)
        event = await bench.next(Lost)
        assert isinstance(event, Lost)
        assert "can't be reached for /health" in event.why
        event = await bench.restart(Lost)
        assert isinstance(event, Lost)
        assert "could not be started again: server 0 (unix:" in event.why
        assert "has not been well for server.start_timeout_s" in event.why
        assert "rollout.urls" in event.why
        os.unlink(bench.scripted.uds)
        async with ScriptedServer(bench.scripted.uds, vocab_size=VOCAB_SIZE, paused=True) as again:
            await bench.restart()
            assert not again.paused
            assert bench.servers.fleet.find("0", 0) is None  # nothing is asked of it before it has weights
            bench.probes = 0
            await bench.swap(3)
            assert bench.probes == 2  # each life is compared with the trainer
            assert again.calls.count("/init_weight_transfer_engine") == 1
            await bench.servers._lives["0"].close()


@pytest.mark.slow
async def test_a_health_check_that_fails_once_is_no_death(opened: Opened) -> None:
    async with opened() as bench:
        bench.scripted.calls.clear()
        bench.scripted.order("/health", Status(500))
        bench.servers._lives["0"].live.suspected.set()
        await until(lambda: bench.scripted.calls.count("/health") >= 4)  # the one that failed, and looks after it
        assert not bench.told


async def test_a_server_that_cannot_be_used_after_its_restart_is_lost_with_the_reason(opened: Opened) -> None:
    async with opened() as bench:
        bench.scripted.backend = "nccl"
        event = await bench.restart(Lost)
        assert isinstance(event, Lost)
        assert "its weight transfer backend is 'nccl', the run uses 'areal_file'" in event.why


@pytest.mark.slow
async def test_the_first_start_that_fails_is_an_error(config: Config, uds: str, hurry: None) -> None:
    folder = RunFolder.create(config, None)
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        scripted = await stack.enter_async_context(ScriptedServer(uds, vocab_size=VOCAB_SIZE, dtype="bfloat16"))
        bench = Bench(config, folder, scripted, Crew(group))
        with pytest.raises(HandshakeError, match="computes in bfloat16"):
            await bench.servers.start(stack, "0")
        await scripted.__aexit__(None, None, None)
        with pytest.raises(HandshakeError, match="has not been well for"):
            await bench.servers.start(stack, "0")
    folder.close()


@pytest.mark.parametrize(("trainer_at", "wrong_by", "good"), [(2, 2e-4, False), (3, 2e-4, True), (3, 0.6, False)])
async def test_the_numbers_of_each_life_are_compared(
    opened: Opened, trainer_at: int, wrong_by: float, good: bool
) -> None:
    """Closely where the trainer holds the same version; for the coarse where it has gone on."""
    async with opened() as bench:
        await bench.restart()
        bench.trainer_at, bench.wrong_by = trainer_at, wrong_by
        if good:
            await bench.swap(2)
            return
        event = await bench.swap(2, Failed)
        assert isinstance(event, Failed)
        assert (event.of, event.id) == ("server", "0")
        assert "its log-probabilities differ from the trainer's by" in event.why
        assert bench.servers.fleet.find("0", 0) is None
        with pytest.raises(RequestFailed):
            await ask(bench)


async def test_weights_of_another_model_are_no_swap_to_try_again(opened: Opened) -> None:
    async with opened() as bench:
        await bench.restart()
        reason = "/dev/shm/w: is missing: model.norm.weight. Start server and trainer from the same model, …"
        bench.scripted.order("/init_weight_transfer_engine", Status(500, reason))
        event = await bench.swap(1, Failed)
        assert isinstance(event, Failed)
        assert event.of == "server"
        assert "model.norm.weight" in event.why


async def test_a_file_that_cannot_be_read_is_a_swap_to_try_again(opened: Opened) -> None:
    async with opened() as bench:
        await bench.restart()
        bench.scripted.order(
            "/init_weight_transfer_engine", Status(500, "/dev/shm/w: can't be read as a safetensors file")
        )
        event = await bench.swap(1, Failed)
        assert isinstance(event, Failed)
        assert event.of == "swap"
        await bench.swap(1)
