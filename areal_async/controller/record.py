"""Watches a run go by and writes `metrics.jsonl`: a line a step, in the run folder and to whoever reads the steps.

What always holds: it decides nothing; a row is written when its `StepDone` was handled, before the next batch.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from areal_async.controller.metrics import BatchFigures, Meter, StepRow, batch_figures, step_row
from areal_async.controller.rollouts import Rollouts
from areal_async.controller.samples import Samples
from areal_async.core.orchestrator import Orchestrator
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Forget,
    Published,
    SampleId,
    Scored,
    StepDone,
    Swapped,
    Train,
)


class Record:
    """Figures of the run. meter: who was busy."""

    def __init__(
        self,
        path: Path,
        core: Orchestrator,
        samples: Samples,
        rollouts: Rollouts,
        meter: Meter,
        on_row: Callable[[StepRow], None],
    ) -> None:
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._core = core
        self._samples = samples
        self._rollouts = rollouts
        self._on_row = on_row
        self.meter = meter
        self._figures: BatchFigures | None = None
        self._in_training: frozenset[SampleId] = frozenset()
        self._generated_before = 0
        self._discarded = 0
        self._swap_pause_s = 0.0
        self._verdicts: Counter[str] = Counter()
        self._waiting = ""
        self._waited_for = ""
        self._idle = True
        self.rows: list[StepRow] = []

    def close(self) -> None:
        self._file.close()

    def seen(self, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """An event has been handled and gave these commands."""
        self.meter.in_flight(event.at, self._rollouts.in_flight)
        if isinstance(event, StepDone):
            self._step_done(event)
        elif isinstance(event, Scored):
            self._verdicts[event.verdict] += 1
        elif isinstance(event, Swapped):
            self._swap_pause_s += event.pause_s
        elif isinstance(event, Published):
            self.meter.training(event.at, training=False)
            self._idle = True
        for command in commands:
            if isinstance(command, Train):
                self._train(event.at, command)
            elif isinstance(command, Cancel):
                self._discard(command.sample)
            elif isinstance(command, Forget):
                for sample in command.samples:
                    self._discard(sample)
        if isinstance(event, Published):
            self.put_waiting_into_words()

    def put_waiting_into_words(self) -> None:
        """Note what the trainer waits for, if it does. To be called now and then: it looks at all that is in flight."""
        if self._idle:
            self._waiting = self._core.waiting()

    def _train(self, at: float, command: Train) -> None:
        batch = self._samples.of(command)
        self._figures = batch_figures(command, batch)
        self._in_training = frozenset(entry.sample for entry in command.samples)
        self._waited_for, self._waiting = self._waiting, ""
        self._idle = False
        self.meter.training(at, training=True)

    def _discard(self, sample: SampleId) -> None:
        if sample in self._samples and sample not in self._in_training:
            self._discarded += self._samples[sample].length

    def _step_done(self, done: StepDone) -> None:
        assert self._figures is not None, f"step {done.step} is done, and was never begun"
        generated = self._rollouts.tokens_generated
        row = step_row(
            done,
            self._figures,
            lap=self.meter.lap(done.at),
            tokens_generated=generated - self._generated_before,
            tokens_discarded=self._discarded,
            swap_pause_s=self._swap_pause_s,
            waited_for=self._waited_for,
            verdicts=dict(self._verdicts),
            ledger=self._core.balance(),
        )
        self._generated_before, self._discarded, self._swap_pause_s = generated, 0, 0.0
        self._verdicts.clear()
        self._file.write(msgspec.json.encode(row) + b"\n")
        self.rows.append(row)
        self._on_row(row)
