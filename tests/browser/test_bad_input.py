"""What can't be read: one clear line on the page, and the rest works."""

import os
import re
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from areal_async.log.format import VERSION

from .looks import eventually, points
from .recording import STEPS
from .viewing import DOWN_S, Viewer
from .watching import Tabs

pytestmark = pytest.mark.slow

View = Callable[..., Viewer]
LOG = Path("log") / "decisions.log"
LONG_AGO = 1e9  # when a file was written last, seconds since 1970: nobody writes it any more
MAGIC_BYTES = 8  # at the beginning of a file of the log; its format's version follows


@pytest.fixture
def copy(runs: Path, tmp_path: Path) -> Path:
    """Of `odd`, to be damaged."""
    folder = tmp_path / "runs" / "odd"
    shutil.copytree(runs / "odd", folder)
    return folder


def problem(page: Page, pattern: str) -> None:
    """Such a line is shown, once, without a traceback."""
    line = page.locator(".problem, [role=alert]").filter(has_text=re.compile(pattern)).first
    expect(line).to_be_visible()
    assert "Traceback" not in page.locator("body").inner_text()


def curves(page: Page) -> None:
    page.locator("#figure-reward").scroll_into_view_if_needed()
    expect(page.locator("#figure-reward .main-svg").first).to_be_visible()
    eventually(page, lambda: points(page).get("reward", 0), lambda drawn: drawn >= STEPS)


def settled(page: Page) -> None:
    """All that the page asks for by itself has come: the lags, which tell η, are the last."""
    curves(page)
    expect(page.locator(".tiles")).to_contain_text("η")


def test_a_torn_log_is_told_and_the_rest_is_shown(view: View, tabs: Tabs, copy: Path) -> None:
    with (copy / LOG).open("r+b") as file:
        file.truncate((copy / LOG).stat().st_size - 5)
    os.utime(copy / LOG, (LONG_AGO, LONG_AGO))  # of a log that was just written the end may be on its way
    viewer = view(copy.parent)
    page = tabs.open(viewer.at("odd/overview"))
    problem(page, "torn|cut off|incomplete")
    curves(page)
    page.goto(viewer.at("odd/samples"))
    expect(page.locator("table.samples tbody tr").first).to_be_visible()


def test_damage_in_the_middle_is_told_with_its_place(view: View, tabs: Tabs, copy: Path) -> None:
    middle = (copy / LOG).stat().st_size // 2
    with (copy / LOG).open("r+b") as file:
        file.seek(middle)
        file.write(b"\xff" * 8)
    viewer = view(copy.parent)
    page = tabs.open(viewer.at("odd/overview"))
    problem(page, r"decisions\.log.*\d")
    curves(page)
    page.goto(viewer.at("odd/samples"))
    expect(page.locator("table.samples tbody tr").first).to_be_visible()


def test_a_log_of_a_newer_release_is_told(view: View, tabs: Tabs, copy: Path) -> None:
    with (copy / LOG).open("r+b") as file:
        start = file.read(MAGIC_BYTES) + (VERSION + 1).to_bytes(4, "little")
        file.seek(0)
        file.write(start + zlib.crc32(start).to_bytes(4, "little"))
    page = tabs.open(view(copy.parent).at("odd/overview"))
    problem(page, f"written in format {VERSION + 1}")
    curves(page)
    page.locator("#figure-lags").scroll_into_view_if_needed()
    expect(page.locator("#figure-lags")).to_contain_text("nothing so far")  # the lags were asked for
    expect(page.locator(".tiles")).not_to_contain_text("η")  # of it nothing is known


def test_a_folder_that_goes_away_is_told_and_its_neighbours_are_shown(
    view: View, tabs: Tabs, copy: Path, runs: Path
) -> None:
    shutil.copytree(runs / "plain", copy.parent / "plain")
    viewer = view(copy.parent)
    viewer.has_read("odd")  # so the page doesn't ask while the folder goes away
    page = tabs.open(viewer.at("odd/overview"))
    settled(page)
    shutil.rmtree(copy)
    tabs.expect("404")
    page.reload()
    problem(page, "odd")
    page.goto(viewer.at("plain/overview"))
    expect(page.locator("#figure-reward .main-svg").first).to_be_visible()
    expect(page.locator("[role=alert]:visible")).to_have_count(0)


def test_payloads_that_were_freed_are_told(view: View, tabs: Tabs, copy: Path) -> None:
    for segment in (copy / "log").glob("payload-*"):
        segment.unlink()
    viewer = view(copy.parent)
    viewer.has_read("odd")
    page = tabs.open(viewer.at("odd/samples"))
    expect(page.locator("table.samples tbody tr").first).to_be_visible()
    page.goto(viewer.at("odd/sample?id=0.0"))
    expect(page.get_by_role("heading", name="Sample 0.0")).to_be_visible()
    expect(page.locator("main")).to_contain_text(re.compile("payload|arrays"))


def test_what_does_not_exist_is_told(viewer: Viewer, tabs: Tabs) -> None:
    tabs.expect("404|400")
    page = tabs.open(viewer.at("odd/sample?id=77777.0"))
    problem(page, r"77777\.0")
    page.goto(viewer.at("nothing/overview"))
    problem(page, "nothing")
    page.goto(viewer.at("odd/overview"))
    curves(page)


def test_a_viewer_that_has_ended_is_told(view: View, tabs: Tabs, runs: Path) -> None:
    viewer = view(runs)
    viewer.has_read("odd")  # then the run is over for the page, and it asks nothing by itself
    page = tabs.open(viewer.at("odd/overview"))
    settled(page)
    viewer.process.send_signal(signal.SIGINT)
    viewer.process.wait(DOWN_S)
    tabs.expect("ERR_CONNECTION_REFUSED|failed to fetch|dynamically imported")
    page.evaluate("location.hash = '#/odd/samples'")
    problem(page, "doesn't answer|fetch")
