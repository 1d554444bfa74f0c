"""Writes log π_prox of each trained step into the run folder, for people: `prox/step-000012.npz`; its form stands in
`areal_async.runfiles`.

What always holds: a file is there whole, under its name, or not at all; it is of the newest branch that has trained its
step. Files of steps whose samples nobody needs any more stay as long as all of these fit into `room`, as the log keeps
the payload segment that it is writing; the oldest goes first. The event loop has its turn after every piece of a file.
What can't be written is told once and left out: the run goes on, and nothing else needs it.
"""

import asyncio
import contextlib
import logging
import zipfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from areal_async import runfiles
from areal_async.controller.crew import Crew
from areal_async.controller.samples import Samples, of_rank
from areal_async.errors import LogError
from areal_async.messages import SampleId, Train
from areal_async.runfiles import LogProbs
from areal_async.wire.arrays import Array

logger = logging.getLogger("areal_async")

PIECE_SAMPLES: Final = 64  # between two turns of the event loop: 15 µs each
PIECE_BYTES: Final = 1 << 20  # 1 ms of checksum and copy
SAMPLE_BYTES: Final = 230  # of a file, for each answer beside its numbers
_UNFINISHED: Final = ".step-"


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """That is to be written. values: of each sample, its response tokens."""

    about: runfiles.About
    values: dict[SampleId, LogProbs]


class Proximal:
    """root: the run folder. samples: of the run. room: bytes for steps that nobody needs any more."""

    def __init__(self, root: Path, samples: Samples, crew: Crew, room: int) -> None:
        self._root = root
        self._samples = samples
        self._crew = crew
        self._room = room
        self._files: dict[SampleId, int] = {}  # step, by the first sample of its batch
        self._nbytes: dict[int, int] = {}  # of each step, about
        self._released: dict[int, None] = {}  # steps, the oldest first
        self._released_bytes = 0
        self._pending: dict[int, _Step] = {}  # in the order in which they are to be written
        self._at_work = False
        self._told = False

    def resume(self) -> None:
        """Go on with what earlier controllers have left; `RolledBack` follows. `samples` knows what was released."""
        for path in (self._root / runfiles.PROX).glob(f"{_UNFINISHED}*"):
            self._remove(path)
        for step in runfiles.prox_steps(self._root):
            try:
                about = runfiles.prox_about(self._root, step)
            except LogError:
                about = None
            if about is None:
                self._remove(runfiles.prox_path(self._root, step))
                continue
            self._nbytes[step] = runfiles.prox_path(self._root, step).stat().st_size
            first = next(iter(about.attempts), "")
            if self._samples.can_be_read(first):
                self._files[first] = step
            else:
                self._release(step)

    def keep(self, command: Train, kept: Sequence[Sequence[Array]]) -> None:
        """All ranks have done a step. kept: of each, the arrays beside its `StepDone`; none where they keep nothing."""
        if not any(kept):
            return
        try:
            values = dict(self._cut(command, kept))
        except (LogError, ValueError) as error:
            self._tell(command.step, str(error))
            return
        about = runfiles.About(
            step=command.step,
            branch=command.branch,
            attempts={entry.sample: entry.attempt for entry in command.samples},
        )
        self._pending.pop(command.step, None)
        self._pending[command.step] = _Step(about, values)
        self._forget(command.step)
        self._files[command.samples[0].sample] = command.step
        self._nbytes[command.step] = sum(SAMPLE_BYTES + part.nbytes for part in values.values())
        if not self._at_work:
            self._at_work = True
            self._crew.start(self._work(), "log π_prox")

    def release(self, samples: Iterable[SampleId]) -> None:
        """Their arrays may leave the disk. All samples of a step are released together."""
        for sample in samples:
            if (step := self._files.pop(sample, None)) is not None:
                self._release(step)

    def roll_back(self, to: int) -> None:
        """Steps from `to` on are trained again."""
        self._files = {sample: step for sample, step in self._files.items() if step < to}
        for step in [step for step in self._nbytes if step >= to]:
            self._drop(step)

    def close(self) -> None:
        """Write what still waits: the run has ended, and nobody else needs the event loop."""
        for step in list(self._pending.values()):
            for _ in self._write(step):
                pass

    def _cut(self, command: Train, kept: Sequence[Sequence[Array]]) -> Iterator[tuple[SampleId, LogProbs]]:
        """What the ranks sent, sample by sample and without prompts. Raises ValueError where it doesn't fit;
        LogError."""
        for rank, arrays in enumerate(kept):
            samples = [entry.sample for entry in of_rank(command, rank)]
            answers = [self._samples[sample].sample for sample in samples]
            ends = np.cumsum([0, *(len(answer.token_ids) for answer in answers)])
            if len(arrays) != 2 or arrays[1].shape != (ends[-1],) or not np.array_equal(arrays[0], np.diff(ends)):
                raise ValueError(f"trainer.{rank} sent {[array.shape for array in arrays]} for {ends[-1]} tokens")
            whole = arrays[1].astype(np.float32, copy=False)
            for sample, answer, begin, end in zip(samples, answers, ends[:-1], ends[1:], strict=True):
                yield sample, whole[begin + answer.prompt_tokens : end]

    async def _work(self) -> None:
        while self._pending:
            with contextlib.closing(self._write(next(iter(self._pending.values())))) as pieces:
                for _ in pieces:
                    await asyncio.sleep(0)
        self._at_work = False

    def _write(self, step: _Step) -> Generator[None]:
        """Yields after each piece. Written aside; it gets its name unless it is stale by then."""
        number = step.about.step
        path = runfiles.prox_path(self._root, number)
        unfinished = path.with_name(f".{path.stem}.tmp")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)  # for who may read the log
            with zipfile.ZipFile(unfinished, "w") as file:
                yield from _members(file, step)
            if self._pending.get(number) is step:
                unfinished.replace(path)
        except OSError as error:
            self._tell(number, f"{error.filename or path}: {error.strerror}")
        finally:
            self._remove(unfinished)
        if self._pending.get(number) is step:
            del self._pending[number]

    def _release(self, step: int) -> None:
        self._released[step] = None
        self._released_bytes += self._nbytes[step]
        while self._released_bytes > self._room:
            self._drop(next(iter(self._released)))

    def _forget(self, step: int) -> None:
        """What was known of a step's file: it goes, or is written anew."""
        nbytes = self._nbytes.pop(step, 0)
        if step in self._released:
            del self._released[step]
            self._released_bytes -= nbytes

    def _drop(self, step: int) -> None:
        self._forget(step)
        self._pending.pop(step, None)
        self._remove(runfiles.prox_path(self._root, step))

    def _remove(self, path: Path) -> None:
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            logger.warning("%s: can't be removed: %s; it is of a step that isn't the run's any more", path, error)

    def _tell(self, step: int, why: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "log π_prox of step %d isn't kept: %s; the run goes on without it, and this is not said again for "
                "other steps (train.keep_prox=false turns it off)", step, why,
            )  # fmt: skip


def _members(file: zipfile.ZipFile, step: _Step) -> Iterator[None]:
    file.writestr(zipfile.ZipInfo(runfiles.ABOUT), msgspec.json.encode(step.about))
    samples = nbytes = 0
    for sample, values in step.values.items():
        member = BytesIO()
        np.save(member, values, allow_pickle=False)
        file.writestr(zipfile.ZipInfo(f"{sample}.npy"), member.getbuffer())
        samples, nbytes = samples + 1, nbytes + values.nbytes
        if samples >= PIECE_SAMPLES or nbytes >= PIECE_BYTES:
            samples = nbytes = 0
            yield
