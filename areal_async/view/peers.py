"""Servers, reward workers and the trainer of a run, for the page that shows them.

What always holds: it only reads: `status.json`, the processes as the kernel knows them, the ends of the files in
`stderr/`. The run itself is asked nothing but the `/metrics` of its servers, and those only while somebody looks, at
most every `ASK_EVERY_S`, with a deadline, and only where its controller lives on this host: a folder that was copied
can't have us ask addresses that it names. What can't be had is None, and `problem` says why in one line.
"""

import asyncio
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from areal_async import run_processes
from areal_async.controller import status
from areal_async.controller.status import Status
from areal_async.core.view import PeerView
from areal_async.core.waiting import duration
from areal_async.errors import ConfigError
from areal_async.rollout.http import Http
from areal_async.run_processes import OLD_S, Process
from areal_async.trace.words import first_line
from areal_async.view.api import PeerRow, Peers

ASK_EVERY_S: Final = 2.0
ASK_DEADLINE_S: Final = 0.5  # a server that takes longer has better things to do than to be looked at
STDERR_LINES: Final = 50
LINE: Final = 2000  # characters of each
ABSENT: Final = ("starting", "lost", "quarantined")  # states of a server
WORKER: Final = "reward worker "
SERVER: Final = "server "
# vLLM 0.32's own names (v1/metrics/loggers.py). An engine of several ranks has a line for each.
FIGURES: Final = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^\n]*\})? +(\S+)", re.MULTILINE
)


class Figures(NamedTuple):
    """Of an engine. running, waiting: requests. cache: share of the KV cache in use, 0 to 1."""

    running: int
    waiting: int
    cache: float


class _Seen(NamedTuple):
    """controller: pid of the living one here, None if there is none. at: run clock. live: what is told is of now."""

    status: Status | None
    controller: int | None
    at: float
    live: bool
    problem: str


class PeersWatch:
    """One run's. Made in a running loop; many may look at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked_at = -ASK_EVERY_S
        self._figures: dict[str, Figures | str] = {}
        self._asking = asyncio.Lock()

    async def look(self, verdicts: dict[str, int] | None) -> Peers:
        """As they are now. verdicts: as in `Peers`."""
        seen = _see(self._folder)
        told, pid = seen.status, seen.controller
        processes = {} if pid is None else {each.name: each for each in run_processes.children(pid, self._folder)}
        figures = await self._engines(_answering(told)) if told is not None and seen.live else {}
        rows = [] if told is None else list(_joined(self._folder, told, seen.at, processes, figures))
        rows += _not_joined(self._folder, seen.at, processes)
        silent = [why for why in figures.values() if isinstance(why, str)]
        problems = [seen.problem, *silent]
        return Peers(at=seen.at, peers=rows, verdicts=verdicts, problem="; ".join(filter(None, problems)))

    async def _engines(self, addresses: Mapping[str, str]) -> dict[str, Figures | str]:
        """Figures of each server by its name, or why there are none: new ones, or those of less than 2 s ago."""
        async with self._asking:
            if time.monotonic() - self._asked_at >= ASK_EVERY_S:
                found = await asyncio.gather(*(ask(name, address) for name, address in addresses.items()))
                self._figures = dict(zip(addresses, found, strict=True))
                self._asked_at = time.monotonic()
            return self._figures


async def ask(name: str, address: str) -> Figures | str:
    """A server's figures; or, in one line, why there are none."""
    who = f"server {name} ({address})"
    http = Http(address)
    try:
        async with asyncio.timeout(ASK_DEADLINE_S):
            answered, body = await http.ask("GET", "/metrics", b"")
    except TimeoutError:
        return f"{who} has not told its figures within {ASK_DEADLINE_S:g} s"
    except OSError as error:
        return f"{who} can't be asked for its figures: {first_line(str(error))}"
    finally:
        await http.close()
    if answered != 200:
        return f"{who} answered {answered} to /metrics"
    return figures_in(body) or f"{who} told no figures of a vLLM engine"


def figures_in(text: bytes) -> Figures | None:
    """From Prometheus text; None if one of them isn't there. Of several ranks: sums, and the mean of the caches."""
    found: dict[bytes, list[float]] = {}
    for name, value in FIGURES.findall(text):
        try:
            found.setdefault(name, []).append(float(value))
        except ValueError:
            return None
    running, waiting = found.get(b"num_requests_running"), found.get(b"num_requests_waiting")
    cache = found.get(b"kv_cache_usage_perc")
    if running is None or waiting is None or cache is None:
        return None
    return Figures(round(sum(running)), round(sum(waiting)), sum(cache) / len(cache))


# ------------------------------------------------------------------------------------------------------------ seeing


def _answering(told: Status) -> dict[str, str]:
    """Addresses of the servers that are there: of one that starts or is lost it is known that it doesn't answer."""
    there = (server.name for server in told.servers if server.state not in ABSENT)
    return {name: told.addresses[name] for name in there if name in told.addresses}


def _see(folder: Path) -> _Seen:
    """What the run last told, and whether that is of now."""
    try:
        told = status.read(folder)
    except ConfigError as error:
        return _Seen(None, None, 0.0, False, str(error))
    if told is not None and told.host != socket.gethostname():
        elsewhere = "" if told.ended else f"the run is on host {told.host}: its processes can't be seen from here"
        return _Seen(told, None, told.at, False, elsewhere)
    pid = run_processes.controller(folder)
    if told is None:
        return _Seen(None, pid, 0.0, False, "the run has told nothing yet: there is no status.json in its folder")
    if pid is None:
        gone = "" if told.ended else "the controller is gone and has told no end; this is what it told last"
        return _Seen(told, None, told.at, False, gone)
    if pid != told.pid:  # a run that is resumed: what is told is of the controller before
        return _Seen(None, pid, told.at, False, f"the controller (pid {pid}) is starting: it has told nothing yet")
    if told.ended:
        return _Seen(told, pid, told.at, False, "")
    age_s = time.time() - told.time
    old = f"what is told is {age_s:.0f} s old: the controller's loop stands still" if age_s > OLD_S else ""
    return _Seen(told, pid, told.at + max(0.0, age_s), True, old)


# --------------------------------------------------------------------------------------------------------------- rows


def _joined(
    folder: Path, told: Status, at: float, processes: dict[str, Process], figures: Mapping[str, Figures | str]
) -> Iterator[PeerRow]:
    """Those that the run told of, in its order. Their processes are taken out of `processes`."""
    servers = {f"{SERVER}{server.name}": server for server in told.servers}
    for peer in told.peers:
        name = run_processes.file_of(peer.label)
        row = PeerRow(
            label=peer.label,
            thing=peer.label.removeprefix(WORKER),
            kind=_kind(name),
            state=_words(peer, at),
            since=peer.since,
            version=told.version if peer.label == "trainer" else None,
            restarts=peer.restarts,
            why=peer.why,
            stderr=_last_lines(folder, name),
        )
        if server := servers.get(peer.label):
            row = replace(row, version=server.version if server.version >= 0 else None, load=server.load)
            if isinstance(engine := figures.get(server.name), Figures):
                row = replace(row, running=engine.running, waiting=engine.waiting, cache=engine.cache)
        yield _with(row, processes.pop(name, None))


def _not_joined(folder: Path, at: float, processes: Mapping[str, Process]) -> Iterator[PeerRow]:
    """Children that start, or hang at that."""
    for name, process in processes.items():
        label = f"{SERVER}{name.removeprefix('server-')}" if _kind(name) == "server" else name
        label = f"{WORKER}{name}" if _kind(name) == "worker" else label
        row = PeerRow(
            label=label,
            thing="",
            kind=_kind(name),
            state="starting: it has not joined yet",
            since=at - process.age_s,
            stderr=_last_lines(folder, name),
        )
        yield _with(row, process)


def _with(row: PeerRow, process: Process | None) -> PeerRow:
    if process is None:
        return row
    return replace(row, pid=process.pid, cpu_s=process.cpu_s, resident=process.resident)


def _kind(name: str) -> Literal["server", "worker", "trainer"]:
    """By the name of its file in `stderr/`."""
    if name.startswith("server-"):
        return "server"
    return "worker" if name.startswith("rewards") else "trainer"


def _words(peer: PeerView, at: float) -> str:
    if peer.restart_at is None:
        return peer.state
    return f"{peer.state}: starts again in {duration(max(0.0, peer.restart_at - at))}"


def _last_lines(folder: Path, name: str) -> list[str]:
    lines = run_processes.last_lines(folder, name, STDERR_LINES)
    return [line if len(line) <= LINE else f"{line[:LINE]} …" for line in lines]
