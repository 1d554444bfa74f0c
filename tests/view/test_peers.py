"""The page of servers and workers: what is told of them, from `status.json`, the kernel, stderr and the engines."""

import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async import run_processes
from areal_async.controller.status import Status
from areal_async.core.view import PeerView, ServerView
from areal_async.run_processes import Process
from areal_async.view import peers
from areal_async.view.api import PeerRow
from areal_async.view.peers import Figures, PeersWatch, ask, figures_in

# As vLLM 0.32 writes it (v1/metrics/loggers.py), names that begin in the same way included.
EXPOSITION = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b} 9"} 64.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a b} 9"} 32.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a b} 9",reason="capacity"} 31.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a b} 9"} 0.8300000000000001
vllm:prefix_cache_queries_total{engine="0",model_name="a b} 9"} 1.7e+06
"""

STATUS = Status(
    time=0.0, pid=os.getpid(), host=socket.gethostname(), name="x", at=100.0, ended="", phase="", waits=(),
    last_event=97.0, loop_lag_s=0.0, steps=4, version=2, branch=0, in_flight=3, ready=1, outstanding=2,
    balance={"admitted": 6},
    peers=(
        PeerView("trainer", "idle", 90.0),
        PeerView("server 0", "serving", 80.0),
        PeerView("server 1", "lost", 99.0, 103.0, 2, "server 1 (pid 7) was ended by SIGKILL; the last lines\nof it"),
        PeerView("reward worker rewards.0", "working", 5.0),
    ),
    servers=(ServerView("0", "serving", 1, 3), ServerView("1", "lost", -1, 0)),
)  # fmt: skip


PATIENCE_S = 60.0  # more than any of these answers takes, however busy the machine is


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is asked has as much time as it needs."""
    monkeypatch.setattr(peers, "ASK_DEADLINE_S", PATIENCE_S)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The clock of the machine, which stands still."""
    moment = time.time()
    monkeypatch.setattr(time, "time", lambda: moment)
    return moment


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    (tmp_path / "stderr").mkdir()
    return tmp_path


def tell(run: Path, **changes: object) -> None:
    told = msgspec.structs.replace(STATUS, **{"time": time.time(), **changes})
    (run / "status.json").write_bytes(msgspec.json.encode(told))


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """As if this process were its controller."""
    lock = run / "log" / "lock"
    lock.write_text(str(os.getpid()))
    with lock.open():
        yield


def of(rows: list[PeerRow], label: str) -> PeerRow:
    (row,) = [row for row in rows if row.label == label]
    return row


class Engine:
    """Answers /metrics on a Unix socket, which no other host could reach."""

    def __init__(self, body: bytes = EXPOSITION, status: int = 200, delay_s: float = 0.0) -> None:
        self.body, self.status, self.delay_s, self.asked = body, status, delay_s, 0

    async def _metrics(self, request: web.Request) -> web.Response:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        return web.Response(body=self.body, status=self.status)

    @contextlib.asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics)])
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        try:
            yield f"unix:{path}"
        finally:
            await runner.cleanup()


# -------------------------------------------------------------------------------------------------- an engine's figures


def test_an_engines_figures() -> None:
    assert figures_in(EXPOSITION) == Figures(64, 32, 0.8300000000000001)


def test_the_ranks_of_an_engine_are_added_up() -> None:
    other = EXPOSITION.replace(b'engine="0"', b'engine="1"').replace(b" 64.0", b" 2.0").replace(b"0.83", b"0.17")
    assert figures_in(EXPOSITION + other) == (66, 64, pytest.approx(0.5))


@pytest.mark.parametrize("name", [b"vllm:num_requests_running{", b"vllm:num_requests_waiting{", b"vllm:kv_cache"])
def test_half_of_the_figures_are_none(name: bytes) -> None:
    assert figures_in(EXPOSITION.replace(name, b"other:name{")) is None


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.floats(0, 1)), min_size=1, max_size=4), st.binary()
)
@settings(deadline=None, max_examples=25)
def test_any_figures_come_back_and_any_bytes_are_no_error(ranks: list[tuple[int, int, float]], noise: bytes) -> None:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    lines = [
        f'vllm:{name}{{engine="{rank}"}} {value}'
        for rank, values in enumerate(ranks)
        for name, value in zip(names, values, strict=True)
    ]
    running, waiting, caches = zip(*ranks, strict=True)
    expected = (sum(running), sum(waiting), pytest.approx(sum(caches) / len(caches)))
    assert figures_in("\n".join(lines).encode()) == expected
    figures_in(noise)
    figures_in(EXPOSITION.replace(b"64.0", noise))


async def test_why_an_engine_told_nothing_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run / "s"
    assert "can't be asked for its figures" in str(await ask("0", f"unix:{path}"))
    assert "can't be asked for its figures" in str(await ask("0", "no address"))
    async with Engine(status=503).listening(path) as address:
        assert await ask("0", address) == f"server 0 ({address}) answered 503 to /metrics"
    async with Engine(b"hello").listening(path) as address:
        assert await ask("0", address) == f"server 0 ({address}) told no figures of a vLLM engine"
    monkeypatch.setattr(peers, "ASK_DEADLINE_S", 0.05)
    async with Engine(delay_s=0.15).listening(path) as address:
        assert await ask("0", address) == f"server 0 ({address}) has not told its figures within 0.05 s"


async def test_an_engine_is_asked_only_so_often_and_however_many_look(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ASK_EVERY_S", PATIENCE_S)
    engine = Engine()
    async with engine.listening(run / "s") as address:
        tell(run, addresses={"0": address})
        with held(run):
            watch = PeersWatch(run)
            found = [*await asyncio.gather(watch.look({}), watch.look({})), await watch.look({})]
            assert engine.asked == 1
            assert {of(seen.peers, "server 0").running for seen in found} == {64}
            watch._asked_at -= peers.ASK_EVERY_S
            engine.body = EXPOSITION.replace(b" 64.0", b" 5.0")
            assert of((await watch.look({})).peers, "server 0").running == 5
    assert engine.asked == 2


async def test_nobody_is_asked_for_a_run_that_does_not_go_on_here(run: Path) -> None:
    engine = Engine()
    async with engine.listening(run / "s") as address:
        for changes in ({}, {"ended": "steps_done"}, {"host": "node7"}):
            tell(run, addresses={"0": address}, **changes)
            assert of((await PeersWatch(run).look({})).peers, "server 0").running is None
        with held(run):
            others: list[dict[str, object]] = [{"ended": "steps_done"}, {"host": "node7"}, {"pid": 1}]
            for other in others:
                tell(run, addresses={"0": address}, **other)
                await PeersWatch(run).look({})
    assert engine.asked == 0


async def test_a_silent_engine_leaves_the_rest(run: Path) -> None:
    async with Engine().listening(run / "s") as address:
        addresses = {"0": address, "1": f"unix:{run}/gone"}
        with held(run):
            tell(run, addresses=addresses)
            assert (await PeersWatch(run).look({})).problem == ""  # server 1 is lost: nobody expects that it answers
            tell(run, addresses=addresses, servers=(STATUS.servers[0], ServerView("1", "updating", 1, 0)))
            found = await PeersWatch(run).look({})
    assert of(found.peers, "server 0").cache == pytest.approx(0.83)
    assert of(found.peers, "server 1").cache is None
    assert re.fullmatch(r"server 1 \(unix:.*/gone\) can't be asked for its figures: .*", found.problem)


# --------------------------------------------------------------------------------------------------------- what is told


async def test_each_is_told_with_its_state_and_since_when(run: Path, now: float) -> None:
    tell(run, time=now - 2.0)
    with held(run):
        found = await PeersWatch(run).look({"right": 3, "wrong": 1})
    assert found.verdicts == {"right": 3, "wrong": 1}
    assert found.at == pytest.approx(102.0)
    assert found.problem == ""
    assert [(row.label, row.thing, row.kind, row.state.partition(":")[0], row.since) for row in found.peers] == [
        ("trainer", "trainer", "trainer", "idle", 90.0),
        ("server 0", "server 0", "server", "serving", 80.0),
        ("server 1", "server 1", "server", "lost", 99.0),
        ("reward worker rewards.0", "rewards.0", "worker", "working", 5.0),
    ]
    trainer, first, second, _ = found.peers
    assert (trainer.version, trainer.load) == (2, None)
    assert (first.version, first.load, first.restarts, first.why) == (1, 3, 0, "")
    assert (second.version, second.load, second.restarts) == (None, 0, 2)
    assert second.why.endswith("the last lines\nof it")
    assert second.state == "lost: starts again in 1.0 s"


async def test_processes_are_told_and_those_that_have_not_joined(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [
        Process("server-0", 11, "S", 30.0, 4.5, 1000, 3),
        Process("server-2", 12, "S", 7.0, 1.5, 2000, 1),
        Process("rewards.1", 13, "S", 6.0, 0.5, 3000, 1),
    ]
    monkeypatch.setattr(run_processes, "children", lambda pid, folder: iter(there))
    tell(run)
    with held(run):
        found = await PeersWatch(run).look({})
    first, last = of(found.peers, "server 0"), of(found.peers, "server 2")
    assert (first.pid, first.cpu_s, first.resident) == (11, 4.5, 1000)
    assert of(found.peers, "trainer").pid is None
    assert (last.pid, last.kind, last.thing, last.state) == (12, "server", "", "starting: it has not joined yet")
    assert found.at - last.since == pytest.approx(7.0)
    assert of(found.peers, "reward worker rewards.1").kind == "worker"
    assert len(found.peers) == 6


async def test_the_last_lines_of_stderr_and_no_more(run: Path) -> None:
    (run / "stderr" / "server-0.log").write_text("".join(f"line {n}\n" for n in range(80)))
    (run / "stderr" / "rewards.0.log").write_bytes(b"\xff\x00<b>\n" + b"y" * 5000)
    tell(run)
    found = await PeersWatch(run).look({})
    assert of(found.peers, "server 0").stderr == [f"line {n}" for n in range(30, 80)]
    odd, long = of(found.peers, "reward worker rewards.0").stderr
    assert odd == "\ufffd\0<b>"
    assert len(long) == peers.LINE + 2
    assert of(found.peers, "trainer").stderr == []


@pytest.mark.parametrize(
    ("changes", "lives", "words"),
    [
        ({"ended": "steps_done"}, False, ""),
        ({}, False, "the controller is gone and has told no end; this is what it told last"),
        ({"host": "node7"}, False, "the run is on host node7: its processes can't be seen from here"),
        ({"time": 1.0}, True, "s old: the controller's loop stands still"),
        ({"pid": 1}, True, "is starting: it has told nothing yet"),
    ],
)
async def test_what_is_told_is_not_taken_for_what_is(run: Path, changes: object, lives: bool, words: str) -> None:
    tell(run, **changes)  # type: ignore[arg-type]
    with held(run) if lives else contextlib.nullcontext():
        found = await PeersWatch(run).look({})
    assert found.problem.endswith(words)
    assert bool(found.problem) == bool(words)
    if not lives:
        assert found.at == 100.0


async def test_a_run_that_has_told_nothing_or_what_cannot_be_read(run: Path) -> None:
    found = await PeersWatch(run).look({})
    assert found.peers == []
    assert found.problem == "the run has told nothing yet: there is no status.json in its folder"
    (run / "status.json").write_text('{"time": "soon"}')
    assert "was not written by this release" in (await PeersWatch(run).look({})).problem
