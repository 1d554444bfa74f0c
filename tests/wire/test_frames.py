"""What is packed comes out the same; whatever else comes in is a WireError, never another exception."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from areal_async.errors import WireError
from areal_async.messages import Beat, Probe, ScoreTask, Train
from areal_async.wire import arrays as wire_arrays
from areal_async.wire import frames

arrays = nps.arrays(
    dtype=st.sampled_from(list(wire_arrays.DTYPES.values())), shape=nps.array_shapes(min_dims=0, min_side=0, max_side=5)
)


@given(st.lists(arrays, max_size=6), st.text(max_size=20))
def test_round_trip(sent: list[np.ndarray], id: str) -> None:
    packed = [bytes(frame) for frame in frames.pack(Probe(id="p"), sent, id=id)]
    got_id, message, got = frames.open_envelope(packed)
    assert (got_id, message) == (id, Probe(id="p"))
    assert len(got) == len(sent)
    for one, other in zip(got, sent, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@given(arrays)
def test_strided_arrays_arrive_as_they_look(array: np.ndarray) -> None:
    strided = array.T[::-1] if array.ndim else array
    (got,) = frames.unpack(frames.pack(Beat(), [strided]))[1]
    assert got.shape == strided.shape
    assert got.tobytes() == strided.tobytes()


def test_arrays_are_not_copied() -> None:
    array = np.arange(100_000, dtype=np.int32)
    (got,) = frames.unpack(frames.pack(Beat(), [array]))[1]
    assert np.shares_memory(got, array)


def test_unaligned_bytes_become_an_aligned_array() -> None:
    header, data = frames.pack(Beat(), [np.arange(10, dtype=np.int64)])
    shifted = memoryview(bytearray(b"x" + bytes(data)))[1:]
    (got,) = frames.unpack([header, shifted])[1]
    assert got.flags.aligned
    assert got.tolist() == list(range(10))


def test_columns_of_a_row_travel_untouched() -> None:
    columns = {"table": msgspec.Raw(msgspec.msgpack.encode({"a": [1, 2.5, None]}))}
    task = ScoreTask(sample="0.0", attempt=0, prompt="p", answer=None, finish="stop", columns=columns)
    message, _ = frames.unpack(frames.pack(task))
    assert isinstance(message, ScoreTask)
    assert msgspec.msgpack.decode(message.columns["table"]) == {"a": [1, 2.5, None]}


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_garbage_is_an_error(garbage: list[bytes]) -> None:
    with pytest.raises(WireError):
        frames.unpack(garbage)


@given(st.data())
def test_a_damaged_message_is_an_error_or_a_message(data: st.DataObject) -> None:
    packed = [bytes(frame) for frame in frames.pack(Probe(id="p"), [np.arange(6.0).reshape(2, 3)])]
    which = data.draw(st.integers(0, len(packed) - 1))
    at = data.draw(st.integers(0, len(packed[which]) - 1))
    damaged = bytearray(packed[which])
    damaged[at] ^= data.draw(st.integers(1, 255))
    packed[which] = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    try:
        _, got = frames.unpack(packed)
    except WireError:
        return
    assert sum(array.nbytes for array in got) == sum(map(len, packed[1:]))


@pytest.mark.parametrize(
    ("infos", "data"),
    [
        ([["|O", [1]]], [b"x" * 8]),  # objects are never unpickled
        ([["<i4", [2]]], [b"x" * 7]),
        ([["<i4", [-1]]], [b""]),
        ([["<i4", [1 << 62, 1 << 62]]], [b""]),
        ([["<i4", [0, 1 << 62, 1 << 62]]], [b""]),
        ([["<i4", [1]]], []),
        ([], [b"abcd"]),
        ([["<i4", [1] * 9]], [b"abcd"]),
    ],
)
def test_descriptions_that_lie_are_refused(infos: list[object], data: list[bytes]) -> None:
    with pytest.raises(WireError, match="malformed"):
        frames.unpack([msgspec.msgpack.encode(["id", {"kind": "beat"}, infos]), *data])


@pytest.mark.parametrize("array", [np.array([object()]), np.zeros(2, ">i4"), np.zeros(1, "U3"), np.zeros(2, complex)])
def test_only_plain_numbers_can_be_sent(array: np.ndarray) -> None:
    with pytest.raises(WireError, match=r"Beat r7: an array of dtype .* can't be sent"):
        frames.pack(Beat(), [array], id="r7")


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = frames.pack(Beat(), [np.zeros(100, np.uint8)])
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 99)
    with pytest.raises(WireError, match="100 bytes; at most 99"):
        frames.unpack(packed)
    with pytest.raises(WireError, match="100 bytes; at most 99"):
        frames.pack(Beat(), [np.zeros(100, np.uint8)])
    with pytest.raises(WireError, match="257 arrays"):
        frames.pack(Beat(), [np.zeros(1, np.uint8)] * 257)


def test_addresses_are_checked_before_the_system_does_it_less_clearly() -> None:
    frames.check_address("ipc://" + "x" * 107)
    with pytest.raises(WireError, match="1 to 107 bytes, this one has 108"):
        frames.check_address("ipc://" + "x" * 108)
    with pytest.raises(WireError, match="not an address"):
        frames.check_address("/tmp/x")


def test_a_train_header_of_a_large_batch_fits() -> None:
    samples = tuple((f"{group}.{member}", 0, 0.5) for group in range(1024) for member in range(16))
    train = msgspec.convert(
        {"step": 1, "branch": 0, "groups": list(range(1024)), "samples": samples, "minibatches": []}, Train
    )
    assert len(frames.pack(train)[0]) < frames.MAX_HEADER_BYTES // 100


@pytest.mark.parametrize("came", [7, 9])
def test_a_size_that_does_not_fit_is_said(came: int) -> None:
    header, _ = frames.pack(Beat(), [np.zeros((2, 1), np.int32)])
    with pytest.raises(WireError, match=rf"an array <i4\[2, 1\] has 8 bytes, {came} came"):
        frames.unpack([header, bytes(came)])
