"""Reading a run's log folder: records in their order, payloads by reference, torn ends.

What always holds: the reader changes nothing, but for `cut`, which only the writer calls. A torn end of the
decision log is said (`on_torn`) and left out; anything else that isn't right raises LogError with file and offset.
The log of a run that is still going on can be read; its end then may look torn, for the writer is in the middle of it.
"""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from areal_async.errors import LogError, Released
from areal_async.log import format as fmt
from areal_async.log import payloads
from areal_async.log.format import HEAD_BYTES, HEADER_BYTES, Entry, FileKind, Head, PayloadRef, Torn
from areal_async.log.payloads import Payload
from areal_async.messages import AnyRecord, CheckpointDone, Release, Rules, SampleDone

log = logging.getLogger(__name__)

_ENTRIES: Final = msgspec.msgpack.Decoder(Entry)
_BUFFER_BYTES: Final = 1 << 20  # few system calls for many small records
_BLOCK_BYTES: Final = 512  # the least that any disk or file system writes at once
_LEAST_ZEROS: Final = 8  # fewer at the end of a file say nothing


class Record(NamedTuple):
    """message: an event, a command, a note, or (first) the rules. offset: where it begins in `decisions.log`."""

    message: AnyRecord
    payload: PayloadRef | None
    offset: int


def warn(torn: Torn) -> None:
    log.warning("%s; it was being written when the run was ended, and is left out", torn)


def read_records(folder: Path, on_torn: Callable[[Torn], None] = warn) -> Iterator[Record]:
    """The decision log of the folder, from its first record (a `Rules`) to its last whole one.

    on_torn is called, last, if the log ends in the middle of a record. Raises LogError: no log, corruption, records
    that this version doesn't know.
    """
    path = folder / fmt.DECISIONS_NAME
    for item in scan(path, "decisions"):
        if isinstance(item, Torn):
            on_torn(item)
            return
        yield parse(path, *item)


def parse(path: Path, offset: int, body: bytes) -> Record:
    """A record of the decision log, of its checked body. Raises LogError: this version doesn't know it, or it can't be
    the first."""
    try:
        entry = _ENTRIES.decode(body)
    except msgspec.DecodeError as error:
        raise unknown(path, offset, error) from None
    if offset == HEADER_BYTES and not isinstance(entry.record, Rules):
        raise LogError(f"{path}: the first record is {type(entry.record).__name__}, not Rules; it isn't a run's log")
    return Record(entry.record, entry.payload, offset)


def unknown(path: Path, offset: int, error: msgspec.DecodeError) -> LogError:
    return LogError(f"{path}: the record at offset {offset} is whole but unknown to this version: {error}")


def read_payload(folder: Path, ref: PayloadRef) -> Payload:
    """The arrays that a record refers to. Raises LogError if they are missing or damaged; `Released` if that is because
    nobody needs them any more (to find that out the decision log is read)."""
    if not fmt.payload_path(folder, ref.segment).exists():
        _raise_if_released(folder, ref)
    return payloads.read(folder, ref)


def _raise_if_released(folder: Path, ref: PayloadRef) -> None:
    sample, attempt, checkpoint = "", 0, 0
    for record in read_records(folder):
        match record.message:
            case SampleDone() as done if record.payload == ref:
                sample, attempt = done.sample, done.attempt
            case SampleDone() as done if sample and done.sample == sample:
                raise Released(
                    f"{fmt.payload_path(folder, ref.segment)}: sample {sample}, attempt {attempt} was replaced by its"
                    f" attempt {done.attempt}, and its arrays were deleted; the decisions are kept"
                )
            case CheckpointDone():
                checkpoint = record.message.version
            case Release() as release if sample in release.samples:
                raise Released(
                    f"{fmt.payload_path(folder, ref.segment)}: sample {sample}, attempt {attempt} was released after"
                    f" checkpoint {checkpoint}, and its arrays were deleted; the decisions are kept"
                )


def scan(path: Path, kind: FileKind, begin: int = HEADER_BYTES) -> Iterator[tuple[int, bytes] | Torn]:
    """Offset and checked body of each record of a file, from the one at `begin` on; a `Torn` comes last if the end is
    torn."""
    try:
        file = path.open("rb", buffering=_BUFFER_BYTES)
    except OSError as error:
        raise LogError(f"{path}: can't be read: {error.strerror}") from None
    with file:
        torn = _check_start(path, file, kind)
        if torn:
            yield torn
            return
        offset = begin
        if begin != HEADER_BYTES:
            file.seek(begin)
        while data := file.read(HEAD_BYTES):
            head = _whole_head(path, offset, data, file)
            body = file.read(head.nbytes) if head else b""
            if head is None or len(body) < head.nbytes or not _whole_body(path, offset, head, body, file):
                yield Torn(path, offset, _size(file) - offset)
                return
            yield offset, body
            offset += HEAD_BYTES + head.nbytes


def index_segment(folder: Path, number: int) -> Iterator[tuple[payloads.PayloadHeader, PayloadRef] | Torn]:
    """Which samples lie where in a payload segment, by the heads of its records; a `Torn` comes last if the end is torn
    (of any segment: before a loss of power the system may have written the next one first).

    The arrays are neither read nor checked. Raises LogError for a damaged head.
    """
    path = fmt.payload_path(folder, number)
    with path.open("rb") as file:
        torn = _check_start(path, file, "payloads")
        if torn:
            yield torn
            return
        offset, size = HEADER_BYTES, _size(file)
        while offset < size:
            file.seek(offset)
            head = _whole_head(path, offset, file.read(HEAD_BYTES), file)
            end = offset + HEAD_BYTES + head.nbytes if head else size + 1
            if end > size:
                yield Torn(path, offset, size - offset)
                return
            yield payloads.read_header(file, path, offset, end), PayloadRef(number, offset, end - offset)
            offset = end


def index_payloads(folder: Path) -> Iterator[tuple[payloads.PayloadHeader, PayloadRef]]:
    """`index_segment` of all segments of the folder; torn ends are said and left out."""
    for number in fmt.payload_segments(folder):
        for item in index_segment(folder, number):
            if isinstance(item, Torn):
                warn(item)
            else:
                yield item


def find_torn_end(path: Path, kind: FileKind) -> Torn | None:
    """Reads and checks the whole file. Raises LogError if it is corrupt elsewhere than at a torn end."""
    return next((item for item in scan(path, kind) if isinstance(item, Torn)), None)


def cut(torn: Torn) -> None:
    """Shorten the file by its torn end, and say so. Only who holds the folder's lock may do this."""
    log.warning("%s; it was being written when the run was ended, and is cut", torn)
    os.truncate(torn.path, torn.offset)


def _check_start(path: Path, file: BinaryIO, kind: FileKind) -> Torn | None:
    """Reads the file's header. Raises LogError if it is there and not one of this kind."""
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or _was_lost(file, 0, HEADER_BYTES, header):
        return Torn(path, 0, _size(file))
    fmt.check_file_header(path, header, kind)
    return None


def _whole_head(path: Path, offset: int, data: bytes, file: BinaryIO) -> Head | None:
    """None if the record at `offset` is torn before its body."""
    if len(data) < HEAD_BYTES:
        return None
    try:
        return fmt.parse_head(path, offset, data)
    except LogError:
        if _was_lost(file, offset, offset + HEAD_BYTES, data):
            return None
        raise


def _whole_body(path: Path, offset: int, head: Head, body: bytes, file: BinaryIO) -> bool:
    """False if the end of it never reached the disk."""
    try:
        fmt.check_body(path, offset, head, body)
    except LogError:
        if _was_lost(file, offset, offset + HEAD_BYTES + head.nbytes, body):
            return False
        raise
    return True


def _was_lost(file: BinaryIO, begin: int, end: int, data: bytes) -> bool:
    """Whether bytes of the file from `begin` to `end` have become zeros in a loss of power, with all that follows.

    They have if nothing but zeros is left, from `begin` on or from a block's first byte on. data: the last of them.
    """
    if any(data[-1:]):
        return False
    zeros = _zeros_begin(file)
    block = -(-zeros // _BLOCK_BYTES) * _BLOCK_BYTES
    return zeros <= begin or (block < end and _size(file) - block >= _LEAST_ZEROS)


def _zeros_begin(file: BinaryIO) -> int:
    """From where on the file is nothing but zeros."""
    end = _size(file)
    while end:
        start = max(0, end - _BUFFER_BYTES)
        used = len(os.pread(file.fileno(), end - start, start).rstrip(b"\0"))
        if used:
            return start + used
        end = start
    return 0


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size
