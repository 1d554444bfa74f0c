"""A line of very many points: what is drawn of it."""

from typing import Any

import pytest
from playwright.sync_api import Page

from .test_lines import of
from .viewing import Viewer
from .watching import Tabs

pytestmark = pytest.mark.slow

MANY = 10_000
YS = [None if step % 7 == 0 else float((step * 7919) % 1000) for step in range(MANY)]
LINE = {"type": "scatter", "x": list(range(MANY)), "y": [*YS[:5001], 1e6, *YS[5002:]]}


@pytest.fixture
def page(viewer: Viewer, tabs: Tabs) -> Page:
    return tabs.open(viewer.at(""))


def thinned(page: Page, traces: list[dict[str, Any]], span: list[float] | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = of(page, "thin", "thinned(a[0], a[1] ?? undefined)", traces, span)
    return found


def test_the_largest_and_the_smallest_of_each_stretch_stay(page: Page) -> None:
    (line,) = thinned(page, [LINE])
    xs, ys = line["x"], line["y"]
    assert len(xs) <= 3001
    assert (xs[0], xs[-1], xs) == (0, MANY - 1, sorted(set(xs)))
    assert ys == [LINE["y"][step] for step in xs]
    assert max(y for y in ys if y is not None) == 1e6
    assert None in ys, "gaps stay gaps"
    for begin in range(0, MANY, 100):  # each stretch of ten buckets
        whole = [y for y in LINE["y"][begin : begin + 100] if y is not None]
        kept = [y for x, y in zip(xs, ys, strict=True) if begin <= x < begin + 100 and y is not None]
        assert (min(kept), max(kept)) == (min(whole), max(whole))


def test_near_enough_each_is_drawn(page: Page) -> None:
    (line,) = thinned(page, [LINE], [4000.5, 4999.5])
    assert [x for x in line["x"] if 4000 <= x <= 5000] == list(range(4000, 5001))
    assert len(line["x"]) < 3000
    assert max(y for y in line["y"] if y is not None) == 1e6, "the y axis fits all"
    for span in ([-9.0, -1.0], [2e4, 3e4], [-1e9, 1e9]):
        (line,) = thinned(page, [LINE], span)
        assert (line["x"][0], line["x"][-1]) == (0, MANY - 1)


def test_lines_of_a_stack_keep_the_same_points(page: Page) -> None:
    stack = [LINE | {"stackgroup": "all"}, LINE | {"stackgroup": "all", "y": list(range(MANY))}]
    first, second = thinned(page, stack)
    assert first["x"] == second["x"] == sorted(set(first["x"]))
    assert len(first["x"]) <= 2001


def test_others_stay_as_they_are(page: Page) -> None:
    few = {"type": "scatter", "x": [1, 2], "y": [3, None], "name": "x"}
    bars = {"type": "bar", "x": list(range(5000)), "y": list(range(5000))}
    assert thinned(page, [few, bars]) == [few, bars]
