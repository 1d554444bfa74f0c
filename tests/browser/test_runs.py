"""The page of all runs: what it lists, chosen runs on top of each other, a link to that."""

import re

import pytest
from playwright.sync_api import expect

from .looks import points, until
from .recording import STEPS
from .viewing import Viewer
from .watching import Tabs

pytestmark = pytest.mark.slow

PLAIN_STEPS = 6


def test_runs_are_listed_and_found(viewer: Viewer, tabs: Tabs) -> None:
    page = tabs.open(viewer.address)
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="odd")).to_contain_text(f"{STEPS} of {STEPS}")
    expect(rows.filter(has_text="plain")).to_contain_text(f"{PLAIN_STEPS} of {PLAIN_STEPS}")
    page.keyboard.press("/")
    page.keyboard.type("plai")
    expect(rows).to_have_count(1)
    page.get_by_role("link", name="plain", exact=True).click()
    expect(page).to_have_url(re.compile("#/plain/overview"))
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(page.get_by_role("searchbox", name="filter runs")).to_be_visible()


def test_chosen_runs_lie_on_top_of_each_other(viewer: Viewer, tabs: Tabs) -> None:
    page = tabs.open(viewer.address)
    for name in ("odd", "plain"):
        page.locator("table.runs tbody tr").filter(has=page.get_by_role("link", name=name)).get_by_role(
            "checkbox"
        ).check()
    looks = "#figure-reward .plot"
    until(page, f"(document.querySelector('{looks}')?.data ?? []).length >= 2")
    drawn = page.locator(looks).evaluate(
        "plot => plot.data.filter(one => one.mode !== 'none').map(one => [one.line.color, one.line.dash, one.y.length])"
    )
    both = [one for one in drawn if one[2] in (STEPS, PLAIN_STEPS)]
    assert len({(colour, dash) for colour, dash, _ in both}) == 2, drawn
    assert points(page)["reward"] >= STEPS + PLAIN_STEPS
    expect(page).to_have_url(re.compile("chosen=odd(,|%2C)plain"))
    again = tabs.open(page.url)
    until(again, f"(document.querySelector('{looks}')?.data ?? []).length >= 2")
    expect(again.get_by_role("checkbox", checked=True)).to_have_count(2)
