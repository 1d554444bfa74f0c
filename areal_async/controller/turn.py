"""The one place that every event of a run passes, in one order: record, decide, carry out.

What always holds: an event is in the log before its commands are carried out, so that whatever the outside world has
seen can be told from the log; handling is synchronous, so no event is handled in the middle of another; the log is
written once a loop turn, however many events came in it.
"""

import asyncio
from collections.abc import Callable

from areal_async.core.orchestrator import Orchestrator
from areal_async.log.format import PayloadRef
from areal_async.log.writer import RunLog
from areal_async.messages import AnyCommand, AnyEvent, Woke


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
        self._scheduled = False
        self._closed = False
        self._alarm: asyncio.TimerHandle | None = None

    def take(self, event: AnyEvent, payload: PayloadRef | None = None) -> None:
        """Have an event handled in the next turn of the loop. After `close` events are dropped: the run is over."""
        if self._closed:
            return
        self._inbox.append((event, payload))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def close(self) -> None:
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()

    def _run(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        inbox, self._inbox = self._inbox, []
        commands: list[AnyCommand] = []
        try:
            for event, payload in inbox:
                self._log.append(event, payload)
                found = self._core.handle(event)
                for command in found:
                    self._log.append(command)
                commands += found
                self._seen(event, found)
            self._log.flush()
            for command in commands:
                self._carry_out(command)
            self._set_alarm()
        except Exception as error:  # a callback of the loop: here it would only be printed
            self.close()
            self._broken(error)

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
