"""When a run is over, and with which words.

What always holds: a run ends as it should only while the trainer is idle, so the weights of its last step are safe.
"""

from typing import Literal, TypeAlias

from areal_async.core.fleet import Fleet
from areal_async.core.groups import Groups
from areal_async.core.ledger import Ledger
from areal_async.core.trainer import Trainer
from areal_async.messages import Fail, Failed, Lost, Rules

Reason: TypeAlias = Literal["steps_done", "data_ended", "stopped"]


def finished(rules: Rules, ledger: Ledger, groups: Groups, trainer: Trainer, *, stopping: bool) -> Reason | None:
    """Why the run is over as it should, if it is. Asked after a step that could begin has begun."""
    if trainer.state == "starting" and stopping:
        return "stopped"
    if trainer.state != "idle":
        return None
    if trainer.version >= rules.steps:
        return "steps_done"
    if stopping:
        return "stopped"
    if groups.data_ended and ledger.ready == ledger.outstanding:
        return "data_ended"  # all that could still be trained is ready, and it is less than a batch
    return None


def lost(event: Lost, ledger: Ledger, fleet: Fleet, trainer: Trainer, *, stopping: bool) -> list[Fail]:
    """A peer is gone: nothing here can do without it, unless the run only waits for the trainer's last step."""
    if stopping and event.peer != "trainer":
        return []
    story = fleet.find(event.id).story() if event.peer == "server" else trainer.story()
    name = f"server {event.id}" if event.peer == "server" else event.id
    return [Fail(why=f"{name} is gone at step {ledger.step}: {event.why}\n{story}")]


def failed(event: Failed, ledger: Ledger, fleet: Fleet, trainer: Trainer) -> list[Fail]:
    """A swap, a step or a publication could not be done; nothing if it is one that a rollback has made pointless."""
    if event.of == "swap":
        server = fleet.find(event.id)
        if server.loading is None:
            return []
        story = server.story()
    else:
        doing = {"train": "training", "publish": "publishing"}[event.of]
        if trainer.state != doing or event.id != str(trainer.version):
            return []
        story = trainer.story()
    return [Fail(why=f"{event.of} {event.id} failed at step {ledger.step}: {event.why}\n{story}")]
