"""What can be said of any page by looking at it: names of controls, contrast, width, markup that came from a run.

A page draws when it gets to it. So what is read of one is read again until it is as wanted (`until`, `eventually`), and
a look at all of it begins when all of it is drawn (`filled`, `drawn_anew`), never after some time.
"""

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from playwright.sync_api import Page, expect

from .watching import WAIT_MS

CONTRAST: Final = 4.5  # of text, as WCAG's level AA asks for any size of letters

_NAMELESS: Final = """() => {
  const shown = (one) => one.checkVisibility({ visibilityProperty: true });
  const labelled = (one) => (one.getAttribute("aria-labelledby") ?? "").split(" ").filter(Boolean)
    .map((id) => document.getElementById(id)?.textContent ?? "").join(" ");
  const name = (one) => one.getAttribute("aria-label") || labelled(one)
    || [...(one.labels ?? [])].map((label) => label.textContent).join(" ")
    || (/^(INPUT|SELECT|TEXTAREA)$/.test(one.tagName) ? "" : one.textContent) || one.getAttribute("title") || "";
  const controls = "a[href], button, input, select, textarea, summary, [role=button], [role=tab], [tabindex='0']";
  return [...document.querySelectorAll(controls)].filter((one) => shown(one) && name(one).trim() === "")
    .map((one) => one.outerHTML.slice(0, 160));
}"""

# Each piece of text that is shown: its colour on the colours behind it. Colours are asked of a canvas, which knows all
# ways of writing them.
_PALE: Final = """(least) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (colour) => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(colour, [r, g, b, a / 255]);
    }
    return known.get(colour);
  };
  const over = (top, below, alpha) => top.slice(0, 3).map((part, at) => part * alpha + below[at] * (1 - alpha));
  const path = (one) => one === null ? [] : [...path(one.parentElement), one];
  const luminance = (colour) => colour.map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const seen = new Set();
  const pale = new Map();  // one of a kind is enough
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || seen.has(one)) continue;
    if (/^(SCRIPT|STYLE|NOSCRIPT|OPTION)$/i.test(one.tagName)) continue;
    seen.add(one);
    if (!one.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (one.matches(":disabled") || one.closest("[aria-disabled=true]")) continue;
    let ground = [255, 255, 255];
    let opacity = 1;
    for (const each of path(one)) {
      const style = getComputedStyle(each);
      const [colour, alpha] = [rgba(style.backgroundColor), rgba(style.backgroundColor)[3]];
      ground = over(colour, ground, alpha);
      opacity *= Number(style.opacity);
    }
    const style = getComputedStyle(one);
    const inDrawing = one.namespaceURI.endsWith("svg");
    const colour = rgba(inDrawing ? style.fill : style.color);
    const faint = opacity * (inDrawing ? Number(style.fillOpacity) : 1);
    if (colour[3] * faint === 0) continue;
    const text = over(colour, ground, colour[3] * faint);
    const [light, dark] = [luminance(text), luminance(ground)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < least) {
      const called = one.tagName.toLowerCase() + "." + (one.getAttribute("class") ?? "").replaceAll(" ", ".");
      const colours = `rgb(${text.map(Math.round)}) on rgb(${ground.map(Math.round)})`;
      const words = walker.currentNode.data.trim().slice(0, 40);
      pale.set(called + colours, `${ratio.toFixed(2)} ${called} "${words}" ${colours}`);
    }
  }
  return { looked: seen.size, pale: [...pale.values()] };
}"""

_MARKUP: Final = """() => [
  ...(window.hostile === undefined ? [] : [`a script of the run's texts has run: ${window.hostile}`]),
  ...[...document.querySelectorAll("img[src=x], a[href^=javascript], main h1, body > h1, [onerror]")]
    .map((one) => `an element of the run's texts: ${one.outerHTML.slice(0, 100)}`),
]"""


# Whether the figures that are there have the colours of the present theme, and the width of the present window.
_DRAWN_ANEW: Final = """() => {
  const probe = document.createElement("i");
  probe.style.color = "var(--text)";
  document.body.append(probe);
  const ink = getComputedStyle(probe).color;
  probe.remove();
  const room = (plot) =>  // a timeline has three screens
    plot.matches(".tl-plot") ? 3 * Math.max(100, plot.parentElement.clientWidth) : plot.clientWidth;
  return [...document.querySelectorAll(".js-plotly-plot")].filter((plot) => plot.checkVisibility()).every((plot) => {
    const svg = plot.querySelector(".main-svg");
    const marks = [...plot.querySelectorAll(".xtick text, .ytick text")];
    return svg !== null && Math.abs(Number(svg.getAttribute("width")) - room(plot)) < 2
      && marks.every((one) => getComputedStyle(one).fill === ink);
  });
}"""

# What a page has when it has what it shows
FILLED: Final = {
    "overview": "#figure-reward .main-svg", "timeline": ".tl-plot .main-svg", "samples": "table.samples tbody tr",
    "sample": ".tokens .t", "peers": "article.peer", "config": "pre.config", "report": ".card",
    "runs": "table.runs tbody tr",
}  # fmt: skip


class Pale(NamedTuple):
    """looked: how many pieces of text were looked at. pale: those below `CONTRAST`."""

    looked: int
    pale: list[str]


def until(page: Page, condition: str) -> None:
    """Wait for a JavaScript expression. (playwright's own way needs `eval`, which the page's policy forbids.)"""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"it has not come true: {condition}"
        page.wait_for_timeout(50)


def eventually(page: Page, read: Callable[[], Any], wanted: Callable[[Any], object]) -> Any:
    """What `read` gives once it is as `wanted`."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not wanted(found := read()):
        assert time.monotonic() < deadline, f"it has not come true; the last that was read: {found}"
        page.wait_for_timeout(50)
    return found


def filled(page: Page, name: str) -> None:
    """Return when this page (a key of `FILLED`) shows what it has."""
    if name == "overview":
        page.locator("#figure-reward").scroll_into_view_if_needed()  # it is drawn when it comes into view
    expect(page.locator(f"main .page-{name} {FILLED[name]}").first).to_be_visible()


def drawn_anew(page: Page) -> None:
    """Return when the figures fit the theme and the window, which may just have changed."""
    until(page, f"({_DRAWN_ANEW})()")


def nameless(page: Page) -> list[str]:
    """Controls without a name for who can't see them."""
    found: list[str] = page.evaluate(_NAMELESS)
    return found


def pale(page: Page) -> Pale:
    return Pale(**page.evaluate(_PALE, CONTRAST))


def sideways(page: Page) -> int:
    """By how many pixels the page can be scrolled to the right."""
    wider: int = page.evaluate(
        "() => { scrollTo(1e6, scrollY); const wider = scrollX; scrollTo(0, scrollY); return Math.round(wider); }"
    )
    return wider


def markup(page: Page) -> list[str]:
    """What of a run's texts has become more than text."""
    found: list[str] = page.evaluate(_MARKUP)
    return found


def points(page: Page) -> dict[str, int]:
    """Of each figure that is drawn the number of its points that have a value, by the figure's key."""
    found: dict[str, int] = page.evaluate(
        """() => {
          const count = (plot) => plot.data.flatMap((trace) => [...trace.y]).filter((value) => value !== null).length;
          const key = (plot) => plot.closest("figure").id.replace("figure-", "");
          const plots = [...document.querySelectorAll("figure .js-plotly-plot")].filter((plot) => plot.data);
          return Object.fromEntries(plots.map((plot) => [key(plot), count(plot)]));
        }"""
    )
    return found


def scripts(page: Page) -> list[str]:
    """Scripts that stand in the page itself. The server's page has none; a report has all of its own."""
    found: list[str] = page.evaluate(
        """() => [...document.scripts].filter((one) => !one.src && one.type !== "application/json")
          .map((one) => one.textContent.slice(0, 100))"""
    )
    return found
