"""Watches a run go by and writes `metrics.jsonl`: a line a step, in the run folder and to whoever reads the steps.

What always holds: it decides nothing; a row is written when its `StepDone` was handled, before the next batch; nothing
that it does for an event grows with what is in flight. Rows of steps that training went back over stay in the file,
under their branch; what is in memory is the history that survives.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from areal_async.controller.checks import Pool
from areal_async.controller.evaluating import Evaluation
from areal_async.controller.growing_file import GrowingFile
from areal_async.controller.metrics import (
    BatchFigures,
    LostByLength,
    Meter,
    Scores,
    StepRow,
    Totals,
    batch_figures,
    step_row,
)
from areal_async.controller.rollouts import Rollouts
from areal_async.controller.samples import Kept, Samples
from areal_async.core import shaping
from areal_async.core.orchestrator import Orchestrator
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Evaluate,
    EvaluationDone,
    Failed,
    Forget,
    Lost,
    Published,
    Release,
    Restart,
    RolledBack,
    Rules,
    SampleDone,
    SampleId,
    Scored,
    StartSample,
    StepDone,
    Swap,
    Swapped,
    Train,
)

logger = logging.getLogger("areal_async")

Line = TypeVar("Line")


class Reader(Protocol):
    """Is told of steps and evaluations as they end."""

    def step(self, row: StepRow) -> None: ...

    def evaluation(self, result: Evaluation) -> None: ...


class Record:
    """Figures of the run. meter: who was busy. totals, verdicts: since the run began. waiting_since: run clock from
    which on the trainer is idle, None while it isn't. readers: told of each row and each evaluation."""

    def __init__(
        self,
        path: Path,
        rules: Rules,
        core: Orchestrator,
        samples: Samples,
        rollouts: Rollouts,
        checks: Pool,
        meter: Meter,
        on_row: Callable[[StepRow], None],
    ) -> None:
        self._path = path
        self._file = GrowingFile(path)
        self._rules = rules
        self._core = core
        self._samples = samples
        self._rollouts = rollouts
        self._checks = checks
        self._on_row = on_row
        self._figures: BatchFigures | None = None
        self._branch = -1  # of the step that is trained
        self._counted: set[SampleId] = set()
        self._in_training: frozenset[SampleId] = frozenset()
        self._placed: dict[SampleId, tuple[str, int]] = {}  # the server, and how often it had been lost before
        self._losses: Counter[str] = Counter()
        self._evaluated_on: dict[int, str] = {}
        self._lengths = LostByLength()
        self._steps_measured = 0
        self._before = Totals()
        self._verdicts_before: Counter[str] = Counter()
        self._waiting = ""
        self._waited_for = ""
        self._scores = Scores()
        self.meter = meter
        self.totals = Totals()
        self.verdicts: Counter[str] = Counter()
        self.waiting_since: float | None = 0.0
        self.rows: list[StepRow] = []
        self.evaluations: list[Evaluation] = []
        self.readers: list[Reader] = []

    def close(self) -> None:
        self._file.close()

    def resume(self, now: float) -> None:
        """Go on behind what earlier controllers of this run have written; `RolledBack` follows. Counts begin anew."""
        folder = self._path.parent
        rows = {row.step: row for row in _lines(self._path, StepRow)}
        self.rows = [rows[step] for step in sorted(rows)]
        self.evaluations = _lines(folder / "eval" / "results.jsonl", Evaluation)
        self.totals.samples_stale = self._before.samples_stale = self._core.balance()["samples_stale"]
        self._steps_measured = self._core.step
        self.waiting_since = now

    def seen(self, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """An event has been handled and gave these commands; none of them has been carried out yet."""
        self._counted.clear()
        self._event(event)
        stale = _stale(commands) if self._rules.when_older == "drop" else ()
        for sample in stale:
            self._drop(sample)
        for command in commands:
            self._command(event.at, command, stale)
        if isinstance(event, Published):
            self.put_waiting_into_words(event.at)

    def evaluated(self, result: Evaluation) -> None:
        """An evaluation has ended; its event follows."""
        self.evaluations.append(result)
        self.totals.tokens_evaluated += result.tokens
        self._scores = Scores(eval_version=result.version, eval_score=result.score, eval_pass_at=result.pass_at)
        for reader in self.readers:
            reader.evaluation(result)

    def put_waiting_into_words(self, now: float) -> None:
        """Note what the trainer waits for, if it does. To be called now and then: it looks at all that is in flight."""
        if self.waiting_since is not None:
            self._waiting = self._core.waiting(now)

    # ------------------------------------------------------------------------------------------------- what happened

    def _event(self, event: AnyEvent) -> None:
        match event:
            case StepDone() if event.branch == self._branch:  # else it was told late, of a branch that is over
                self._step_done(event)
            case RolledBack():
                self._roll_back(event)
            case SampleDone():
                self._unplace(event.at, event.sample)
                self._lengths.ended(event.length)
                self.totals.unwanted_length += not shaping.has_wanted_length(event.length, self._rules)
            case Scored():
                self.verdicts[event.verdict] += 1
            case Swapped():
                self.totals.swap_pause_s += event.pause_s
                self.meter.serving(event.at, event.server, serving=True)
            case Published():
                self.meter.training(event.at, training=False)
                self.waiting_since = event.at
            case Lost(peer="server"):
                self._lost(event.at, event.id)
            case EvaluationDone():
                self._evaluation_over(event.at, event.version)
            case Failed():
                self._failed(event)

    def _failed(self, event: Failed) -> None:
        if event.of == "sample":
            self._unplace(event.at, event.id)
        elif event.of == "swap":
            self.meter.serving(event.at, event.id, serving=True)  # it goes on under its old weights
        elif event.of == "server":
            self._lost(event.at, event.id)
        elif event.of == "evaluation":
            self._evaluation_over(event.at, int(event.id))

    def _command(self, at: float, command: AnyCommand, stale: Sequence[SampleId]) -> None:
        match command:
            case StartSample():
                self._unplace(at, command.sample)
                self._placed[command.sample] = command.server, self._losses[command.server]
                self.meter.load(at, command.server, 1)
            case Train():
                self._train(at, command)
            case Swap():
                self.meter.serving(at, command.server, serving=False)
            case Restart(peer="server"):
                self.totals.restarts += 1
            case Restart(peer="rewards"):
                self.totals.reward_restarts += 1
            case Evaluate():
                self._evaluation_over(at, command.version)
                self._evaluated_on[command.version] = command.server
                self.meter.load(at, command.server, 1)
            case Cancel():
                self._unplace(at, command.sample)  # what had arrived of it is forgotten by a command of its own
            case Forget() | Release():
                self._discard(command.samples, stale)

    def _unplace(self, at: float, sample: SampleId) -> None:
        server, losses = self._placed.pop(sample, ("", -1))
        if losses == self._losses[server]:
            self.meter.load(at, server, -1)

    def _lost(self, at: float, server: str) -> None:
        """Nothing is asked of it any more; what it was asked goes on elsewhere."""
        self._losses[server] += 1
        self._evaluated_on = {version: other for version, other in self._evaluated_on.items() if other != server}
        self.meter.lost(at, server)

    def _evaluation_over(self, at: float, version: int) -> None:
        if (server := self._evaluated_on.pop(version, None)) is not None:
            self.meter.load(at, server, -1)

    # ----------------------------------------------------------------------------------------------- the price of age

    def _drop(self, sample: SampleId) -> None:
        """Where it never began, no token is lost and its length isn't known."""
        length = self._rollouts.tokens_so_far(sample)
        self.totals.tokens_stale += length
        if sample not in self._samples and length:
            self._lengths.ended(length)
        if length:
            self._lengths.lost(length, 1.0)

    def _measure_masked(self, command: Train, batch: list[Kept]) -> None:
        """How much of each sample has no gradient; a batch that is trained again after a rollback counts once."""
        if command.step < self._steps_measured:
            return
        self._steps_measured = command.step + 1
        if command.mask_below <= 0:
            return
        for kept in batch:
            masked = sum(tokens for version, tokens in kept.by_version.items() if version < command.mask_below)
            if masked:
                self._lengths.lost(kept.length, masked / sum(kept.by_version.values()))

    def _discard(self, samples: Sequence[SampleId], stale: Sequence[SampleId]) -> None:
        for sample in samples:
            known = sample in self._samples and sample not in self._counted
            if known and sample not in self._in_training and sample not in stale:
                self._counted.add(sample)
                self.totals.tokens_discarded += self._samples[sample].length

    # -------------------------------------------------------------------------------------------------------- the step

    def _train(self, at: float, command: Train) -> None:
        batch = self._samples.of(command)
        self._figures = batch_figures(command, batch, self._rules.max_staleness)
        self._measure_masked(command, batch)
        self._branch = command.branch
        self._in_training = frozenset(entry.sample for entry in command.samples)
        self._waited_for, self._waiting = self._waiting, ""
        if self.waiting_since is not None:
            self.totals.trainer_wait_s += at - self.waiting_since
        self.waiting_since = None
        self.meter.training(at, training=True)

    def _roll_back(self, event: RolledBack) -> None:
        self._branch = -1
        self.meter.training(event.at, training=False)
        self.rows = [row for row in self.rows if row.step < event.to]
        self.evaluations = [result for result in self.evaluations if result.version <= event.to]

    def _step_done(self, done: StepDone) -> None:
        assert self._figures is not None, f"step {done.step} is done, and was never begun"
        balance = self._core.balance()
        totals = self.totals
        totals.tokens_generated = self._rollouts.tokens_generated
        totals.continued = self._rollouts.requests_again
        totals.tokens_inferred = self._rollouts.tokens_inferred
        totals.checks_again = self._checks.repeated
        totals.tokens_trained += self._figures.tokens_trained
        totals.tokens_masked += self._figures.tokens_masked
        totals.samples_stale = balance["samples_stale"]
        row = step_row(
            done,
            self._figures,
            self.meter.lap(done.at),
            self._scores,
            totals=totals,
            before=self._before,
            lost_by_length=self._lengths.quarters(),
            waited_for=self._waited_for,
            verdicts=dict(self.verdicts - self._verdicts_before),
            ledger=balance,
        )
        self._before, self._verdicts_before = msgspec.structs.replace(totals), Counter(self.verdicts)
        self._scores = Scores()
        self._file.write(msgspec.json.encode(row) + b"\n")
        self.rows.append(row)
        for reader in self.readers:
            reader.step(row)
        self._on_row(row)


def _stale(commands: Sequence[AnyCommand]) -> Sequence[SampleId]:
    """Samples of groups that were dropped for their age: a deadline passes when a step is formed, so what is stopped or
    forgotten behind a `Train` is stale; before it stands what the event itself has ended."""
    found: dict[SampleId, None] = {}
    formed = False
    for command in commands:
        if isinstance(command, Train):
            formed = True
        elif formed and isinstance(command, Cancel):
            found[command.sample] = None
        elif formed and isinstance(command, Forget | Release):
            found.update(dict.fromkeys(command.samples))
    return tuple(found)


def _lines(path: Path, kind: type[Line]) -> list[Line]:
    """What is in a file of JSON lines; a last one that isn't whole is cut. Lines of other versions are left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    end = data.rfind(b"\n") + 1
    if end < len(data):
        logger.warning("%s: the last line isn't whole (%d bytes): cut", path, len(data) - end)
        os.truncate(path, end)
    found, decoder = [], msgspec.json.Decoder(kind)
    for number, line in enumerate(data[:end].splitlines(), 1):
        try:
            found.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            logger.warning("%s:%d: left out of the summary: %s", path, number, error)
    return found
