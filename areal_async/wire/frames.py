"""The form of a message: `[header, array, array, …]`.

The header is msgpack of an envelope: the id of the request that it asks or answers ("" for beats, hellos and the like),
one struct of `messages.AnyWire`, dtype and shape of each array. The arrays follow as raw bytes, without a copy.

What always holds: whatever bytes come in, `unpack` returns a message that is what its type says, or raises WireError;
sizes are bounded, and nothing is ever unpickled.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from areal_async.errors import WireError
from areal_async.messages import AnyWire
from areal_async.wire import arrays as _arrays
from areal_async.wire.arrays import Array, ArrayInfo, Buffer

MAX_HEADER_BYTES: Final = 64 << 20  # the largest is `Train`: about 40 bytes a sample, so more than a million samples
MAX_FRAME_BYTES: Final = 1 << 30  # an array; 256 million float32. ZeroMQ drops a peer that sends more (MAXMSGSIZE)
MAX_ARRAYS: Final = 256  # `Train` has five
MAX_ID_CHARACTERS: Final = 256
IPC_PATH_BYTES: Final = 107  # Linux: sockaddr_un.sun_path has 108, the last one is the NUL


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header frame."""

    id: str
    message: AnyWire
    arrays: tuple[ArrayInfo, ...] = ()


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Envelope)


def pack(message: AnyWire, arrays: Sequence[Array] = (), *, id: str = "") -> list[bytes | memoryview]:
    """Frames of a message. The array frames are views of the arrays: don't change these until the message is sent."""
    try:
        infos = tuple(_arrays.describe(array) for array in arrays)
    except ValueError as error:
        raise WireError(f"{type(message).__name__} {id}: {error}") from None
    if len(arrays) > MAX_ARRAYS or len(id) > MAX_ID_CHARACTERS:
        raise WireError(
            f"{type(message).__name__} {id[:MAX_ID_CHARACTERS]}: {len(arrays)} arrays and an id of {len(id)}"
            f" characters; at most {MAX_ARRAYS} and {MAX_ID_CHARACTERS} fit into a message"
        )
    header = _ENCODER.encode(Envelope(id, message, infos))
    packed: list[bytes | memoryview] = [header, *map(_arrays.raw, arrays)]
    _check_sizes([memoryview(frame).nbytes for frame in packed], f"{type(message).__name__} {id}")
    return packed


def unpack(frames: Sequence[Buffer]) -> tuple[AnyWire, list[Array]]:
    """Message and arrays; raises WireError if the frames are not a message."""
    _, message, arrays = open_envelope(frames)
    return message, arrays


def open_envelope(frames: Sequence[Buffer]) -> tuple[str, AnyWire, list[Array]]:
    """Id, message and arrays; raises WireError if the frames are not a message.

    The arrays share the memory of the frames (and keep it alive).
    """
    sizes = [memoryview(frame).nbytes for frame in frames]
    if not frames:
        raise WireError("a message without frames came; the peer doesn't speak this protocol")
    _check_sizes(sizes, "a message that came")
    try:
        # bytes(): `ScoreTask.columns` points into the header and must not pin or outlive a frame of ZeroMQ
        envelope = _DECODER.decode(bytes(frames[0]))
        if len(envelope.id) > MAX_ID_CHARACTERS:
            raise ValueError(f"its id has {len(envelope.id)} characters, at most {MAX_ID_CHARACTERS} are allowed")
        if len(envelope.arrays) != len(frames) - 1:
            raise ValueError(f"its header announces {len(envelope.arrays)} arrays, {len(frames) - 1} came")
        arrays = [_arrays.view(info, frame) for info, frame in zip(envelope.arrays, frames[1:], strict=True)]
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(
            f"a malformed message came (frames of {sizes[:8]} bytes): {error}; do both sides run the same areal-async?"
        ) from None
    return envelope.id, envelope.message, arrays


def check_address(address: str) -> None:
    """Raises WireError for an address that ZeroMQ would refuse less clearly, or cut."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp"):
        raise WireError(f"{address}: not an address; it is ipc:///path/of/socket or tcp://host:port")
    length = len(rest.encode())
    if scheme == "ipc" and not 0 < length <= IPC_PATH_BYTES:
        raise WireError(
            f"{address}: the path of a socket may have 1 to {IPC_PATH_BYTES} bytes, this one has {length};"
            " use a folder with a shorter name, such as one under /tmp or $XDG_RUNTIME_DIR"
        )


def _check_sizes(sizes: Sequence[int], what: str) -> None:
    if len(sizes) - 1 > MAX_ARRAYS:
        raise WireError(f"{what}: {len(sizes) - 1} arrays; at most {MAX_ARRAYS} fit into a message")
    if sizes[0] > MAX_HEADER_BYTES:
        raise WireError(f"{what}: a header of {sizes[0]} bytes; at most {MAX_HEADER_BYTES} are allowed")
    largest = max(sizes)
    if largest > MAX_FRAME_BYTES:
        raise WireError(f"{what}: a frame of {largest} bytes; at most {MAX_FRAME_BYTES} are allowed: split it up")
