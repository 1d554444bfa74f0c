"""When a run is over, and with which words.

What always holds: a run ends as it should only while the trainer is idle, so the weights of its last step are safe, and
only when they were evaluated, where that is wanted and there is a server that still can.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from areal_async.core.parts import Parts
from areal_async.messages import AnyCommand, Fail, Finish

Reason: TypeAlias = Literal["steps_done", "data_ended", "stopped"]


def finish(parts: Parts, at: float) -> list[AnyCommand]:
    """The last commands of a run that is over as it should, if it is. Asked after a step that could begin has begun."""
    reason = _reason(parts)
    if reason is None:
        return []
    if reason == "stopped" and parts.trainer.returns:
        return [*parts.groups.leave_running(), Finish(reason=reason)]
    if not parts.stopping and parts.fleet.is_alive and not parts.evaluations.is_concluded(parts.trainer.version):
        return []
    return [*parts.groups.cancel_unready(at, reason), Finish(reason=reason)]


def _reason(parts: Parts) -> Reason | None:
    ledger, trainer = parts.ledger, parts.trainer
    if trainer.state in ("starting", "lost") and parts.stopping:
        return "stopped"  # nobody is there to save a model; a resume goes on from the newest checkpoint
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
    if fleet.last_lost is None or fleet.is_alive:
        return None
    more = ledger.taken < rules.steps * rules.batch_groups and not parts.groups.data_ended
    if not more and not ledger.in_flight:
        return None
    return Fail(
        why=f"no rollout server is left at step {ledger.step}. The first that was lost: {fleet.first_loss}\n"
        f"The last one: {fleet.last_lost.story()}"
    )


def said(commands: Sequence[AnyCommand]) -> str:
    """What the last of these commands ends the run with, or ""."""
    last = commands[-1] if commands else None
    return last.reason if isinstance(last, Finish) else last.why if isinstance(last, Fail) else ""
