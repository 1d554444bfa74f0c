"""What a run shows to the person in front of it: a live table or plain lines, and a summary at the end.

What always holds: it only reads; a run behaves the same whether anybody looks or not, also when its output can't be
written any more (a closed pipe or terminal, a full disk).
"""

import asyncio
import contextlib
import io
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import IO, Protocol, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from areal_async.controller.controller import Controller
from areal_async.controller.evaluating import Evaluation
from areal_async.controller.metrics import StepRow
from areal_async.controller.result import RunResult

REFRESH_S = 0.25  # of the live display
SHOWN_STEPS = 12  # rows of the live table
ENDS = 5  # steps at either end that the summary's "from … to …" averages over


@contextmanager
def outlasting(file: TextIO) -> Iterator[IO[str]]:
    """`file`, for a run that goes on without it: what it doesn't take is left out, and the first time told on the
    standard error."""
    with contextlib.closing(_Outlasted(file)) as output:
        yield cast("IO[str]", output)


class _Outlasted(io.TextIOBase):
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._errors = sys.stderr  # rich's live table takes its place
        self._told = False

    def write(self, text: str) -> int:
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def close(self) -> None:
        """The file stays open, but nothing waits in it that would fail again when Python ends."""
        if not self.closed:
            super().close()  # flushes
            try:
                self._file.flush()
            except OSError:  # it was told
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._file.encoding

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if not self._told:
                self._told = True
                with contextlib.suppress(OSError):  # nobody reads that either
                    print(f"areal-async: output can't be written: {error.strerror}; the run goes on", file=self._errors)


class Display(Protocol):
    """Shows steps as they come."""

    def step(self, row: StepRow) -> None: ...


@asynccontextmanager
async def display(run: Controller, console: Console) -> AsyncIterator[Display]:
    """A live table where `console` is a terminal, a line a step elsewhere."""
    if console.is_terminal:
        async with _live(run, console) as shown:
            yield shown
        return
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    with _logging(handler):
        yield _Lines(run, console)


class _logging:
    """The program's messages go to `handler` while a display is up."""

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        logger = logging.getLogger("areal_async")
        logger.setLevel(logging.INFO)
        logger.addHandler(self._handler)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("areal_async").removeHandler(self._handler)


class _Lines:
    def __init__(self, run: Controller, console: Console) -> None:
        self._steps = run.config.train.steps
        self._console = console

    def step(self, row: StepRow) -> None:
        waited = f"  waited: {row.waited_for.partition(':')[0]}" if row.waited_for else ""
        generated, trained = (per_second(tokens, row.step_s) for tokens in (row.tokens_generated, row.tokens_trained))
        self._console.print(
            f"step {row.version}/{self._steps}  reward {row.reward_mean:.3f}  "
            f"lag {row.lag_mean:.2f} (max {row.lag_max})  {row.step_s:.2f} s  "
            f"generated {generated}  trained {trained}{waited}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )


@asynccontextmanager
async def _live(run: Controller, console: Console) -> AsyncIterator[Display]:
    table = _LiveTable(run)
    handler = RichHandler(console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S")
    with _logging(handler), Live(table.render(), console=console, auto_refresh=False, transient=False) as live:

        async def keep_fresh() -> None:
            while True:
                live.update(table.render(), refresh=True)
                await asyncio.sleep(REFRESH_S)

        fresh = asyncio.create_task(keep_fresh(), name="display")
        try:
            yield table
        finally:
            fresh.cancel()
            await asyncio.gather(fresh, return_exceptions=True)
            live.update(table.render(), refresh=True)


class _LiveTable:
    def __init__(self, run: Controller) -> None:
        self._run = run
        self._rows: list[StepRow] = []
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self._task = self._progress.add_task("steps", total=run.config.train.steps)

    def step(self, row: StepRow) -> None:
        self._rows = [*self._rows[1 - SHOWN_STEPS :], row]
        self._progress.update(self._task, completed=row.version)

    def render(self) -> RenderableType:
        table = Table(title=escape(str(self._run.folder)), title_justify="left")
        for name in ("step", "reward", "lag mean", "lag max", "length", "seconds", "generated", "trained", "idle t/r"):
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(
                str(row.version),
                f"{row.reward_mean:.3f}",
                f"{row.lag_mean:.2f}",
                str(row.lag_max),
                f"{row.response_len_mean:.0f}",
                f"{row.step_s:.2f}",
                per_second(row.tokens_generated, row.step_s),
                per_second(row.tokens_trained, row.step_s),
                f"{row.trainer_idle_share:.0%} / {row.rollout_idle_share:.0%}",
            )
        return Group(table, self._progress, Text(self._run.phase, overflow="ellipsis", no_wrap=True))


def per_second(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):,.0f} tok/s"


def summary(result: RunResult, console: Console) -> None:
    """The table at the end of a run."""
    table = Table(title="The run", title_justify="left", show_header=False)
    rows = result.rows
    table.add_row("ended", _reason(result))
    if rows:
        first, last = rows[:ENDS], rows[-ENDS:]
        table.add_row("reward", f"{_mean(first):.3f} → {_mean(last):.3f} (first and last {len(first)} steps)")
        table.add_row(
            "lag", f"mean {sum(r.lag_mean for r in rows) / len(rows):.2f}, max {max(r.lag_max for r in rows)}"
        )
        table.add_row("price of age", price_of_age(rows))
        samples = sum(row.samples for row in rows)
        mixed = sum(row.mixed_share * row.samples for row in rows) / max(samples, 1)
        table.add_row("samples", f"{samples:,}, {mixed:.0%} of them with tokens of two versions or more")
        verdicts: Counter[str] = Counter()
        for row in rows:
            verdicts.update(row.verdicts)
        table.add_row("checks", ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.most_common()))
        table.add_row("tokens", f"{sum(row.tokens_trained for row in rows):,} trained")
    if result.evaluations:
        table.add_row("evaluation", evaluations_in_words(result.evaluations))
    table.add_row("time", f"{result.seconds:.0f} s in all")
    table.add_row(
        "busy",
        f"trainer and servers at the same time {result.both_busy_share:.0%} of the run; idle: trainer "
        f"{result.trainer_idle_share:.0%}, servers {result.rollout_idle_share:.0%} (start-up included)",
    )
    table.add_row("folder", escape(str(result.folder)))
    model = str(result.model) if result.model else "none: the run was stopped before there was one"
    table.add_row("model", escape(model))
    console.print(table)


def price_of_age(rows: Sequence[StepRow]) -> str:
    """What the bound on age has cost: waiting, and whatever `rollout.when_older` says besides. The wait before the
    first step is for the servers to start."""
    trained = sum(row.tokens_trained for row in rows)
    masked = sum(row.tokens_masked for row in rows)
    older = sum(row.tokens_older for row in rows)
    dropped, lost = sum(row.samples_stale for row in rows), sum(row.tokens_stale for row in rows)
    words = [f"after the first step the trainer stood idle for {sum(row.trainer_wait_s for row in rows[1:]):.1f} s"]
    if older:
        words.append(f"{older / max(trained, 1):.1%} of the trained tokens were older than η")
    if masked:
        words.append(f"{masked / max(trained + masked, 1):.1%} of the tokens got no gradient")
    if dropped:
        words.append(f"{dropped:,} samples were dropped with {lost:,} tokens")
    if masked or dropped:
        quarters = " / ".join(f"{share:.0%}" for share in rows[-1].lost_by_length)
        words.append(f"lost of each quarter of answer length, short to long: {quarters}")
    return "; ".join(words)


def evaluations_in_words(evaluations: Sequence[Evaluation]) -> str:
    """`0.480 → 0.961 (versions 10 and 90), best 0.964 (version 80); pass@4 of the last one 0.998`."""
    first, last = evaluations[0], evaluations[-1]
    best = max(evaluations, key=lambda one: one.score)
    words = f"score {last.score:.3f} (version {last.version})"
    if len(evaluations) > 1:
        words = f"score {first.score:.3f} → {last.score:.3f} (versions {first.version} and {last.version})"
        words += f", best {best.score:.3f} (version {best.version})"
    k = max(last.pass_at, default=1)
    return words + (f"; pass@{k} of the last one {last.pass_at[k]:.3f}" if k > 1 else "")


def _reason(result: RunResult) -> str:
    said = {"steps_done": "all steps done", "data_ended": "the data ended", "stopped": "stopped on request"}
    return f"{said[result.reason]}, {result.steps} steps"


def _mean(rows: tuple[StepRow, ...]) -> float:
    return sum(row.reward_mean for row in rows) / len(rows)
