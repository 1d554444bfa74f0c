"""`areal-async view RUN --export FILE.html` and `--png FILE`: a run for those who can't look at it where it is.

What always holds: only the file that is named is written, the run isn't changed; the file is whole or isn't there, and
what it is, is said on the terminal.
"""

import argparse
import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_async.errors import ConfigError

if TYPE_CHECKING:
    from areal_async.view.runs import RunFolders

PICTURES: Final = (".png", ".svg")
_MANY: Final = re.compile(r"\d{1,4}")
_NAMES: Final = re.compile(r"\d{1,18}\.\d{1,9}(?:,\d{1,18}\.\d{1,9})*")


def export(folders: "RunFolders", arguments: argparse.Namespace) -> None:
    """`--export`."""
    from areal_async.view.export import SAMPLES, export

    out: Path = arguments.export
    _check_folder("--export", out)
    wanted = SAMPLES if arguments.samples is None else samples(arguments.samples)
    with _progress() as read:
        made = asyncio.run(export(folders, out, wanted, read))
    left = f" ({made.left_out} more are too long)" if made.left_out else ""
    print(
        f"{out}: {made.nbytes / 1e6:.1f} MB, {made.steps:,} rows, {made.samples} of {made.of:,} samples{left}; any "
        "browser opens it, without a network"
    )


def png(folders: "RunFolders", arguments: argparse.Namespace) -> None:
    """`--png`."""
    out: Path = arguments.png
    if out.suffix not in PICTURES:
        raise ConfigError(f"command line: view: --png {out}: must end in {' or '.join(PICTURES)}")
    _check_folder("--png", out)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "command line: view: --png: needs matplotlib, which isn't installed; pip install 'areal-async[plots]'"
        ) from None
    from areal_async.view.export import picture

    with _progress() as read:
        nbytes = asyncio.run(picture(folders, out, read))
    print(f"{out}: {nbytes / 1e3:.0f} kB")


def samples(text: str) -> int | list[str]:
    """`20`, or `12.3,40.0`."""
    if _MANY.fullmatch(text):
        return int(text)
    if _NAMES.fullmatch(text):
        return text.split(",")
    raise ConfigError(f"command line: view: --samples {text}: say how many, or name some: 20, or 12.3,40.0")


def _check_folder(option: str, out: Path) -> None:
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"command line: view: {option} {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise ConfigError(f"command line: view: {option} {out}: is a folder; name a file")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """A bar on a terminal; it is told which share of the log was read."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("reading the log", total=1.0)
        yield lambda share: bar.update(task, completed=share)
