"""The page's arithmetic: its pure functions against what they must give, computed here or by the project's own code."""

import math
from typing import Any, Final

import pytest
from playwright.sync_api import Page

from areal_async.view.figures import busy_parts

from .viewing import Viewer
from .watching import Tabs

pytestmark = pytest.mark.slow

SHARES: Final = [
    (0.0, 0.0, 1.0),
    (1.0, 1.0, 0.0),
    (0.5, 0.25, 0.375),
    (0.9694572, 0.9176621, 0.0305428),
    (0.1, 0.3, 0.65),
]


@pytest.fixture
def page(viewer: Viewer, tabs: Tabs) -> Page:
    return tabs.open(viewer.at(""))


def of(page: Page, module: str, expression: str, *arguments: object) -> Any:
    """`expression` with the module's names, and `a`: the arguments."""
    named = f"const m = await import(new URL('static/{module}.js', document.baseURI)); with (m) return {expression};"
    return page.evaluate(f"async (a) => {{ {named} }}", list(arguments))


def test_who_was_busy_is_what_the_project_says(page: Page) -> None:
    rows = [
        {"trainer_idle_share": trainer, "rollout_idle_share": rollout, "both_busy_share": both, "step_s": 1.0 + at}
        for at, (trainer, rollout, both) in enumerate(SHARES)
    ]
    for row, shares in zip(rows, SHARES, strict=True):
        assert of(page, "lines", "busyParts(a[0])", row) == pytest.approx(list(busy_parts(*shares)), abs=1e-12)
    whole = of(page, "lines", "busyOf(a[0])", rows)
    parts = [busy_parts(*shares) for shares in SHARES]
    weights = [row["step_s"] for row in rows]
    for at, share in enumerate(whole["shares"]):
        expected = sum(part[at] * weight for part, weight in zip(parts, weights, strict=True)) / sum(weights)
        assert share == pytest.approx(expected, abs=1e-12)
    assert whole["sum"] == pytest.approx(1.0, abs=1e-6)
    assert of(page, "lines", "busyParts(a[0])", {**rows[0], "both_busy_share": None}) is None


def test_shown_percents_add_up_to_a_hundred(page: Page) -> None:
    for shares in ([1, 0, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [0.25049, 0.25049, 0.25049, 0.24853], [1 / 7] * 7):
        shown = of(page, "now", "rounded(a[0])", shares)
        assert sum(round(10 * float(one)) for one in shown) == 1000
        assert all(abs(float(one) - 100 * share) < 0.1 for one, share in zip(shown, shares, strict=True))


def test_a_later_row_of_a_step_replaces_what_was_given_up(page: Page) -> None:
    steps = [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (3, 2)]
    rows = [{"step": step, "branch": branch} for step, branch in steps]
    parted = of(page, "lines", "branches(a[0])", rows)
    assert [(row["step"], row["branch"]) for row in parted["kept"]] == [(0, 0), (1, 1), (2, 1), (3, 2)]
    assert [[(row["step"], row["branch"]) for row in part] for part in parted["abandoned"]] == [
        [(0, 0), (1, 0), (2, 0), (3, 0)],
        [(2, 1), (3, 1)],
    ]
    went_back = {"branch": 3, "run": {"version": 2}}  # and no row of the new branch yet
    parted = of(page, "lines", "branches(a[0], a[1])", rows, went_back)
    assert [row["step"] for row in parted["kept"]] == [0, 1]


def test_what_is_not_known_is_a_gap(page: Page) -> None:
    rows = [
        {"tokens_generated": 10, "step_s": 2.0, "mismatch_max": 0.0, "mismatch_tokens": 0, "verdicts": {"right": 3}},
        {"tokens_generated": 10, "step_s": 0.0, "mismatch_max": 0.5, "mismatch_tokens": 1, "verdicts": {"wrong": 1}},
        {"tokens_generated": None, "step_s": 2.0},
    ]
    read = "a[0].map(reader(a[1]))"
    assert of(page, "lines", read, rows, {"field": "tokens_generated", "per": "step_s"}) == [5.0, None, None]
    assert of(page, "lines", read, rows, {"field": "mismatch_max", "per": ""}) == [None, 0.5, None]
    assert of(page, "lines", read, rows, {"field": "verdicts/right", "per": ""}) == [3, 0, None]
    labels = of(
        page, "lines", "expand([a[1]], a[0]).map((one) => one.label)", rows, {"field": "verdicts/*", "label": ""}
    )
    assert labels == ["right", "wrong"]


def test_smoothing_is_exponential_and_keeps_gaps(page: Page) -> None:
    values, weight = [4.0, None, 0.0, 8.0], 0.75
    expected: list[float | None] = []
    weighted = total = 0.0
    for value in values:
        if value is None:
            expected.append(None)
            continue
        weighted, total = weight * weighted + (1 - weight) * value, weight * total + (1 - weight)
        expected.append(weighted / total)
    assert of(page, "lines", "smoothed(a[0], a[1])", values, weight) == pytest.approx(expected)
    assert of(page, "lines", "smoothed(a[0], 0)", values) == values
    assert of(page, "lines", "smoothed(a[0], 0.98)", [3.0] * 5) == pytest.approx([3.0] * 5)


def test_numbers_are_written_for_people(page: Page) -> None:
    def shown(expression: str) -> str:
        return str(of(page, "common", expression))

    assert [shown(f"duration({seconds})") for seconds in (0.456, 12.34, 59.97, 65, 3599.6, 7_620, 275_000)] == [
        "0.46 s", "12.3 s", "1 min 00 s", "1 min 05 s", "1 h 00 min", "2 h 07 min", "3 d 4 h",
    ]  # fmt: skip
    assert shown("clock(3723.96, 1)") == "1:02:04.0"
    assert shown("clock(59.999)") == "0:01:00"
    assert [shown(f"count({many})") for many in (999, 9_500, 12_345, 1_234_567)] == ["999", "9,500", "12.3 k", "1.23 M"]
    assert [shown(f"number({value})") for value in (0.95312, 12345.6, 1.3e-7, 0)] == [
        "0.9531",
        "12,346",
        "1.30e-7",
        "0",
    ]
    assert shown("number(null)") == shown("percent(NaN)") == shown("duration(undefined)") == "–"
    assert shown("percent(0.12345)") == "12.3 %"
    assert math.isclose(float(of(page, "common", "Number(number(a[0]))", 0.1234567)), 0.1235)


def test_what_a_step_waits_for_is_in_short_lines(page: Page) -> None:
    text = (
        "step 0 waits for 9 more ready groups: group 1 (floor 0, deadline 3) <- sample 1.3 on server 0, for 1.0 s, "
        "sample 1.4 on server 0, for 1.0 s, group 3 (floor 0, deadline 3) "
        "<- sample 3.1 on server 0, for 1.0 s and 29 more"
    )
    assert of(page, "now", "shortLines(a[0])", text) == [
        "step 0 waits for 9 more ready groups",
        "group 1 (floor 0, deadline 3) ← sample 1.3 on server 0, for 1.0 s, sample 1.4 on server 0, for 1.0 s",
        "group 3 (floor 0, deadline 3) ← sample 3.1 on server 0, for 1.0 s and 29 more",
    ]
    assert of(page, "now", "shortLines(a[0])", "the run is over: steps_done") == ["the run is over: steps_done"]
