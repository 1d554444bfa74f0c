"""Pictures of every page of `areal-async view`, for the documentation: docs/images/view-*.png.

    python tools/screenshots.py RUN [--to FOLDER]

RUN: a run folder; its neighbours are shown on the page of all runs. What always holds: size and names of the pictures;
each is a small file (few colours, no dithering). What they show depends on the run alone.
"""

import argparse
import io
import json
import re
import signal
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

ROOT: Final = Path(__file__).resolve().parent.parent
LAPTOP: Final = (1280, 860)
PHONE: Final = (390, 844)
COLOURS: Final = 96  # of a picture; antialiased letters and seven lines need no more
SETTLE_MS: Final = 1200  # figures and their letters are there
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


def pages(address: str, run: str) -> dict[str, str]:
    """Name of the picture -> address. The sample is one whose tokens are of several versions, if there is one."""
    key = urllib.parse.quote(run)
    asked = f"{address}api/runs/{key}/samples?versions_min=2&sort=length&limit=1"
    with urllib.request.urlopen(asked) as answer:
        rows = json.load(answer)["rows"]
    sample = f"{key}/sample?id={rows[0]['id']}" if rows else f"{key}/samples"
    places = {
        "overview": f"{key}/overview", "timeline": f"{key}/timeline", "samples": f"{key}/samples", "sample": sample,
        "servers": f"{key}/peers", "configuration": f"{key}/config", "runs": "",
    }  # fmt: skip
    return {name: f"{address}#/{place}" for name, place in places.items()}


def shoot(browser: Browser, address: str, to: Path, *, size: tuple[int, int] = LAPTOP, scheme: str = "light") -> None:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, locale="en-GB",
                            timezone_id="UTC", reduced_motion="reduce")  # type: ignore[arg-type]  # fmt: skip
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(SETTLE_MS)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(to, optimize=True)
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
        shoot(browser, report.as_uri(), to / "view-export.png")
        browser.close()


if __name__ == "__main__":
    main()
