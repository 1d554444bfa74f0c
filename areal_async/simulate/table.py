"""What is shown of simulated rows: one line each, or a page where there is one row alone.

What always holds: it only shows; `Result` has all of it, and more.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rich.markup import escape
from rich.table import Table

from areal_async.simulate.figures import Figures
from areal_async.simulate.sweep import Result


class _Column(NamedTuple):
    name: str
    of: Callable[[Result, Figures], str]


_COLUMNS: Final = (
    _Column("GPUs", lambda result, _: str(result.gpus)),
    _Column("s/step", lambda result, _: _time(result.step_s)),
    _Column("steps/h", lambda result, _: f"{result.steps_per_s * 3600:,.4g}"),
    _Column("tokens/s", lambda result, _: f"{result.tokens_per_s:,.0f}"),
    _Column("idle: trainer", lambda _, figures: f"{figures.trainer_idle_share:.0%}"),
    _Column("servers", lambda _, figures: f"{figures.rollout_idle_share:.0%}"),
    _Column("lag mean", lambda _, figures: f"{figures.lag_mean:.2f}"),
    _Column("max", lambda _, figures: str(figures.lag_max)),
    _Column("wait s/step", lambda _, figures: _time(figures.trainer_wait_s / max(figures.steps, 1))),
    _Column("age costs", lambda _, figures: age(figures) or "-"),
    _Column("GPU-hours", lambda _, figures: f"{figures.gpu_hours:,.4g}"),
    _Column("speed-up", lambda result, _: "-" if result.speed_up is None else f"{result.speed_up:.2f}"),
)


def names(keys: Sequence[str]) -> dict[str, str]:
    """Keys by their last part, where that says which."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: key if last.count(key.rpartition(".")[2]) > 1 else key.rpartition(".")[2] for key in keys}


def swept(results: Sequence[Result]) -> list[str]:
    """Keys in the order of the sweep, those of later grids behind."""
    return list(dict.fromkeys(key for result in results for key in result.values))


def rows(results: Sequence[Result], title: str) -> Table:
    keys = swept(results)
    table = Table(title=escape(title), title_justify="left", show_edge=False, pad_edge=False)
    for name in (*names(keys).values(), *(column.name for column in _COLUMNS)):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        cells = [escape(result.values.get(key, "")) for key in keys]
        figures = result.figures
        if figures is None:
            table.add_row(*cells, str(result.gpus), "failed", *["-"] * (len(_COLUMNS) - 2))
            continue
        table.add_row(*cells, *(column.of(result, figures) for column in _COLUMNS))
    return table


def page(result: Result, figures: Figures, title: str) -> Table:
    """One row, with more of its figures."""
    table = Table(title=escape(title), title_justify="left", show_header=False)
    steps = max(figures.steps, 1)
    lost = " / ".join(f"{share:.0%}" for share in figures.lost_by_length)
    for name, text in (
        ("system", f"{result.system}, η = {result.max_staleness}"),
        ("GPUs", f"{result.gpus}: {_many(result.servers, 'server')}, {_many(result.trainer_ranks, 'trainer rank')}"),
        ("ended", f"{figures.end.replace('_', ' ')}, {figures.steps} steps in {_long(figures.seconds)}"),
        ("a step", f"{_time(result.step_s)} s, of it training {_time(sum(figures.train_s) / steps)} s"),
        ("speed", f"{result.steps_per_s * 3600:,.4g} steps/h, {result.tokens_per_s:,.0f} trained tokens/s"),
        ("idle", f"trainer {figures.trainer_idle_share:.0%}, servers {figures.rollout_idle_share:.0%}; both busy "
                 f"{figures.both_busy_share:.0%}"),
        ("lag", f"mean {figures.lag_mean:.2f}, max {figures.lag_max}; {figures.mixed_share:.0%} of the samples have "
                "tokens of two versions or more"),
        ("price of age", f"the trainer waited {_time(figures.trainer_wait_s / steps)} s a step; "
                         f"{age(figures) or 'no token lost'}"),
        ("lost by length", f"{lost} (quarters, the shortest first)" if any(figures.lost_by_length) else ""),
        ("answers", f"{figures.response_len_mean:,.0f} tokens in the mean, {figures.truncated_share:.1%} cut"),
        ("tokens", f"{figures.tokens_generated:,} generated, {figures.tokens_trained:,} trained, "
                   f"{figures.tokens_recomputed:,} computed again after swaps"),
        ("servers", f"{'resharding' if result.system == 'colocated' else 'swaps'} "
                    f"{_time(figures.swap_pause_s / result.servers / steps)} s, prefill "
                    f"{_time(figures.stalled_s / result.servers / steps)} s of each in a step"),
        ("losses", f"{_many(figures.restarts, 'server')} lost, {_many(figures.continued, 'answer')} went on elsewhere"
                   if figures.restarts else ""),
        ("GPU-hours", f"{figures.gpu_hours:,.4g}"),
    ):  # fmt: skip
        if text:
            table.add_row(name, text)
    return table


def age(figures: Figures) -> str:
    """What the bound on age has cost in tokens, by `rollout.when_older`; empty: nothing."""
    trained = max(figures.tokens_trained + figures.tokens_masked, 1)
    words = []
    if figures.tokens_older:
        words.append(f"{figures.tokens_older / trained:.1%} older")
    if figures.tokens_masked:
        words.append(f"{figures.tokens_masked / trained:.1%} masked")
    if figures.tokens_stale:
        written = max(figures.tokens_generated + figures.tokens_unfinished, 1)
        words.append(f"{figures.tokens_stale / written:.1%} dropped")
    return ", ".join(words)


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _time(seconds: float) -> str:
    return f"{seconds:,.3g}" if not 1000 <= seconds < 1e9 else f"{seconds:,.0f}"


def _long(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 1e9 else f"{seconds / 3600:.3g} h"
