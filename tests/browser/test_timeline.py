"""The timeline as a reader uses it: spans and their stories, zoom and move, by mouse and by keys, links to a moment."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from .looks import eventually, until
from .viewing import Viewer
from .watching import PHONE, Tabs

pytestmark = pytest.mark.slow

SPANS = "(document.querySelector('.tl-plot')?.layout?.shapes ?? []).length"


@pytest.fixture
def page(viewer: Viewer, tabs: Tabs) -> Page:
    page = tabs.open(viewer.at("odd/timeline"))
    until(page, f"{SPANS} > 3")
    return page


@pytest.fixture
def near(viewer: Viewer, tabs: Tabs, runs: Path) -> Page:
    """Around step 2: there every step is many pixels wide, however slowly the run was recorded."""
    rows = [json.loads(line) for line in (runs / "odd" / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in reversed(rows) if row["step"] == 2)
    begin, end = max(0.0, row["time_s"] - 1.5 * row["step_s"]), row["time_s"] + 0.5 * row["step_s"]
    page = tabs.open(viewer.at(f"odd/timeline?from={begin:.6f}&to={end:.6f}"))
    until(page, f"{SPANS} > 3")
    return page


def over(page: Page, lane: str, told: str) -> None:
    """Move the mouse along a lane until what it points at is told."""
    name = page.locator(".tl-name").filter(has_text=re.compile(f"^[▸▾]?{lane}")).first
    name.scroll_into_view_if_needed()
    row, chart = name.bounding_box(), page.locator(".tl-chart").bounding_box()
    assert row is not None
    assert chart is not None
    for x in range(int(chart["x"]) + 2, int(chart["x"] + chart["width"]), 4):
        page.mouse.move(x, row["y"] + min(row["height"] / 2, 9))
        tip = page.locator(".tl-tip")
        if tip.is_visible() and re.search(told, tip.inner_text()):
            return
    raise AssertionError(f"nothing in the lane {lane} tells {told}; the lanes: {lanes(page)}")


def lanes(page: Page) -> list[str]:
    return page.locator(".tl-name").all_inner_texts()


def seen(page: Page, holds: Callable[[float, float], bool] = lambda begin, end: True) -> tuple[float, float]:
    """What the address says is seen, seconds; it says so a moment after a move. holds: what is to be seen."""

    def read() -> tuple[float, float] | None:
        found = re.search(r"from=([\d.]+)&to=([\d.]+)", page.url)
        return None if found is None else (float(found.group(1)), float(found.group(2)))

    told: tuple[float, float] = eventually(page, read, lambda told: told is not None and holds(*told))
    return told


def test_servers_trainer_and_checks_have_lanes(page: Page) -> None:
    text = " ".join(lanes(page))
    for lane in ("server 0", "server 1", "trainer", "prompts", "rewards"):
        assert lane in text, text
    assert page.evaluate(SPANS) >= 5  # one for each kind
    expect(page.locator(".tl-said")).to_contain_text(re.compile(r"\d+ spans in"))


def test_a_click_on_a_span_tells_its_story(near: Page) -> None:
    page = near
    over(page, "trainer", "step 2")
    page.mouse.down()
    page.mouse.up()
    panel = page.get_by_role("complementary", name="details")
    expect(panel.get_by_role("heading", name=re.compile("step 2"))).to_be_visible()
    expect(panel.locator("table.story tr").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()


def test_the_wheel_with_ctrl_zooms_and_the_address_keeps_it(page: Page, tabs: Tabs) -> None:
    chart = page.locator(".tl-chart").bounding_box()
    assert chart is not None
    page.mouse.move(chart["x"] + chart["width"] / 2, chart["y"] + 60)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -700)
    page.keyboard.up("Control")
    expect(page).to_have_url(re.compile("from="))
    begin, end = seen(page, lambda begin, end: begin > 0)
    assert begin < end
    again = tabs.open(page.url)
    until(again, f"{SPANS} > 0")
    expect(again.locator(".tl-tools .figure")).to_have_text(page.locator(".tl-tools .figure").inner_text())


def test_keys_zoom_and_move(page: Page) -> None:
    page.locator(".tl-chart").focus()
    page.keyboard.press("+")
    first = seen(page)
    page.keyboard.press("+")
    before = seen(page, lambda begin, end: end - begin < first[1] - first[0])
    page.keyboard.press("ArrowRight")
    after = seen(page, lambda begin, end: begin > before[0])
    assert after[1] - after[0] == pytest.approx(before[1] - before[0], rel=1e-3)
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("from="))


def test_keys_choose_a_span_and_open_its_story(near: Page) -> None:
    page = near
    page.locator(".tl-chart").focus()
    said = page.locator(".tl-said")
    for _ in range(20):
        page.keyboard.press("ArrowDown")
        if said.inner_text().strip() == "trainer":
            break
    for _ in range(20):
        page.keyboard.press(".")
        if re.search(r"trainer: .*step \d", said.inner_text()):
            break
    expect(said).to_have_text(re.compile(r"trainer: .*step \d"))
    expect(page.locator(".tl-chosen")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="details").locator("h2")).to_be_visible()


def test_a_phone_shows_lanes(viewer: Viewer, tabs: Tabs) -> None:
    page = tabs.open(viewer.at("odd/timeline"), size=PHONE)
    until(page, f"{SPANS} > 3")
    chart = page.locator(".tl-chart").bounding_box()
    assert chart is not None
    assert chart["width"] > 150
