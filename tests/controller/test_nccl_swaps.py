"""Swaps over NCCL: scripted servers that speak vLLM's routes, rank 0 on the real wire, and a communicator that is a
dictionary. Everything but the transfer itself."""

import asyncio
import os
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from aiohttp import web
from torch import Tensor

from areal_async import config_machines
from areal_async.config import Config
from areal_async.controller import Controller, RunResult, nccl_swaps
from areal_async.controller.nccl_swaps import NcclSwaps
from areal_async.engines.deepspeed.nccl import Transfer
from areal_async.errors import WireError
from areal_async.log.reader import read_records
from areal_async.messages import (
    PROTOCOL,
    AnyWire,
    Failed,
    Goodbye,
    Hello,
    Joined,
    Lost,
    ParameterInfo,
    Probe,
    ProbeResult,
    Publish,
    Published,
    Restart,
    SendWeights,
    Swapped,
)
from areal_async.rollout.types import SwapFailed, SwapTimes
from areal_async.rollout.vllm_http import VllmClient
from areal_async.testing.recipes import scripted
from areal_async.testing.vllm_server import Order, ScriptedServer, Slow, Stall, Status
from areal_async.wire.dealer import Dealer, Request
from areal_async.wire.router import Router

from ..waiting import PATIENCE_S, until

MANIFEST = (ParameterInfo("wte", (4, 2), "BF16"), ParameterInfo("norm", (2,), "F32"))
CPU = torch.device("cpu")
LOOK_S = 0.002
FORMING = ["/get_world_size", "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
SWAPPING = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


@dataclass
class Room:
    """One communicator. ranks: who is there. receiving: workers that wait for a broadcast."""

    world: int
    ranks: set[int] = field(default_factory=set)
    receiving: int = 0
    sent: list[tuple[str, Tensor]] | None = None
    aborted: bool = False


class Fabric:
    """What NCCL does, as far as it can be seen: nobody goes on until all are there, for ever."""

    def __init__(self) -> None:
        self.rooms: dict[int, Room] = {}
        self.over = False

    def room(self, port: int, world: int) -> Room:
        room = self.rooms.get(port)
        if room is None or len(room.ranks) == room.world:  # a port is used again after a while
            room = self.rooms[port] = Room(world)
        assert room.world == world
        return room


class RankZero:
    """The endpoint that is put in the place of NCCL's."""

    def __init__(self, fabric: Fabric, room: Room) -> None:
        self._fabric = fabric
        self._room = room

    def broadcast(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        content = list(tensors)
        while self._room.receiving < self._room.world - 1 and not self._room.aborted:
            assert not self._fabric.over
            time.sleep(LOOK_S)
        if not self._room.aborted:
            self._room.sent = content

    def abort(self) -> None:
        self._room.aborted = True


class NcclServer(ScriptedServer):
    """Loads what comes over the fabric. workers: GPUs."""

    def prepare(self, fabric: Fabric, workers: int = 1) -> None:
        self.backend = "nccl"
        self.fabric = fabric
        self.workers = workers
        self.room: Room | None = None
        self.bodies: list[dict[str, Any]] = []
        self.loaded: list[tuple[str, Tensor]] = []

    def _gets(self) -> Any:
        return super()._gets() | {"/get_world_size": self._world_size}

    def _posts(self) -> Any:
        return super()._posts() | {
            "/init_weight_transfer_engine": self._init,
            "/shutdown_weight_transfer_engine": self._shutdown,
        }

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": self.workers})

    async def _shutdown(self, request: web.Request) -> web.Response:
        self.room = None
        return web.json_response({})

    async def _init(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        self.bodies.append(info)
        room = self.fabric.room(info["master_port"], info["world_size"])
        room.ranks |= {info["rank_offset"] + worker for worker in range(self.workers)}
        while len(room.ranks) < room.world:  # noqa: ASYNC110 (another thread's doing)
            await asyncio.sleep(LOOK_S)
        self.room = room
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        self.bodies.append(info)
        if not self._updating or self.room is None:
            return web.json_response({"error": "not initialized"}, status=500)
        room = self.room
        room.receiving += self.workers
        while room.sent is None:  # noqa: ASYNC110 (another thread's doing)
            await asyncio.sleep(LOOK_S)
        self.loaded = room.sent
        room.receiving -= self.workers
        if room.receiving == 0:
            room.sent = None
        told = list(zip(info["names"], info["dtype_names"], map(tuple, info["shapes"]), strict=True))
        assert told == [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self.loaded]
        return web.json_response({})


class World:
    """Servers, rank 0 in a thread on the real wire, and the swaps."""

    def __init__(self, stack: AsyncExitStack, folder: str, router: Router) -> None:
        self._stack = stack
        self._folder = folder
        self._router = router
        self.fabric = Fabric()
        self.servers: dict[str, NcclServer] = {}
        self.clients: dict[str, VllmClient] = {}
        self.busy = threading.Event()  # rank 0's main thread stands still, as in a training step, until it is set
        self.busy.set()
        self.transfer = Transfer(CPU, MANIFEST, self._open)
        self.life: int | None = 0
        self.swaps = NcclSwaps(
            "127.0.0.1:29600", 30.0, self._ask,
            parameters=lambda: MANIFEST, serving=lambda: set(self.servers), rank0=lambda: self.life,
        )  # fmt: skip

    def _open(self, join: Any, device: torch.device) -> RankZero:
        room = self.fabric.room(join.port, join.world)
        room.ranks.add(0)
        while len(room.ranks) < room.world:
            if self.fabric.over:
                raise WireError("the test is over")
            time.sleep(LOOK_S)
        return RankZero(self.fabric, room)

    async def _ask(self, message: AnyWire, id: str, deadline_s: float) -> AnyWire:
        answer, _ = await self._router.request("trainer.0", message, id=id, deadline_s=deadline_s)
        return answer

    async def server(self, name: str, workers: int = 1) -> NcclServer:
        """A server, or the next life of one."""
        path = f"{self._folder}/{name}-{uuid.uuid4().hex[:4]}"
        server = NcclServer(path)
        server.prepare(self.fabric, workers)
        await self._stack.enter_async_context(server)
        self.clients[name] = await self._stack.enter_async_context(VllmClient(name, f"unix:{path}"))
        self.servers[name] = server
        return server

    async def publish(self, version: int) -> None:
        message = Publish(version=version, branch=0)
        answer, _ = await self._router.request("trainer.0", message, id=f"p{version}", deadline_s=30)
        assert isinstance(answer, Published)
        assert answer.location == f"nccl:{version}"

    async def swap(self, version: int, *names: str) -> list[SwapTimes | SwapFailed]:
        """All (or these) servers' swaps, in one wave; what each came to."""
        asked = names or tuple(self.servers)
        outcomes = await asyncio.gather(
            *(self.swaps.swap(self.clients[name], version) for name in asked), return_exceptions=True
        )
        assert all(isinstance(outcome, SwapTimes | SwapFailed) for outcome in outcomes), outcomes
        return outcomes  # type: ignore[return-value]

    def rank(self, address: str) -> None:
        """Rank 0: its main thread, as `engines.deepspeed.rank.serve`."""
        hello = Hello(
            protocol=PROTOCOL, secret="s", worker="trainer", name="trainer.0", nonce="a", credits=6, parameters=MANIFEST
        )
        with Dealer(address, hello, aside=self.transfer.take) as connection:
            while True:
                request = connection.receive(1.0)
                if request is None:
                    continue
                if isinstance(request.message, Goodbye):
                    return
                self._do(connection, request)

    def _do(self, connection: Dealer, request: Request) -> None:
        match request.message:
            case Publish(version=version):
                tensors = {"wte": torch.full((4, 2), float(version)), "norm": torch.full((2,), float(version))}
                location, nbytes = self.transfer.publish(version, tensors.items())
                done = Published(at=0, version=version, branch=0, location=location, nbytes=nbytes)
                connection.reply(request, done)
            case Probe(id=id):
                assert self.busy.wait(60)
                connection.reply(request, ProbeResult(id=id))


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(nccl_swaps, "GRACE_S", 0.2)
    monkeypatch.setattr(nccl_swaps, "GATHER_S", 0.3)
    async with opened() as world:
        yield world


@asynccontextmanager
async def opened() -> AsyncIterator[World]:
    here = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="aa-") as folder:
        address = f"ipc://{folder}/w"
        async with Router(address, "s", lambda _: here.set(), lambda *_: None) as router, AsyncExitStack() as stack:
            world = World(stack, folder, router)
            thread = threading.Thread(target=world.rank, args=(address,))
            thread.start()
            try:
                await here.wait()
                yield world
            finally:
                world.fabric.over = True
                world.busy.set()
                router.goodbye("trainer.0")
                await asyncio.to_thread(thread.join, 30)


def usable(outcomes: list[SwapTimes | SwapFailed]) -> list[bool]:
    return [outcome.server_usable for outcome in outcomes if isinstance(outcome, SwapFailed)]


async def test_two_servers_swap_together_and_again(world: World) -> None:
    one, two = await world.server("0", workers=2), await world.server("1")
    await world.publish(1)
    outcomes = await world.swap(1)
    assert [isinstance(outcome, SwapTimes) for outcome in outcomes] == [True, True]
    assert one.calls == two.calls == FORMING + SWAPPING
    assert [server.bodies[0] for server in (one, two)] == [
        {
            "master_address": "127.0.0.1", "master_port": 29600, "rank_offset": offset, "world_size": 4,
            "packed": True, "packed_buffer_size_bytes": 1 << 30, "packed_num_buffers": 2,
        }
        for offset in (1, 3)
    ]  # fmt: skip
    assert one.bodies[1] == two.bodies[1] == {
        "names": ["wte", "norm"], "dtype_names": ["bfloat16", "float32"], "shapes": [[4, 2], [2]],
    }  # fmt: skip
    assert (one.label, two.label, one.paused, two.paused) == ("1", "1", False, False)
    assert all(bool((tensor == 1).all()) for server in (one, two) for _, tensor in server.loaded)
    one.calls.clear()
    await world.publish(2)
    await world.swap(2)
    assert one.calls == SWAPPING, "the communicator is used again"
    assert all(bool((tensor == 2).all()) for server in (one, two) for _, tensor in server.loaded)


async def test_a_swap_goes_on_while_rank_0_trains(world: World) -> None:
    await world.server("0")
    await world.publish(1)
    world.busy.clear()
    step = asyncio.create_task(world._router.request("trainer.0", Probe(id="step"), id="step", deadline_s=60))
    assert isinstance((await world.swap(1))[0], SwapTimes)
    assert not step.done()
    world.busy.set()
    await step


async def test_a_wave_waits_for_those_that_ask_a_moment_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_swaps, "GATHER_S", 60.0)  # all have asked long before
    one, two = await world.server("0"), await world.server("1")
    await world.publish(1)
    first = asyncio.create_task(world.swap(1, "1"))
    await asyncio.sleep(0.1)
    await asyncio.gather(first, world.swap(1, "0"))
    assert [server.bodies[0]["world_size"] for server in (one, two)] == [3, 3]
    assert [server.bodies[0]["rank_offset"] for server in (one, two)] == [1, 2], "in the order of the names"


async def test_a_trainer_that_was_started_again_is_in_no_communicator(world: World) -> None:
    """While it is away nothing is begun at the servers; when it is back, they all form a new one."""
    servers = [await world.server(name) for name in ("0", "1")]
    await world.publish(1)
    assert all(isinstance(outcome, SwapTimes) for outcome in await world.swap(1))
    world.life = None
    for server in servers:
        server.calls.clear()
    for outcome in await world.swap(1):
        assert isinstance(outcome, SwapFailed)
        assert outcome.server_usable
        assert "trainer rank 0 is not there" in str(outcome)
    assert not any(server.calls for server in servers)
    world.life = 2
    await world.publish(2)
    assert all(isinstance(outcome, SwapTimes) for outcome in await world.swap(2))
    for server in servers:
        assert "/init_weight_transfer_engine" in server.calls


@pytest.mark.slow
async def test_without_one_that_does_not_ask_and_with_it_again(world: World) -> None:
    one, two = await world.server("0"), await world.server("1")
    await world.publish(1)
    began = time.monotonic()
    await world.swap(1, "0")
    assert time.monotonic() - began >= nccl_swaps.GATHER_S
    assert (one.label, two.calls) == ("1", [])
    await world.publish(2)
    await world.swap(2)
    assert (one.label, two.label) == ("2", "2")
    assert one.calls == (FORMING + SWAPPING) * 2, "others are in it now: a new communicator"
    assert [body["master_port"] for body in one.bodies if "master_port" in body] == [29600, 29601]


async def test_one_that_fails_in_the_middle_takes_the_wave_with_it_and_the_next_goes_well(world: World) -> None:
    one, two = await world.server("0"), await world.server("1")
    await world.publish(1)
    two.order("/update_weights", Status(500, "lost a GPU"))
    outcomes = await world.swap(1)
    assert usable(outcomes) == [False, False]
    assert "lost a GPU It must be restarted." in str(outcomes[1])
    assert "it was given up 0.2 s after another one of its wave had failed: server 1 answered 500" in str(outcomes[0])
    assert (one.paused, two.paused) == (True, True), "never resumed after the update began"
    assert "/finish_weight_update" not in one.calls + two.calls
    assert world.fabric.rooms[29600].aborted, "rank 0 gave the hanging broadcast up"
    one, two = await world.server("0"), await world.server("1")  # restarted
    outcomes = await world.swap(1)
    assert usable(outcomes) == []
    assert (one.label, two.label) == ("1", "1")
    assert one.bodies[0]["master_port"] == 29601


@pytest.mark.slow
async def test_one_that_says_nothing_is_given_up_at_the_deadline(world: World) -> None:
    world.swaps._timeout_s = 1.0
    one, _ = await world.server("0"), await world.server("1")
    await world.publish(1)
    one.order("/update_weights", Stall(0))
    began = time.monotonic()
    outcomes = await world.swap(1)
    assert 1.0 <= time.monotonic() - began < 20
    assert usable(outcomes) == [False, False]
    assert any("did not answer" in str(outcome) for outcome in outcomes)


async def test_what_rank_0_cant_send_is_named(world: World) -> None:
    await world.server("0")
    outcomes = await world.swap(9)
    assert usable(outcomes) == [False]
    assert "version 9 can't be sent: it isn't published here (but: none)" in str(outcomes[0])


async def test_an_unclear_broadcast_means_a_new_communicator(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers have said that they have everything, so they go on; what rank 0 thinks of it isn't known."""
    one = await world.server("0")
    await world.publish(1)
    ask = world.swaps._ask

    async def unheard(message: AnyWire, id: str, deadline_s: float) -> object:
        answer = await ask(message, id, deadline_s)
        if isinstance(message, SendWeights):
            raise WireError("trainer.0 did not answer")
        return answer

    monkeypatch.setattr(world.swaps, "_ask", unheard)
    assert usable(await world.swap(1)) == []
    assert (one.label, one.paused) == ("1", False)
    monkeypatch.undo()
    assert usable(await world.swap(1)) == []
    assert one.calls == (FORMING + SWAPPING) * 2


async def test_one_that_cant_join_leaves_the_others_to_be_restarted(world: World) -> None:
    """Who waits for it in the rendezvous can't be reached any more; it itself goes on."""
    _, two = await world.server("0"), await world.server("1")
    await world.publish(1)
    two.order("/init_weight_transfer_engine", Status(500, "no NCCL"))
    outcomes = await world.swap(1)
    assert usable(outcomes) == [False, True]
    assert "no NCCL It goes on under its old weights." in str(outcomes[1])
    assert "/pause" not in two.calls


async def test_one_that_is_gone_before_it_joins(world: World) -> None:
    one, two = await world.server("0"), await world.server("1")
    await world.publish(1)
    os.unlink(two.uds)
    outcomes = await world.swap(1)
    assert usable(outcomes) == [True, False]
    assert one.calls == ["/get_world_size"]


async def test_one_that_cant_pause_has_all_go_on(world: World) -> None:
    one, two = await world.server("0"), await world.server("1")
    await world.publish(1)
    one.order("/pause", Status(500, "busy"))
    outcomes = await world.swap(1)
    assert usable(outcomes) == [True, True]
    assert (one.paused, two.paused) == (False, False)
    assert "/start_weight_update" not in one.calls + two.calls
    assert usable(await world.swap(1)) == []
    assert two.calls.count("/init_weight_transfer_engine") == 1, "nobody hangs in the communicator: it is used again"


async def test_one_that_cant_start_is_not_waited_for(world: World) -> None:
    one, two = await world.server("0"), await world.server("1")
    await world.publish(1)
    one.order("/start_weight_update", Status(500, "no"))
    outcomes = await world.swap(1)
    assert usable(outcomes) == [False, False]
    assert "/update_weights" not in one.calls + two.calls
    assert (one.paused, two.paused) == (True, True)


async def test_one_that_cant_finish_is_lost_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_swaps, "GRACE_S", 60.0)  # nobody waits for it
    one, two = await world.server("0"), await world.server("1")
    await world.publish(1)
    one.order("/finish_weight_update", Status(500, "no memory"))
    outcomes = await world.swap(1)
    assert usable(outcomes) == [False]
    assert isinstance(outcomes[1], SwapTimes)
    assert (one.paused, two.paused, two.label) == (True, False, "1")


@pytest.mark.slow
async def test_versions_that_differ_are_waves_of_their_own(world: World) -> None:
    one, two = await world.server("0"), await world.server("1")
    await world.publish(1)
    await world.publish(2)
    outcomes = await asyncio.gather(*(world.swaps.swap(world.clients[n], v) for n, v in (("0", 1), ("1", 2))))
    assert len(outcomes) == 2
    assert (one.label, two.label) == ("1", "2")
    assert all(bool((tensor == 2).all()) for _, tensor in two.loaded)


async def test_a_run_that_ends_in_the_middle_leaves_nothing(world: World) -> None:
    one, two = await world.server("0"), await world.server("1")
    await world.publish(1)
    one.order("/update_weights", Slow(600))
    tasks = [asyncio.create_task(world.swaps.swap(world.clients[name], 1)) for name in ("0", "1")]
    await until(lambda: "/update_weights" in one.calls and "/update_weights" in two.calls)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)


# ------------------------------------------------------------------------------------------------------- in whole runs


def nccl_run(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Config:
    monkeypatch.setattr(config_machines, "gpus_here", lambda: ("0", "1", "2"))
    return make_config(
        "rollout.servers=2", "weights.wave=2", "weights.transport=nccl", "weights.nccl_address=127.0.0.1:29600",
        "server.max_restarts=2", *overrides,
    )  # fmt: skip


def happened(result: RunResult, *kinds: type) -> list[Any]:
    return [record.message for record in read_records(result.folder / "log") if isinstance(record.message, kinds)]


@pytest.mark.slow
async def test_a_run_over_nccl(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    config = nccl_run(make_config, monkeypatch, "train.steps=1000")
    async with Controller(config, recipes=scripted()) as run:
        async with asyncio.timeout(PATIENCE_S):
            async for _ in run.steps():
                live = run._parts._servers.fleet._live.values()
                if len(live) == 2 and all(server.version >= 2 for server in live):
                    run.stop()
        result = run.result()
    assert {event.location for event in happened(result, Published)} >= {"nccl:0", "nccl:1"}
    assert {event.server for event in happened(result, Swapped) if event.version >= 1} == {"0", "1"}
    assert happened(result, Failed, Lost) == []


@pytest.mark.slow
async def test_a_run_in_which_a_server_fails_in_the_middle_of_a_swap(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost, started again, and swaps again together with the other; the run goes on."""
    order = Order(path="/update_weights", fault=Status(500, "lost a GPU"), skip=1)
    config = nccl_run(make_config, monkeypatch, "train.steps=1000")
    async with Controller(config, recipes=scripted(orders={"server-1": [[order]]})) as run:
        first = None
        async with asyncio.timeout(PATIENCE_S):
            async for _ in run.steps():
                now = run._parts._servers._lives.get("1")
                first = first or now
                if now is not None and now is not first and now.probed:
                    run.stop()
        result = run.result()
    assert [(event.peer, event.id) for event in happened(result, Lost)] == [("server", "1")]
    assert "lost a GPU" in happened(result, Lost)[0].why
    assert [command.id for command in happened(result, Restart)] == ["1"]
    assert len([event for event in happened(result, Joined) if event.id == "1"]) == 2
    assert "1" in {event.server for event in happened(result, Swapped)}
