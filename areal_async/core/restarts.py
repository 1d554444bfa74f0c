"""Processes that are started again after they were lost: servers, reward workers and the trainer.

What always holds: the pause before a restart grows with each loss, and a loss that lies long back is forgotten; who was
told to start again is not told so twice.
"""

from typing import Final

from areal_async.core.lifecycle import Thing, Word

FIRST_RESTART_S: Final = 1.0  # pause before the first restart; it doubles with each further one
LONGEST_RESTART_S: Final = 60.0
FORGET_LOSSES_S: Final = 600.0  # who has worked for so long without a loss has a clean record again


class Restarted(Thing):
    """id: its name. restarts: of a record that was not forgotten. restart_at: run clock from which it may be started
    again; None if there is nothing to wait for. since: when it joined or was last told to do something; an event from
    before that is past. why: the cause of its last loss.
    """

    __slots__ = ("_works_since", "id", "restart_at", "restarts", "since", "why")
    id: str

    def __init__(self, name: str, at: float) -> None:
        self.id = name
        super().__init__(at)
        self.restarts = 0
        self.restart_at: float | None = None
        self.since = at
        self.why = ""
        self._works_since: float | None = None

    def work(self, state: str, at: float, why: str = "", *words: Word) -> None:
        """It does, from now on, what it is there for."""
        self.move(state, at, why, *words)
        if self._works_since is None:
            self._works_since = at

    def forgive(self, at: float) -> None:
        """Its restarts are forgotten if it has worked for long."""
        if self._works_since is not None and at - self._works_since >= FORGET_LOSSES_S:
            self.restarts = 0

    def end(self, why: str) -> None:
        """This life of it is over."""
        self.why = why
        self.restart_at = self._works_since = None

    def wait_for_restart(self, at: float) -> None:
        pause_s = min(FIRST_RESTART_S * 2 ** min(self.restarts, 10), LONGEST_RESTART_S)
        self.restarts += 1
        self.restart_at = at + pause_s
        self.move("lost", at, "restart {} in {} s: {}", self.restarts, pause_s, self.why)

    def start_again(self, at: float) -> bool:
        """Whether its pause is over; it counts as told then."""
        if self.restart_at is None or self.restart_at > at:
            return False
        self.restart_at = None
        self.since = at
        return True
