"""Pictures of every page of `areal-async view`, for the documentation: docs/images/view-*.png.

    python tools/screenshots.py RUN [--to FOLDER]

RUN: a run folder; its neighbours are shown on the page of all runs. What always holds: size and names of the pictures;
what they show depends on the run alone.
"""

import argparse
import io
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

ROOT: Final = Path(__file__).resolve().parent.parent
LAPTOP: Final = (1280, 860)
PHONE: Final = (390, 844)
MARGIN: Final = 20  # below a page that is shorter than the picture
SETTLE_MS: Final = 1200  # figures and their letters are there
SECONDS: Final = 12.0  # of the run, that the timeline's picture shows
COMPARED: Final = 4
NO_GUTTER: Final = (
    "document.documentElement.style.scrollbarGutter = 'auto'"  # the place of a scroll bar that isn't there
)
FLAGS: Final = ("--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")


@contextmanager
def viewer(folder: Path) -> Iterator[str]:
    """The address of a viewer of this folder of runs."""
    command = [sys.executable, "-m", "areal_async", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"areal-async view {folder} has ended")
            found = re.search(r"http://\S+", line)
        yield found.group()
        process.send_signal(signal.SIGINT)


def asked(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(address) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def pages(address: str, run: str) -> dict[str, str]:
    """Name of the picture -> address. The sample is a right one with tokens of three versions, if there is one; the
    timeline shows some seconds in the middle; all runs are compared, as many as can be told apart."""
    key = urllib.parse.quote(run)
    of_run = f"{address}api/runs/{key}"
    while not asked(f"{of_run}/overview?since=1000000")["reading"]["done"]:
        time.sleep(0.1)
    rows = asked(f"{of_run}/samples?versions_min=3&verdict=right&sort=advantage&limit=1")["rows"]
    sample = f"{key}/sample?id={rows[0]['id']}" if rows else f"{key}/samples"
    middle = asked(f"{of_run}/timeline?from=0&to=1&width=10")["seconds"] * 2 / 3
    others = [row["key"] for row in asked(f"{address}api/runs")["runs"] if row["key"] != run]
    compared = ",".join([run, *others][:COMPARED])
    timeline = f"{key}/timeline?from={middle - SECONDS / 2}&to={middle + SECONDS / 2}"
    places = {
        "overview": f"{key}/overview", "timeline": timeline,
        "samples": f"{key}/samples", "sample": sample, "servers": f"{key}/peers", "configuration": f"{key}/config",
        "runs": f"?chosen={urllib.parse.quote(compared)}",
    }  # fmt: skip
    return {name: f"{address}#/{place}" for name, place in places.items()}


def shoot(browser: Browser, address: str, to: Path, *, size: tuple[int, int] = LAPTOP, scheme: str = "light") -> None:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, locale="en-GB",
                            timezone_id="UTC", reduced_motion="reduce")  # type: ignore[arg-type]  # fmt: skip
    page.add_init_script("document.addEventListener('DOMContentLoaded', () => {" + NO_GUTTER + "})")
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(SETTLE_MS)
    if page.locator(".tokens .t.first").count():
        page.locator(".tokens .t.first").last.click()  # what a token tells
    content = page.evaluate("document.querySelector('main').lastElementChild.getBoundingClientRect().bottom")
    clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], math.ceil(content) + MARGIN)}
    picture = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")  # type: ignore[arg-type]
    page.close()
    picture.save(to, optimize=True)
    print(f"{to}: {picture.width} x {picture.height}, {to.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images", metavar="FOLDER")
    arguments = parser.parse_args()
    run, to = arguments.run.resolve(), arguments.to
    to.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch, viewer(run.parent) as address:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", chromium_sandbox=False, args=list(FLAGS)
        )
        found = pages(address, run.name)
        for name, place in found.items():
            shoot(browser, place, to / f"view-{name}.png")
        shoot(browser, found["overview"], to / "view-overview-dark.png", scheme="dark")
        shoot(browser, found["overview"], to / "view-phone.png", size=PHONE)
        report = Path(scratch) / "report.html"
        command = [sys.executable, "-m", "areal_async", "view", str(run), "--export", str(report)]
        subprocess.run(command, check=True)
        shoot(browser, f"{report.as_uri()}#/{urllib.parse.quote(run.name)}/report", to / "view-export.png")
        browser.close()


if __name__ == "__main__":
    main()
