"""Opening a log that is there already: torn ends are cut, samples are found again.

What always holds: every torn end is said with file, offset and bytes before it is cut; after that each record's arrays
are there, unless they are needed no more; bytes of a payload segment that a record refers to are never written a second
time, so a reference names the arrays that it named, or none.
"""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from areal_async.errors import LogError
from areal_async.log import format as fmt
from areal_async.log import reader
from areal_async.log.format import Entry, PayloadRef, Torn
from areal_async.log.places import Places
from areal_async.messages import Cancel, CheckpointDone, Forget, Release, SampleDone, SampleId

log = logging.getLogger(__name__)


class _Rough(msgspec.Struct, frozen=True, array_like=True):
    """A record that isn't looked into: what opening a log needs of most of them, at a tenth of the time."""

    record: msgspec.Raw
    payload: PayloadRef | None = None


_ROUGH: Final = msgspec.msgpack.Decoder(_Rough)
_ENTRY: Final = msgspec.msgpack.Decoder(Entry)
# How the records that are looked into begin, behind the heads of the array and of the map that they are
_NAMING: Final = tuple(
    msgspec.msgpack.encode({"kind": kind})[1:] for kind in ("forget", "release", "cancel", "checkpoint_done")
)
_BEGINS_AT: Final = 2
_CHECKED: Final = 2  # newest segments whose arrays are checked, too: what may never have been synced
_NAMED: Final = 20  # samples in a warning


class _Gone(NamedTuple):
    """Arrays that a record refers to and that aren't there. offset: of the record."""

    attempt: int
    offset: int
    ref: PayloadRef


@dataclass
class Recovered:
    """next: number of the segment to write on."""

    places: Places = field(default_factory=Places)
    next: int = 1


@dataclass
class _Decisions:
    """What the decision log says. cancelled: attempts. gone: by sample. checkpoint: offset of the last one's record."""

    cancelled: set[tuple[SampleId, int]] = field(default_factory=set)
    gone: dict[SampleId, _Gone] = field(default_factory=dict)
    checkpoint: int = 0


def recover(folder: Path) -> Recovered:
    """Only who holds the folder's lock may do this. Raises LogError for corruption, OSError."""
    found = Recovered()
    names: dict[PayloadRef, tuple[SampleId, int]] = {}
    numbers = fmt.payload_segments(folder)
    found.next = max(numbers, default=1)
    for number in numbers[-_CHECKED:]:
        _cut(reader.find_torn_end(fmt.payload_path(folder, number), "payloads"))
    for number in numbers:
        found.places.open(number)
        for item in reader.index_segment(folder, number):
            if isinstance(item, Torn):
                _cut(item)
                continue
            header, ref = item
            names[ref] = header.sample, header.attempt
            found.places.find(header.sample, header.attempt, ref)
    if not (folder / fmt.DECISIONS_NAME).exists():
        return found
    decisions = _follow_references(folder, names, found)
    if not decisions.gone:
        return found
    _cut_before(folder, decisions)
    return recover(folder)  # of a log that ends sooner


def _follow_references(folder: Path, names: dict[PayloadRef, tuple[SampleId, int]], found: Recovered) -> _Decisions:
    """Which arrays are needed: those that a record refers to, and that no later record has released or replaced."""
    path = folder / fmt.DECISIONS_NAME
    decisions = _Decisions()
    for item in reader.scan(path, "decisions"):
        if isinstance(item, Torn):
            _cut(item)
            break
        offset, body = item
        try:
            ref = _ROUGH.decode(body).payload
            if ref in names:
                sample, attempt = names[ref]
                decisions.gone.pop(sample, None)
                if (sample, attempt) not in decisions.cancelled:
                    found.places.need(sample, ref)
            elif ref is not None or body.startswith(_NAMING, _BEGINS_AT):
                _follow(_ENTRY.decode(body), offset, decisions, found)
        except msgspec.DecodeError as error:
            raise reader.unknown(path, offset, error) from None
    return decisions


def _follow(entry: Entry, offset: int, decisions: _Decisions, found: Recovered) -> None:
    match entry:
        case Entry(record=SampleDone(sample=sample, attempt=attempt), payload=PayloadRef() as ref):
            if (sample, attempt) not in decisions.cancelled:
                decisions.gone[sample] = _Gone(attempt, offset, ref)
            found.next = max(found.next, ref.segment + 1)
        case Entry(record=Cancel(sample=sample, attempt=attempt)):
            decisions.cancelled.add((sample, attempt))
        case Entry(record=CheckpointDone()):
            decisions.checkpoint = offset
        case Entry(record=Forget(samples=samples)):
            found.places.forget(samples)
        case Entry(record=Release(samples=samples)):
            found.places.release(samples)
            for sample in samples:
                decisions.gone.pop(sample, None)


def _cut_before(folder: Path, decisions: _Decisions) -> None:
    """A loss of power took arrays that the records of their samples have outlived. What was handled from the first such
    record on was never synced, so no checkpoint has it: the log ends there, as if the power had been lost then."""
    path = folder / fmt.DECISIONS_NAME
    sample, first = min(decisions.gone.items(), key=lambda item: item[1].offset)
    if decisions.checkpoint > first.offset:
        raise LogError(
            f"{fmt.payload_path(folder, first.ref.segment)}: the arrays of sample {sample}, attempt {first.attempt}"
            f" (offset {first.ref.offset}, {first.ref.nbytes} bytes) are gone, and were on the disk before the"
            " checkpoint after them was written. The file was changed or taken away; restore it from a copy"
        )
    names = [f"sample {sample}, attempt {gone.attempt}" for sample, gone in decisions.gone.items()]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    log.warning(
        "%s: a loss of power took the arrays of %d finished samples (%s%s); cut at offset %d of %d, before the record"
        " of the first of them: what was handled from there on will be done again",
        path, len(names), "; ".join(names[:_NAMED]), more, first.offset, path.stat().st_size,
    )  # fmt: skip
    os.truncate(path, first.offset)


def _cut(torn: Torn | None) -> None:
    if torn is not None:
        reader.cut(torn)
