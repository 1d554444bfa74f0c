"""A prediction beside what happened: a recorded run simulated by its own rules, and both in the same figures.

What always holds: the prediction gets nothing of the run but its rules and how many steps it has trained; models and
answers are those that are given, of another run or of a data sheet.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace as with_fields
from rich.markup import escape
from rich.table import Table

from areal_async.messages import Rules
from areal_async.simulate.engine import Progress, simulate
from areal_async.simulate.figures import Figures
from areal_async.simulate.fit import RecordedAnswers
from areal_async.simulate.happened import Happened, happened
from areal_async.simulate.models import Cluster

Unit: TypeAlias = Literal["s", "tokens", "tokens/s", "steps", "share"]


class Line(NamedTuple):
    """One figure. error: of the prediction, as a share of what happened; of shares their difference."""

    name: str
    unit: Unit
    predicted: float
    real: float

    @property
    def error(self) -> float:
        if self.unit == "share":
            return self.predicted - self.real
        return self.predicted / self.real - 1 if self.real else 0.0


@dataclass(frozen=True, slots=True)
class Compared:
    """disturbed: what has happened and isn't simulated, assumed: what the log didn't tell of it; in words."""

    rules: Rules
    lines: tuple[Line, ...]
    disturbed: tuple[str, ...]
    assumed: tuple[str, ...] = ()

    def line(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)


def validate(folder: Path, cluster: Cluster, seed: int = 0, progress: Progress | None = None) -> Compared:
    """folder: of the log of the run that is predicted. cluster: models, as fitted to another run, or planned.

    Errors: LogError; ConfigError where nothing was trained; RunFailed where the prediction is that the run fails.
    """
    real = happened(folder)
    rules = with_fields(real.rules, steps=real.steps, eval_every=0)
    answers = cluster.answers
    if isinstance(answers, RecordedAnswers):
        answers = answers.asked_by(rules)
    cluster = replace(cluster, servers=rules.servers, answers=answers, start_s=0.0)
    figures = simulate(rules, cluster, seed, progress)
    assumed = []
    if real.spread:
        assumed.append(
            f"lags of the real run: the arrays of {real.spread:,} answers of several versions can't be read (any more);"
            " their tokens are taken as spread evenly over these versions"
        )
    return Compared(rules, tuple(_lines(figures, real)), tuple(real.disturbed), tuple(assumed))


def _lines(figures: Figures, real: Happened) -> Iterator[Line]:
    steps, seconds = real.steps, real.seconds
    trained = max(real.lag_tokens.total(), 1)
    lag = sum(lag * tokens for lag, tokens in real.lag_tokens.items()) / trained
    yield Line("step", "s", figures.seconds / figures.steps, seconds / steps)
    yield Line("training of a step", "s", sum(figures.train_s) / figures.steps, sum(real.train_s) / len(real.train_s))
    yield Line("trainer's wait a step", "s", figures.trainer_wait_s / figures.steps, real.trainer_wait_s / steps)
    yield Line("swap pauses a step", "s", figures.swap_pause_s / figures.steps, real.swap_pause_s / steps)
    yield Line("generated", "tokens/s", figures.tokens_per_s, real.tokens_generated / seconds)
    yield Line("trained", "tokens/s", figures.tokens_trained_per_s, trained / seconds)
    yield Line("trainer idle", "share", figures.trainer_idle_share, 1 - real.training_s / seconds)
    yield Line("servers idle", "share", figures.rollout_idle_share, 1 - real.busy_s / seconds)
    yield Line("both busy", "share", figures.both_busy_share, real.both_s / seconds)
    yield Line("answer's length", "tokens", figures.response_len_mean, real.length / max(real.samples, 1))
    yield Line("answers of two versions or more", "share", figures.mixed_share, real.mixed / max(real.samples, 1))
    yield Line("lag, mean", "steps", figures.lag_mean, lag)
    predicted = max(sum(figures.lag_tokens.values()), 1)
    for steps_old in sorted({*figures.lag_tokens, *real.lag_tokens}):
        shares = figures.lag_tokens.get(steps_old, 0) / predicted, real.lag_tokens[steps_old] / trained
        yield Line(f"tokens of lag {steps_old}", "share", *shares)


def table(compared: Compared, title: str) -> Table:
    rules = compared.rules
    about = f"{title}: {rules.steps} steps of {rules.batch_groups} × {rules.group_size}, η = {rules.max_staleness}"
    shown = Table(title=escape(about), title_justify="left", show_edge=False, pad_edge=False)
    shown.add_column("")
    for name in ("predicted", "real", "error"):
        shown.add_column(name, justify="right")
    for line in compared.lines:
        if line.unit == "share":
            cells = f"{line.predicted:.1%}", f"{line.real:.1%}", f"{line.error * 100:+.1f} points"
            shown.add_row(line.name, *cells)
        else:
            values = (f"{value:,.4g} {line.unit}" for value in (line.predicted, line.real))
            shown.add_row(line.name, *values, f"{line.error:+.1%}")
    return shown
