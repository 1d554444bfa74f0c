"""The tests' own watchfulness: what a page does wrong is seen, so that its absence says something."""

import pytest

from .looks import eventually
from .watching import Tabs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "trouble"),
    [
        ("console.error('a word')", "console error: a word"),
        ("console.warn('a word')", "console warning: a word"),
        ("setTimeout(() => { throw new Error('thrown') })", "uncaught: thrown"),
        ("Promise.reject(new Error('rejected'))", "uncaught: rejected"),
        ("new Image().src = 'http://example.com/x.png'", "it asked another host: http://example.com/x.png"),
        ("fetch('https://127.0.0.2/').catch(() => 0)", "it asked another host: https://127.0.0.2/"),
        ("fetch('http://127.0.0.1:9/').catch(() => 0)", "not loaded: http://127.0.0.1:9/"),
    ],
)
def test_a_page_that_misbehaves_is_found_out(tabs: Tabs, script: str, trouble: str) -> None:
    page = tabs.open(f"data:text/html,<title>t</title><script>{script}</script>")
    eventually(page, tabs.troubles, lambda found: any(trouble in one for one in found))
    tabs.expect("")


def test_a_page_that_behaves_is_no_trouble(tabs: Tabs) -> None:
    page = tabs.open("data:text/html,<title>t</title><script>console.log('a word')</script>")
    assert page.title() == "t"
    assert tabs.troubles() == []
