"""`status.json` in the run folder: what a run does and waits for, so that `areal-async why` can tell it from outside.

What always holds: the file is whole at any moment (written aside, then renamed); it is written every `EVERY_S` from the
run's own loop, so one that gets old says that the loop stands still; it decides nothing, and a disk without room for it
doesn't end the run. It may be lost when the machine is: nothing reads it to go on, so it isn't synced.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from areal_async.core.orchestrator import Orchestrator
from areal_async.core.view import PeerView, ServerView
from areal_async.errors import ConfigError
from areal_async.messages import Version

logger = logging.getLogger("areal_async")

NAME: Final = "status.json"
EVERY_S: Final = 2.0
TICK_S: Final = 0.1  # a stop of the loop that is shorter than this may be missed


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds of the run clock, but for `time`.

    time: when this was written, seconds since 1970. pid, host: of the controller. at: the run clock then. ended: how
    the run ended, "" while it goes on. phase: what it does besides training (it saves the model, say), or "".
    waits: who waits for whom, from the outermost on. peers: the trainer first.
    addresses: of servers, by name, for those who want to ask them themselves (`unix:PATH`, `http://HOST:PORT`).
    last_event: when something happened last. loop_lag_s: the longest that the loop stood still since the last writing.
    """

    time: float
    pid: int
    host: str
    name: str
    at: float
    ended: str
    phase: str
    waits: tuple[str, ...]
    last_event: float
    loop_lag_s: float
    steps: int
    version: Version
    branch: int
    in_flight: int
    ready: int
    outstanding: int
    balance: dict[str, int]
    peers: tuple[PeerView, ...]
    servers: tuple[ServerView, ...]
    addresses: dict[str, str] = {}


class StatusFile:
    """Keeps a run's file. name, steps: of the configuration. phase: what the run does besides training. waits: what is
    waited for outside of the core. addresses: of servers. now: the run clock. last_event: run clock of the last thing
    that happened."""

    def __init__(
        self,
        folder: Path,
        name: str,
        steps: int,
        core: Orchestrator,
        *,
        phase: Callable[[], str],
        waits: Callable[[], Sequence[str]],
        addresses: Callable[[], Mapping[str, str]],
        now: Callable[[], float],
        last_event: Callable[[], float],
    ) -> None:
        self._path = folder / NAME
        self._aside = folder / f".{NAME}.new"
        self._name = name
        self._steps = steps
        self._core = core
        self._phase = phase
        self._waits = waits
        self._addresses = addresses
        self._now = now
        self._last_event = last_event
        self._pid, self._host = os.getpid(), socket.gethostname()
        self._lag_s = 0.0
        self._ended = ""
        self._told = False

    async def keep(self) -> None:
        """Write it again and again."""
        while True:
            self.write()
            for _ in range(round(EVERY_S / TICK_S)):
                asked = time.monotonic()
                await asyncio.sleep(TICK_S)
                self._lag_s = max(self._lag_s, time.monotonic() - asked - TICK_S)

    def end(self, how: str) -> None:
        """The run has ended; how: for people."""
        self._ended = how
        self.write()

    def write(self) -> None:
        """Write it now. A disk that doesn't take it is told of once."""
        data = msgspec.json.encode(self.status())
        self._lag_s = 0.0
        try:
            self._aside.write_bytes(data)
            os.replace(self._aside, self._path)
        except OSError as error:
            if not self._told:
                logger.warning("%s can't be written: %s; `areal-async why` will not know of the run", self._path, error)
            self._told = True

    def status(self) -> Status:
        """As it is now."""
        view, now = self._core.view(), self._now()
        return Status(
            time=time.time(),
            pid=self._pid,
            host=self._host,
            name=self._name,
            at=now,
            ended=self._ended,
            phase=self._phase(),
            waits=(self._core.waiting(now), *self._waits()),
            last_event=self._last_event(),
            loop_lag_s=self._lag_s,
            steps=self._steps,
            version=view.version,
            branch=view.branch,
            in_flight=view.in_flight,
            ready=view.ready,
            outstanding=view.outstanding,
            balance=view.balance,
            peers=view.peers,
            servers=view.servers,
            addresses=dict(self._addresses()),
        )


def read(folder: Path) -> Status | None:
    """The status of a run; None if it has written none. Errors: ConfigError: it is no status of this release."""
    path = folder / NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Status)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: was not written by this release of areal-async: {error}") from error
