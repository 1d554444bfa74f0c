"""Both event loops, sockets in a folder of the test's own, and a check that nothing stays behind."""

import asyncio
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from areal_async.messages import PROTOCOL, Hello
from areal_async.wire import beats

SECRET = "s3cret"
SETTLE_S = 20.0  # how long what a test has just ended may take to go
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def _uvloop_has_its_pipe() -> None:
    """uvloop opens a pipe with its first loop and keeps it for the life of the process: that is no leak of ours."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def _nothing_stays_behind(_uvloop_has_its_pipe: None) -> Iterator[None]:
    """Threads and every descriptor, event and poll descriptors of ZeroMQ included."""
    before = _open_files(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + SETTLE_S
    while (left := (_open_files() - before[0], set(threading.enumerate()) - before[1]))[0] > 0 or left[1]:
        assert time.monotonic() < deadline, f"{left[0]} descriptors more than before; threads left: {left[1]}"
        gc.collect()
        time.sleep(0.01)


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="aa-") as folder:  # pytest's own paths are too long for a socket
        yield f"ipc://{folder}/w"


@pytest.fixture(params=sorted(LOOPS))
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine in a fresh loop of either kind; afterwards no task may be left."""

    def run_it(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(120):
                result = await coroutine
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left: {left}"
            return result

        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(limited())

    return run_it


@pytest.fixture
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.05)
    monkeypatch.setattr(beats, "LOST_AFTER_S", 0.4)


@pytest.fixture
def hello() -> Callable[..., Hello]:
    def make(name: str = "rewards.0", nonce: str = "a", **changes: Any) -> Hello:
        values = {"protocol": PROTOCOL, "secret": SECRET, "worker": "reward", "credits": 2} | changes
        return Hello(name=name, nonce=nonce, **values)

    return make


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
