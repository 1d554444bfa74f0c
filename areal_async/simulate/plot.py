"""Simulated rows as a picture (PNG or SVG): curves over a sweep, or what one run was like.

What always holds: matplotlib is asked for here alone (extra `plots`); the same rows give the same picture, and SVGs
the same bytes.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_async import output_file
from areal_async.simulate.figures import Figures
from areal_async.simulate.sweep import Result
from areal_async.simulate.table import names, swept

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = ("#1f6fb2", "#d1603d", "#3f8f5b", "#8458a6", "#8a8a8a", "#b8860b", "#2aa198", "#c2185b")
DPI: Final = 130
_WIDTH: Final = 4.6  # inches of a panel
_HEIGHT: Final = 3.6


def draw(results: Sequence[Result], title: str, file: Path) -> None:
    """Errors: ArealError where the file can't be written."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "areal-async"  # else its ids are random
    there = [result for result in results if result.figures is not None]
    if not there:
        return
    figures = there[0].figures
    assert figures is not None
    figure = _page(figures, title) if len(results) == 1 else _sweep(there, title)
    form = file.suffix.lower().removeprefix(".")
    with output_file.whole(file) as out, warnings.catch_warnings(action="ignore", category=UserWarning):
        # of letters that the font lacks, which the picture shows
        figure.savefig(out, format=form, dpi=DPI, metadata={"Date": None} if form == "svg" else None)


def _new(columns: int, title: str) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT), layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    figure.suptitle(title, fontsize=10, parse_math=False)  # a dollar is a dollar
    for each in axes:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
        each.set_axisbelow(True)
    return figure, axes


# ---------------------------------------------------------------------------------------------------------- one run


def _page(figures: Figures, title: str) -> "Figure":
    from matplotlib.ticker import MaxNLocator

    figure, (steps, lags, idle) = _new(3, title)
    numbers = range(1, figures.steps + 1)
    steps.plot(numbers, figures.step_s, color=COLOURS[0], linewidth=1.2, label="from step to step")
    steps.plot(numbers, figures.train_s, color=COLOURS[1], linewidth=1.2, label="training")
    steps.set(xlabel="step", ylabel="seconds", ylim=(0, None))
    steps.xaxis.set_major_locator(MaxNLocator(integer=True))
    steps.legend(fontsize=8)
    whole = max(sum(figures.lag_tokens.values()), 1)
    shares = [100 * tokens / whole for tokens in figures.lag_tokens.values()]
    lags.bar([str(lag) for lag in figures.lag_tokens], shares, color=COLOURS[0])
    lags.set(xlabel="lag of a trained token, steps", ylabel="share of trained tokens, %")
    _busy(idle, ["trainer", "servers"], [figures.trainer_idle_share, figures.rollout_idle_share])
    return figure


def _busy(axes: "Axes", who: Sequence[str], idle: Sequence[float]) -> None:
    """Bars of busy and idle time."""
    axes.bar(who, [100 * (1 - share) for share in idle], color=COLOURS[0], label="busy", width=0.6)
    axes.bar(who, [100 * share for share in idle], bottom=[100 * (1 - share) for share in idle], color="#dddddd",
             label="idle", width=0.6)  # fmt: skip
    axes.set(ylabel="share of time, %", ylim=(0, 100))
    axes.legend(fontsize=8, loc="center")  # between the bars


# ---------------------------------------------------------------------------------------------------------- a sweep


def _sweep(results: Sequence[Result], title: str) -> "Figure":
    """Speed, idle shares and lag, over the swept key with the most numbers; a line for each combination of the others.
    Without such a key, bars."""
    keys = swept(results)
    axis = _axis(results, keys)
    if axis is None:
        return _bars(results, keys, title)
    figure, (speed, idle, lag) = _new(3, title)
    others = [key for key in keys if key != axis]
    short = names(keys)
    lines: dict[str, list[Result]] = {}
    for result in results:
        if axis in result.values:
            label = ", ".join(f"{short[key]} {result.values[key]}" for key in others if key in result.values)
            lines.setdefault(label, []).append(result)
    for number, (label, of_line) in enumerate(lines.items()):
        points = sorted((float(result.values[axis]), result) for result in of_line)
        x = [place for place, _ in points]
        told = [(result, result.figures) for _, result in points if result.figures is not None]
        colour = COLOURS[number % len(COLOURS)]
        speed.plot(x, [result.tokens_per_s for result, _ in told], "o-", color=colour, label=label, markersize=4)
        idle.plot(x, [100 * figures.trainer_idle_share for _, figures in told], "o-", color=colour, markersize=4)
        idle.plot(x, [100 * figures.rollout_idle_share for _, figures in told], "s--", color=colour, markersize=4)
        lag.plot(x, [figures.lag_mean for _, figures in told], "o-", color=colour, markersize=4)
        lag.plot(x, [figures.lag_max for _, figures in told], "s--", color=colour, markersize=4)
    for each in (speed, idle, lag):
        each.set_xlabel(axis)
        _scale(each, [float(result.values[axis]) for result in results if axis in result.values])
    speed.set(ylabel="trained tokens/s", ylim=(0, None))
    _thousands(speed)
    idle.set(ylabel="idle, %", ylim=(0, 100))
    lag.set(ylabel="lag of trained tokens, steps", ylim=(0, None))
    _legend(idle, "trainer", "servers")
    _legend(lag, "mean", "max")
    if len(lines) > 1:
        speed.legend(fontsize=8)
    return figure


def _legend(axes: "Axes", full: str, dashed: str) -> None:
    """What full and dashed lines are, whatever their colour."""
    from matplotlib.lines import Line2D

    grey = "#555555"
    handles = [Line2D([], [], color=grey, marker="o", markersize=4, label=full),
               Line2D([], [], color=grey, marker="s", markersize=4, linestyle="--", label=dashed)]  # fmt: skip
    axes.legend(handles=handles, fontsize=8, handlelength=3.5)


def _scale(axes: "Axes", values: Sequence[float]) -> None:
    """Ticks where there are points; logarithmic where these double."""
    places = sorted(set(values))
    if places[0] > 0 and places[-1] / places[0] >= 8:
        axes.set_xscale("log", base=2)
    elif places[0] == 0 and places[-1] >= 8:
        axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.set_xticks([], minor=True)


def _thousands(axes: "Axes") -> None:
    from matplotlib.ticker import StrMethodFormatter

    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _axis(results: Sequence[Result], keys: Sequence[str]) -> str | None:
    """The key with the most different numbers, the last one of equals; one value is no axis."""
    best, most = None, 1
    for key in keys:
        values = {result.values[key] for result in results if key in result.values}
        if all(_is_number(value) for value in values) and len(values) >= max(most, 2):
            best, most = key, len(values)
    return best


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _bars(results: Sequence[Result], keys: Sequence[str], title: str) -> "Figure":
    figure, (speed, idle, lag) = _new(3, title)
    labels = ["\n".join(result.values[key] for key in keys if key in result.values) for result in results]
    told = [(result, result.figures) for result in results if result.figures is not None]
    places = list(range(len(told)))
    speed.bar(places, [result.tokens_per_s for result, _ in told], color=COLOURS[0], width=0.6)
    speed.set(ylabel="trained tokens/s")
    _thousands(speed)
    for side, name, colour, shares in (
        (-0.2, "trainer", COLOURS[0], [figures.trainer_idle_share for _, figures in told]),
        (0.2, "servers", COLOURS[1], [figures.rollout_idle_share for _, figures in told]),
    ):
        idle.bar([place + side for place in places], [100 * share for share in shares], 0.4, color=colour, label=name)
    idle.set(ylabel="idle, %", ylim=(0, 100))
    idle.legend(fontsize=8)
    for side, name, colour, lags in (
        (-0.2, "mean", COLOURS[0], [figures.lag_mean for _, figures in told]),
        (0.2, "max", COLOURS[1], [float(figures.lag_max) for _, figures in told]),
    ):
        lag.bar([place + side for place in places], lags, 0.4, color=colour, label=name)
    highest = max(figures.lag_max for _, figures in told)
    lag.set(ylabel="lag of trained tokens, steps", ylim=(0, 1.25 * max(highest, 1)))  # room for the legend
    lag.legend(fontsize=8)
    for each in (speed, idle, lag):
        each.set_xticks(places, labels)
        each.set_xlabel(", ".join(names(keys).values()))
    return figure
