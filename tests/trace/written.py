"""Logs for tests of `trace`: what a walk of the core left, as turns, or as a run folder with arrays."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np

from areal_async.log.turns import Turn
from areal_async.log.writer import RunLog
from areal_async.messages import AnyRecord, Command, Event, Note, Rules, SampleDone
from areal_async.trace.life import GroupLife
from areal_async.trace.lives import Lives
from areal_async.wire.arrays import Array


def turns_of(records: Iterable[AnyRecord]) -> Iterator[Turn]:
    """Records of a log (its rules may be left out) event by event."""
    turn: Turn | None = None
    for number, record in enumerate(records):
        if isinstance(record, Event):
            if turn is not None:
                yield turn
            turn = Turn(0 if turn is None else turn.number + 1, record, None, 100 * number)  # type: ignore[arg-type]
        elif isinstance(record, Command) and turn is not None:
            turn.commands.append(record)  # type: ignore[arg-type]
            turn.offsets.append(100 * number)
        elif isinstance(record, Note) and turn is not None:
            turn.notes.append(record)
    if turn is not None:
        turn.last = True
        yield turn


def followed(records: Sequence[AnyRecord]) -> tuple[Lives, list[GroupLife]]:
    """The lives at the log's end, and all groups: those that left in the order in which they did, then the others."""
    rules = records[0]
    assert isinstance(rules, Rules)
    lives = Lives(rules)
    groups = [group for turn in turns_of(records) for group in lives.take(turn)]
    return lives, [*groups, *lives.rest()]


def outcomes(groups: Iterable[GroupLife]) -> Counter[str]:
    return Counter(group.outcome(sample) for group in groups for sample in group.samples)


def is_done(record: AnyRecord) -> TypeGuard[SampleDone]:
    return isinstance(record, SampleDone)


def arrays(done: SampleDone, tokens: Sequence[int] = ()) -> list[Array]:
    """Token ids, loss mask, log-probabilities, versions of prompt and answer. tokens: its first ids, else 3, 4, 5, …"""
    count = done.prompt_tokens + done.length
    ids = np.arange(3, 3 + count, dtype=np.int32)
    ids[: min(count, len(tokens))] = tokens[:count]
    mask = (np.arange(count) >= done.prompt_tokens).astype(np.uint8)
    versions = np.where(mask, done.newest, -1).astype(np.int32)
    if done.length:
        versions[done.prompt_tokens] = done.oldest
    return [ids, mask, (-mask / np.pi).astype(np.float32), versions]


def write(folder: Path, records: Iterable[AnyRecord], *, tokens: Sequence[int] = (), segment_bytes: int = 1500) -> Path:
    """A run folder with this log."""
    with contextlib.closing(RunLog(folder / "log", segment_bytes)) as run_log:
        for record in records:
            if is_done(record):
                run_log.append(record, run_log.put(record.sample, record.attempt, arrays(record, tokens)))
            else:
                run_log.append(record)
    return folder
