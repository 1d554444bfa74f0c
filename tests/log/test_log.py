"""What is logged comes back, bit for bit; a torn end is said; anything else that isn't right is an error."""

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from areal_async.errors import LogError
from areal_async.log import format as fmt
from areal_async.log import reader, writer
from areal_async.log.format import PayloadRef, Torn
from areal_async.log.writer import RunLog
from areal_async.messages import AnyRecord, Note, Rules, SampleDone, StepDone, Train, TrainSample, Woke
from areal_async.wire.arrays import DTYPES

RULES = Rules(
    seed=1, steps=2, batch_groups=2, group_size=2, max_staleness=1, max_concurrent=4, minibatches=1, ranks=1,
    max_tokens_per_microbatch=64,
    max_new_tokens=4096,
)  # fmt: skip
MANY = 1 << 20

floats = st.floats(allow_nan=False)
records: st.SearchStrategy[AnyRecord] = st.one_of(
    st.builds(Woke, at=floats),
    st.builds(Note, at=floats, what=st.text(max_size=9), data=st.dictionaries(st.text(max_size=5), st.none() | floats)),
    st.builds(StepDone, at=floats, step=st.integers(0, 99), branch=st.just(0), metrics=st.just({"loss": float("inf")})),
    st.builds(
        Train, step=st.integers(0, 9), branch=st.just(1), groups=st.just((1, 2)), minibatches=st.just(()),
        samples=st.just((TrainSample("1.0", 0, -0.1),)),
    ),
)  # fmt: skip
arrays = nps.arrays(
    dtype=st.sampled_from(list(DTYPES.values())), shape=nps.array_shapes(min_dims=0, min_side=0, max_side=6)
)


def done(sample: str = "0.0") -> SampleDone:
    return SampleDone(
        at=1.0, sample=sample, attempt=0, oldest=0, newest=1, prompt_tokens=3, length=5, loss_tokens=5, finish="stop"
    )


def a_log(folder: Path, *after: AnyRecord) -> Path:
    with closing(RunLog(folder, MANY)) as log:
        for record in (RULES, *after):
            log.append(record)
    return folder / fmt.DECISIONS_NAME


def messages(folder: Path) -> list[AnyRecord]:
    return [record.message for record in reader.read_records(folder, on_torn=pytest.fail)]


# ---------------------------------------------------------------------------------------------------------- round trips


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(records, max_size=20), st.data())
def test_records_come_back_in_order(
    tmp_path_factory: pytest.TempPathFactory, logged: list[AnyRecord], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    with closing(RunLog(folder, MANY)) as log:
        log.append(RULES)
        for record in logged:
            log.append(record)
            if data.draw(st.booleans()):
                log.flush()
    assert messages(folder) == [RULES, *logged]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(arrays, max_size=5), max_size=12), st.integers(1, 2000), st.data())
def test_samples_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, samples: list[list[np.ndarray]], segment_bytes: int, data: st.DataObject
) -> None:
    """From memory, from disk, after the log was opened again, and by reference; whatever the size of the segments."""
    folder = tmp_path_factory.mktemp("log")

    def check(log: RunLog, n: int) -> None:
        for i in range(n):
            assert_same(log.get(f"{i}.0", 7), samples[i])

    refs: list[PayloadRef] = []
    with closing(RunLog(folder, segment_bytes)) as log:
        for i, put in enumerate(samples):
            refs.append(log.put(f"{i}.0", 7, put))
            if data.draw(st.booleans()):
                log.flush()
            check(log, i + 1)
    with closing(RunLog(folder, segment_bytes)) as log:
        check(log, len(samples))
    for i, ref in enumerate(refs):
        payload = reader.read_payload(folder, ref)
        assert (payload.sample, payload.attempt) == (f"{i}.0", 7)
        assert_same(payload.arrays, samples[i])


def assert_same(got: list[np.ndarray], put: list[np.ndarray]) -> None:
    assert len(got) == len(put)
    for one, other in zip(got, put, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        assert one.flags.aligned
        assert one.flags.writeable


def test_records_name_their_samples(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path, MANY)) as log:
        log.append(RULES)
        ref = log.put("0.0", 0, [np.arange(5)])
        log.append(done(), ref)
    record = list(reader.read_records(tmp_path))[-1]
    assert (record.message, record.payload) == (done(), ref)
    assert reader.read_payload(tmp_path, ref).arrays[0].tolist() == [0, 1, 2, 3, 4]


def test_what_was_put_is_a_copy(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path, MANY)) as log:
        array = np.arange(5)
        log.put("0.0", 0, [array])
        array[:] = 0
        log.get("0.0", 0)[0][:] = 0
        assert log.get("0.0", 0)[0].tolist() == [0, 1, 2, 3, 4]


def test_attempts_are_apart_and_samples_can_be_released(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path, MANY)) as log:
        first = log.put("0.0", 0, [np.array([1])])
        log.put("0.0", 1, [np.array([2])])
        assert [log.get("0.0", attempt)[0].item() for attempt in (0, 1)] == [1, 2]
        with pytest.raises(LogError, match=r"sample 0\.0, attempt 2 is not in the log"):
            log.get("0.0", 2)
        log.release(["0.0", "9.9"])
        with pytest.raises(LogError, match="was released"):
            log.get("0.0", 0)
    assert reader.read_payload(tmp_path, first).arrays[0].item() == 1


def test_the_first_record_is_the_rules(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path / "a", MANY)) as log, pytest.raises(LogError, match="must be its Rules, not a Woke"):
        log.append(Woke(at=0.0))
    with closing(RunLog(tmp_path / "b", MANY)) as log:
        log._begun = True
        log.append(Woke(at=0.0))
    with pytest.raises(LogError, match="the first record is Woke"):
        messages(tmp_path / "b")


def test_objects_can_not_be_logged(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path, MANY)) as log, pytest.raises(LogError, match=r"sample 3\.1, attempt 0: .* object"):
        log.put("3.1", 0, [np.array([object()])])


# ------------------------------------------------------------------------------------------------- damage of every kind


def test_cut_at_every_byte_of_the_last_record(tmp_path: Path) -> None:
    """The rest is read, the torn end is said with its place; a writer cuts it and goes on; nothing else is lost."""
    path = a_log(tmp_path / "whole", Woke(at=1.0), Woke(at=2.0))
    whole = path.read_bytes()
    offset = [record.offset for record in reader.read_records(tmp_path / "whole")][-1]
    for size in range(offset, len(whole)):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / path.name).write_bytes(whole[:size])
        said: list[Torn] = []
        read = [record.message for record in reader.read_records(folder, said.append)]
        assert read == [RULES, Woke(at=1.0)]
        expected = [Torn(folder / path.name, offset, size - offset)] if size > offset else []
        assert said == expected
        with closing(RunLog(folder, MANY)) as log:
            log.append(Woke(at=3.0))
        assert messages(folder) == [RULES, Woke(at=1.0), Woke(at=3.0)]


def test_a_torn_end_of_the_payloads_is_cut_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(RunLog(tmp_path, MANY)) as log:
        log.put("0.0", 0, [np.arange(9)])
        ref = log.put("1.0", 0, [np.arange(9)])
    path = fmt.payload_path(tmp_path, 1)
    whole = path.read_bytes()
    for size in (*range(17), ref.offset - 1, ref.offset, ref.offset + 5, ref.offset + 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        with closing(RunLog(tmp_path, MANY)) as log:
            if size >= ref.offset:
                assert log.get("0.0", 0)[0].tolist() == list(range(9))
            with pytest.raises(LogError, match="not in the log"):
                log.get("1.0", 0)
            new = log.put("2.0", 0, [np.arange(3)])
        assert reader.read_payload(tmp_path, new).arrays[0].tolist() == [0, 1, 2]
    assert f"{path}: torn end: the last 5 bytes, from offset {ref.offset} on" in caplog.text


@pytest.mark.slow
def test_every_flipped_byte_is_an_error_with_its_offset(tmp_path: Path) -> None:
    path = a_log(tmp_path, Woke(at=1.0), done(), Woke(at=2.0))
    whole = path.read_bytes()
    offsets = [0, *(record.offset for record in reader.read_records(tmp_path))]
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        path.write_bytes(damaged)
        where = max(offset for offset in offsets if offset <= at)
        with pytest.raises(LogError) as caught:
            messages(tmp_path)
        assert str(path) in str(caught.value)
        assert f"offset {where}" in str(caught.value)
        with pytest.raises(LogError, match=f"offset {where}"):
            RunLog(tmp_path, MANY)


def test_every_flipped_byte_of_a_payload_is_an_error(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path, MANY)) as log:
        ref = log.put("0.0", 0, [np.arange(4, dtype=np.int32), np.ones(3, np.uint8)])
        log.put("1.0", 0, [np.arange(4)])
    path = fmt.payload_path(tmp_path, 1)
    whole = path.read_bytes()
    for at in range(ref.offset, ref.offset + ref.nbytes):
        damaged = bytearray(whole)
        damaged[at] ^= 0x01
        path.write_bytes(damaged)
        with pytest.raises(LogError, match=f"offset {ref.offset}"):
            reader.read_payload(tmp_path, ref)
    path.write_bytes(whole[: ref.offset + 20])
    with pytest.raises(LogError, match="no whole payload"):
        reader.read_payload(tmp_path, ref)
    path.unlink()
    with pytest.raises(LogError, match="payload segment 1 can't be read: No such file"):
        reader.read_payload(tmp_path, ref)


def test_zeros_after_a_loss_of_power_are_a_torn_end(tmp_path: Path) -> None:
    path = a_log(tmp_path, Woke(at=1.0))
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(5000))
    said: list[Torn] = []
    assert len(list(reader.read_records(tmp_path, said.append))) == 2
    assert said == [Torn(path, size, 5000)]
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(LogError, match=f"offset {size}"):
        messages(tmp_path)


def test_other_files_and_versions_are_told_from_logs(tmp_path: Path) -> None:
    path = a_log(tmp_path)
    path.write_bytes(fmt.file_header("payloads"))
    with pytest.raises(LogError, match="not a decisions file"):
        messages(tmp_path)
    start = b"AREALOGD" + (99).to_bytes(4, "little")
    path.write_bytes(start + fmt.zlib.crc32(start).to_bytes(4, "little"))
    with pytest.raises(LogError, match="written in format 99"):
        messages(tmp_path)
    body = msgspec.msgpack.encode([{"kind": "never_heard_of", "at": 0.0}, None])
    path.write_bytes(fmt.file_header("decisions") + fmt.record_head([body]) + body)
    with pytest.raises(LogError, match=r"offset 16 .* this version"):
        messages(tmp_path)
    with pytest.raises(LogError, match="No such file"):
        messages(tmp_path / "nowhere")


# -------------------------------------------------------------------------------------------------- writing, full disks


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A disk with room for so many bytes; call it again to make room."""
    room = 0
    real_write = os.write

    def write(fd: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real_write(fd, memoryview(data)[:room])
        room -= count
        return count

    def set_room(bytes_free: int) -> None:
        nonlocal room
        room = bytes_free

    monkeypatch.setattr(fmt.os, "write", write)
    yield set_room
    monkeypatch.undo()


def test_a_full_disk_loses_and_doubles_nothing(tmp_path: Path, small_disk: Callable[[int], None]) -> None:
    """Full at every possible byte, with two segments; `get` works all the while."""
    sizes = []
    for room in range(0, 400, 7):
        folder = tmp_path / str(room)
        log = RunLog(folder, 150)
        log.append(RULES)
        for i in range(3):
            log.append(done(f"{i}.0"), log.put(f"{i}.0", 0, [np.arange(i, i + 7)]))
        small_disk(room)
        with pytest.raises(LogError, match=r"no room to write the log .* Nothing is lost"):
            log.flush()
        for i in range(3):
            assert log.get(f"{i}.0", 0)[0].tolist() == list(range(i, i + 7))
        log.append(Woke(at=9.0))
        small_disk(1 << 20)
        log.flush()
        log.close()
        read = list(reader.read_records(folder, on_torn=pytest.fail))
        assert [record.message for record in read] == [RULES, *(done(f"{i}.0") for i in range(3)), Woke(at=9.0)]
        for i, record in enumerate(read[1:4]):
            assert record.payload is not None
            assert reader.read_payload(folder, record.payload).arrays[0].tolist() == list(range(i, i + 7))
        sizes.append(sum(path.stat().st_size for path in folder.iterdir() if path.name != fmt.LOCK_NAME))
    assert len(set(sizes)) == 1
    assert sizes[0] > 400


def test_no_record_is_on_disk_before_the_sample_that_it_names(
    tmp_path: Path, small_disk: Callable[[int], None]
) -> None:
    small_disk(1 << 20)
    log = RunLog(tmp_path, MANY)
    log.append(RULES)
    log.flush()
    log.append(done(), log.put("0.0", 0, [np.arange(100)]))
    small_disk(200)
    with pytest.raises(LogError):
        log.flush()
    assert messages(tmp_path) == [RULES]
    small_disk(1 << 20)
    log.close()
    assert messages(tmp_path) == [RULES, done()]


def test_flush_is_one_write_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real_write = os.write

    def write(fd: int, data: bytes) -> int:
        calls.append(fd)
        return real_write(fd, data)

    monkeypatch.setattr(fmt.os, "write", write)
    with closing(RunLog(tmp_path, MANY)) as log:
        log.append(RULES)
        for i in range(50):
            log.append(done(f"{i}.0"), log.put(f"{i}.0", 0, [np.arange(1000)]))
        log.flush()
        assert len(calls) == 2
        log.flush()
        assert len(calls) == 2


def test_a_real_limit_of_the_system(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in a child: the error says so, the log that stays is whole up to a torn end."""
    code = f"""
import resource, numpy as np
from pathlib import Path
from areal_async.errors import LogError
from areal_async.log.writer import RunLog
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
log = RunLog(Path({str(tmp_path)!r}), 1 << 20)
log.put("0.0", 0, [np.arange(10)])
log.flush()
log.put("1.0", 0, [np.arange(1000)])
try:
    log.flush()
except LogError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.close()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert "no room to write the log (File too large)" in result.stdout
    with closing(RunLog(tmp_path, MANY)) as log:
        assert log.get("1.0", 0)[0].tolist() == list(range(1000))


def test_killed_after_a_flush_nothing_is_lost(tmp_path: Path) -> None:
    code = f"""
import os, signal, msgspec, numpy as np
from pathlib import Path
from areal_async.log.writer import RunLog
from areal_async.messages import Rules, Woke
log = RunLog(Path({str(tmp_path)!r}), 1 << 20)
log.append(msgspec.json.decode({msgspec.json.encode(RULES).decode()!r}, type=Rules))
log.put("0.0", 0, [np.arange(10)])
log.append(Woke(at=1.0))
log.flush()
log.append(Woke(at=2.0))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], timeout=200, check=False)
    assert messages(tmp_path) == [RULES, Woke(at=1.0)]
    with closing(RunLog(tmp_path, MANY)) as log:
        assert log.get("0.0", 0)[0].tolist() == list(range(10))


def test_one_writer_a_folder(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path, MANY)), pytest.raises(LogError, match=f"process {os.getpid()} is writing this log"):
        RunLog(tmp_path, MANY)
    with closing(RunLog(tmp_path, MANY)):
        pass


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogError, match="can't be made or opened"):
        RunLog(tmp_path / "file", MANY)


# ----------------------------------------------------------------------------------------------------------------- sync


async def test_sync_is_ordered_off_the_loop_and_closes_full_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real_sync = os.fdatasync

    def fdatasync(fd: int) -> None:
        assert asyncio._get_running_loop() is None, "in the event loop's thread"
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real_sync(fd)

    monkeypatch.setattr(writer.os, "fdatasync", fdatasync)
    with closing(RunLog(tmp_path, 100)) as log:
        log.append(RULES)
        for i in range(3):
            log.put(f"{i}.0", 0, [np.arange(20)])
        await log.sync()
        assert synced == ["payload-000001.seg", "payload-000002.seg", "payload-000003.seg", "decisions.log"]
        assert log.get("0.0", 0)[0].tolist() == list(range(20))
        synced.clear()
        log.put("9.0", 0, [np.arange(20)])
        await asyncio.gather(log.sync(), log.sync())
        assert synced[-2:] == ["payload-000004.seg", "decisions.log"]
        assert "payload-000001.seg" not in synced


async def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fdatasync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with closing(RunLog(tmp_path, 100)) as log:
        log.append(RULES)
        for i in range(3):
            log.put(f"{i}.0", 0, [np.arange(20)])
        with monkeypatch.context() as patch:
            patch.setattr(writer.os, "fdatasync", fdatasync)
            with pytest.raises(LogError, match=r"the disk did not take the log: .*Input/output error"):
                await log.sync()
        await log.sync()


async def test_a_cancelled_sync_still_ends_its_work(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path, 100)) as log:
        log.append(RULES)
        for i in range(20):
            log.put(f"{i}.0", 0, [np.arange(20)])
        first = asyncio.create_task(log.sync())
        await asyncio.sleep(0)
        log.put("x.0", 0, [np.arange(20)])
        second = asyncio.create_task(log.sync())
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await log.sync()
