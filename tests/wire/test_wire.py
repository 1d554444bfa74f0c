"""Router and dealers over real sockets, under both event loops."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from areal_async.errors import WireError
from areal_async.messages import Beat, Goodbye, Hello, Probe, ProbeResult, Welcome, WorkerError
from areal_async.wire import beats, dealer, frames, router
from areal_async.wire.dealer import Dealer, Request
from areal_async.wire.router import Router

from ..waiting import until

SECRET = "s3cret"
LONG_S = 60.0  # what is answered at once alone takes a while on a busy machine
Hellos = Callable[..., Hello]
Run = Callable[[Any], Any]


class Seen:
    """What the controller heard."""

    def __init__(self, refuse: str | None = None) -> None:
        self.joined: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.refuse = refuse

    def on_joined(self, hello: Hello) -> str | None:
        self.joined.append(f"{hello.name}/{hello.nonce}")
        return self.refuse

    def on_lost(self, name: str, why: str) -> None:
        self.lost.append((name, why))


def open_router(address: str, seen: Seen) -> Router:
    return Router(address, SECRET, seen.on_joined, seen.on_lost)


class Worker:
    """A worker in a thread, as a worker process has it in its main thread. `work` answers one request."""

    def __init__(self, address: str, hello: Hello, work: Callable[[Dealer, Request], None]) -> None:
        self.got: list[str] = []
        self.error: WireError | None = None
        self.said_goodbye = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, hello, work))

    def _run(self, address: str, hello: Hello, work: Callable[[Dealer, Request], None]) -> None:
        try:
            with Dealer(address, hello) as connection:
                while not self._stop.is_set():
                    request = connection.receive(0.02)
                    if request is None:
                        continue
                    if isinstance(request.message, Goodbye):
                        self.said_goodbye = True
                        return
                    self.got.append(request.id)
                    work(connection, request)
        except WireError as error:
            self.error = error

    async def __aenter__(self) -> "Worker":
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self.ended()

    async def ended(self) -> None:
        await until(lambda: not self._thread.is_alive())
        self._thread.join()

    def join(self) -> None:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()


def echo(connection: Dealer, request: Request) -> None:
    connection.reply(request, ProbeResult(id=request.id), request.arrays)


def keep(connection: Dealer, request: Request) -> None:
    """Never answers."""


def probe(id: str) -> Probe:
    return Probe(id=id)


async def heard(socket: Any, skip: int = 0) -> list[bytes]:
    """The next message that is no beat, without its first `skip` frames: beats come whenever they are due."""
    while True:
        await until(lambda: socket.poll(0))
        parts: list[bytes] = socket.recv_multipart()[skip:]
        if frames.open_envelope(parts)[1] != Beat():
            return parts


@asynccontextmanager
async def raw_peer(address: str, routing_id: str, *messages: Any) -> Any:
    """A DEALER without any manners; yields a function that receives one message."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt_string(zmq.ROUTING_ID, routing_id)
        socket.connect(address)
        for message in messages:
            socket.send_multipart(message if isinstance(message, list) else frames.pack(message))

        async def receive() -> Any:
            return frames.unpack(await heard(socket))[0]

        receive.socket = socket  # type: ignore[attr-defined]
        yield receive


# ------------------------------------------------------------------------------------------------------------- everyday


def test_asked_and_answered(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        seen = Seen()
        async with open_router(address, seen) as controller, Worker(address, hello(), echo) as worker:
            sent = [np.arange(4096, dtype=np.int32), np.linspace(0, 1, 50_000, dtype=np.float32), np.zeros(0, np.uint8)]
            message, got = await controller.request("rewards.0", probe("r0"), sent, id="r0", deadline_s=LONG_S)
            assert message == ProbeResult(id="r0")
            assert [a.tobytes() for a in got] == [a.tobytes() for a in sent]
            assert all(a.flags.aligned for a in got)
            answers = await asyncio.gather(
                *(controller.request("rewards.0", probe(str(i)), id=str(i), deadline_s=LONG_S) for i in range(200))
            )
            assert [answer[0].id for answer in answers] == [str(i) for i in range(200)]
            assert controller.outstanding("rewards.0") == 0
            assert worker.got == ["r0", *map(str, range(200))]
        assert seen.joined == ["rewards.0/a"]
        assert worker.error is None

    run(scene())


def test_works_over_tcp(run: Run, hello: Hellos) -> None:
    async def scene() -> None:
        async with AsyncExitStack() as stack:
            controller = await stack.enter_async_context(open_router("tcp://127.0.0.1:*", Seen()))
            await stack.enter_async_context(Worker(controller.address, hello(), echo))
            await controller.request("rewards.0", probe("r"), id="r", deadline_s=LONG_S)

    run(scene())


def test_the_end_of_the_controller_says_goodbye_to_all(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        seen = Seen()
        async with AsyncExitStack() as stack:
            workers = [Worker(address, hello(f"rewards.{i}"), echo) for i in range(3)]
            async with open_router(address, seen):
                for worker in workers:
                    await stack.enter_async_context(worker)
                await until(lambda: len(seen.joined) == 3)
            for worker in workers:
                await worker.ended()
            assert all(worker.said_goodbye for worker in workers)
        assert seen.lost == []

    run(scene())


def test_goodbyes_go_out_when_the_controller_is_cancelled(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        seen = Seen()

        async def controller() -> None:
            async with open_router(address, seen):
                await asyncio.sleep(60)

        task = asyncio.create_task(controller())
        async with Worker(address, hello(), echo) as worker:
            await until(lambda: seen.joined)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await worker.ended()
            assert worker.said_goodbye

    run(scene())


def test_a_worker_that_ignores_the_goodbye_gets_an_error(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        seen = Seen()

        def deaf() -> None:
            with Dealer(address, hello()) as connection:
                while connection.receive(5) is not None:
                    pass

        async with open_router(address, seen) as controller:
            worker = asyncio.create_task(asyncio.to_thread(deaf))
            await until(lambda: seen.joined)
            controller.goodbye("rewards.0")
            with pytest.raises(WireError, match="said goodbye"):
                await worker
        await asyncio.get_running_loop().shutdown_default_executor()
        assert seen.lost == []

    run(scene())


# ------------------------------------------------------------------------------------------------ who is let in, or not


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secret": "other"}, "not the secret of this run"),
        ({"secret": "sécret"}, "not the secret of this run"),
        ({"protocol": 999}, "speaks protocol 999"),
        ({"credits": 0}, "credits, not 0"),
    ],
)
def test_refused_with_a_reason(run: Run, address: str, hello: Hellos, changes: dict[str, Any], reason: str) -> None:
    async def scene() -> None:
        seen = Seen()
        async with open_router(address, seen), Worker(address, hello(**changes), echo) as worker:
            await worker.ended()
            assert worker.error is not None
            assert reason in str(worker.error)
            assert SECRET not in str(worker.error)
        assert seen.joined == []

    run(scene())


def test_the_controller_may_refuse(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        seen = Seen(refuse="rank 0 of 2 ranks, this run has 4")
        async with open_router(address, seen), Worker(address, hello(), echo) as worker:
            await worker.ended()
            assert "this run has 4" in str(worker.error)
        assert seen.lost == []

    run(scene())


def test_strangers_are_not_heard(run: Run, address: str) -> None:
    async def scene() -> None:
        seen = Seen()
        async with open_router(address, seen) as controller:
            asked = asyncio.create_task(controller.request("rewards.0", probe("r"), id="r", deadline_s=0.3))
            answer = frames.pack(ProbeResult(id="r"), id="r")
            async with raw_peer(address, "rewards.0/x", answer, [b"\xff"]) as receive:
                assert "doesn't know you" in (await receive()).why
                assert "malformed" in (await receive()).why
            with pytest.raises(WireError, match="has not said hello yet"):
                await asked
        assert seen.joined == []

    run(scene())


def test_what_the_callbacks_raise_ends_the_block(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        def broken(_: Hello) -> None:
            raise RuntimeError("a bug")

        with pytest.raises(ExceptionGroup) as caught:
            async with Router(address, SECRET, broken, lambda *_: None), raw_peer(address, "rewards.0/a", hello()):
                await asyncio.sleep(60)
        assert caught.group_contains(RuntimeError, match="a bug")

    run(scene())


def test_no_controller_at_all(address: str, hello: Hellos, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealer, "WELCOME_S", 0.1)
    with pytest.raises(WireError, match=r"no controller answered at ipc:.* within 0\.1 s"), Dealer(address, hello()):
        pass


def test_an_address_in_use_or_out_of_reach(run: Run, hello: Hellos) -> None:
    async def scene() -> None:
        with pytest.raises(WireError, match="can't listen at ipc:///nonexistent"):
            async with open_router("ipc:///nonexistent/folder/socket", Seen()):
                pass

    run(scene())


# -------------------------------------------------------------------------------------------------------------- credits


def test_credits_are_never_exceeded(run: Run, address: str, hello: Hellos) -> None:
    """Checked at the worker: with 3 credits no more than 3 requests are ever there, given up ones included."""

    async def scene() -> None:
        held: list[Request] = []
        most = 0

        def work(connection: Dealer, request: Request) -> None:
            nonlocal most
            held.append(request)
            # at first there is more than enough to do, so that all credits are used; then one too many may come
            while (more := connection.receive(LONG_S if not most and len(held) < 3 else 0.002)) is not None:
                held.append(more)
            most = max(most, len(held))
            while held:
                echo(connection, held.pop())

        async with open_router(address, Seen()) as controller, Worker(address, hello(credits=3), work):
            waits = (
                controller.request("rewards.0", probe(str(i)), id=str(i), deadline_s=0.01 if i % 5 == 4 else LONG_S)
                for i in range(60)
            )
            results = await asyncio.gather(*waits, return_exceptions=True)
        assert most == 3
        assert all(isinstance(result, tuple) for i, result in enumerate(results) if i % 5 != 4)

    run(scene())


def test_a_request_that_was_given_up_keeps_its_credit(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        go = threading.Event()

        def work(connection: Dealer, request: Request) -> None:
            go.wait(LONG_S)
            echo(connection, request)

        seen = Seen()
        async with open_router(address, seen) as controller, Worker(address, hello(credits=1), work) as worker:
            await until(lambda: seen.joined)
            with pytest.raises(
                WireError, match=r"rewards\.0 did not answer Probe slow within 0\.2 s: the worker has it"
            ):
                await controller.request("rewards.0", probe("slow"), id="slow", deadline_s=0.2)
            with pytest.raises(WireError, match=r"Probe next within 0\.1 s: it still waits for a credit \(1 of 1"):
                await controller.request("rewards.0", probe("next"), id="next", deadline_s=0.1)
            assert controller.outstanding("rewards.0") == 1
            again = asyncio.create_task(controller.request("rewards.0", probe("slow"), id="slow", deadline_s=LONG_S))
            await asyncio.sleep(0.05)
            go.set()
            assert (await again)[0] == ProbeResult(id="slow")
            assert worker.got == ["slow"]
            assert controller.outstanding("rewards.0") == 0

    run(scene())


def test_the_same_id_twice_at_a_time(run: Run, address: str) -> None:
    async def scene() -> None:
        async with open_router(address, Seen()) as controller:
            first = asyncio.create_task(controller.request("rewards.0", probe("r"), id="r", deadline_s=0.1))
            await asyncio.sleep(0)
            with pytest.raises(WireError, match="already asked for Probe r"):
                await controller.request("rewards.0", probe("r"), id="r", deadline_s=1)
            with pytest.raises(WireError, match="did not answer Probe r"):
                await first

    run(scene())


def test_an_error_of_the_worker_is_an_error_here(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        def work(connection: Dealer, request: Request) -> None:
            connection.reply(request, WorkerError(why="Traceback: no such file"))
            with pytest.raises(WireError, match="can't be answered"):
                connection.reply(request, WorkerError(why="twice"))

        async with open_router(address, Seen()) as controller, Worker(address, hello(), work):
            with pytest.raises(WireError, match=r"rewards\.0 failed at Probe r:\nTraceback: no such file"):
                await controller.request("rewards.0", probe("r"), id="r", deadline_s=LONG_S)

    run(scene())


def test_the_end_of_the_wire_ends_its_requests(run: Run, address: str) -> None:
    async def scene() -> None:
        async with open_router(address, Seen()) as controller:
            asked = asyncio.create_task(controller.request("rewards.0", probe("r"), id="r", deadline_s=60))
            await asyncio.sleep(0)
        with pytest.raises(WireError, match="closed by the controller"):
            await asked

    run(scene())


# ---------------------------------------------------------------------------------------------- deaths, and coming back


def test_the_next_incarnation_gets_what_was_unanswered(run: Run, address: str, hello: Hellos) -> None:
    """In its order, under its ids; each asker gets one answer; the old one is told, and its answer isn't heard."""

    async def scene() -> None:
        seen, late = Seen(), threading.Event()

        def slow(connection: Dealer, request: Request) -> None:
            late.wait(LONG_S)
            connection.reply(request, ProbeResult(id="from the old one"))

        async with open_router(address, seen) as controller, Worker(address, hello(), slow) as old:
            asked = [
                asyncio.create_task(controller.request("rewards.0", probe(f"r{i}"), id=f"r{i}", deadline_s=LONG_S))
                for i in range(5)
            ]
            await until(lambda: old.got == ["r0"])
            async with Worker(address, hello(nonce="b"), echo) as new:
                answers = await asyncio.gather(*asked)
                late.set()
                await old.ended()
            assert [answer[0].id for answer in answers] == [f"r{i}" for i in range(5)]
            assert new.got == [f"r{i}" for i in range(5)]
            assert "replaced" in str(old.error)
            assert seen.joined == ["rewards.0/a", "rewards.0/b"]
            assert [name for name, why in seen.lost if "replaced" in why] == ["rewards.0"]
            assert controller.outstanding("rewards.0") == 0

    run(scene())


@pytest.mark.slow
def test_a_killed_worker_process_and_the_next_one(run: Run, address: str, hello: Hellos) -> None:
    """kill -9 in the middle of a request: the next process gets it, and its asker one answer."""
    code = """
import os, signal, sys
import msgspec
from areal_async.messages import Goodbye, Hello, ProbeResult
from areal_async.wire.dealer import Dealer
address, hello, dies = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Hello), sys.argv[3] == "dies"
with Dealer(address, hello) as dealer:
    while not isinstance((request := dealer.receive(60)).message, Goodbye):
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        dealer.reply(request, ProbeResult(id=request.id), request.arrays)
"""

    async def scene() -> None:
        async def start(nonce: str, fate: str) -> asyncio.subprocess.Process:
            said = msgspec.json.encode(hello(nonce=nonce)).decode()
            return await asyncio.create_subprocess_exec(sys.executable, "-c", code, address, said, fate)

        seen = Seen()
        async with open_router(address, seen) as controller:
            first = await start("a", "dies")
            array = np.arange(10)
            asked = asyncio.create_task(controller.request("rewards.0", probe("r"), [array], id="r", deadline_s=LONG_S))
            assert await first.wait() == -9
            second = await start("b", "lives")
            message, arrays = await asked
            assert (message, arrays[0].tolist()) == (ProbeResult(id="r"), list(range(10)))
        assert await second.wait() == 0
        assert seen.joined == ["rewards.0/a", "rewards.0/b"]

    run(scene())


def test_requests_wait_for_a_worker_that_comes_later(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        async with open_router(address, Seen()) as controller:
            asked = asyncio.create_task(controller.request("rewards.0", probe("r"), id="r", deadline_s=LONG_S))
            await asyncio.sleep(0.05)
            async with Worker(address, hello(), echo):
                await asked

    run(scene())


@pytest.mark.usefixtures("fast_beats")
def test_a_dead_worker_is_noticed(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        seen = Seen()
        async with open_router(address, seen) as controller:
            async with raw_peer(address, "rewards.0/a", hello()) as receive:
                assert await receive() == Welcome()
                began = time.monotonic()
                await until(lambda: seen.lost)
                assert time.monotonic() - began > 0.3
                assert seen.lost[0][0] == "rewards.0"
                assert "nothing was heard for 0.45 s" in seen.lost[0][1]
            with pytest.raises(WireError, match=r"isn't there .* dead or stands still"):
                await controller.request("rewards.0", probe("r"), id="r", deadline_s=0.05)

    run(scene())


@pytest.mark.usefixtures("fast_beats")
@pytest.mark.slow
def test_a_worker_that_computes_for_long_lives(
    run: Run, address: str, hello: Hellos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "LOST_AFTER_S", 0.8)  # a thread of a busy machine is silent for 0.4 s at times

    async def scene() -> None:
        seen = Seen()

        def work(connection: Dealer, request: Request) -> None:
            time.sleep(2.0)  # more than twice LOST_AFTER_S
            echo(connection, request)

        async with open_router(address, seen) as controller, Worker(address, hello(), work):
            await controller.request("rewards.0", probe("r"), id="r", deadline_s=LONG_S)
        assert seen.lost == []

    run(scene())


@pytest.mark.usefixtures("fast_beats")
def test_a_loop_that_stood_still_takes_nobody_for_dead(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        seen = Seen()
        async with open_router(address, seen), Worker(address, hello(), echo):
            await until(lambda: seen.joined)
            time.sleep(0.35)  # noqa: ASYNC251  (on purpose, not long enough for the worker to give us up)
            await asyncio.sleep(0.2)
            assert seen.lost == []

    run(scene())


@pytest.mark.usefixtures("fast_beats")
@pytest.mark.slow
def test_a_controller_that_falls_silent_is_given_up(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        seen = Seen()
        async with open_router(address, seen), Worker(address, hello(), echo) as worker:
            await until(lambda: seen.joined)
            worker.join()  # the loop stands still meanwhile
            assert "nothing was heard of it for" in str(worker.error)

    run(scene())


def test_a_controller_that_died_is_given_up(
    run: Run, address: str, hello: Hellos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with kill -9: the socket breaks without a goodbye."""
    monkeypatch.setattr(dealer, "RECONNECT_S", 0.2)
    monkeypatch.setattr(beats, "BEAT_S", 0.05)

    async def scene() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            async with Worker(address, hello(), echo) as worker:
                await until(lambda: socket.poll(0))
                socket.send_multipart([socket.recv_multipart()[0], *frames.pack(Welcome())])
                await until(lambda: socket.poll(0))  # its first beat: it has been welcomed
                socket.close(linger=0)
                await worker.ended()
                assert "the connection broke" in str(worker.error)

    run(scene())


def test_a_repeated_id_is_answered_from_memory(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            async with Worker(address, hello(), echo) as worker:
                await until(lambda: socket.poll(0))
                name = socket.recv_multipart()[0]
                socket.send_multipart([name, *frames.pack(Welcome())])
                request = frames.pack(probe("r"), [np.arange(5)], id="r")
                for _ in range(3):
                    socket.send_multipart([name, *request])
                    id, message, arrays = frames.open_envelope(await heard(socket, skip=1))
                    assert (id, message, arrays[0].tolist()) == ("r", ProbeResult(id="r"), [0, 1, 2, 3, 4])
                assert worker.got == ["r"]

    run(scene())


def test_a_broken_connection_heals(run: Run, address: str, hello: Hellos, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same incarnation connects again: what it had is sent again, worked on once, answered once; nobody is lost."""

    async def scene() -> None:
        seen = Seen()
        async with open_router(address, seen) as controller:
            routing_id = "rewards.0/a"
            async with raw_peer(address, routing_id, hello()) as receive:
                assert await receive() == Welcome()
                asked = asyncio.create_task(controller.request("rewards.0", probe("r"), id="r", deadline_s=LONG_S))
                assert await receive() == probe("r")
                async with raw_peer(address, routing_id, hello()) as receive_again:
                    assert await receive_again() == Welcome()
                    assert await receive_again() == probe("r")
                    receive_again.socket.send_multipart(frames.pack(ProbeResult(id="r"), id="r"))
                    await asked
        assert seen.joined == ["rewards.0/a"]
        assert seen.lost == []

    run(scene())


def test_who_breaks_the_protocol_is_lost(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> None:
        seen = Seen()
        async with open_router(address, seen), raw_peer(address, "rewards.0/a", hello(), [b"nonsense"]):
            await until(lambda: seen.lost)
        assert "broke the protocol" in seen.lost[0][1]

    run(scene())


def test_closing_is_quick_even_if_a_worker_is_stuck(run: Run, address: str, hello: Hellos) -> None:
    async def scene() -> float:
        seen = Seen()
        big = [np.zeros(50_000_000, np.uint8)]
        async with raw_peer(address, "rewards.0/a", hello()), open_router(address, seen) as controller:
            await until(lambda: seen.joined)
            with pytest.raises(WireError, match="did not answer"):  # the peer never receives
                await controller.request("rewards.0", probe("r"), big, id="r", deadline_s=0.1)
            began = time.monotonic()
        return time.monotonic() - began

    assert run(scene()) < 2 * router.LINGER_MS / 1000 + 10  # the peer would be stuck for ever
