"""A run on a disk of a few MB that fills in the middle: `run_on_small_disk.py CONFIG DISK BOOKS SERVER_BOOK`.

To be started in a mount namespace of its own. Prints, as JSON, what was seen while the disk was full, and the end.
"""

import asyncio
import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from areal_async.config_file import load_config
from areal_async.controller import Controller
from areal_async.testing.recipes import scripted

DISK_BYTES = 4 << 20
FULL_AT = (1, 4)  # steps
STILL_S = 2.5  # two tries of the run
QUIET_S = 1.5  # nothing has been carried out for so long: what was before has come to its end


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def count(self, part: str) -> int:
        return sum(part in line for line in self.lines)


def fill(disk: Path) -> Path:
    """Until not a byte more goes in."""
    ballast = disk / "ballast"
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC  # noqa: PT017
    finally:
        os.close(fd)
    return ballast


def sizes(*paths: Path) -> list[int]:
    return [path.stat().st_size for path in paths]


async def settled(*paths: Path) -> list[int]:
    """Their sizes, when they have stayed the same for a while."""
    before, now = list[int](), sizes(*paths)
    while now != before:
        before = now
        await asyncio.sleep(QUIET_S)
        now = sizes(*paths)
    return now


async def live(config_path: Path, disk: Path, books: Path, server_book: Path) -> dict[str, object]:
    said = Kept()
    logging.getLogger("areal_async").addHandler(said)
    seen = []
    recipes = scripted(books=books, server_book=server_book, step_s=0.05)
    async with asyncio.timeout(240), Controller(load_config(config_path), run_dir=disk / "run", recipes=recipes) as run:
        async for row in run.steps():
            if row.step in FULL_AT:
                ballast = fill(disk)
                while said.count("no room to write the log") == len(seen):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                before = await settled(books, server_book)
                await asyncio.sleep(STILL_S)
                after = sizes(books, server_book)
                seen.append({"before": before, "after": after})
                ballast.unlink()
        result = run.result()
    return {"steps": result.steps, "reason": result.reason, "seen": seen, "said": said.lines}


def main() -> None:
    config, disk, books, server_book = map(Path, sys.argv[1:])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk], check=True)
    print(json.dumps(asyncio.run(live(config, disk, books, server_book))))


if __name__ == "__main__":
    main()
