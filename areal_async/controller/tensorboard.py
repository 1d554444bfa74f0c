"""Writes the rows of `metrics.jsonl` and the evaluations as TensorBoard events to `tensorboard/` of the run folder.

What always holds: tags are the names of `metrics.jsonl` (`verdicts/right` for an entry of a field that has several); an
event is in the file when the call returns, if the disk has room for it. Of the package `tensorboard` only its records
are used, not its writer, which has a thread of its own and would load TensorFlow where that is installed; the package
is imported only if `metrics.tensorboard` asks for it (that it is installed is looked at by `config_check`).
"""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from areal_async.controller.evaluating import Evaluation
from areal_async.controller.growing_file import GrowingFile
from areal_async.controller.metrics import StepRow


class TensorBoard:
    """One event file in `folder`, which is made."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = GrowingFile(folder / name)
        self._records = RecordWriter(self._file)
        self._event = Event
        self._summary = Summary
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def close(self) -> None:
        self._file.close()

    def step(self, row: StepRow) -> None:
        """At x = the step; evaluations come by `evaluation`, at their own x."""
        scalars = {tag: value for tag, value in _scalars(row) if not tag.startswith("eval_")}
        self._add(row.step, scalars)

    def evaluation(self, result: Evaluation) -> None:
        """At x = the version that was evaluated."""
        passed = {f"eval_pass_at/{k}": chance for k, chance in result.pass_at.items()}
        self._add(result.version, {"eval_score": result.score, **passed})

    def _add(self, step: int, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._write(event.SerializeToString())

    def _write(self, record: bytes) -> None:
        self._records.write(record)


def _scalars(row: StepRow) -> Iterator[tuple[str, float]]:
    """Every number of a row; texts have no place on an axis."""
    for name, value in msgspec.structs.asdict(row).items():
        entries = {"": value}
        if isinstance(value, dict):
            entries = {f"/{key}": entry for key, entry in value.items()}
        elif isinstance(value, tuple):
            entries = {f"/{number}": entry for number, entry in enumerate(value, 1)}
        for suffix, entry in entries.items():
            if isinstance(entry, int | float):
                yield name + suffix, float(entry)
