"""The timeline as a reader uses it: spans and their stories, zoom and move, by mouse and by keys, links to a moment."""

import re

import pytest
from playwright.sync_api import Page, expect

from .looks import until
from .viewing import Viewer
from .watching import PHONE, Tabs

pytestmark = pytest.mark.slow

SPANS = "(document.querySelector('.tl-plot')?.layout?.shapes ?? []).length"


@pytest.fixture
def page(viewer: Viewer, tabs: Tabs) -> Page:
    page = tabs.open(viewer.at("odd/timeline"))
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


def seen(page: Page) -> tuple[float, float]:
    """What the address says is seen, seconds."""
    found = re.search(r"from=([\d.]+)&to=([\d.]+)", page.url)
    assert found is not None, page.url
    return float(found.group(1)), float(found.group(2))


def test_servers_trainer_and_checks_have_lanes(page: Page) -> None:
    text = " ".join(lanes(page))
    for lane in ("server 0", "server 1", "trainer", "prompts", "rewards"):
        assert lane in text, text
    assert page.evaluate(SPANS) >= 5  # one for each kind
    expect(page.locator(".tl-said")).to_contain_text(re.compile(r"\d+ spans in"))


def test_a_click_on_a_span_tells_its_story(page: Page) -> None:
    over(page, "trainer", "step 2")
    page.mouse.down()
    page.mouse.up()
    panel = page.get_by_role("complementary", name="details")
    expect(panel.get_by_role("heading", name=re.compile("step 2"))).to_be_visible()
    expect(panel.locator("table.story tr").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()


def test_the_wheel_zooms_and_the_address_keeps_it(page: Page, tabs: Tabs) -> None:
    chart = page.locator(".tl-chart").bounding_box()
    assert chart is not None
    page.mouse.move(chart["x"] + chart["width"] / 2, chart["y"] + 60)
    page.mouse.wheel(0, -700)
    expect(page).to_have_url(re.compile("from="))
    begin, end = seen(page)
    assert 0 < begin < end
    again = tabs.open(page.url)
    until(again, f"{SPANS} > 0")
    expect(again.locator(".tl-tools .figure")).to_have_text(page.locator(".tl-tools .figure").inner_text())


def test_keys_zoom_move_and_open(page: Page) -> None:
    page.locator(".tl-chart").focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile("from="))
    before = seen(page)
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(400)
    after = seen(page)
    assert after[0] > before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0], rel=1e-3)
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("from="))
    for _ in range(20):
        page.keyboard.press("ArrowDown")
        if page.locator(".tl-said").inner_text().strip() == "trainer":
            break
    page.keyboard.press(".")
    page.keyboard.press(".")
    expect(page.locator(".tl-chosen")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="details").locator("h2")).to_be_visible()


def test_a_phone_shows_lanes(viewer: Viewer, tabs: Tabs) -> None:
    page = tabs.open(viewer.at("odd/timeline"), size=PHONE)
    until(page, f"{SPANS} > 3")
    chart = page.locator(".tl-chart").bounding_box()
    assert chart is not None
    assert chart["width"] > 150
