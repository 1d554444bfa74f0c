"""A page on paper: all figures, in light colours, as wide as the sheet; afterwards it is on the screen as before."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .looks import until
from .viewing import Viewer
from .watching import Tabs

pytestmark = pytest.mark.slow

SHEET_PX = {"A4": 794 - 2 * 45, "Letter": 816 - 2 * 45}  # inside of margins of 12 mm

# What the page has when the browser takes it: those who listen later are called when what others began is done.
REMEMBER = """() => window.addEventListener("beforeprint", () => {
  const drawn = [...document.querySelectorAll("figure.figure-card:not([hidden])")].map((figure) => {
    const svg = figure.querySelector(".main-svg");
    const points = (figure.querySelector(".js-plotly-plot")?.data ?? []).flatMap(({ y }) => [...y]).length;
    return { key: figure.id.slice(7), folded: figure.closest("details:not([open])") !== null, points,
             svg: svg?.getBoundingClientRect().width ?? 0, room: figure.clientWidth,
             letters: [...figure.querySelectorAll(".main-svg text")].map((one) => getComputedStyle(one).fill) };
  });
  window.onPaper = { drawn, theme: document.documentElement.dataset.theme ?? "", chart:
    document.querySelector(".tl-plot .main-svg")?.getBoundingClientRect().width ?? 0 };
})"""


def printed(page: Page, sheet: str = "A4") -> tuple[dict[str, Any], bytes]:
    page.evaluate(REMEMBER)
    pdf = page.pdf(format=sheet, prefer_css_page_size=False)
    until(page, "window.onPaper !== undefined")
    found: dict[str, Any] = page.evaluate("window.onPaper")
    return found, pdf


def first_drawn(page: Page) -> None:
    expect(page.locator("#figure-reward .main-svg").first).to_be_visible()


def test_all_figures_are_printed_light_and_whole_though_nobody_scrolled(viewer: Viewer, tabs: Tabs) -> None:
    page = tabs.open(viewer.at("odd/overview"), size=(1600, 700), scheme="dark")
    first_drawn(page)
    before = page.locator("figure .main-svg").count()
    found, pdf = printed(page)
    main = [figure for figure in found["drawn"] if not figure["folded"]]
    assert len(main) == 12
    assert before < 2 * 3 * len(main)  # some of them were far below the window
    for figure in main:
        assert figure["svg"] > 0, figure
        assert figure["points"] > 0 or figure["key"] == "mismatch_max", figure
        assert figure["svg"] <= figure["room"] <= SHEET_PX["A4"] / 2, figure
        assert set(figure["letters"]) <= {"rgb(29, 29, 27)", "rgb(95, 95, 90)"}, figure  # of the light page
    assert all(figure["svg"] == 0 for figure in found["drawn"] if figure["folded"])
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 2
    # the screen has it again as it was
    assert page.evaluate("document.documentElement.dataset.theme ?? ''") == ""
    until(page, "document.querySelector('#figure-reward .main-svg').getBoundingClientRect().width > 400")
    letters = "getComputedStyle(document.querySelector('#figure-reward .xtick text')).fill"
    until(page, f"{letters} === 'rgb(228, 228, 223)'")


def test_what_the_reader_unfolded_is_printed_too(viewer: Viewer, tabs: Tabs) -> None:
    page = tabs.open(viewer.at("odd/overview"))
    first_drawn(page)
    page.locator("details.more > summary").click()
    page.evaluate("scrollTo(0, 0)")
    found, _ = printed(page, "Letter")
    assert len(found["drawn"]) > 20
    assert [figure["key"] for figure in found["drawn"] if figure["svg"] == 0] == []
    assert all(figure["svg"] <= SHEET_PX["Letter"] / 2 for figure in found["drawn"])


def test_a_report_is_printed_from_the_disk(runs: Path, tmp_path: Path, tabs: Tabs) -> None:
    file = tmp_path / "report.html"
    command = [sys.executable, "-m", "areal_async", "view", str(runs / "plain"), "--export", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    page = tabs.open(f"file://{file}", offline=True)
    first_drawn(page)
    found, _ = printed(page)
    assert [figure["key"] for figure in found["drawn"] if not figure["folded"] and figure["svg"] == 0] == []


def test_the_timeline_fits_on_the_sheet(viewer: Viewer, tabs: Tabs) -> None:
    page = tabs.open(viewer.at("odd/timeline"), size=(2000, 900))
    until(page, "(document.querySelector('.tl-plot')?.layout?.shapes ?? []).length > 3")
    wide = page.evaluate("document.querySelector('.tl-chart').clientWidth")
    found, _ = printed(page)
    assert 0 < found["chart"] / 3 < SHEET_PX["A4"]  # three screens are drawn, one of them is seen
    until(page, f"document.querySelector('.tl-plot').layout.width === {3 * wide}")


def test_an_answer_is_printed_whole_without_what_only_a_screen_needs(viewer: Viewer, tabs: Tabs) -> None:
    page = tabs.open(viewer.at("odd/samples"))
    page.locator("table.samples tbody td.id a").first.click()
    expect(page.locator(".tokens .t[data-at]").first).to_be_visible()
    page.emulate_media(media="print", color_scheme="dark")
    for selector in (".token-detail", "#pages", ".sample-head button"):
        expect(page.locator(selector).first).to_be_hidden()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    boxes = page.locator("main pre, main .scroll")
    assert boxes.evaluate_all("all => all.filter(one => one.scrollHeight > one.clientHeight + 1).length") == 0
