"""Letters of all the world: tokens stay in order whichever way they are written, and turn nothing around them."""

import itertools

import pytest
from playwright.sync_api import Page, expect

from .test_made_up import opened, sample
from .viewing import Viewer
from .watching import Tabs

pytestmark = pytest.mark.slow

ARABIC, HEBREW = ["مر", "حبا", " ", "بالعالم"], ["של", "ום", "! ", "12"]
LINE = ["x", " = ", *ARABIC, ", ", *HEBREW, " (", "日本", "語", "한국어", ") ", "😀", "👩‍👩‍👧", " + ", "7"]


@pytest.fixture
def page(viewer: Viewer, tabs: Tabs) -> Page:
    full = sample(viewer, LINE, [3] * len(LINE))
    full["columns"] = {"id-" + "0123456789" * 30: "q" * 300, "عمود": "مرحبا بالعالم, 5"}
    page = opened(tabs, viewer, "sample?id=0.0", "samples/*", lambda: full, size=(1280, 800))
    expect(page.locator(".tokens .t[data-at]")).to_have_count(len(LINE))
    return page


def test_tokens_stand_in_order_from_left_to_right(page: Page) -> None:
    boxes = page.locator(".tokens .t[data-at]").evaluate_all("all => all.map(one => one.getBoundingClientRect())")
    assert len({round(box["top"]) for box in boxes}) == 1, "the line is too long for this test"
    for (text, box), (_, following) in itertools.pairwise(zip(LINE, boxes, strict=True)):
        assert box["right"] <= following["left"] + 0.1, text
    assert page.locator(".tokens .t[data-at]").all_text_contents() == [
        "👩⟨U+200D⟩👩⟨U+200D⟩👧" if text == "👩‍👩‍👧" else text for text in LINE
    ]


def test_the_fixed_letters_have_others_behind_them_for_what_they_lack(page: Page) -> None:
    family = page.locator(".tokens").evaluate("one => getComputedStyle(one).fontFamily")
    first, _, behind = family.partition("monospace,")
    for others in ("CJK", "Arabic", "Hebrew", "Emoji"):
        assert others in behind, family
        assert others not in first, family  # or digits would be those of the emoji


def test_long_names_of_the_data_stay_in_the_window(page: Page) -> None:
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wider) <= 0
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(wider) <= 0
