"""The core of a run: events in, commands out, one at a time, in the order of the log.

What always holds: it only passes events to the machines that own their tables (`groups`, `fleet`, `trainer`, over one
`ledger`) and asks them how to go on; `Finish` or `Fail` is its last command, and what comes after it is ignored.
"""

from areal_async.core import endings
from areal_async.core.admission import check
from areal_async.core.fleet import Fleet
from areal_async.core.groups import Groups
from areal_async.core.ledger import Ledger
from areal_async.core.lifecycle import Thing
from areal_async.core.trainer import Trainer
from areal_async.core.waiting import explain
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    DataEnded,
    Fail,
    Failed,
    Finish,
    GroupRead,
    Joined,
    Lost,
    Published,
    RolledBack,
    Rules,
    SampleDone,
    Scored,
    StepDone,
    StopRequested,
    Swapped,
    Woke,
)


class Orchestrator:
    """See `areal_async.messages` for what each event says and each command asks for.

    Raises ValueError for rules that no run could follow, and IllegalTransition for an event that can't be true.
    """

    def __init__(self, rules: Rules) -> None:
        check(rules)
        self._rules = rules
        self._ledger = Ledger(rules)
        self._fleet = Fleet(rules)
        self._groups = Groups(rules, self._ledger, self._fleet)
        self._trainer = Trainer(rules, self._ledger, self._fleet, 0.0)
        self._rewards = False  # the reward workers have joined
        self._stopping = False
        self._over = ""

    @property
    def step(self) -> int:
        """The next step to be formed: batch_groups · step groups have been handed to training."""
        return self._ledger.step

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        if self._over:
            return []
        commands = self._take(event)
        if not _ends(commands):
            commands += self._go_on(event.at)
        self._over = _ends(commands)
        return commands

    def next_wakeup(self) -> float | None:
        """Run clock at which a `Woke` is wanted: never, since nothing here waits for a time."""
        return None

    def waiting(self) -> str:
        """Who waits for whom, one line."""
        if self._over:
            return f"the run is over: {self._over}"
        return explain(self._rules, self._ledger, self._fleet, self._trainer, self._groups, rewards=self._rewards)

    def story(self, id: str) -> str:
        """What happened to a live thing: "1307.5", "1307", "trainer", a server's name; or its label, "server 2"."""
        things: list[Thing] = [self._trainer, *self._fleet.servers.values(), *self._ledger.find(id)]
        told = [thing.story() for thing in things if id in (thing.label, thing.label.partition(" ")[2])]
        return "\n".join(told) or f"nothing that lives is called {id}; the log has what is over"

    def balance(self) -> dict[str, int]:
        """How many groups and samples (`samples_…`) were admitted, and what became of them."""
        return self._ledger.balance()

    def _take(self, event: AnyEvent) -> list[AnyCommand]:
        groups = self._groups
        match event:
            case SampleDone():
                return [*groups.done(event)]
            case Scored():
                return [*groups.scored(event)]
            case GroupRead():
                return [*groups.read(event)]
            case DataEnded():
                return [*groups.ended(event)]
            case Failed(of="sample"):
                return [*groups.sample_failed(event)]
            case Failed(of="group"):
                return [*groups.group_failed(event)]
            case Failed():
                return [*endings.failed(event, self._ledger, self._fleet, self._trainer)]
            case StepDone():
                return [*self._trainer.step_done(event)]
            case Published():
                self._trainer.published(event)
            case Swapped():
                self._fleet.swapped(event)
            case RolledBack():
                publish = self._trainer.roll_back(event)
                return [*groups.start_again(event.at, f"back to version {event.to}"), publish]
            case Joined():
                return self._joined(event)
            case Lost():
                return [*endings.lost(event, self._ledger, self._fleet, self._trainer, stopping=self._stopping)]
            case StopRequested():
                self._stopping = True
            case Woke():
                pass
        return []

    def _joined(self, event: Joined) -> list[AnyCommand]:
        if event.peer == "trainer":
            return [self._trainer.join(event)]
        if event.peer == "server":
            self._fleet.join(event)
        else:
            self._rewards = True
        return []

    def _go_on(self, at: float) -> list[AnyCommand]:
        """What has become possible: a step, the end, swaps, new groups."""
        train = [] if self._stopping else self._trainer.train(at)
        reason = endings.finished(self._rules, self._ledger, self._groups, self._trainer, stopping=self._stopping)
        if reason is not None:
            return [*self._groups.cancel_unready(at, reason), Finish(reason=reason)]
        if self._stopping:
            return []
        swaps = self._fleet.swaps(at)
        late = self._groups.stop_late(at) if train else []
        return [*train, *late, *swaps, *(self._groups.admit(at) if self._rewards else ())]


def _ends(commands: list[AnyCommand]) -> str:
    """What the last command ends the run with, or ""."""
    last = commands[-1] if commands else None
    return last.reason if isinstance(last, Finish) else last.why if isinstance(last, Fail) else ""
