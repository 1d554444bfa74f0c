"""Pages of samples and of servers, given answers that no short run has: what must hold whatever the server says."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from .looks import markup
from .viewing import Viewer
from .watching import PHONE, Tabs

pytestmark = pytest.mark.slow

Answer = dict[str, Any]

TEXTS = [
    "<script>window.hostile='made up'</script>", "<img src=x onerror=\"window.hostile='made up'\">", "a\u202eb\u2066c",
    "zero\0byte", "half\ud800", "\U000e0041tag", "\u200b", "", "\r\n", "\n", "\n\n", " \t ", "é́́", "مرحبا", "&lt;b&gt;",
    "x" * 400,
]  # fmt: skip
SEEN = [
    TEXTS[0], TEXTS[1], "a⟨U+202E⟩b⟨U+2066⟩c", "zero⟨U+0000⟩byte", "half⟨U+D800⟩", "⟨U+E0041⟩tag", "⟨U+200B⟩", "",
    "⟨U+000D⟩\n", "\n", "\n\n", " \t ", "é́́", "مرحبا", "&lt;b&gt;", TEXTS[15],
]  # fmt: skip
MANY = 32_000
MEGABYTE = 1_000_000


def asked(viewer: Viewer, path: str) -> Answer:
    found: Answer = viewer.asked(f"odd/{path}")
    return found


def sample(viewer: Viewer, texts: list[str], versions: list[int]) -> Answer:
    """A real sample, but of these tokens; version -1: not the model's."""
    count = len(texts)
    row = asked(viewer, "samples?limit=1&outcome=trained")["rows"][0]
    full = asked(viewer, f"samples/{row['id']}")
    full["record"] |= {
        "response_ids": list(range(count)), "versions": versions, "loss_mask": [int(v >= 0) for v in versions],
        "logprobs": [-0.5 if v >= 0 else 0.0 for v in versions], "response_tokens": count, "step": 9,
        "advantage": -1.25,
    }  # fmt: skip
    full["tokens"] = texts
    full["prox"] = [-0.25 if v >= 0 else None for v in versions]
    return full


def answers(page: Page, path: str, answer: Callable[[], Answer]) -> None:
    """From now on the page gets this, however often it asks for `path`."""

    def told(route: Route) -> None:
        route.fulfill(content_type="application/json", body=json.dumps(answer()))

    page.route(f"**/api/runs/odd/{path}", told)


def begun(tabs: Tabs, viewer: Viewer, **how: Any) -> Page:
    """A page that has asked all that it asks by itself, before the answers are made up."""
    page = tabs.open(viewer.at("odd/config"), **how)
    expect(page.locator("pre.config")).to_be_visible()
    return page


def opened(tabs: Tabs, viewer: Viewer, place: str, path: str, answer: Callable[[], Answer], **how: Any) -> Page:
    page = begun(tabs, viewer, **how)
    answers(page, path, answer)
    page.goto(viewer.at(f"odd/{place}"))
    return page


def lives(page: Page, viewer: Viewer) -> None:
    """The page takes the run for one that goes on."""
    overview = asked(viewer, "overview")
    overview["run"]["state"] = "running"
    answers(page, "overview*", lambda: overview | {"rows": [], "next": 0})


def detail(page: Page) -> dict[str, str]:
    names = page.locator(".token-detail dt").all_inner_texts()
    return dict(zip(names, page.locator(".token-detail dd").all_inner_texts(), strict=True))


@pytest.mark.parametrize("spaces", [False, True])
def test_each_token_is_its_text_and_nothing_else(viewer: Viewer, tabs: Tabs, spaces: bool) -> None:
    full = sample(viewer, TEXTS, [2] * len(TEXTS))
    full["columns"] = {"<b>name</b>": TEXTS[0], "line": "y" * MEGABYTE}
    full["checks"] = [
        {"verdict": "crash", "reward": None, "why": "".join(TEXTS), "extracted": TEXTS[1], "seconds": 0.5}
    ]
    full["missing"] = [TEXTS[0]]
    page = opened(tabs, viewer, "sample?id=0.0", "samples/*", lambda: full)
    expect(page.locator(".tokens .t[data-at]")).to_have_count(len(TEXTS))
    if spaces:
        page.get_by_label("show spaces").check()
    assert page.locator(".tokens .t[data-at]").all_text_contents() == SEEN
    assert markup(page) == []
    assert page.evaluate("window.hostile") is None
    page.get_by_text("line 1,000,000 characters").click()
    assert len(page.locator(".beside details").last.inner_text()) < MEGABYTE / 10
    page.get_by_role("button", name="show all 1,000,000 characters").click()
    assert len(page.locator(".beside details pre").last.inner_text()) == MEGABYTE


def test_the_keys_walk_through_the_tokens(viewer: Viewer, tabs: Tabs) -> None:
    versions = [3, 3, -1, -1, 3, 4, 4, 6]
    page = opened(
        tabs, viewer, "sample?id=0.0", "samples/*", lambda: sample(viewer, [f" t{n}" for n in range(8)], versions)
    )
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert detail(page)["token"] == "1 of 8"
    page.keyboard.press("Shift+ArrowRight")
    told = detail(page)
    assert (told["token"], told["text"], told["version"], told["lag"]) == ("6 of 8", '" t5"', "v4", "5")
    assert told["log π_behav"] == "−0.5000 (60.7 %)"
    assert (told["π_prox / π_behav"], told["advantage"], told["loss mask"]) == ("1.284", "−1.25", "1")
    page.keyboard.press("Shift+ArrowRight")
    assert detail(page)["token"] == "8 of 8"
    page.keyboard.press("ArrowRight")
    assert detail(page)["token"] == "8 of 8"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    told = detail(page)
    assert (told["token"], told["version"], told["advantage"]) == ("3 of 8", "not the model's", "–")
    assert page.locator(".from").all_text_contents() == ["v3", "v4", "v6"]
    page.keyboard.press("Escape")
    expect(page.locator(".token-detail dt")).to_have_count(0)


def test_what_shades_the_tokens_is_chosen_and_lives_in_the_address(viewer: Viewer, tabs: Tabs) -> None:
    full = sample(viewer, ["a", "b", "c"], [3, 4, 4])
    full["record"]["logprobs"], full["prox"] = [-0.001, -3.0, -3.0], [-0.001, -2.0, None]
    page = opened(tabs, viewer, "sample?id=0.0", "samples/*", lambda: full)
    ground = "all => all.map(one => getComputedStyle(one).backgroundColor)"
    tokens = page.locator(".tokens .t[data-at]")
    expect(tokens).to_have_count(3)
    by_version = tokens.evaluate_all(ground)
    assert by_version[0] != by_version[1] == by_version[2]
    page.get_by_role("button", name="log π_behav").click()
    by_behaviour = tokens.evaluate_all(ground)
    assert by_behaviour[0] != by_behaviour[1] == by_behaviour[2]
    page.get_by_role("button", name="π_prox / π_behav").click()
    expect(page).to_have_url(re.compile("shade=ratio"))
    first, second, third = tokens.evaluate_all(ground)
    assert second not in (first, third)
    expect(page.locator(".legend")).to_contain_text("not kept: 1")
    page.reload()
    expect(page.get_by_role("button", name="π_prox / π_behav")).to_have_attribute("aria-pressed", "true")


def test_an_answer_of_many_tokens_has_all_of_them(viewer: Viewer, tabs: Tabs) -> None:
    texts = [".\n" if n % 20 == 19 else f" w{n}" for n in range(MANY)]
    page = opened(
        tabs, viewer, "sample?id=0.0", "samples/*", lambda: sample(viewer, texts, [n // 4000 for n in range(MANY)])
    )
    expect(page.locator(".tokens .t[data-at]")).to_have_count(MANY)
    assert page.locator(".chunk").count() > 100
    page.locator(".tokens").focus()
    page.keyboard.press("End")
    assert detail(page)["token"] == "32,000 of 32,000"
    assert page.locator(".tokens .current").evaluate("one => one.getBoundingClientRect().bottom < innerHeight")


def test_new_samples_announce_themselves_and_move_no_row(viewer: Viewer, tabs: Tabs) -> None:
    first = asked(viewer, "samples?limit=50")
    more = 0

    def page_of_samples() -> Answer:
        rows = [first["rows"][0] | {"id": f"9{n}.0"} for n in range(more)] + first["rows"]
        return first | {"rows": rows[:50], "total": first["total"] + more}

    page = begun(tabs, viewer)
    lives(page, viewer)
    answers(page, "samples?*", page_of_samples)
    page.goto(viewer.at("odd/samples"))
    rows = page.locator("table.samples tbody td.id")
    expect(rows).to_have_count(len(first["rows"]))
    before = rows.all_inner_texts()
    more = 37
    button = page.get_by_role("button", name="37 new")
    expect(button).to_be_visible()
    assert rows.all_inner_texts() == before
    button.click()
    expect(rows.first).to_have_text("90.0")
    expect(button).to_be_hidden()


def test_cards_of_servers_change_in_place_and_stderr_is_followed(viewer: Viewer, tabs: Tabs) -> None:
    lines = 60
    row = {
        "label": "server 0", "thing": "server 0", "kind": "server", "state": "serving", "since": 1.0, "version": 7,
        "load": 5, "running": 3, "waiting": 2, "cache": 0.25, "restarts": 1, "why": "<b>killed</b>\nlast words",
        "pid": 12, "cpu_s": 3.0, "resident": 1_500_000_000,
    }  # fmt: skip

    def peers() -> Answer:
        told = row | {"stderr": [f"line {n} {TEXTS[0]}" for n in range(lines - 50, lines)], "running": lines}
        return {"at": 100.0 + lines, "peers": [told], "verdicts": {"right": 3, "wrong": 1}, "problem": TEXTS[1]}

    page = begun(tabs, viewer, size=PHONE)
    lives(page, viewer)
    answers(page, "peers", peers)
    page.goto(viewer.at("odd/peers"))
    card = page.get_by_role("article", name="server 0")
    expect(card).to_contain_text("serving for 2 min 39 s")
    expect(card.get_by_role("img", name="25.0 %")).to_be_visible()
    expect(page.get_by_role("link", name="right 3 75.0 %")).to_be_visible()
    card.get_by_text("stderr").click()
    card.evaluate("one => one.mine = true")
    lines = 90
    output = card.locator("pre.stderr")
    expect(output).to_contain_text("line 89 ")
    assert output.evaluate("one => one.scrollHeight - one.scrollTop - one.clientHeight") < 2
    output.evaluate("one => one.scrollTop = 0")
    lines = 120
    expect(output).to_contain_text("line 119 ")
    assert output.evaluate("one => one.scrollTop") == 0
    assert card.evaluate("one => one.mine")
    assert markup(page) == []
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
