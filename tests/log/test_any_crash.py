"""A log that was cut at any byte, as a kill or a loss of power can leave it: what is whole is there, the rest is said.

One log is written with all its writes noted: which bytes of which file, in which order. Each crash is a folder with the
files as they were after so many bytes.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_async.errors import LogError
from areal_async.log import format as fmt
from areal_async.log import reader
from areal_async.log.format import PayloadRef, Torn
from areal_async.log.writer import RunLog
from areal_async.messages import AnyRecord, Forget, Release, Rules, SampleDone, Scored, Woke

RULES = Rules(
    seed=1, steps=2, batch_groups=2, group_size=2, max_staleness=1, max_concurrent=4, minibatches=1, ranks=1,
    max_tokens_per_microbatch=64,
    max_new_tokens=4096,
)  # fmt: skip
SEGMENT = 600
SAMPLES = 7
BLOCK = 512


class Write(NamedTuple):
    """Bytes of `name` that one system call wrote, from `begin` to `end`."""

    name: str
    begin: int
    end: int


class Whole(NamedTuple):
    """The log as it was written to its end. data: by file. ends: of each record in the decision log, by offset."""

    writes: list[Write]
    data: dict[str, bytes]
    records: list[reader.Record]
    ends: list[int]


def arrays(number: int) -> list[np.ndarray]:
    return [np.full(12 + number, number, np.int32), np.ones(number, np.uint8), np.linspace(0, number, 9)]


def done(sample: str, attempt: int) -> SampleDone:
    return SampleDone(
        at=1.0, sample=sample, attempt=attempt, oldest=0, newest=1, prompt_tokens=3, length=5, loss_tokens=5,
        finish="stop",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    writes: list[Write] = []
    real_write = os.write

    def write(fd: int, data: bytes) -> int:
        begin = os.fstat(fd).st_size
        count = real_write(fd, data)
        writes.append(Write(Path(os.readlink(f"/proc/self/fd/{fd}")).name, begin, begin + count))
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fmt.os, "write", write)
        with closing(RunLog(folder, SEGMENT)) as log:
            log.append(RULES)
            for number in range(SAMPLES):
                log.append(done(f"{number}.0", 0), log.put(f"{number}.0", 0, arrays(number)))
                if number % 3 == 0:
                    continue  # several events, one flush
                log.append(Scored(at=2.0, sample=f"{number}.0", attempt=0, verdict="right", reward=1.0))
                if number == 4:
                    log.append(Forget(samples=("0.0",)))
                    log.append(Release(samples=("1.0", "2.0")))
                log.flush()
    data = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != fmt.LOCK_NAME}
    records = list(reader.read_records(folder))
    return Whole(writes, data, records, [*(record.offset for record in records[1:]), len(data[fmt.DECISIONS_NAME])])


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A folder that thousands of small files are made and deleted in; on a disk that takes longer than the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def lay_out(folder: Path, whole: Whole, sizes: dict[str, int], zeros: bool = False) -> Path:
    """The folder with the files cut to these sizes; zeros: with zeros in place of what is gone."""
    folder.mkdir()
    for name, size in sizes.items():
        data = whole.data[name]
        (folder / name).write_bytes(data[:size] + bytes(len(data) - size) * zeros)
    return folder


def segment_of(name: str) -> int:
    return int(Path(name).stem.removeprefix("payload-"))


def check(folder: Path, whole: Whole, sizes: dict[str, int], nothing_missing: bool, file_ends: dict[str, int]) -> None:
    """sizes: where each file was cut. file_ends: how long it was found (zeros stand behind the cut)."""
    size, found = sizes.get(fmt.DECISIONS_NAME, 0), file_ends.get(fmt.DECISIONS_NAME, 0)
    n = sum(end <= size for end in whole.ends)
    kept = whole.records[:n]
    last_end = whole.ends[n - 1] if n else (fmt.HEADER_BYTES if size >= fmt.HEADER_BYTES else 0)
    if found:
        said: list[Torn] = []
        assert [record.message for record in reader.read_records(folder, said.append)] == [r.message for r in kept]
        expected = [Torn(folder / fmt.DECISIONS_NAME, last_end, found - last_end)] if found > last_end else []
        assert said == expected
    arrays_gone = [r for r in kept if isinstance(r.message, SampleDone) and not is_whole(folder, r, sizes)]
    assert not (nothing_missing and arrays_gone)
    kept, released = before_what_is_gone(kept, arrays_gone)
    extra: list[AnyRecord] = [Woke(at=9.0)] if kept else [RULES, Woke(at=9.0)]
    with closing(RunLog(folder, SEGMENT)) as log:
        for record in whole.records:
            if not isinstance(record.message, SampleDone):
                continue
            sample = record.message.sample
            assert log.has(sample, 0) == (is_whole(folder, record, sizes) and sample not in released), sample
            if log.has(sample, 0):
                same(log.get(sample, 0), sample)
        for record_ in extra:
            log.append(record_)
        ref = log.put("new", 0, arrays(30))
        log.append(done("new", 0), ref)
    with closing(RunLog(folder, SEGMENT)) as log:
        assert log.get("new", 0)[0].tolist() == [30] * 42
    after = list(reader.read_records(folder, on_torn=lambda torn: pytest.fail(str(torn))))
    assert [record.message for record in after] == [*(r.message for r in kept), *extra, done("new", 0)]
    for record in after:  # a reference names the arrays that it named, or none
        if record.payload is not None and isinstance(record.message, SampleDone):
            check_reference(folder, record.message.sample, record.payload)


def before_what_is_gone(
    kept: list[reader.Record], arrays_gone: list[reader.Record]
) -> tuple[list[reader.Record], set[str]]:
    """The records before the first that needs arrays that aren't there, and the samples that they release."""
    while True:
        released = {name for r in kept if isinstance(r.message, Release) for name in r.message.samples}
        needs = [r for r in arrays_gone if isinstance(r.message, SampleDone) and r.message.sample not in released]
        cut = next((i for i, record in enumerate(kept) if record in needs), None)
        if cut is None:
            return kept, released
        kept = kept[:cut]


def is_whole(folder: Path, record: reader.Record, sizes: dict[str, int]) -> bool:
    """The arrays that it refers to."""
    ref = record.payload
    assert ref is not None
    return ref.offset + ref.nbytes <= sizes.get(fmt.payload_path(folder, ref.segment).name, 0)


def check_reference(folder: Path, sample: str, ref: PayloadRef) -> None:
    try:
        payload = reader.read_payload(folder, ref)
    except LogError:
        return
    assert payload.sample == sample


def same(got: list[np.ndarray], sample: str) -> None:
    for one, other in zip(got, arrays(int(sample.partition(".")[0])), strict=True):
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())


def crashes(whole: Whole, step: int) -> Iterator[dict[str, int]]:
    """Sizes of the files after a kill at every `step`th byte that was written."""
    sizes: dict[str, int] = {}
    count = 0
    for write in whole.writes:
        for size in range(write.begin + 1, write.end + 1):
            sizes[write.name] = size
            if count % step == 0 or size == write.end:
                yield dict(sizes)
            count += 1


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_byte(whole: Whole, step: int) -> None:
    """Nothing is missing that a record refers to, whole records are all there, the rest is cut; and the log goes on."""
    tried = 0
    with in_memory() as memory:
        for sizes in crashes(whole, step):
            folder = lay_out(memory / "log", whole, sizes)
            check(folder, whole, sizes, nothing_missing=True, file_ends=sizes)
            shutil.rmtree(folder)
            tried += 1
    assert tried >= sum(write.end - write.begin for write in whole.writes) // step


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.data())
def test_power_lost_at_any_byte(whole: Whole, data: st.DataObject) -> None:
    """Each file on its own: cut at any byte, lengthened with zeros, or not there at all."""
    sizes: dict[str, int] = {}
    file_ends: dict[str, int] = {}
    zeros = data.draw(st.booleans())
    for name, content in whole.data.items():
        size = data.draw(st.integers(0, len(content)) if not zeros else cuts(whole, name))
        if name != fmt.DECISIONS_NAME and data.draw(st.integers(0, 5)) == 0:
            continue
        if zeros:  # what was written as zeros is whole, however much of it is gone
            while size < len(content) and content[size] == 0:
                size += 1
            assume(size == len(content) or len(content) - size >= 8)
        sizes[name], file_ends[name] = size, len(content) if zeros else size
    older = sorted(segment_of(name) for name in sizes if name != fmt.DECISIONS_NAME)[:-2]
    if zeros and any(sizes[name] < file_ends[name] for name in map(name_of, older)):
        assume(False)  # only of the newest two are the arrays looked at when the log is opened
    with in_memory() as memory:
        folder = lay_out(memory / "log", whole, sizes, zeros)
        check(folder, whole, sizes, nothing_missing=False, file_ends=file_ends)


def name_of(segment: int) -> str:
    return fmt.payload_path(Path(), segment).name


def cuts(whole: Whole, name: str) -> st.SearchStrategy[int]:
    """Where zeros can begin: where a write began, or a block of the disk."""
    size = len(whole.data[name])
    begun = [write.begin for write in whole.writes if write.name == name]
    return st.sampled_from(sorted({0, *begun, *range(0, size, BLOCK), size}))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_bit_before_a_torn_end_is_refused(whole: Whole, data: st.DataObject) -> None:
    """Corruption isn't taken for a torn end, and says where it is; also in the arrays of the newest segments."""
    name = data.draw(st.sampled_from([fmt.DECISIONS_NAME, *sorted(whole.data)[-2:]]))
    with in_memory() as memory:
        folder = lay_out(memory / "log", whole, {n: len(whole.data[n]) for n in whole.data})
        offsets = [offset for offset, _ in records_of(folder / name, name)]
        last = data.draw(st.integers(1, len(offsets) - 1)) if len(offsets) > 1 else 0
        content = bytearray(whole.data[name][: offsets[last] + data.draw(st.integers(0, 11)) if last else None])
        at = data.draw(st.integers(0, (offsets[last] if last else len(content)) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        (folder / name).write_bytes(content)
        where = max((offset for offset in offsets if offset <= at), default=0)
        with pytest.raises(LogError, match=rf"{name}: .*offset {where}\b|{name}: .*written in format"):
            RunLog(folder, SEGMENT)


def records_of(path: Path, name: str) -> Iterator[tuple[int, bytes]]:
    for item in reader.scan(path, "decisions" if name == fmt.DECISIONS_NAME else "payloads"):
        assert not isinstance(item, Torn)
        yield item
