"""A browser for tests, and what holds for every page in it: no error, no warning, no request to anybody else.

What always holds: `tabs` fails the test where a page wrote an error or a warning to its console, raised, could not load
something, or asked for anything that isn't on this machine; a test that wants such a thing names it (`Tabs.expect`).
What it drives is the system's Chromium (tools/bring_chromium.sh): playwright's own browsers are never fetched.

The driver is a process of its own, so whoever uses it has a `browser` fixture that lives longer than one test.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from typing import Final, NoReturn
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Error,
    Page,
    Request,
    Response,
    expect,
    sync_playwright,
)

FLAGS: Final = (
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",  # nobody else is to be found
)
HERE: Final = {"127.0.0.1", "localhost"}
# Nothing is measured by these two: they only end the wait for what never comes. Beside other work the viewer, which
# has a low priority, may be fifty times slower than alone.
WAIT_MS: Final = 60_000  # for what a page shows
START_MS: Final = 180_000  # for the browser
SOON_MS: Final = 3_000  # for what may have to be done again
LAPTOP: Final = (1280, 800)
PHONE: Final = (390, 844)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Without it the tests are left out; never in CI, where it must be there."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        _without("there is no chromium: tools/bring_chromium.sh brings it")
    expect.set_options(timeout=WAIT_MS)  # its own is 5 s, whatever a page's default is
    with sync_playwright() as playwright:
        # no sandbox: it needs namespaces that containers don't have, and the only pages are our own
        try:
            browser = playwright.chromium.launch(
                executable_path=path, chromium_sandbox=False, args=list(FLAGS), timeout=START_MS
            )
        except Error as error:
            _without(f"{path} doesn't start: {error.message.splitlines()[0]}; tools/bring_chromium.sh tells more")
        yield browser
        browser.close()


def _without(why: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


@contextlib.contextmanager
def watched(browser: Browser) -> Iterator["Tabs"]:
    """Tabs of one test, which fails where something went wrong in them."""
    tabs = Tabs(browser)
    yield tabs
    tabs.close()
    assert not tabs.troubles(), "\n".join(tabs.troubles())


def go(page: Page, letter: str, place: str) -> None:
    """Press g and the letter, which leads to an address like `place`.

    The page takes two keys for one command only if they come soon after each other, and on a busy machine they may not.
    """
    for _ in range(20):
        page.keyboard.press("g")
        page.keyboard.press(letter)
        with contextlib.suppress(AssertionError):
            return expect(page).to_have_url(re.compile(place), timeout=SOON_MS)
    raise AssertionError(f"g {letter} leads to {page.url}")


class Tabs:
    """Opens pages, each in a profile of its own, and remembers what went wrong in them."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._expected: list[re.Pattern[str]] = []
        self._troubles: list[str] = []
        self._contexts: list[BrowserContext] = []
        self.requested: list[str] = []

    def open(
        self,
        address: str,
        *,
        size: tuple[int, int] = LAPTOP,
        scheme: str = "light",
        offline: bool = False,
        motion: str = "reduce",
    ) -> Page:
        """scheme: "light" or "dark", as the system says it."""
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion=motion, locale="en-GB",
            timezone_id="UTC", offline=offline,
        )  # type: ignore[arg-type]  # fmt: skip
        context.set_default_timeout(WAIT_MS)
        self._contexts.append(context)
        context.on("console", self._console)
        context.on("weberror", lambda error: self._trouble(f"uncaught: {error.error}"))
        context.on("request", self._request)
        context.on("requestfailed", self._failed)
        context.on("response", self._response)
        page = context.new_page()
        page.goto(address)
        return page

    def expect(self, pattern: str) -> None:
        """From now on a trouble that has this in it is none."""
        self._expected.append(re.compile(pattern))

    def troubles(self) -> list[str]:
        return [one for one in self._troubles if not any(pattern.search(one) for pattern in self._expected)]

    def close(self) -> None:
        while self._contexts:
            context = self._contexts.pop()
            for page in context.pages:
                page.unroute_all(behavior="ignoreErrors")  # a live page may just be asking what a test answers
            context.close()

    def _trouble(self, what: str) -> None:
        self._troubles.append(what)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._trouble(f"console {message.type}: {message.text} ({message.location.get('url')})")

    def _request(self, request: Request) -> None:
        self.requested.append(request.url)
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in HERE:
            self._trouble(f"it asked another host: {request.url}")

    def _failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # what is still on its way when a page is left
            self._trouble(f"not loaded: {request.url}: {request.failure}")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self._trouble(f"answered {response.status}: {response.url}")
