"""An exported report, opened from the disk with the network off: the same page, and nothing is asked of anybody."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .looks import drawn_anew, eventually, filled, markup, nameless, pale, points, sideways, until
from .recording import HOSTILE
from .watching import LAPTOP, PHONE, Tabs

pytestmark = pytest.mark.slow

OWN_SCRIPTS = "a script inside the page"  # a report has its scripts inside; test_bundle.py has that no others run


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `odd`, in a folder by itself."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    command = [sys.executable, "-m", "areal_async", "view", str(runs / "odd"), "--export", str(file), "--samples", "50"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (made.returncode, made.stderr) == (0, "")
    return file


@pytest.fixture
def data(report: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="areal-data">(.*?)</script>', report.read_text())
    assert found is not None
    read: dict[str, Any] = json.loads(found[1])
    return read


def opened(tabs: Tabs, report: Path, place: str = "") -> Page:
    page = tabs.open(f"file://{report}{place}", offline=True)
    page.wait_for_selector("main .page")
    assert tabs.requested == [f"file://{report}"]
    return page


def test_it_opens_at_the_overview_and_draws(tabs: Tabs, report: Path, data: dict[str, Any]) -> None:
    page = opened(tabs, report)
    until(page, "location.hash === '#/odd/overview'")
    filled(page, "overview")
    rows = data["/api/runs/odd/overview"]["rows"]
    page.locator("summary", has_text="More figures").click()
    for key in ("truncated_share", "verdicts", "mixed_share"):
        page.locator(f"#figure-{key}").scroll_into_view_if_needed()
        page.locator(f"#figure-{key} .js-plotly-plot").wait_for()
    page.locator("#figure-lags").scroll_into_view_if_needed()
    drawn = eventually(page, lambda: points(page), lambda drawn: {"truncated_share", "lags"} <= drawn.keys())
    assert drawn["truncated_share"] >= len({row["step"] for row in rows})
    assert drawn["lags"] >= 2
    expect(page.locator("#pages a")).to_have_text(["Overview", "Samples", "Configuration", "About this file"])
    expect(page.locator("#run-reading")).to_contain_text("as of 20")
    page.locator(".troubles button.link").first.click()  # its story is in the file
    expect(page.locator("#panel table.story tr").first).to_be_visible()
    assert len(tabs.requested) == 1
    assert [one for one in markup(page) if not one.startswith(OWN_SCRIPTS)] == []


LAGS = "document.querySelector('#figure-lags .js-plotly-plot').data[0]"
WHOLE_RUN = ".figure-tools > button"  # it is there while something else is seen
REWARD = "document.querySelector('#figure-reward .js-plotly-plot')"


def test_lags_of_the_steps_that_are_shown(tabs: Tabs, report: Path, data: dict[str, Any]) -> None:
    page = opened(tabs, report)
    page.locator("#figure-lags").scroll_into_view_if_needed()
    page.locator("#figure-lags .main-svg").first.wait_for()
    whole = page.evaluate(f"JSON.stringify({LAGS}.customdata)")
    zoom = "{'xaxis.range[0]': -0.5, 'xaxis.range[1]': 1.5}"
    # again and again: the page begins to listen a moment after the figure is there
    until(page, f"{REWARD}?.emit?.('plotly_relayout', {zoom}), !document.querySelector('{WHOLE_RUN}').hidden")
    until(page, f"JSON.stringify({LAGS}.customdata) !== {json.dumps(whole)}")
    lags = data["/report"]["lags"]
    expected = sorted({int(lag) for step, tokens, _ in lags if step <= 1 for lag in tokens})
    assert [int(lag) for lag in page.evaluate(f"[...{LAGS}.x]")] == expected


def test_samples_are_filtered_and_shaded(tabs: Tabs, report: Path, data: dict[str, Any]) -> None:
    page = opened(tabs, report, "#/odd/samples")
    rows = data["/report"]["rows"]
    expect(page.locator("table.samples tbody tr")).to_have_count(len(rows))
    wrong = [row["id"] for row in rows if row["verdict"] == "wrong"]
    page.locator("select[name=verdict]").select_option("wrong")
    expect(page.locator("table.samples tbody tr")).to_have_count(len(wrong))
    mixed = max(rows, key=lambda row: row["versions"])
    assert mixed["versions"] > 1
    page.goto(f"file://{report}#/odd/sample?id={mixed['id']}")
    expect(page.locator("h2", has_text=f"Sample {mixed['id']}")).to_be_visible()
    full = data[f"/api/runs/odd/samples/{mixed['id']}"]
    versions = {version for version in full["record"]["versions"] if version >= 0}
    for version in versions:
        expect(page.get_by_text(f"v{version}", exact=True).first).to_be_visible()
    hostile = next(name for name, value in data.items() if "/samples/" in name and HOSTILE[0] in value["tokens"])
    page.goto(f"file://{report}#/odd/sample?id={hostile.rpartition('/')[2]}")
    expect(page.get_by_text(HOSTILE[0]).first).to_be_visible()
    assert [one for one in markup(page) if not one.startswith(OWN_SCRIPTS)] == []
    tabs.expect("404")
    page.goto(f"file://{report}#/odd/sample?id=999.0")
    expect(page.locator("main .problem")).to_contain_text("sample 999.0 isn't in this file")


@pytest.mark.parametrize("place", ["overview", "samples", "config", "report"])
def test_it_can_be_read_by_all(tabs: Tabs, report: Path, place: str) -> None:
    page = opened(tabs, report, f"#/odd/{place}")
    filled(page, place)
    found = []
    for size, scheme in ((LAPTOP, "light"), (PHONE, "dark")):
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        drawn_anew(page)
        found += pale(page).pale + nameless(page)
        found += [f"{wider} pixels to the right of the window"] if (wider := sideways(page)) else []
    assert not found, "\n".join(found)


def test_nothing_in_it_runs_but_what_it_names(tabs: Tabs, report: Path, tmp_path: Path) -> None:
    """A script that somebody puts into the file is refused."""
    tabs.expect("Content Security Policy|violates")
    changed = tmp_path / "changed.html"
    changed.write_text(report.read_text().replace("</body>", "<script>window.hostile = 1</script></body>"))
    page = tabs.open(f"file://{changed}", offline=True)
    page.wait_for_selector("main .page")
    assert page.evaluate("window.hostile") is None
