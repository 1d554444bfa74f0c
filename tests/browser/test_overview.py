"""The overview as a reader uses it: curves, zoom, smoothing, what went wrong and its stories, the ledger, keys."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from .looks import eventually, filled, markup, points, until
from .recording import IMAGE, STEPS
from .viewing import Viewer
from .watching import WAIT_MS, Tabs, go

pytestmark = pytest.mark.slow


@pytest.fixture
def page(viewer: Viewer, tabs: Tabs) -> Page:
    """The overview of `odd` with its first figures drawn, and all there that moves others when it comes."""
    page = tabs.open(viewer.at("odd/overview"))
    drawn(page, "reward")
    drawn(page, "lag")
    expect(page.locator(".tiles")).to_contain_text("η")  # it comes with the lags
    return page


def drawn(page: Page, key: str) -> None:
    page.locator(f"#figure-{key}").scroll_into_view_if_needed()
    expect(page.locator(f"#figure-{key} .main-svg").first).to_be_visible()


def trace(page: Page, key: str, at: int) -> dict[str, Any]:
    """x and y of one line of a figure, as it is drawn."""
    found: dict[str, Any] = page.locator(f"#figure-{key} .plot").evaluate(
        "(plot, at) => ({ x: [...plot.data[at].x], y: [...plot.data[at].y], name: plot.data[at].name })", at
    )
    return found


def rows(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; of a step that was trained again the last one."""
    all_rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]
    return list({row["step"]: row for row in all_rows}.values())


def test_curves_have_the_numbers_of_metrics_jsonl(page: Page, runs: Path) -> None:
    """Training went back to a checkpoint in this run: what was given up is a line of its own."""
    kept = rows(runs / "odd")
    assert [row["step"] for row in kept] == list(range(STEPS))
    lines = page.locator("#figure-reward .plot").evaluate("plot => plot.data.map(one => [[...one.x], [...one.y]])")
    assert [[row["step"] for row in kept], [row["reward_mean"] for row in kept]] in lines
    assert points(page)["reward"] > STEPS
    page.get_by_role("button", name="by time").click()
    expect(page).to_have_url(re.compile("x=time"))
    times = [pytest.approx(row["time_s"]) for row in kept]
    of_x = "plot => plot.data.map(one => [...one.x])"
    eventually(page, lambda: page.locator("#figure-reward .plot").evaluate(of_x), lambda lines: times in lines)


def test_a_drag_zooms_into_all_figures(page: Page) -> None:
    plot = page.locator("#figure-reward .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    expect(page.get_by_role("button", name="whole run")).to_be_visible()
    eventually(
        page,
        lambda: [ranged(page, key) for key in ("reward", "lag")],
        lambda ranges: ranges[0] == pytest.approx(ranges[1]) and 0 < ranges[0][0] < ranges[0][1] < STEPS,
    )
    page.get_by_role("button", name="whole run").click()
    until(page, "document.querySelector('#figure-lag .plot').layout.xaxis.range[1] > 8.5")


def ranged(page: Page, key: str) -> list[float]:
    found: list[float] = page.locator(f"#figure-{key} .plot").evaluate("plot => [...plot.layout.xaxis.range]")
    return found


def test_smoothing_is_drawn_over_the_raw_line_and_lives_in_the_address(page: Page) -> None:
    before = points(page)["reward"]
    page.get_by_role("slider", name="smoothing").focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile(r"smooth=0\.2"))
    eventually(page, lambda: points(page)["reward"], lambda now: now == before + STEPS)


def test_pointing_at_a_curve_tells_its_values(page: Page, runs: Path) -> None:
    plot = page.locator("#figure-reward .nsewdrag").first
    plot.scroll_into_view_if_needed()
    plot.hover()
    expect(page.locator("#figure-reward .hoverlayer text").first).to_be_visible()
    told = " ".join(page.locator("#figure-reward .hoverlayer text").all_text_contents())
    assert any(f"{row['reward_mean']:.3g}" in told for row in rows(runs / "odd")), told


def test_all_figures_that_have_numbers_are_drawn(page: Page) -> None:
    page.locator("details.more > summary").click()
    keys = page.locator("figure.figure-card:visible").evaluate_all("all => all.map(one => one.id.slice(7))")
    assert len(keys) > 15
    for key in keys:
        drawn(page, key)
    found = points(page)
    exact = {"mismatch_max"}  # 0 with scripted peers, which no logarithmic axis has
    assert {key for key in keys if not found.get(key)} == exact
    for key in keys:
        assert page.locator(f"#figure-{key} figcaption").inner_text().endswith(".")


def test_what_went_wrong_has_its_story(page: Page) -> None:
    """A trainer died, a server was killed, attempts failed with a text that is no markup."""
    page.get_by_role("button", name=re.compile("show all")).click()
    told = page.locator(".troubles").inner_text()
    assert "lost" in told
    assert "rolled back" in told
    assert IMAGE in told
    page.locator(".troubles button", has_text="failed").first.click()
    panel = page.get_by_role("complementary", name="details")
    expect(panel.locator("table.story tr").first).to_be_visible()
    expect(panel).to_contain_text("starts on server")
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    assert markup(page) == []


def test_the_ledger_and_the_shares_add_up(page: Page) -> None:
    expect(page.get_by_text("in exactly one line: nothing is lost")).to_be_visible()
    table = page.locator("table.balance")
    numbers = [int(text.replace(",", "")) for text in table.locator("tbody td.number").all_inner_texts()]
    sums = [int(text.replace(",", "")) for text in table.locator("tfoot td.number").all_inner_texts()]
    assert [sum(numbers[0::2]), sum(numbers[1::2])] == sums
    shares = re.search(r"([\d. +]+) = 100 %", page.locator("main").inner_text())
    assert shares is not None
    assert sum(map(float, shares.group(1).split("+"))) == pytest.approx(100)


def test_keys_lead_everywhere(page: Page) -> None:
    for keys, address in (("t", "timeline"), ("s", "samples"), ("p", "peers"), ("c", "config"), ("o", "overview")):
        go(page, keys, f"#/odd/{address}")
        filled(page, address)
        expect(page.locator("#pages a[aria-current=page]")).to_have_count(1)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()


def test_tab_reaches_every_page_with_a_visible_focus(page: Page) -> None:
    page.evaluate("scrollTo(0, 0)")
    page.locator("body").press("Tab")
    seen = []
    for _ in range(12):
        seen.append(page.evaluate("document.activeElement.textContent.trim()"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", seen
        page.keyboard.press("Tab")
    assert {"to the content", "Overview", "Timeline", "Samples", "Configuration"} <= set(seen)
    page.get_by_role("link", name="Samples").focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#/odd/samples"))


def test_dark_or_light_is_chosen_and_stays(page: Page) -> None:
    def ground() -> str:
        colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return colour

    light = ground()
    page.get_by_role("button", name="dark or light").click()
    dark = ground()
    assert dark != light
    page.reload()
    assert ground() == dark
    page.keyboard.press("d")
    assert ground() == light


def test_how_far_the_log_was_read_is_told_until_it_is_read(viewer: Viewer, tabs: Tabs) -> None:
    """A small log is read at once, so what the server says of it is changed on its way, until it was seen."""
    page = tabs.open("about:blank")
    is_read = False

    def partly(route: Route) -> None:
        answer = route.fetch(timeout=WAIT_MS)
        told = answer.json()
        if not is_read:
            told["reading"] |= {"nbytes": 1_000, "of": 4_000, "done": False}
        route.fulfill(response=answer, json=told)

    page.route("**/overview?*", partly)
    page.goto(viewer.at("odd/overview"))
    expect(page.get_by_text("reading the log: 25 %")).to_be_visible()
    is_read = True
    expect(page.get_by_text("reading the log")).to_have_count(0)
