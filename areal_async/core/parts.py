"""The machines that a run's decisions are made by, put together over one ledger.

What always holds: nothing is decided here. Each machine knows those that were made before it.
"""

from areal_async.core.admission import check
from areal_async.core.evaluating import Evaluations
from areal_async.core.fleet import Fleet
from areal_async.core.groups import Groups
from areal_async.core.ledger import Ledger
from areal_async.core.lifecycle import Thing
from areal_async.core.resuming import refusals
from areal_async.core.trainer import Trainer
from areal_async.core.workers import Workers
from areal_async.messages import Restart, Rules


class Parts:
    """stopping: the run was asked to stop.

    Raises ValueError for rules that no run could follow.
    """

    def __init__(self, rules: Rules) -> None:
        check(rules)
        self.rules = rules
        self.ledger = Ledger(rules)
        self.fleet = Fleet(rules)
        self.groups = Groups(rules, self.ledger, self.fleet)
        self.trainer = Trainer(rules, self.ledger, self.fleet, 0.0)
        self.evaluations = Evaluations(rules, self.fleet, self.trainer)
        self.rewards = Workers(rules.max_worker_restarts)
        self.stopping = False

    @property
    def wakeup(self) -> float | None:
        """Run clock from which one of them has something to do, if there is such a time."""
        times = (self.fleet.wakeup, self.rewards.wakeup, self.evaluations.wakeup, self.trainer.restart_at)
        return min((at for at in times if at is not None), default=None)

    def wake(self, at: float) -> list[Restart]:
        """Who was lost, and has waited for long enough, is started again."""
        if self.trainer.restart_at is self.fleet.wakeup is self.rewards.wakeup is None:
            return []
        return [*self.trainer.wake(at), *self.fleet.wake(at), *self.rewards.wake(at)]

    def resume(self, rules: Rules) -> None:
        """A new controller goes on by these rules; servers, reward workers and ranks of before are gone.

        Raises ValueError for rules that can't follow those of before.
        """
        check(rules)
        if told := refusals(self.rules, rules):
            raise ValueError("\n".join(told))
        self.rules = self.ledger.rules = rules
        self.fleet.resume(rules)
        self.groups.resume(rules)
        self.trainer.resume(rules)
        self.evaluations.resume(rules)
        self.rewards.resume(rules.max_worker_restarts)
        self.stopping = False

    def find(self, id: str) -> list[Thing]:
        """What lives under this name, or under its label ("server 2")."""
        peers = [*self.fleet.servers.values(), *self.rewards.workers.values()]
        things: list[Thing] = [self.trainer, *peers, *self.ledger.find(id)]
        return [thing for thing in things if id in (thing.label, thing.label.rpartition(" ")[2])]
