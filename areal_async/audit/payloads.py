"""References from the decision log to the arrays of samples: each leads to the sample that it says, as long as it is
needed.

What always holds: by default only the head of each payload is read; with `whole` all of it, and compared with what its
`SampleDone` says. One file is open at a time.
"""

from collections import Counter
from pathlib import Path
from typing import BinaryIO

import numpy as np

from areal_async.audit.findings import Findings
from areal_async.errors import LogError
from areal_async.log import format as fmt
from areal_async.log import payloads, reader
from areal_async.log.format import HEAD_BYTES, PayloadRef
from areal_async.messages import Release, SampleDone, SampleId
from areal_async.wire.arrays import Array


class References:
    """checked: how many were followed. gone: samples whose segment isn't there any more, and that were not released
    yet, by segment."""

    def __init__(self, folder: Path, findings: Findings, *, whole: bool) -> None:
        self._folder = folder
        self._add = findings.add
        self._whole = whole
        self._there: dict[int, bool] = {}
        self._open: tuple[int, BinaryIO] | None = None
        self._gone: dict[SampleId, int] = {}
        self.checked = 0
        self.nbytes = 0

    def follow(self, done: SampleDone, ref: PayloadRef, *, needed: bool) -> None:
        """What the record of a finished sample refers to. needed: it may still be trained."""
        segment = ref.segment
        if segment not in self._there:
            path = fmt.payload_path(self._folder, segment)
            self._there[segment] = path.is_file()
            if self._whole and self._there[segment]:
                self._beginning(path)
        if not self._there[segment]:
            if needed:
                self._gone[done.sample] = segment
            return
        self._gone.pop(done.sample, None)
        self.checked += 1
        self.nbytes += ref.nbytes
        about = f"sample {done.sample}"
        try:
            if self._whole:
                found = reader.read_payload(self._folder, ref)
                name, attempt = found.sample, found.attempt
                for text in compare(done, found.arrays):
                    self._add("payload.content", about, text)
            else:
                name, attempt = self._head(ref)
        except LogError as error:
            self._add("payload.damaged", about, str(error))
            return
        if (name, attempt) != (done.sample, done.attempt):
            text = f"attempt {done.attempt} refers to segment {segment}, offset {ref.offset}; there is sample {name},"
            self._add("payload.other", about, f"{text} attempt {attempt}")

    def release(self, command: Release) -> None:
        for name in command.samples:
            self._gone.pop(name, None)

    def close(self) -> None:
        """The log is at its end: what was not released until then must still be there."""
        if self._open is not None:
            self._open[1].close()
            self._open = None
        for segment, count in sorted(Counter(self._gone.values()).items()):
            name = next(name for name, place in self._gone.items() if place == segment)
            path = fmt.payload_path(self._folder, segment)
            text = f"{path} isn't there; {count} samples in it were never released"
            self._add("payload.missing", f"sample {name}", text)

    def _beginning(self, path: Path) -> None:
        """References pass over it, but whoever reads the file from its first byte on (a resume) doesn't."""
        with path.open("rb") as file:
            header = file.read(fmt.HEADER_BYTES)
        try:
            if len(header) == fmt.HEADER_BYTES:  # a shorter file is found where a reference leads to
                fmt.check_file_header(path, header, "payloads")
        except LogError as error:
            self._add("payload.damaged", path.name, str(error))

    def _head(self, ref: PayloadRef) -> tuple[SampleId, int]:
        path = fmt.payload_path(self._folder, ref.segment)
        if self._open is None or self._open[0] != ref.segment:
            if self._open is not None:
                self._open[1].close()
            self._open = ref.segment, path.open("rb")
        file = self._open[1]
        file.seek(ref.offset)
        data = file.read(HEAD_BYTES)
        end = ref.offset + ref.nbytes
        if len(data) < HEAD_BYTES or HEAD_BYTES + fmt.parse_head(path, ref.offset, data).nbytes != ref.nbytes:
            raise LogError(f"{path}: no whole payload of {ref.nbytes} bytes at offset {ref.offset}")
        header = payloads.read_header(file, path, ref.offset, end)
        return header.sample, header.attempt


def compare(done: SampleDone, arrays: list[Array]) -> list[str]:
    """What of the arrays (token ids, loss mask, log-probabilities, versions) isn't as the event says."""
    wrong = []
    lengths = [len(array) for array in arrays]
    if lengths != [done.prompt_tokens + done.length] * 4:
        return [f"its arrays have lengths {lengths}, expected 4 of {done.prompt_tokens} + {done.length}"]
    _, mask, logprobs, versions = arrays
    trained = mask != 0
    if int(trained.sum()) != done.loss_tokens:
        wrong.append(f"its loss mask has {int(trained.sum())} tokens, the log says {done.loss_tokens}")
    sampled = versions[trained]
    if len(sampled) and (int(sampled.min()), int(sampled.max())) != (done.oldest, done.newest):
        span = f"{int(sampled.min())} to {int(sampled.max())}"
        wrong.append(f"its trained tokens are of versions {span}, the log says {done.oldest} to {done.newest}")
    if not bool(np.isfinite(logprobs[trained]).all()):
        wrong.append("a log-probability isn't a finite number")
    return wrong
