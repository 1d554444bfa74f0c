"""A numpy array as plain bytes with a description beside it: on the wire and, the same, in the log's payload segments.

What always holds: only fixed-size little-endian numbers (no objects, so nothing is ever unpickled); nothing is copied
unless an array isn't contiguous or lies unaligned; a description is checked against the bytes before it is believed.
Every complaint is a ValueError in plain words; `frames` and `log.payloads` add where it happened.
"""

import math
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.generic]
Buffer: TypeAlias = bytes | bytearray | memoryview

DTYPES: Final = {
    name: np.dtype(name)
    for name in ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
}
MAX_DIMENSIONS: Final = 8  # no tensor of this field has more; numpy itself ends at 64


class ArrayInfo(msgspec.Struct, frozen=True, array_like=True):
    """dtype: numpy's `dtype.str`, one of `DTYPES`. shape: lengths of the dimensions; C order."""

    dtype: str
    shape: tuple[int, ...]


def describe(array: Array) -> ArrayInfo:
    dtype = array.dtype.str
    if dtype not in DTYPES:
        raise ValueError(f"an array of dtype {array.dtype} can't be sent or logged; convert it to {known_dtypes()}")
    if array.ndim > MAX_DIMENSIONS:
        raise ValueError(f"an array has {array.ndim} dimensions; at most {MAX_DIMENSIONS} can be sent or logged")
    return ArrayInfo(dtype, array.shape)


def raw(array: Array) -> memoryview:
    """The bytes of the array in C order: a view of its own memory where it is contiguous, a copy's otherwise."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def nbytes(info: ArrayInfo) -> int:
    """How many bytes an array so described has. Python integers: a hostile shape can't overflow."""
    dtype = DTYPES.get(info.dtype)
    if dtype is None:
        raise ValueError(f"an array is said to have the dtype {info.dtype!r}; known are {known_dtypes()}")
    if len(info.shape) > MAX_DIMENSIONS or any(length < 0 for length in info.shape):
        raise ValueError(f"an array is said to have the shape {info.shape}, which can't be")
    return math.prod(info.shape) * dtype.itemsize


def view(info: ArrayInfo, data: Buffer) -> Array:
    """The array over `data` itself: it lives as long as the array does and is writable if `data` is.

    ZeroMQ puts small messages at odd addresses, which torch and SIMD loops don't like: those, and only those, are
    copied.
    """
    expected, present = nbytes(info), memoryview(data).nbytes
    if present != expected:
        raise ValueError(f"an array {info.dtype}{list(info.shape)} has {expected} bytes, {present} came")
    array: Array = np.frombuffer(data, dtype=DTYPES[info.dtype]).reshape(info.shape)
    return array if array.flags.aligned else array.copy()


def known_dtypes() -> str:
    return ", ".join(str(dtype) for dtype in DTYPES.values())
