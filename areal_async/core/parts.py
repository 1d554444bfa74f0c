"""The machines that a run's decisions are made by, put together over one ledger.

What always holds: nothing is decided here. Each machine knows those that were made before it.
"""

from areal_async.core.admission import check
from areal_async.core.evaluating import Evaluations
from areal_async.core.fleet import Fleet
from areal_async.core.groups import Groups
from areal_async.core.ledger import Ledger
from areal_async.core.trainer import Trainer
from areal_async.messages import Rules


class Parts:
    """rewards: the reward workers have joined. stopping: the run was asked to stop.

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
        self.rewards = False
        self.stopping = False
