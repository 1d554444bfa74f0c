"""Payload segments: the arrays of samples on disk. The sample store is this, there is no other.

    body = header length u32, msgpack header [sample, attempt, [[dtype, shape], …]], then the arrays, raw, each
           beginning at a multiple of 8 bytes from the start of its record, so that they are used where they are read

What always holds: a sample can be read as soon as `put` has returned, written to disk or not; it is compared with its
checksum and with the name that it was asked for by. A segment only grows at its end, and not after the next
has begun.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec
import numpy as np

from areal_async.errors import LogError
from areal_async.log import format as fmt
from areal_async.log.format import HEAD_BYTES, PayloadRef
from areal_async.messages import SampleId
from areal_async.wire import arrays as _arrays
from areal_async.wire.arrays import Array, ArrayInfo

ALIGNMENT: Final = 8  # bytes; of the widest dtype
_LENGTH_BYTES: Final = 4


class PayloadHeader(msgspec.Struct, frozen=True, array_like=True):
    sample: SampleId
    attempt: int
    arrays: tuple[ArrayInfo, ...]


class Payload(NamedTuple):
    """arrays: own memory, writable."""

    sample: SampleId
    attempt: int
    arrays: list[Array]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(PayloadHeader)


def encode(sample: SampleId, attempt: int, arrays: Sequence[Array]) -> list[bytes | memoryview]:
    """A whole record, in parts; the array parts are views. Raises LogError for arrays that can't be logged."""
    try:
        infos = tuple(_arrays.describe(array) for array in arrays)
    except ValueError as error:
        raise LogError(f"sample {sample}, attempt {attempt}: {error}") from None
    header = _ENCODER.encode(PayloadHeader(sample, attempt, infos))
    body: list[bytes | memoryview] = [len(header).to_bytes(_LENGTH_BYTES, "little"), header]
    position = HEAD_BYTES + _LENGTH_BYTES + len(header)
    for array in arrays:
        data = _arrays.raw(array)
        body += [bytes(_padding(position)), data]
        position += _padding(position) + data.nbytes
    return [fmt.record_head(body), *body]


def decode(path: Path, ref: PayloadRef, record: memoryview) -> Payload:
    """record: the bytes that `ref` names. The arrays are views of them. Raises LogError if anything is wrong."""
    if len(record) < HEAD_BYTES:
        raise _outside(path, ref, len(record))
    head = fmt.parse_head(path, ref.offset, record[:HEAD_BYTES])
    if HEAD_BYTES + head.nbytes != ref.nbytes or len(record) != ref.nbytes:
        raise _outside(path, ref, len(record))
    fmt.check_body(path, ref.offset, head, record[HEAD_BYTES:])
    start = HEAD_BYTES + _LENGTH_BYTES
    position = start + int.from_bytes(record[HEAD_BYTES:start], "little")
    header = _parse_header(path, ref.offset, record[start:position])
    arrays = []
    try:
        for info in header.arrays:
            position += _padding(position)
            end = position + _arrays.nbytes(info)
            arrays.append(_arrays.view(info, record[position:end]))
            position = end
    except ValueError as error:
        raise LogError(f"{path}: the payload at offset {ref.offset} can't be read: {error}") from None
    return Payload(header.sample, header.attempt, arrays)


def read_header(file: BinaryIO, path: Path, offset: int, end: int) -> PayloadHeader:
    """Which sample the record from `offset` to `end` holds; `file` stands behind its head. Not checked by checksum."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if offset + HEAD_BYTES + _LENGTH_BYTES + length > end:
        raise LogError(f"{path}: corrupt record at offset {offset}: its header is said to have {length} bytes")
    return _parse_header(path, offset, file.read(length))


def read(folder: Path, ref: PayloadRef) -> Payload:
    """The payload that `ref` names, from disk. Raises LogError if it is missing or damaged."""
    path = fmt.payload_path(folder, ref.segment)
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise LogError(f"{path}: payload segment {ref.segment} can't be read: {error.strerror}") from None
    try:
        return decode(path, ref, read_at(fd, path, ref))
    finally:
        os.close(fd)


def read_at(fd: int, path: Path, ref: PayloadRef) -> memoryview:
    """The bytes that `ref` names, in fresh writable memory that is aligned for any dtype."""
    buffer = np.empty(ref.nbytes, np.uint8).data
    try:
        count = os.preadv(fd, [buffer], ref.offset) if ref.nbytes else 0
    except OSError as error:
        raise LogError(f"{path}: reading {ref.nbytes} bytes at offset {ref.offset} failed: {error.strerror}") from None
    if count != ref.nbytes:
        raise _outside(path, ref, count)
    return buffer


class Segment:
    """One payload file that is being written: what is on disk (`size`), and after it what isn't yet (`pending`)."""

    def __init__(self, folder: Path, number: int) -> None:
        """Opens or makes the file; its end must be whole (`reader.cut_torn_end`). Raises OSError."""
        self.number = number
        self.path = fmt.payload_path(folder, number)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.size = os.fstat(self.fd).st_size
        self.pending = bytearray() if self.size else bytearray(fmt.file_header("payloads"))

    @property
    def end(self) -> int:
        return self.size + len(self.pending)

    def put(self, record: Sequence[bytes | memoryview]) -> PayloadRef:
        offset = self.end
        for part in record:
            self.pending += part
        return PayloadRef(self.number, offset, self.end - offset)

    def get(self, ref: PayloadRef) -> Payload:
        if ref.offset < self.size and ref.offset + ref.nbytes <= self.size:
            return decode(self.path, ref, read_at(self.fd, self.path, ref))
        return decode(self.path, ref, self._unwritten(ref))

    def flush(self) -> None:
        """Write what is pending. Raises OSError; what was written until then is known and isn't written again."""
        before = len(self.pending)
        try:
            fmt.write_all(self.fd, self.pending)
        finally:
            self.size += before - len(self.pending)

    def _unwritten(self, ref: PayloadRef) -> memoryview:
        """A full disk can stop in the middle of a record: its first part is on disk then, the rest isn't."""
        buffer = np.empty(ref.nbytes, np.uint8)
        written = max(0, self.size - ref.offset)
        if written:
            buffer[:written] = read_at(self.fd, self.path, PayloadRef(ref.segment, ref.offset, written))
        start = ref.offset + written - self.size
        rest = self.pending[start : start + ref.nbytes - written]
        buffer[written:] = np.frombuffer(rest, np.uint8)
        return buffer.data


def _parse_header(path: Path, offset: int, data: bytes | memoryview) -> PayloadHeader:
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise LogError(f"{path}: corrupt record at offset {offset}: its header can't be read: {error}") from None


def _padding(position: int) -> int:
    return -position % ALIGNMENT


def _outside(path: Path, ref: PayloadRef, count: int) -> LogError:
    return LogError(
        f"{path}: no whole payload of {ref.nbytes} bytes at offset {ref.offset} (only {count} are there, or the record"
        " there is another one); the decision log and this file don't belong together, or the file was cut"
    )
