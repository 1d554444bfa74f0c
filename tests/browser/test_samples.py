"""The table of samples and one sample in full, as a reader uses them: filters, links, shades, what a token tells."""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .looks import eventually, markup
from .recording import FIRST_HOSTILE, HOSTILE, SCRIPT
from .viewing import Viewer
from .watching import PHONE, Tabs

pytestmark = pytest.mark.slow

Record = dict[str, Any]


@pytest.fixture(scope="module")
def records(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """What `areal-async trace` says of the samples of `odd`: the truth that the page is compared with."""
    file = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    command = [sys.executable, "-m", "areal_async", "trace", str(runs / "odd"), "--samples", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return [json.loads(line) for line in file.read_text().split("\n") if line]  # texts have other ends of line in them


@pytest.fixture
def mixed(records: list[Record]) -> Record:
    """A trained sample with tokens of two versions or more, which begins with hostile texts."""
    return next(
        one
        for one in records
        if one["response_ids"][0] == FIRST_HOSTILE
        and len({version for version in one["versions"] if version >= 0}) > 1
        and one["outcome"] == "trained"
    )


def ids(page: Page) -> list[str]:
    return page.locator("table.samples tbody td.id").all_inner_texts()


def shown(page: Page, expected: list[Record]) -> None:
    """The table has just these, in some order."""
    names = [one["id"] for one in expected]
    assert 0 < len(names) <= 50
    expect(page.locator("table.samples")).not_to_have_attribute("aria-busy", "true")
    eventually(page, lambda: sorted(ids(page)), lambda found: found == sorted(names))


def test_filters_leave_what_fits_and_live_in_the_address(viewer: Viewer, tabs: Tabs, records: list[Record]) -> None:
    page = tabs.open(viewer.at("odd/samples"))
    shown(page, records)
    page.locator("select[name=verdict]").select_option("wrong")
    wrong = [one for one in records if one["verdict"] == "wrong"]
    assert len(wrong) < len(records)
    shown(page, wrong)
    page.locator("input[name=length_min]").fill("48")
    page.locator("input[name=versions_min]").fill("2")
    left = [one for one in wrong if one["response_tokens"] >= 48 and len({v for v in one["versions"] if v >= 0}) >= 2]
    shown(page, left)
    expect(page).to_have_url(re.compile("verdict=wrong.*length_min=48"))
    again = tabs.open(page.url)
    shown(again, left)
    expect(again.locator("select[name=verdict]")).to_have_value("wrong")
    page.get_by_role("button", name="clear all").click()
    shown(page, records)
    expect(page).not_to_have_url(re.compile("verdict"))


def test_search_finds_texts_of_prompts_and_answers(viewer: Viewer, tabs: Tabs, records: list[Record]) -> None:
    page = tabs.open(viewer.at("odd/samples"))
    shown(page, records)
    page.keyboard.press("/")
    page.keyboard.type("日本語")
    shown(page, [one for one in records if "日本語" in one["response"] + one["prompt"]])
    page.keyboard.press("Control+A")
    page.keyboard.type("<SCRIPT>window.")
    shown(page, [one for one in records if SCRIPT in one["response"] + one["prompt"]])
    page.keyboard.press("Control+A")
    page.keyboard.type("nothing says this")
    expect(page.locator("table.samples tbody tr")).to_have_count(0)
    expect(page.get_by_text("No sample fits")).to_be_visible()


def test_the_table_is_sorted_by_the_headings(viewer: Viewer, tabs: Tabs, records: list[Record]) -> None:
    page = tabs.open(viewer.at("odd/samples"))
    shown(page, records)
    page.get_by_role("columnheader", name="tokens").get_by_role("button").click()
    expect(page.get_by_role("columnheader", name="tokens")).to_have_attribute("aria-sort", "descending")
    lengths = {one["id"]: one["response_tokens"] for one in records}
    assert [lengths[name] for name in ids(page)] == sorted(lengths.values(), reverse=True)
    page.get_by_role("columnheader", name="tokens").get_by_role("button").click()
    expect(page.get_by_role("columnheader", name="tokens")).to_have_attribute("aria-sort", "ascending")
    assert [lengths[name] for name in ids(page)] == sorted(lengths.values())


def test_two_versions_have_two_shades(viewer: Viewer, tabs: Tabs, mixed: Record) -> None:
    """In both themes; and what the model did not sample looks different, also without colours."""
    page = tabs.open(viewer.at(f"odd/sample?id={mixed['id']}"))
    expect(page.locator(".tokens .t[data-at]")).to_have_count(len(mixed["response_ids"]))
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        colours = page.locator(".tokens .t[data-at]").evaluate_all(
            "all => all.map(one => getComputedStyle(one).backgroundColor)"
        )
        by_version = defaultdict(set)
        for version, colour in zip(mixed["versions"], colours, strict=True):
            by_version[version].add(colour)
        shades = [colours for version, colours in by_version.items() if version >= 0]
        assert len(shades) >= 2
        assert all(len(each) == 1 for each in shades)
        assert len(set().union(*shades)) == len(shades)
    decoration = "one => getComputedStyle(one).textDecorationLine + getComputedStyle(one).borderBottomStyle"
    masked = page.locator('.tokens .t[data-at="1"]').evaluate(decoration)
    assert masked != page.locator('.tokens .t[data-at="2"]').evaluate(decoration)


def test_a_token_tells_its_log_probabilities(viewer: Viewer, tabs: Tabs, mixed: Record) -> None:
    page = tabs.open(viewer.at(f"odd/sample?id={mixed['id']}"))
    at = len(mixed["response_ids"]) - 1
    page.locator(f'.tokens .t[data-at="{at}"]').hover()
    told = page.locator(".token-detail")
    behaviour = f"{mixed['logprobs'][at]:.4f}".replace("-", "−")
    expect(told).to_contain_text(behaviour)
    expect(told).to_contain_text(f"v{mixed['versions'][at]}")
    expect(told).to_contain_text("log π_prox")
    page.locator('.tokens .t[data-at="1"]').hover()
    expect(told).to_contain_text("loss mask0")


def test_hostile_texts_stay_texts(viewer: Viewer, tabs: Tabs, mixed: Record) -> None:
    page = tabs.open(viewer.at(f"odd/sample?id={mixed['id']}"))
    tokens = page.locator(".tokens .t[data-at]")
    expect(tokens).to_have_count(len(mixed["response_ids"]))
    for at, text in enumerate(HOSTILE[:4]):
        assert tokens.nth(at).text_content().strip() == text
    assert "⟨U+202E⟩right to left" in tokens.nth(4).text_content()
    assert "⟨U+001B⟩[31mred⟨U+0000⟩" in tokens.nth(5).text_content()
    assert markup(page) == []


def test_a_row_opens_its_sample_and_back_leads_to_the_same_table(viewer: Viewer, tabs: Tabs, mixed: Record) -> None:
    page = tabs.open(viewer.at("odd/samples?verdict=" + mixed["verdict"]))
    page.get_by_role("link", name=mixed["id"], exact=True).click()
    expect(page.get_by_role("heading", name=f"Sample {mixed['id']}")).to_be_visible()
    page.go_back()
    expect(page.locator("select[name=verdict]")).to_have_value(mixed["verdict"])
    expect(page.get_by_role("link", name=mixed["id"], exact=True)).to_be_focused()


def test_a_phone_shows_a_long_token_without_scrolling_sideways(viewer: Viewer, tabs: Tabs, mixed: Record) -> None:
    page = tabs.open(viewer.at(f"odd/sample?id={mixed['id']}"), size=PHONE)
    expect(page.locator(".tokens .t[data-at]").first).to_be_visible()
    widest = page.locator(".tokens").evaluate("one => one.scrollWidth - one.clientWidth")
    assert widest <= 0
