"""Evaluation during a run: when one is due, on which server, of which version.

What always holds: there is one at a time, and all of it is of one version, since its server gets no other weights until
it is answered; rollouts go on, and nothing of it is in the ledger. Of several that became due meanwhile only the newest
is done. What a rollback has made untrue, and what is told twice, changes nothing.
"""

from dataclasses import dataclass
from typing import Final

from areal_async.core.fleet import Fleet, Server
from areal_async.core.trainer import Trainer
from areal_async.messages import Evaluate, EvaluationDone, Fail, Failed, Lost, Rules, Version

EVALUATION_TRIES: Final = 3  # so many in a row that fail end the run: the next ones would fail as well
EVALUATION_RETRY_S: Final = 1.0  # pause after one that failed: meanwhile its server may get newer weights


@dataclass(frozen=True)
class UnderWay:
    """An evaluation that has yet to be answered. at: run clock at its begin."""

    version: Version
    server: Server
    at: float


class Evaluations:
    """under_way: the evaluation that is not answered yet. wakeup: run clock from which another try may begin.

    Versions k · `eval_every` (k >= 1) and the last one are due.
    """

    def __init__(self, rules: Rules, fleet: Fleet, trainer: Trainer) -> None:
        self._rules = rules
        self._fleet = fleet
        self._trainer = trainer
        self._evaluated: Version = 0  # the newest version of the present history that was
        self._last: Version | None = None  # the run ends with this one
        self._void = False  # what is under way is of a history that didn't happen
        self._failures = 0  # in a row
        self._failed_on: tuple[Version, str] | None = None
        self.under_way: UnderWay | None = None
        self.wakeup: float | None = None

    def begin(self, at: float) -> list[Evaluate]:
        """The newest one that is due, if a server serves its version or a newer one: the one with the newest, then
        the least load; after a failure another server or version, where there is one."""
        fleet = self._fleet
        if self.wakeup is not None:
            if at < self.wakeup:
                return []
            self.wakeup = None
        if not self._rules.eval_every or self.under_way is not None or fleet.newest_open is None:
            return []
        due = self._due(fleet.newest_open)
        if due <= self._known:
            return []
        serving = [server for server in fleet.open if server.state == "serving" and server.version >= due]
        if not serving:
            return []
        server = min(serving, key=self._order)
        server.evaluating = server.version
        server.note(at, "evaluates version {}", server.version)
        self.under_way = UnderWay(server.version, server, at)
        return [Evaluate(version=server.version, server=server.id)]

    def done(self, event: EvaluationDone) -> None:
        now = self.under_way
        if now is None or event.at < now.at or (event.version, event.server) != (now.version, now.server.id):
            return
        if not self._void:
            self._evaluated = now.version
            self._failures = 0
            self._failed_on = None
        self._close(event.at, "version {} is evaluated: {}", now.version, event.score)

    def failed(self, event: Failed) -> list[Fail]:
        now = self.under_way
        if now is None or event.at < now.at or event.id != str(now.version):
            return []
        return self._failed(event.at, event.why)

    def lost(self, event: Lost | Failed) -> list[Fail]:
        """A server may be gone; if it was the one that evaluates, nothing more is heard of the evaluation."""
        now = self.under_way
        if now is None or now.server.evaluating is not None:
            return []
        return self._failed(event.at, f"its server was lost: {event.why}")

    def roll_back(self, to: Version) -> None:
        """Versions above `to` will be others: they are due again, and one that is under way is not waited for, but its
        server is not free before it is answered."""
        self._evaluated = min(self._evaluated, to)
        self._last = None
        self._void = self.under_way is not None and (self._void or self.under_way.version > to)

    def resume(self, rules: Rules) -> None:
        """What was under way is not waited for, and went with its server."""
        self._rules = rules
        self.under_way = self.wakeup = self._failed_on = None
        self._void = False
        self._failures = 0

    def is_concluded(self, last: Version) -> bool:
        """Whether a run that ends with version `last` has been evaluated as it should; if not, that is due now."""
        if not self._rules.eval_every:
            return True
        self._last = last
        return self._known >= last

    @property
    def _known(self) -> Version:
        """What came before the run, or was evaluated, is not due."""
        return max(self._evaluated, self._trainer.first)

    def _due(self, version: Version) -> Version:
        """The newest version up to this one that is to be evaluated; at the end nothing but the last."""
        if self._last is not None:
            return self._last
        return version if version >= self._rules.steps else version - version % self._rules.eval_every

    def _order(self, server: Server) -> tuple[Version, bool, int]:
        return -server.version, self._failed_on == (server.version, server.id), server.load

    def _failed(self, at: float, why: str) -> list[Fail]:
        now, void = self.under_way, self._void
        if now is None:
            return []
        self._close(at, "the evaluation of version {} failed: {}", now.version, why)
        if void:
            return []
        self._failures += 1
        self._failed_on = now.version, now.server.id
        self.wakeup = at + EVALUATION_RETRY_S
        if self._failures < EVALUATION_TRIES:
            return []
        return [
            Fail(
                why=f"{self._failures} evaluations in a row failed, the last one of version {now.version} on server"
                f" {now.server.id}: {why}\nRepair the cause, or leave out eval.every_steps to go on without"
            )
        ]

    def _close(self, at: float, why: str, *words: str | int | float) -> None:
        """It is over: its server may get new weights again."""
        if self.under_way is not None:
            self.under_way.server.evaluating = None
            self.under_way.server.note(at, why, *words)
        self.under_way = None
        self._void = False
