"""The main curves of a run as one picture (PNG or SVG), for a paper, a slide or a chat: `view RUN --png FILE`.

What always holds: what is drawn is what the overview's first figures draw, in the colours of its light theme; dark text
on white; the same run gives the same picture, and SVGs the same bytes. matplotlib is asked for here alone (extra
`plots`).
"""

import io
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Final, NamedTuple

from areal_async.view.api import EvaluationPoint, Figure, Lags
from areal_async.view.curves import Branches, busy, curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS: Final = 3
DPI: Final = 120
_WIDTH: Final = 13.0  # inches: 1,560 pixels
_HEIGHT: Final = 2.75  # of a row of panels
_FONT: Final = 9.0  # points: 15 pixels, and still 11 where the picture is shown 1,200 pixels wide
_COLOUR: Final = re.compile(r"--([\w-]+): (#\w+|var\(--([\w-]+)\));")
_KEYS: Final = 18.0  # points, of the line with the keys under a title
_FEW: Final = 80  # points of which each is marked, as on the page
BUSY: Final = (
    ("both", "busy-both"),
    ("only the trainer", "busy-trainer"),
    ("only servers", "busy-servers"),
    ("nobody", "busy-nobody"),
)


class Shown(NamedTuple):
    """title: of the whole picture. lags: of all trained tokens, None where the log can't be read."""

    title: str
    history: Branches
    evaluations: Sequence[EvaluationPoint]
    lags: Lags | None


def colours() -> dict[str, str]:
    """Of the page's light theme, by name."""
    style = resources.files("areal_async.view").joinpath("static", "style.css").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for name, value, other in _COLOUR.findall(style):
        found.setdefault(name, other or value)  # the light theme comes first
    for name, value in found.items():
        while not value.startswith("#"):
            value = found[value]
        found[name] = value
    return found


def draw(figures: Sequence[Figure], shown: Shown, kind: str) -> bytes:
    """kind: png or svg."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure as Picture

    known = colours()
    rows = -(-len(figures) // COLUMNS)
    text, dim = known["text"], known["dim"]
    with matplotlib.rc_context({
        "svg.hashsalt": "areal-async", "font.size": _FONT, "text.color": text, "axes.labelcolor": dim,
        "xtick.color": dim, "ytick.color": dim, "axes.edgecolor": dim,
    }):  # fmt: skip
        picture = Picture(figsize=(_WIDTH, 0.6 + _HEIGHT * rows), dpi=DPI, layout="constrained", facecolor="white")
        picture.suptitle(shown.title, fontsize=_FONT + 2, x=0.01, ha="left")
        axes = picture.subplots(rows, COLUMNS, squeeze=False).flat
        for panel, figure in zip(axes, figures, strict=False):
            _panel(panel, figure, shown, known)
        for panel in list(axes)[len(figures) :]:
            panel.set_axis_off()
        file = io.BytesIO()
        picture.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def _panel(axes: "Axes", figure: Figure, shown: Shown, known: Mapping[str, str]) -> None:
    axes.set_facecolor("white")
    axes.grid(color=known["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    unit = "" if figure.unit in ("", "%", figure.title.lower()) else f", {figure.unit}"
    axes.set_title(f"{figure.title}{unit}", loc="left", fontsize=_FONT + 1, fontweight="bold", pad=_KEYS)
    axes.set_xlabel("lag, steps" if figure.kind == "lags" else "step")
    drawn = {"lines": _lines, "busy": _busy, "lags": _lags}[figure.kind](axes, figure, shown, known)
    if not drawn:
        axes.text(0.5, 0.5, "nothing is known of it", transform=axes.transAxes, ha="center", color=known["dim"])
        return
    if figure.unit == "%":
        _percent(axes)
    _ticks(axes)


def _lines(axes: "Axes", figure: Figure, shown: Shown, known: Mapping[str, str]) -> bool:
    found = curves(figure, shown.history, shown.evaluations)
    names = [series.label for series in figure.series]
    for curve in found:
        colour = known[f"series-{names.index(curve.label) % 7 + 1}"]
        if curve.evaluations:
            axes.plot(*curve.kept, ":D", color=colour, markersize=4.5, linewidth=1, label=curve.label)
            continue
        for part in curve.abandoned:
            axes.plot(*part, ":", color=colour, linewidth=1.3, alpha=0.6)
        gaps = any(value != value for value in curve.kept.y)  # a point between two gaps would be no line
        marker = "." if gaps or len(curve.kept.x) <= _FEW else ""
        label = "" if curve.label == figure.title else curve.label
        axes.plot(*curve.kept, color=colour, linewidth=1.5, marker=marker, markersize=4, label=label)
    if figure.key == "lag" and shown.lags is not None:
        axes.axhline(shown.lags.eta, color=known["dim"], linewidth=1, linestyle="--", label=f"η = {shown.lags.eta}")
    values = [value for curve in found for value in curve.kept.y if value == value]
    if figure.log and values and min(values) > 0:
        axes.set_yscale("log")
    elif figure.range is None and values and min(values) >= 0:
        axes.set_ylim(bottom=0)
    if figure.range is not None:
        axes.set_ylim(*figure.range)
    _legend(axes)
    return bool(found)


def _busy(axes: "Axes", figure: Figure, shown: Shown, known: Mapping[str, str]) -> bool:
    parts = busy(shown.history.kept)
    if not parts:
        return False
    areas = [[part[at] for _, part in parts] for at in range(len(BUSY))]
    axes.stackplot([step for step, _ in parts], areas, colors=[known[name] for _, name in BUSY],
                   labels=[label for label, _ in BUSY], linewidth=0)  # fmt: skip
    axes.set_ylim(0, 1)
    axes.margins(x=0)
    _legend(axes)
    return True


def _lags(axes: "Axes", figure: Figure, shown: Shown, known: Mapping[str, str]) -> bool:
    tokens = shown.lags.tokens if shown.lags is not None else {}
    whole = sum(tokens.values())
    if shown.lags is None or not whole:
        return False
    eta = shown.lags.eta
    bars = [known["series-2" if lag > eta else "series-1"] for lag in tokens]
    axes.bar(list(tokens), [many / whole for many in tokens.values()], color=bars, width=0.8)
    axes.axvline(eta + 0.5, color=known["dim"], linewidth=1, linestyle="--", label=f"η = {eta}")
    axes.set_xlim(-0.6, max(*tokens, eta) + 0.6)
    _legend(axes)
    return True


def _legend(axes: "Axes") -> None:
    if not axes.get_legend_handles_labels()[1]:
        return
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, fontsize=_FONT - 1, frameon=False,
                borderpad=0.2, borderaxespad=0.0, handlelength=1.4, columnspacing=1.0, handletextpad=0.4)  # fmt: skip


def _percent(axes: "Axes") -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def _ticks(axes: "Axes") -> None:
    """Steps and lags are whole."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
