"""The one place that every event of a run passes, in one order: record, decide, carry out.

What always holds: an event is in the log before its commands are carried out, so that whatever the outside world has
seen can be told from the log; handling is synchronous, so no event is handled in the middle of another; the log is
written once a loop turn, however many events came in it.

While the disk is full nothing is handled and nothing carried out: events wait in their order, samples that finish wait
in memory (no new ones are started, so they are those in flight at most). When there is room it goes on by itself.
"""

import asyncio
import logging
import math
import shutil
from collections.abc import Callable
from typing import Final

from areal_async.core.orchestrator import Orchestrator
from areal_async.errors import DiskFull
from areal_async.log.format import PayloadRef
from areal_async.log.writer import RunLog
from areal_async.messages import AnyCommand, AnyEvent, Woke

logger = logging.getLogger("areal_async")

TRY_S: Final = 1.0  # between two looks whether there is room
SAY_S: Final = 30.0  # between two errors that say so


class Turn:
    """carry_out: does a command, at once or by starting a task. seen: told of each event and its commands, after they
    were handled (metrics). broken: told of an exception in here, which ends the run. now: the run clock."""

    def __init__(
        self,
        core: Orchestrator,
        log: RunLog,
        *,
        carry_out: Callable[[AnyCommand], None],
        seen: Callable[[AnyEvent, list[AnyCommand]], None],
        broken: Callable[[Exception], None],
        now: Callable[[], float],
    ) -> None:
        self._core = core
        self._log = log
        self._carry_out = carry_out
        self._seen = seen
        self._broken = broken
        self._now = now
        self._inbox: list[tuple[AnyEvent, PayloadRef | None]] = []
        self._decided: list[AnyCommand] = []  # not carried out yet
        self._scheduled = False
        self._closed = False
        self._alarm: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()  # on the disk, as far as is known
        self._room.set()
        self._full_since = self._said_at = 0.0
        self._again: asyncio.TimerHandle | None = None

    def take(self, event: AnyEvent, payload: PayloadRef | None = None) -> None:
        """Have an event handled in the next turn of the loop, or when there is room on the disk. After `close` events
        are dropped: the run is over."""
        if self._closed:
            return
        self._inbox.append((event, payload))
        self._schedule()

    async def sync(self) -> None:
        """Return when all that was handled is on the disk itself; while that is full, wait. Raises LogError."""
        while True:
            try:
                await self._log.sync()
            except DiskFull as error:
                if self._closed:
                    raise
                self._wait_for_room(error)
                await self._room.wait()
            else:
                return

    def close(self) -> None:
        self._closed = True
        for timer in (self._alarm, self._again):
            if timer is not None:
                timer.cancel()

    def _schedule(self) -> None:
        if not self._scheduled and self._room.is_set():
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        if self._closed or not self._room.is_set():  # a sync may have found the disk full meanwhile
            return
        inbox, self._inbox = self._inbox, []
        try:
            for event, payload in inbox:
                self._log.append(event, payload)
                found = self._core.handle(event)
                for command in found:
                    self._log.append(command)
                self._decided += found
                self._seen(event, found)
            self._write_and_carry_out()
        except Exception as error:  # a callback of the loop: here it would only be printed
            self._break(error)

    def _write_and_carry_out(self) -> None:
        """What was decided is carried out once, when it is in the log; not at all while it can't be written there."""
        try:
            self._log.flush()
        except DiskFull as error:
            self._wait_for_room(error)
            return
        commands, self._decided = self._decided, []
        for command in commands:
            self._carry_out(command)
        self._set_alarm()

    def _break(self, error: Exception) -> None:
        self.close()
        self._broken(error)

    # -------------------------------------------------------------------------------------------------- a full disk

    def _wait_for_room(self, error: DiskFull) -> None:
        loop = asyncio.get_running_loop()
        if self._room.is_set():
            self._room.clear()
            self._full_since, self._said_at = loop.time(), -math.inf
        if loop.time() - self._said_at >= SAY_S:
            self._said_at = loop.time()
            free = shutil.disk_usage(self._log.folder).free
            logger.error("%s (%.1f MB are free there; nothing is carried out meanwhile)", error, free / 1e6)
        if self._again is None:
            self._again = loop.call_later(TRY_S, self._try_again)

    def _try_again(self) -> None:
        self._again = None
        try:
            self._log.flush()
        except DiskFull as error:
            self._wait_for_room(error)
            return
        except Exception as error:
            self._break(error)
            return
        waited_s = asyncio.get_running_loop().time() - self._full_since
        logger.warning("%s: there is room again; the run goes on after %.0f s", self._log.folder, waited_s)
        self._room.set()
        if self._inbox or self._decided:
            self._schedule()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        wakeup = self._core.next_wakeup()
        if wakeup is not None and not self._closed:
            delay_s = max(0.0, wakeup - self._now())
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._alarm = None
        self.take(Woke(at=self._now()))
