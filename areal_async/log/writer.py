"""The run log while a run goes on: records and samples in, samples out again.

What always holds:
- one writer a folder (a file lock that ends with the process);
- records go to disk in the order of appending, and a sample before any record that may refer to it;
- `flush` makes one system call a file, and after it `kill -9` loses nothing. When the disk is full it raises, nothing
  is lost or doubled, and it can be called again;
- only `sync` (after a loss of power nothing is lost either) waits for the disk, in the one thread of this class;
- a payload segment is deleted by `sync`, once the records that say that nobody needs its samples are on the disk.
A folder that has a log already is continued: torn ends are cut and said; samples are found again.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from areal_async.errors import DiskFull, LogError
from areal_async.log import format as fmt
from areal_async.log import payloads, reader, recovery
from areal_async.log.format import Entry, PayloadRef, Torn
from areal_async.log.payloads import Segment
from areal_async.messages import AnyRecord, Cancel, Rules, SampleDone, SampleId
from areal_async.wire.arrays import Array


class RunLog:
    """The log in `folder` (made if it isn't there), open for writing; `close` it at the end.

    segment_bytes: a payload segment that has reached this size is followed by the next one.
    All methods belong to one thread. Raises LogError: another process writes there, or what is there is corrupt.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._retired: list[Segment] = []  # full; written and synced, then closed
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, _lock(folder))
            try:
                recovered = recovery.recover(folder)
                self._places = recovered.places
                self._segment = Segment(folder, recovered.next)
                self._places.open(recovered.next)
                opened.callback(lambda: os.close(self._segment.fd))  # the one that is the last by then
                path = folder / fmt.DECISIONS_NAME
                self._decisions = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                opened.callback(os.close, self._decisions)
            except OSError as error:
                raise LogError(f"{folder}: the log can't be opened: {error}") from None
            self._opened = opened.pop_all()
        self._written = os.fstat(self._decisions).st_size
        self._pending = bytearray() if self._written else bytearray(fmt.file_header("decisions"))
        self._begun = self._written > fmt.HEADER_BYTES
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="run log")

    def append(self, record: AnyRecord, payload: PayloadRef | None = None) -> None:
        """Add a record; the first one of a log is its `Rules`. It is in memory until `flush`."""
        if not self._begun and not isinstance(record, Rules):
            raise LogError(f"{self.folder}: the first record of a log must be its Rules, not a {type(record).__name__}")
        self._begun = True
        if isinstance(record, SampleDone | Cancel):
            self._places.told(record)
        body = self._encoder.encode(Entry(record, payload))
        self._pending += fmt.record_head([body])
        self._pending += body

    def put(self, sample: SampleId, attempt: int, arrays: Sequence[Array]) -> PayloadRef:
        """Store the arrays of a sample (copied). `get` has them at once; on disk they are after `flush`.

        Putting the same sample and attempt again replaces what `get` returns; references to the first stay good.
        """
        if self._segment.end >= self._segment_bytes:
            self._begin_segment()
        ref = self._segment.put(payloads.encode(sample, attempt, arrays))
        self._places.add(sample, attempt, ref)
        return ref

    def has(self, sample: SampleId, attempt: int) -> bool:
        """Whether `get` has the arrays."""
        return self._find(sample, attempt) is not None

    def get(self, sample: SampleId, attempt: int) -> list[Array]:
        """The arrays as they were put: dtype, shape, every bit. Own memory. Raises LogError if there are none."""
        ref = self._find(sample, attempt)
        if ref is None:
            raise LogError(f"{self.folder}: sample {sample}, attempt {attempt} is not in the log, or was released")
        payload = self._read(ref)
        if (payload.sample, payload.attempt) != (sample, attempt):
            raise LogError(
                f"{fmt.payload_path(self.folder, ref.segment)}: at offset {ref.offset} there is sample"
                f" {payload.sample}, attempt {payload.attempt}, not {sample}, attempt {attempt}"
            )
        return payload.arrays

    def forget(self, samples: Iterable[SampleId]) -> None:
        """`get` is hardly asked for these any more: their places leave memory, and are looked for where it is."""
        self._places.forget(samples)

    def release(self, samples: Iterable[SampleId]) -> None:
        """`get` won't be asked for these again. A segment in which nothing else is needed is deleted by the next
        `sync`, after the record (append it first) that says so has reached the disk."""
        self._places.release(samples)

    def position(self) -> tuple[int, int]:
        """Where the next record will begin in `decisions.log`, and the number of the segment that is written."""
        return self._written + len(self._pending), self._segment.number

    def flush(self) -> None:
        """Hand everything to the operating system: samples, then records. One write a file if it is taken whole.

        Raises DiskFull: nothing is lost, and `flush` can be called again. Raises LogError if it fails otherwise.
        """
        path = self.folder / fmt.DECISIONS_NAME
        before = len(self._pending)
        try:
            for segment in (*self._retired, self._segment):
                path = segment.path
                segment.flush()
            path = self.folder / fmt.DECISIONS_NAME
            fmt.write_all(self._decisions, self._pending)
        except OSError as error:
            raise self._not_written(path, error) from None
        finally:
            self._written += before - len(self._pending)

    async def sync(self) -> None:
        """Flush, and return when all of it is on the disk itself and what nobody needs is deleted. Raises LogError.

        DiskFull comes from the flush: call again. After an error of the disk itself nothing can be said about what is
        on it: end the run, resume from what is there.
        """
        self.flush()
        retired, self._retired = self._retired, []
        kept = [self._segment.fd, self._decisions]
        unneeded = [fmt.payload_path(self.folder, n) for n in self._places.drop_unneeded(writing=self._segment.number)]
        done = self._thread.submit(_sync, [segment.fd for segment in retired], kept, unneeded, self.folder)
        try:
            await asyncio.shield(asyncio.wrap_future(done))  # shield: if we are cancelled, it still ends its work
        except OSError as error:
            raise LogError(f"{self.folder}: the disk did not take the log: {error}; it may have lost a part") from None

    def close(self) -> None:
        """Flush and give everything back, the lock too; doesn't wait for the disk (`sync` does). Raises LogError if
        the flush fails: what wasn't written is lost then."""
        self._thread.shutdown(wait=True)  # a sync that is running needs the descriptors
        with self._opened:
            for segment in self._retired:
                self._opened.callback(os.close, segment.fd)
            self.flush()

    def _begin_segment(self) -> None:
        """Where there is no room for a new file the present one grows on: `put` has memory, and can't wait."""
        try:
            following = Segment(self.folder, self._segment.number + 1)
        except OSError as error:
            if error.errno in fmt.FULL:
                return
            raise self._not_written(fmt.payload_path(self.folder, self._segment.number + 1), error) from None
        self._retired.append(self._segment)
        self._segment = following
        self._places.open(following.number)

    def _find(self, sample: SampleId, attempt: int) -> PayloadRef | None:
        number = self._places.forgotten_in(sample)
        if number is not None:  # others were forgotten with it, and will be asked for, too
            self.flush()  # they are looked for in the file
            for item in reader.index_segment(self.folder, number):
                if not isinstance(item, Torn):
                    self._places.found_again(item[0].sample, item[0].attempt, item[1])
        return self._places.of(sample, attempt)

    def _read(self, ref: PayloadRef) -> payloads.Payload:
        for segment in (self._segment, *self._retired):
            if segment.number == ref.segment:
                return segment.get(ref)
        return payloads.read(self.folder, ref)

    def _not_written(self, path: Path, error: OSError) -> LogError:
        if error.errno in fmt.FULL:
            return DiskFull(
                f"{path}: no room to write the log ({error.strerror}). Nothing is lost: make room, then the run goes on"
            )
        return LogError(f"{path}: the log can't be written: {error}")


def _lock(folder: Path) -> int:
    """The descriptor that holds the lock of the folder. Raises LogError if somebody else has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / fmt.LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise LogError(f"{folder}: the log folder can't be made or opened: {error}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise LogError(
            f"{folder}: process {owner} is writing this log; a run folder belongs to one run at a time."
            " End that one, or use another --run-dir"
        ) from None
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise LogError(f"{folder}: the log folder can't be locked: {error}") from None
        raise
    return fd


def _sync(retired: Sequence[int], kept: Sequence[int], unneeded: Sequence[Path], folder: Path) -> None:
    """In the thread: samples first, then records, then the names of files. Closes `retired`, whatever happens."""
    try:
        for fd in (*retired, *kept):
            os.fdatasync(fd)
        for path in unneeded:
            path.unlink(missing_ok=True)
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        for fd in retired:
            os.close(fd)
