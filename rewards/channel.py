"""The socket between a reward worker and its sandbox process: length-prefixed msgpack structs.

What always holds: both ends are of this version of the program, so nothing is negotiated; a message is never split
for the reader.
"""

import struct
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec

from areal_async.messages import ScoreResult, ScoreTask

LENGTH: Final = struct.Struct("<I")


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The sandbox has loaded function and tokenizer. why: "", or the error because of which it ends."""

    why: str


class Job(msgspec.Struct, frozen=True, tag=True):
    """A check to be done; number: chosen by the worker. token_ids: of the response, int32 in native order."""

    number: int
    task: ScoreTask
    token_ids: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer to the `Job` of this number."""

    number: int
    result: ScoreResult


Message: TypeAlias = Ready | Job | Done

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


class Unpacker:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[Message]:
        self._buffer += received
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH.size : end])  # a copy: the columns of a task point into it
            del self._buffer[:end]
            yield _DECODER.decode(body)
