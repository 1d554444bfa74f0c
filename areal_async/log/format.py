"""How a log file lies on disk. Docs, with a drawing: docs/log.md.

    file   = header, record, record, …
    header = magic "AREALOG" + kind ("D" decisions, "P" payloads), version u32, crc32 of these 12 bytes u32
    record = length of the body u32, crc32 of the body u32, crc32 of these 8 bytes u32, body
All integers are little-endian; crc32 is that of zlib.

What always holds: nothing is believed before its checksum has been compared. The length has one of its own, so that a
damaged length can't pass for a torn end and hide all that follows it.
Torn means: the file ends inside of a header or record, or nothing but zeros is left, from a record's beginning or, in
one, from a disk block's beginning on (some file systems lengthen a file before its data reach the disk; so a loss of
power can leave it). Everything else that isn't right is corruption.
"""

import errno
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from areal_async.errors import LogError
from areal_async.messages import AnyRecord

VERSION: Final = 1
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # errors that more room on the disk ends
MAX_BODY_BYTES: Final = (1 << 32) - 1  # what the length field can say

_HEADER: Final = struct.Struct("<8sII")
_HEAD: Final = struct.Struct("<III")
_PAIR: Final = struct.Struct("<II")
HEADER_BYTES: Final = _HEADER.size
HEAD_BYTES: Final = _HEAD.size

FileKind: TypeAlias = Literal["decisions", "payloads"]
_MAGIC: Final[dict[FileKind, bytes]] = {"decisions": b"AREALOGD", "payloads": b"AREALOGP"}

DECISIONS_NAME: Final = "decisions.log"
LOCK_NAME: Final = "lock"


class PayloadRef(msgspec.Struct, frozen=True, array_like=True):
    """Where the arrays of a sample lie: file `payload-<segment>.seg`, first byte and length of the whole record."""

    segment: int
    offset: int
    nbytes: int


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Body of a record of the decision log."""

    record: AnyRecord
    payload: PayloadRef | None = None


class Torn(NamedTuple):
    """The end of a file that isn't whole: what begins at `offset` has only `nbytes` bytes."""

    path: Path
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.path}: torn end: the last {self.nbytes} bytes, from offset {self.offset} on, are no whole record"


class Head(NamedTuple):
    """Length and checksum of the body that follows."""

    nbytes: int
    crc: int


def payload_path(folder: Path, segment: int) -> Path:
    return folder / f"payload-{segment:06d}.seg"


def payload_segments(folder: Path) -> list[int]:
    """Numbers of the payload segments in the folder, ascending; they start at 1, and deleted ones leave gaps."""
    numbers = (path.stem.removeprefix("payload-") for path in folder.glob("payload-*.seg"))
    return sorted(int(number) for number in numbers if number.isdigit())


def file_header(kind: FileKind) -> bytes:
    start = _MAGIC[kind] + VERSION.to_bytes(4, "little")
    return start + zlib.crc32(start).to_bytes(4, "little")


def check_file_header(path: Path, data: bytes, kind: FileKind) -> None:
    """data: the first `HEADER_BYTES` of the file, all there. Raises LogError if it isn't a log file of this kind."""
    magic, version, crc = _HEADER.unpack(data)
    if magic != _MAGIC[kind]:
        raise LogError(f"{path}: not a {kind} file of areal-async (offset 0 has {magic!r}, not {_MAGIC[kind]!r})")
    if zlib.crc32(data[:12]) != crc:
        raise LogError(f"{path}: the file's header (offset 0) is damaged: its checksum doesn't fit")
    if version != VERSION:
        raise LogError(
            f"{path}: written in format {version}, this areal-async reads {VERSION}; use the one that wrote it"
        )


def record_head(body: Sequence[bytes | memoryview]) -> bytes:
    """The head of a record whose body are these parts, one after another."""
    nbytes, crc = 0, 0
    for part in body:
        nbytes += len(part)
        crc = zlib.crc32(part, crc)
    if nbytes > MAX_BODY_BYTES:
        raise LogError(f"a record of {nbytes} bytes can't be logged; at most {MAX_BODY_BYTES} are possible")
    pair = _PAIR.pack(nbytes, crc)
    return pair + zlib.crc32(pair).to_bytes(4, "little")


def parse_head(path: Path, offset: int, data: bytes | memoryview) -> Head:
    """data: `HEAD_BYTES` at `offset` of the file, all there. Raises LogError if they are damaged."""
    nbytes, crc, own_crc = _HEAD.unpack(data)
    if zlib.crc32(data[:8]) != own_crc:
        raise LogError(
            f"{path}: corrupt record at offset {offset}: the checksum of its head doesn't fit."
            " The file was changed or the disk is failing; restore it from a copy"
        )
    return Head(nbytes, crc)


def check_body(path: Path, offset: int, head: Head, body: bytes | memoryview) -> None:
    """offset: of the record in the file. Raises LogError if the body is damaged."""
    if zlib.crc32(body) != head.crc:
        raise LogError(
            f"{path}: corrupt record at offset {offset} ({head.nbytes} bytes): the checksum of its body doesn't fit."
            " The file was changed or the disk is failing; restore it from a copy"
        )


def write_all(fd: int, data: bytearray) -> None:
    """Write `data` at the descriptor's position, one system call if the system takes it whole.

    What was written leaves `data` at once: after an error (a full disk) the rest, no byte more or less, can be written
    by calling again. Raises OSError.
    """
    while data:
        written = os.write(fd, data)
        del data[:written]
