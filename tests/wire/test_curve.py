"""Workers on other hosts: encrypted, and only with this run's key and secret."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from areal_async.errors import WireError
from areal_async.messages import Hello, Probe, ProbeResult, SendWeights
from areal_async.wire import beats, curve, dealer, frames
from areal_async.wire.dealer import Dealer, Request
from areal_async.wire.router import Router

from .test_wire import LONG_S, SECRET, Seen, Worker, echo, probe, until

Run = Callable[[Any], Any]
Hellos = Callable[..., Hello]
ANY_PORT = "tcp://127.0.0.1:0"


def opened(address: str, seen: Seen) -> Router:
    return Router(address, SECRET, seen.on_joined, seen.on_lost, listen=ANY_PORT)


class Remote(Worker):
    """A worker that knows the public key."""

    def __init__(self, router: Router, hello: Hello, key: str | None = None) -> None:
        self._key = router.public_key if key is None else key
        assert router.listening is not None
        super().__init__(router.listening, hello, echo)

    def _run(self, address: str, hello: Hello, work: Callable[[Dealer, Request], None]) -> None:
        try:
            with Dealer(address, hello, server_key=self._key) as connection:
                while not self._stop.is_set():
                    request = connection.receive(0.02)
                    if request is not None and isinstance(request.message, Probe):
                        work(connection, request)
        except WireError as error:
            self.error = error


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch, fast_beats: None) -> None:
    monkeypatch.setattr(dealer, "RECONNECT_S", 0.3)
    monkeypatch.setattr(beats, "LOST_AFTER_S", 15.0)


def test_remote_and_local_workers_at_one_router(run: Run, address: str, hello: Hellos) -> None:
    async def scenario() -> None:
        seen = Seen()
        async with opened(address, seen) as router:
            assert not router.listening.endswith(":0")
            assert len(router.public_key) == 40
            remote = Remote(router, hello("trainer.0"))
            async with remote, Worker(router.address, hello("rewards.0"), echo):
                for name in ("trainer.0", "rewards.0"):
                    answer, _ = await router.request(name, probe("p"), id="p", deadline_s=LONG_S)
                    assert answer == ProbeResult(id="p")
        assert not seen.lost

    run(scenario())


def test_another_runs_key_is_no_welcome(run: Run, address: str, hello: Hellos) -> None:
    async def scenario() -> None:
        seen = Seen()
        async with opened(address, seen) as router:
            async with Remote(router, hello("trainer.0"), curve.new_keys().public) as remote:
                await remote.ended()
            assert "the public key isn't that of this controller" in str(remote.error)
        assert not seen.joined

    run(scenario())


def test_the_key_alone_is_not_enough(run: Run, address: str, hello: Hellos) -> None:
    async def scenario() -> None:
        seen = Seen()
        async with opened(address, seen) as router:
            async with Remote(router, hello("trainer.0", secret="guessed")) as remote:
                await remote.ended()
            assert "has not the secret of this run" in str(remote.error)
            assert "guessed" not in str(remote.error)
        assert not seen.joined

    run(scenario())


def test_a_plain_client_hears_nothing(run: Run, address: str, hello: Hellos) -> None:
    """Not even what it is refused for; with the right secret in clear text it isn't heard either."""

    async def scenario() -> None:
        seen = Seen()
        async with opened(address, seen) as router:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt_string(zmq.ROUTING_ID, "trainer.0/a")
                socket.connect(router.listening)
                socket.send_multipart(frames.pack(hello("trainer.0")))
                began = time.monotonic()
                await until(lambda: time.monotonic() - began > 0.5)
                assert not socket.poll(0)
        assert not seen.joined

    run(scenario())


@pytest.mark.slow
def test_nobody_listens(hello: Hellos, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealer, "WELCOME_S", 2.0)
    with (
        pytest.raises(WireError, match="nobody listens there"),
        Dealer("tcp://127.0.0.1:9", hello("trainer.0"), server_key=curve.new_keys().public),
    ):
        pass


def test_a_key_that_is_none(hello: Hellos) -> None:
    with (
        pytest.raises(WireError, match="public key is no key"),
        Dealer("tcp://127.0.0.1:9", hello("trainer.0"), server_key="short"),
    ):
        pass


@pytest.mark.parametrize("listen", ["tcp://no-such-host:1", "tcp://192.0.2.1:1"])
def test_an_address_that_isnt_ours(run: Run, address: str, listen: str) -> None:
    async def scenario() -> None:
        with pytest.raises(WireError, match=rf"can't listen at {listen}: .*; name an address of this host"):
            async with Router(address, SECRET, Seen().on_joined, Seen().on_lost, listen):
                pass

    run(scenario())


def test_the_secret_key_is_not_shown() -> None:
    keys = curve.new_keys()
    assert keys.secret not in repr(keys)
    assert keys.public != curve.new_keys().public


def test_a_zeromq_that_cant_encrypt_is_said(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(WireError, match="without libsodium"):
        opened(address, Seen())


def test_aside_goes_beside_the_others(run: Run, address: str, hello: Hellos) -> None:
    """While the worker's thread is busy with one request, another that is taken aside is answered."""

    async def scenario() -> None:
        async with Router(address, SECRET, Seen().on_joined, Seen().on_lost) as router:
            taken: list[Request] = []

            def aside(_: Dealer, request: Request) -> bool:
                if isinstance(request.message, SendWeights):
                    taken.append(request)
                    return True
                return False

            class Busy(Worker):
                def _run(self, address: str, hello: Hello, work: Callable[[Dealer, Request], None]) -> None:
                    with Dealer(address, hello, aside=aside) as connection:
                        first = connection.receive(LONG_S)
                        assert first is not None
                        while not taken:
                            assert not self._stop.wait(0.01)
                        connection.reply(taken[0], ProbeResult(id="aside"))
                        assert connection.receive(0.1) is None
                        connection.reply(first, ProbeResult(id="first"))
                        self._stop.wait(LONG_S)

            async with Busy(router.address, hello("trainer.0"), echo):
                first = router.request("trainer.0", probe("1"), id="1", deadline_s=LONG_S)
                second = router.request("trainer.0", SendWeights(version=1), id="2", deadline_s=LONG_S)
                answers = await asyncio.gather(first, second)
            assert [answer for answer, _ in answers] == [ProbeResult(id="first"), ProbeResult(id="aside")]

    run(scenario())
