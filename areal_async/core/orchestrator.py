"""The core of a run: events in, commands out, one at a time, in the order of the log.

What always holds: it only passes events to the machines that own their tables (`groups`, `fleet`, `workers`,
`trainer`, `evaluating`, over one `ledger`) and asks them how to go on; `Finish` or `Fail` is its last command, and what
comes after it is ignored, unless a new controller resumes the run.
"""

from areal_async.core import endings, going_back
from areal_async.core.parts import Parts
from areal_async.core.view import View, view
from areal_async.core.waiting import explain
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    CheckpointDone,
    DataEnded,
    EvaluationDone,
    Failed,
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
    Version,
)


class Orchestrator:
    """See `areal_async.messages` for what each event says and each command asks for. Raises ValueError for rules
    that no run could follow, and IllegalTransition for an event that can't be true."""

    def __init__(self, rules: Rules) -> None:
        self._parts = Parts(rules)
        self._over = ""

    @property
    def step(self) -> int:
        """The next step to be formed: batch_groups · step groups have been handed to training."""
        return self._parts.ledger.step

    @property
    def returns(self) -> tuple[Version, ...]:
        """Versions that training can go back to, the newest first; () where no checkpoints are made."""
        return self._parts.trainer.returns

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        if self._over and not going_back.is_resume(event):
            return []
        commands = self._take(event)
        if not commands or not endings.said(commands):
            commands += self._go_on(event.at)
        self._over = endings.said(commands) if commands else ""
        return commands

    def next_wakeup(self) -> float | None:
        """Run clock at which a `Woke` is wanted, if there is such a time: for a restart, or another try."""
        return None if self._over or self._parts.stopping else self._parts.wakeup

    def waiting(self, now: float) -> str:
        """Who waits for whom, and for how long, in one line. now: the run clock."""
        return f"the run is over: {self._over}" if self._over else explain(self._parts, now)

    def story(self, id: str) -> str:
        """What happened to a live thing: "1307.5", "1307", "trainer", "rewards.0", a server's name; or its label."""
        told = [thing.story() for thing in self._parts.find(id)]
        return "\n".join(told) or f"nothing that lives is called {id}; the log has what is over"

    def balance(self) -> dict[str, int]:
        """How many groups and samples (`samples_…`) were admitted, and what became of them."""
        return self._parts.ledger.balance()

    def view(self) -> View:
        """What a dashboard shows."""
        return view(self._parts)

    def _take(self, event: AnyEvent) -> list[AnyCommand]:
        parts, groups = self._parts, self._parts.groups
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
            case Failed(of="swap"):
                parts.fleet.swap_failed(event)
            case Failed(of="server"):
                parts.fleet.wrong(event)
                return [*parts.evaluations.lost(event)]
            case Failed(of="evaluation"):
                return [*parts.evaluations.failed(event)]
            case Failed():
                return [*parts.trainer.failed(event)]
            case StepDone():
                return [*parts.trainer.step_done(event)]
            case Published():
                return [*parts.trainer.published(event)]
            case CheckpointDone():
                return [*parts.trainer.checkpoint_done(event)]
            case Swapped():
                parts.fleet.swapped(event)
            case EvaluationDone():
                parts.evaluations.done(event)
            case RolledBack():
                return going_back.rolled_back(event, parts)
            case Joined(peer="trainer"):
                return [*parts.trainer.join(event)]
            case Joined(peer="server"):
                parts.fleet.join(event)
            case Joined():
                parts.rewards.join(event)
            case Lost(peer="server"):
                parts.fleet.lost(event)
                return [*parts.evaluations.lost(event)]
            case Lost(peer="trainer"):
                return [*parts.trainer.lost(event)]
            case Lost():
                parts.rewards.lost(event)
            case StopRequested():
                parts.stopping = True
        return []  # also for `Woke`

    def _go_on(self, at: float) -> list[AnyCommand]:
        """What has become possible: a step, the end, an evaluation, restarts, swaps, new groups."""
        parts = self._parts
        train = parts.trainer.checkpoint_at_stop(at) if parts.stopping else parts.trainer.train(at)
        if end := endings.finish(parts, at):
            return end
        if parts.stopping:
            return [*train]
        if stranded := endings.stranded(parts):
            return [stranded]
        late = parts.groups.stop_late(at) if train else []
        servers = [*parts.wake(at), *parts.evaluations.begin(at), *parts.fleet.swaps(at)]
        admitted = [*parts.groups.start_held(at), *parts.groups.admit(at)] if parts.rewards.workers else []
        return [*train, *late, *servers, *admitted]
