"""The page of all runs: what it lists, chosen runs on top of each other, a link to that."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .looks import eventually, filled
from .recording import STEPS
from .viewing import Viewer
from .watching import Tabs, go

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
    filled(page, "overview")  # the address says so before the page is there
    go(page, "r", r"#/(\?|$)")
    expect(page.get_by_role("searchbox", name="filter runs")).to_be_visible()


def lines_of(page: Page) -> list[Any]:
    """Of each line of rewards its colour, its dash, and how many points it has."""
    found: list[Any] = page.evaluate(
        """() => (document.querySelector("#figure-reward .plot")?.data ?? [])
          .filter((one) => one.mode !== "none").map((one) => [one.line.color, one.line.dash, one.y.length])"""
    )
    return found


def are_of_two_runs(drawn: list[Any]) -> bool:
    """By colour or dash, among the lines with as many points as one of the runs has steps."""
    both = [one for one in drawn if one[2] in (STEPS, PLAIN_STEPS)]
    return {one[2] for one in both} == {STEPS, PLAIN_STEPS} and len({(one[0], one[1]) for one in both}) == 2


def test_chosen_runs_lie_on_top_of_each_other(viewer: Viewer, tabs: Tabs) -> None:
    page = tabs.open(viewer.address)
    for name in ("odd", "plain"):
        page.locator("table.runs tbody tr").filter(has=page.get_by_role("link", name=name)).get_by_role(
            "checkbox"
        ).check()
    eventually(page, lambda: lines_of(page), are_of_two_runs)  # of the one that was chosen first there may be two lines
    expect(page).to_have_url(re.compile("chosen=odd(,|%2C)plain"))
    again = tabs.open(page.url)
    eventually(again, lambda: lines_of(again), are_of_two_runs)
    expect(again.get_by_role("checkbox", checked=True)).to_have_count(2)
