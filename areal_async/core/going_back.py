"""Going back to a checkpoint: after the trainer was lost, and where a new controller resumes a run.

What always holds: nothing that was handed to training is lost or trained twice in the history that survives, since the
steps from the checkpoint on are trained again with the same batches; what has an outcome isn't generated again; the
ledger balances as before. docs/resume.md says what is kept, and why nothing can stick.
"""

from collections.abc import Iterator

from areal_async.core.parts import Parts
from areal_async.messages import AnyCommand, AnyEvent, Cancel, Fail, RolledBack


def is_resume(event: AnyEvent) -> bool:
    """Whether a new controller takes over, be the run over for the one before or not."""
    return isinstance(event, RolledBack) and event.resumed is not None


def rolled_back(event: RolledBack, parts: Parts) -> list[AnyCommand]:
    """Steps from `event.to` on wait for the trainer's ranks. Raises IllegalTransition where they can't be trained
    again, ValueError for rules that can't follow those of before."""
    if parts.trainer.is_past(event):
        return []
    if event.resumed is not None:
        parts.resume(event.resumed)
    parts.trainer.roll_back(event)
    parts.fleet.roll_back(parts.trainer.branch)
    parts.evaluations.roll_back(event.to)
    commands = parts.groups.roll_back(event.at, f"back to version {event.to}")
    if event.resumed is None:
        return [*commands]
    nobody_does = [command for command in commands if not isinstance(command, Cancel)]
    return [*nobody_does, *parts.groups.check_again(), *_too_long(parts)]


def _too_long(parts: Parts) -> Iterator[Fail]:
    """An answer that was accepted by the rules of before, and fits in no micro-batch by those of now."""
    capacity = parts.rules.max_tokens_per_microbatch
    longest = max(
        (
            (sample.done.prompt_tokens + sample.done.length, sample.id)
            for group in parts.ledger.groups.values()  # outstanding, or in training from the checkpoint on
            for sample in group.samples
            if sample.done is not None
        ),
        default=(0, ""),
    )
    if longest[0] > capacity:
        yield Fail(
            why=f"sample {longest[1]}, which is yet to be trained, has {longest[0]} tokens, and"
            f" train.max_tokens_per_microbatch is now {capacity}: resume with at least {longest[0]}"
        )
