"""A run on real vLLM and DeepSpeed, watched in a browser from its start to its end by `areal-async view`."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from ..browser.looks import markup, points, until
from ..browser.viewing import Viewer, ended
from ..browser.watching import Tabs, chromium, watched
from .conftest import Program, lines, metrics

pytestmark = pytest.mark.slow

STEPS = 10


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture
def tabs(browser: Browser) -> Iterator[Tabs]:
    with watched(browser) as opened:
        yield opened


def drawn(page: Page) -> int:
    """Points of the reward's curve, as it is drawn."""
    return points(page).get("reward", 0)


def test_a_run_is_watched_from_its_start_to_its_end(
    start: Callable[..., Program], browser: Browser, tabs: Tabs, tmp_path: Path
) -> None:
    program = start("run", f"train.steps={STEPS}", "rollout.group_size=8")
    program.wait_for(lambda: bool(list((tmp_path / "runs").glob("*/status.json"))))
    (run,) = (tmp_path / "runs").iterdir()
    (tmp_path / "viewer").mkdir()
    viewer = Viewer(run, (), tmp_path / "viewer")
    page = tabs.open(viewer.address)
    state = page.locator("#run-state")
    expect(state).to_contain_text("starting")
    curves_move(page, program, tmp_path)
    expect(state).to_contain_text("running")
    others = {name: tabs.open(viewer.at(f"{run.name}/{name}")) for name in ("peers", "samples", "timeline")}
    expect(others["peers"].get_by_role("article", name="server 0")).to_contain_text("running")
    expect(others["samples"].locator("table.samples tbody tr").first).to_be_visible()
    until(others["timeline"], "(document.querySelector('.tl-plot')?.layout?.shapes ?? []).length > 3")
    assert program.process.wait(timeout=120) == 0, program.text()
    expect(state).to_contain_text("ended")
    expect(page.locator("#run-step")).to_have_text(f"step {STEPS} of {STEPS}")
    until(page, "document.querySelector('#figure-reward .plot').data.some(one => one.y.length === 10)")
    answer_of_two_versions(tabs.open(viewer.at(f"{run.name}/samples?versions_min=2&outcome=trained")))
    tabs.close()  # before the server that they ask again and again
    ended(viewer)


def curves_move(page: Page, program: Program, tmp_path: Path) -> None:
    """The reward's curve appears by itself, and grows."""
    program.wait_for(lambda: lines(metrics(tmp_path)) >= 1)
    page.locator("#figure-reward").scroll_into_view_if_needed()
    until(page, "(document.querySelector('#figure-reward .plot')?.data ?? []).some(one => one.y.length > 0)")
    before = drawn(page)
    assert before < STEPS
    step = page.locator("#run-step").inner_text()
    until(
        page, f"document.querySelector('#figure-reward .plot').data.reduce((n, one) => n + one.y.length, 0) > {before}"
    )
    assert drawn(page) > before
    expect(page.locator("#run-step")).not_to_have_text(step)


def answer_of_two_versions(page: Page) -> None:
    """Its tokens have a shade for each version, and tell what server and trainer thought of them, which is nearly the
    same where the version is the one that was trained."""
    page.locator("table.samples td.id a").first.click()
    tokens = page.locator(".tokens .t[data-at]")
    expect(tokens.first).to_be_visible()
    shades = tokens.evaluate_all(
        """all => [...new Set(all.map((one) =>
          `${one.className.match(/v[0-9]/)[0]},${getComputedStyle(one).backgroundColor}`))]"""
    )
    versions, colours = zip(*(shade.split(",", 1) for shade in shades), strict=True)
    assert len(set(versions)) == len(set(colours)) == len(shades) >= 2
    tokens.last.hover()
    told = page.locator(".token-detail").inner_text()
    behaviour, prox, ratio = (
        float(re.search(rf"{name}\s+(−?[\d.]+)", told).group(1).replace("−", "-"))  # type: ignore[union-attr]
        for name in ("log π_behav", "log π_prox", "π_prox / π_behav")
    )
    assert behaviour <= 0
    assert abs(prox - behaviour) < 5
    assert ratio > 0
    assert markup(page) == []
