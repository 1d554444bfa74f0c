"""A wheel over the timeline: alone it scrolls the page, as everywhere; with Ctrl it zooms, which is told."""

import pytest
from playwright.sync_api import Page, expect

from .looks import until
from .viewing import Viewer
from .watching import Tabs

pytestmark = pytest.mark.slow

LOW = (1000, 300)  # a window that is lower than the page
WHOLE = "document.querySelector('.tl-tools .figure').textContent"
DRAWN = "(document.querySelector('.tl-plot')?.layout?.shapes ?? []).length > 3"


@pytest.fixture
def page(viewer: Viewer, tabs: Tabs) -> Page:
    """With the pointer over the timeline."""
    page = tabs.open(viewer.at("odd/timeline"), size=LOW)
    until(page, DRAWN)
    chart = page.locator(".tl-chart").bounding_box()
    assert chart is not None
    page.mouse.move(chart["x"] + chart["width"] / 2, chart["y"] + 60)
    return page


def scrolled(page: Page) -> int:
    found: int = page.evaluate("Math.round(scrollY)")
    return found


def test_the_wheel_alone_scrolls_the_page_and_it_is_told_how_to_zoom(page: Page) -> None:
    whole = page.evaluate(WHOLE)
    page.mouse.wheel(0, 120)
    until(page, "scrollY > 50")
    expect(page.locator(".tl-tip")).to_have_text("Ctrl + wheel zooms")
    assert page.evaluate(WHOLE) == whole
    assert "from=" not in page.url
    expect(page.locator(".tl-tip")).to_be_hidden()  # it goes by itself


def test_the_wheel_with_ctrl_zooms_at_the_pointer(page: Page) -> None:
    page.keyboard.down("Control")
    for _ in range(5):
        page.mouse.wheel(0, -120)
    page.keyboard.up("Control")
    until(page, "location.hash.includes('from=')")
    assert scrolled(page) == 0
    expect(page.locator(".tl-tip")).not_to_have_text("Ctrl + wheel zooms")
    page.keyboard.down("Control")
    for _ in range(20):
        page.mouse.wheel(0, 120)
    page.keyboard.up("Control")
    until(page, "!location.hash.includes('from=')")


def test_a_pinch_on_a_touchpad_zooms_by_what_the_fingers_do(page: Page) -> None:
    """Browsers tell it as a wheel of few pixels with Ctrl: 40 pixels in all are a factor of 1.5."""
    pinch = "new WheelEvent('wheel', { deltaY: -4, ctrlKey: true, bubbles: true, cancelable: true, clientX: 500 })"
    refused = page.evaluate(
        f"[...Array(10)].filter(() => !document.querySelector('.tl-chart').dispatchEvent({pinch})).length"
    )
    assert refused == 10  # the browser doesn't zoom the page
    until(page, "location.hash.includes('from=')")
    shown, whole = page.evaluate(
        """() => {
          const asked = new URLSearchParams(location.hash.split("?")[1]);
          const layout = document.querySelector(".tl-plot").layout;
          return [asked.get("to") - asked.get("from"), (layout.xaxis.range[1] - layout.xaxis.range[0]) / 3];
        }"""
    )
    assert shown == pytest.approx(whole, rel=1e-3)
    assert shown > 0


def test_sideways_it_moves_what_is_shown(page: Page) -> None:
    page.keyboard.press("+")
    until(page, "location.hash.includes('from=')")
    first = page.evaluate("location.href")
    page.keyboard.press("+")
    until(page, f"location.href !== {first!r}")  # a moment after the key
    before = page.evaluate("location.href")
    page.mouse.wheel(80, 0)
    until(page, f"location.href !== {before!r}")
    page.keyboard.down("Shift")
    page.mouse.wheel(0, -80)
    page.keyboard.up("Shift")
    until(page, f"location.href === {before!r}")
    assert scrolled(page) == 0
