"""A run's log as a timeline that ui.perfetto.dev and chrome://tracing open: `drawing` onto a `lanes.TraceFile`.

What always holds: the log is read once through (and once before that, to count), what is over is written and forgotten,
so a log may be larger than memory; nothing but the file that is named is written.
"""

import contextlib
import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from areal_async import output_file
from areal_async.errors import ConfigError, LogError
from areal_async.log.format import Torn
from areal_async.log.reader import warn
from areal_async.log.turns import Recorded, read_turns, taken
from areal_async.messages import SampleId, StartSample, group_of
from areal_async.trace.drawing import Drawing
from areal_async.trace.lanes import TraceFile

MOST_ARROWS: Final = 20_000  # samples that arrows follow: more make viewers slow
_GZIP_LEVEL: Final = 5


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """samples: that were started. finished, checks, prompts, steps, swaps: answers, verdicts, prompts, trained steps
    and loaded weights that came, those in vain included. arrows: samples that arrows follow, of every `followed`-th
    group. spans, events: in the file. seconds: of the run clock. nbytes: of the file, 0 where it is a pipe or a
    device."""

    samples: int
    finished: int
    checks: int
    prompts: int
    steps: int
    swaps: int
    arrows: int
    followed: int
    spans: int
    events: int
    seconds: float
    nbytes: int


def write(
    log_folder: Path,
    path: Path,
    *,
    sample: SampleId | None = None,
    most_arrows: int = MOST_ARROWS,
    on_torn: Callable[[Torn], None] = warn,
) -> Figures:
    """Draw the log in `log_folder` into `path` (compressed where that ends in `.gz`), in place of what was there.

    sample: the only one that arrows follow; None: all of them, or those of every second, third, … group where there are
    more than `most_arrows`. Errors: LogError; ConfigError where there is no such sample; ArealError where the file
    can't be written.
    """
    extent = _measure(log_folder, sample)
    stride = max(1, -(-extent.samples // most_arrows))

    def follows(name: SampleId) -> bool:
        return group_of(name) % stride == 0 if sample is None else name == sample

    with output_file.whole(path) as file:
        with contextlib.ExitStack() as stack:
            out: BinaryIO = file
            if path.suffix == ".gz":
                packed = stack.enter_context(gzip.GzipFile(path.stem, "wb", _GZIP_LEVEL, file))
                out = cast(BinaryIO, packed)
            recorded = _read(log_folder, on_torn)
            traced = TraceFile(out)
            drawing = Drawing(traced, recorded.rules, follows, extent.seconds)
            for _ in taken(log_folder, recorded.turns, drawing.take):
                pass
            drawing.close()
            name = os.fsencode(log_folder).decode("utf-8", "backslashreplace")
            traced.close({"run": name, "clock": "microseconds since the run began"})
        nbytes = file.tell() if output_file.is_replaceable(path) else 0
    trails = drawing.trails
    return Figures(
        samples=extent.samples, finished=trails.finished, checks=trails.checks, prompts=trails.prompts,
        steps=drawing.trainer.steps, swaps=sum(server.swaps for server in drawing.servers.values()),
        arrows=trails.arrows, followed=stride, spans=traced.spans, events=traced.events, seconds=extent.seconds,
        nbytes=nbytes,
    )  # fmt: skip


@dataclass(frozen=True)
class _Extent:
    """How large a log is. samples: that were started."""

    samples: int
    seconds: float


def _read(log_folder: Path, on_torn: Callable[[Torn], None]) -> Recorded:
    recorded = read_turns(log_folder, on_torn)
    if recorded is None:
        raise LogError(f"{log_folder}: nothing was recorded")
    return recorded


def _measure(log_folder: Path, sample: SampleId | None) -> _Extent:
    samples, found, seconds = 0, sample is None, 0.0
    for turn in _read(log_folder, lambda torn: None).turns:  # a torn end is said when the log is drawn
        seconds = max(seconds, turn.event.at)
        for command in turn.commands:
            if isinstance(command, StartSample):
                samples += command.attempt == 0
                found = found or command.sample == sample
    if not found:
        raise ConfigError(f"command line: trace: no sample {sample} was started in {log_folder}")
    return _Extent(samples, seconds)
