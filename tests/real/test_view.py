"""A run on real vLLM and DeepSpeed, watched in a browser from its start to its end by `areal-async view`.

Nothing here depends on who is faster: the run's server stands still until the page was seen to say that the run starts,
and the run goes on until all of it was looked at; then it is told to stop.
"""

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from ..browser.looks import eventually, markup, points, until
from ..browser.viewing import Viewer, viewers
from ..browser.watching import Tabs, chromium, watched
from .conftest import PATIENCE_S, Program, is_server, lines, metrics

pytestmark = pytest.mark.slow

STEPS = 1000  # it is stopped long before
OF_TWO_VERSIONS = "samples?versions_min=2&outcome=trained"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture
def view(tmp_path: Path) -> Iterator[Callable[..., Viewer]]:
    with viewers(tmp_path) as begin:
        yield begin


@pytest.fixture
def tabs(browser: Browser, view: Callable[..., Viewer]) -> Iterator[Tabs]:
    """view: its servers end after the tabs that ask them again and again."""
    with watched(browser) as opened:
        yield opened


def drawn(page: Page) -> int:
    """Points of the reward's curve, as it is drawn."""
    return points(page).get("reward", 0)


def test_a_run_is_watched_from_its_start_to_its_end(
    start: Callable[..., Program], view: Callable[..., Viewer], tabs: Tabs, tmp_path: Path
) -> None:
    program = start("run", f"train.steps={STEPS}", "rollout.group_size=8")
    program.wait_for(lambda: bool(list((tmp_path / "runs").glob("*/status.json"))))
    (run,) = (tmp_path / "runs").iterdir()
    with standing_still(program):
        viewer = view(run)
        page = tabs.open(viewer.address)
        state = page.locator("#run-state")
        expect(state).to_contain_text("starting")
    curves_move(page, program, tmp_path)
    expect(state).to_contain_text("running")
    others = {name: tabs.open(viewer.at(f"{run.name}/{name}")) for name in ("peers", "samples", "timeline")}
    expect(others["peers"].get_by_role("article", name="server 0")).to_contain_text("running")
    expect(others["samples"].locator("table.samples tbody tr").first).to_be_visible()
    until(others["timeline"], "(document.querySelector('.tl-plot')?.layout?.shapes ?? []).length > 3")
    program.wait_for(lambda: viewer.asked(f"{run.name}/{OF_TWO_VERSIONS}&limit=1")["total"] > 0)
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(timeout=PATIENCE_S) == 0, program.text()
    expect(state).to_contain_text("ended")
    done = lines(metrics(tmp_path))
    expect(page.locator("#run-step")).to_have_text(f"step {done} of {STEPS}")
    until(page, f"document.querySelector('#figure-reward .plot').data.some(one => one.y.length === {done})")
    answer_of_two_versions(tabs.open(viewer.at(f"{run.name}/{OF_TWO_VERSIONS}")))


@contextlib.contextmanager
def standing_still(program: Program) -> Iterator[None]:
    """Its server, which is starting, is stopped meanwhile, so the run gets no further."""
    program.wait_for(lambda: any(is_server(process) for process in program.look()))
    servers = [process for process in program.look() if is_server(process)]  # two, while it forks its engine
    for server in servers:
        server.send_signal(signal.SIGSTOP)
    try:
        assert lines(metrics(program.output.parent)) == 0
        yield
    finally:
        for server in servers:
            server.send_signal(signal.SIGCONT)


def curves_move(page: Page, program: Program, tmp_path: Path) -> None:
    """The reward's curve appears by itself, and grows."""
    program.wait_for(lambda: lines(metrics(tmp_path)) >= 1)
    page.locator("#figure-reward").scroll_into_view_if_needed()
    before = eventually(page, lambda: drawn(page), lambda now: now > 0)
    step = page.locator("#run-step").inner_text()
    eventually(page, lambda: drawn(page), lambda now: now > before)
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
    expect(page.locator(".token-detail")).to_contain_text("log π_behav")
    told = page.locator(".token-detail").inner_text()
    behaviour, prox, ratio = (
        float(re.search(rf"{name}\s+(−?[\d.]+)", told).group(1).replace("−", "-"))  # type: ignore[union-attr]
        for name in ("log π_behav", "log π_prox", "π_prox / π_behav")
    )
    assert behaviour <= 0
    assert abs(prox - behaviour) < 5
    assert ratio > 0
    assert markup(page) == []
