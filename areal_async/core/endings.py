"""When a run is over, and with which words.

What always holds: a run ends as it should only while the trainer is idle, so the weights of its last step are safe, and
only when they were evaluated, where that is wanted and there is a server that still can.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from areal_async.core.parts import Parts
from areal_async.messages import AnyCommand, Fail, Failed, Finish, Lost

Reason: TypeAlias = Literal["steps_done", "data_ended", "stopped"]


def finished(parts: Parts) -> Reason | None:
    """Why the run is over as it should, if it is. Asked after a step that could begin has begun."""
    reason = _reason(parts)
    if reason is None or parts.stopping or not parts.fleet.is_alive:
        return reason
    return reason if parts.evaluations.is_concluded(parts.trainer.version) else None


def _reason(parts: Parts) -> Reason | None:
    ledger, trainer = parts.ledger, parts.trainer
    if trainer.state == "starting" and parts.stopping:
        return "stopped"
    if trainer.state != "idle":
        return None
    if trainer.version >= parts.rules.steps:
        return "steps_done"
    if parts.stopping:
        return "stopped"
    if parts.groups.data_ended and ledger.ready == ledger.outstanding:
        return "data_ended"  # all that could still be trained is ready, and it is less than a batch
    return None


def stranded(parts: Parts) -> Fail | None:
    """No server is left, nor will one come, and there is something to generate; or no check can be made any more."""
    rules, ledger, fleet = parts.rules, parts.ledger, parts.fleet
    if parts.rewards.given_up:
        return Fail(why=f"checks of answers can't be made any more at step {ledger.step}: {parts.rewards.given_up}")
    if fleet.is_alive or fleet.last_lost is None:
        return None
    more = ledger.taken < rules.steps * rules.batch_groups and not parts.groups.data_ended
    if not more and not ledger.in_flight:
        return None
    return Fail(
        why=f"no rollout server is left at step {ledger.step}. The first that was lost: {fleet.first_loss}\n"
        f"The last one: {fleet.last_lost.story()}"
    )


def lost(event: Lost, parts: Parts) -> list[Fail]:
    """The trainer is gone: nothing here can do without it."""
    return [Fail(why=f"{event.id} is gone at step {parts.ledger.step}: {event.why}\n{parts.trainer.story()}")]


def failed(event: Failed, parts: Parts) -> list[Fail]:
    """A step or a publication could not be done; nothing if it is one that a rollback has made pointless."""
    trainer = parts.trainer
    doing = {"train": "training", "publish": "publishing"}[event.of]
    if trainer.state != doing or event.id != str(trainer.version):
        return []
    return [Fail(why=f"{event.of} {event.id} failed at step {parts.ledger.step}: {event.why}\n{trainer.story()}")]


def said(commands: Sequence[AnyCommand]) -> str:
    """What the last of these commands ends the run with, or ""."""
    last = commands[-1] if commands else None
    return last.reason if isinstance(last, Finish) else last.why if isinstance(last, Fail) else ""
