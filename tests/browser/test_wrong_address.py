"""Addresses with an error in them: it is told, and where one can go instead."""

import pytest
from playwright.sync_api import expect

from .viewing import Viewer
from .watching import Tabs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("page_name", ["overviev", "common", "report", "%", "../secret"])
def test_a_page_that_does_not_exist_is_told_with_those_that_do(viewer: Viewer, tabs: Tabs, page_name: str) -> None:
    """Two of these are files of the page, and no pages."""
    page = tabs.open(viewer.at(f"odd/{page_name}"))
    expect(page.locator("main .problem")).to_contain_text(f'There is no page "{page_name.split("/")[0]}"')
    expect(page.locator("#run-name")).to_contain_text("odd")  # the name that it has itself stands before it, in time
    page.locator("main").get_by_role("link", name="Samples").click()
    expect(page.locator("table.samples tbody tr").first).to_be_visible()
    expect(page.locator("[role=alert]:visible")).to_have_count(0)


def test_a_run_that_does_not_exist_is_told_with_a_way_to_those_that_do(viewer: Viewer, tabs: Tabs) -> None:
    tabs.expect("404")
    page = tabs.open(viewer.at("no-such-run/overview"))
    expect(page.locator("main")).to_contain_text("no-such-run")
    page.locator("main").get_by_role("link", name="all runs").click()
    expect(page.get_by_role("link", name="plain")).to_be_visible()
    expect(page.locator("[role=alert]:visible")).to_have_count(0)
