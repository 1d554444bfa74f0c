"""Opening a log that is there already: torn ends are cut, samples are found again.

What always holds: every torn end is said with file, offset and bytes before it is cut; bytes of a payload segment that
a record refers to are never written a second time, so a reference names the arrays that it named, or none.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from areal_async.log import format as fmt
from areal_async.log import reader
from areal_async.log.format import Entry, PayloadRef, Torn
from areal_async.log.places import Places
from areal_async.messages import Cancel, Forget, Release, SampleDone, SampleId

log = logging.getLogger(__name__)


class _Rough(msgspec.Struct, frozen=True, array_like=True):
    """A record that isn't looked into: what opening a log needs of most of them, at a tenth of the time."""

    record: msgspec.Raw
    payload: PayloadRef | None = None


_ROUGH: Final = msgspec.msgpack.Decoder(_Rough)
_ENTRY: Final = msgspec.msgpack.Decoder(Entry)
# How the records that name samples begin, behind the heads of the array and of the map that they are
_NAMING: Final = tuple(msgspec.msgpack.encode({"kind": kind})[1:] for kind in ("forget", "release", "cancel"))
_BEGINS_AT: Final = 2
_CHECKED: Final = 2  # newest segments whose arrays are checked, too: what may never have been synced
_NAMED: Final = 20  # samples in a warning


@dataclass
class Recovered:
    """next: number of the segment to write on. missing: finished samples whose arrays are gone, by their attempt (a
    loss of power took them; the records of them were on the disk sooner)."""

    places: Places = field(default_factory=Places)
    next: int = 1
    missing: dict[SampleId, int] = field(default_factory=dict)


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
    if (folder / fmt.DECISIONS_NAME).exists():
        _follow_references(folder, names, found)
    if found.missing:
        _say_missing(folder, found.missing)
    return found


def _follow_references(folder: Path, names: dict[PayloadRef, tuple[SampleId, int]], found: Recovered) -> None:
    """Which arrays are needed: those that a record refers to, and that no later record has released or replaced."""
    path = folder / fmt.DECISIONS_NAME
    cancelled: set[tuple[SampleId, int]] = set()
    for item in reader.scan(path, "decisions"):
        if isinstance(item, Torn):
            _cut(item)
            return
        offset, body = item
        try:
            ref = _ROUGH.decode(body).payload
            if ref in names:
                sample, attempt = names[ref]
                found.missing.pop(sample, None)
                if (sample, attempt) not in cancelled:
                    found.places.need(sample, ref)
            elif ref is not None or body.startswith(_NAMING, _BEGINS_AT):
                _follow(_ENTRY.decode(body), found, cancelled)
        except msgspec.DecodeError as error:
            raise reader.unknown(path, offset, error) from None


def _follow(entry: Entry, found: Recovered, cancelled: set[tuple[SampleId, int]]) -> None:
    match entry:
        case Entry(record=SampleDone() as done, payload=PayloadRef() as ref):
            if (done.sample, done.attempt) not in cancelled:
                found.missing[done.sample] = done.attempt
            found.next = max(found.next, ref.segment + 1)
        case Entry(record=Cancel(sample=sample, attempt=attempt)):
            cancelled.add((sample, attempt))
        case Entry(record=Forget(samples=samples)):
            found.places.forget(samples)
        case Entry(record=Release(samples=samples)):
            found.places.release(samples)
            for sample in samples:
                found.missing.pop(sample, None)


def _cut(torn: Torn | None) -> None:
    if torn is not None:
        reader.cut(torn)


def _say_missing(folder: Path, missing: dict[SampleId, int]) -> None:
    names = [f"sample {sample}, attempt {attempt}" for sample, attempt in missing.items()]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    log.warning(
        "%s: the arrays of %d finished samples are gone (a loss of power took them before they were synced); they"
        " count as never finished: %s%s", folder, len(names), "; ".join(names[:_NAMED]), more,
    )  # fmt: skip
