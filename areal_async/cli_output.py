"""What a command prints, and how it is stopped on its way.

What always holds: whoever reads along may have enough (`| head`): that is no error, and the exit code is that of all of
it; a letter that the terminal's encoding lacks is written as its number and ends nothing; SIGTERM, like Ctrl-C, leaves
no unfinished file.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from areal_async.errors import ArealError

if TYPE_CHECKING:
    from rich.console import Console

_SIGNALLED: Final = 128  # what shells add to a signal's number
_LEAST_COLUMNS: Final = 40  # in fewer, tables would leave out digits


def open_missing() -> None:
    """What the caller has closed (`>&-`, some daemons): else its number is given to the next file that is opened, and
    what is printed goes there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  for as long as the program lives
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def any_letter() -> None:
    """Of the standard output; the standard error is so from the beginning."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def printable(path: Path) -> str:
    """For JSON: names of files may be bytes that are no UTF-8."""
    return str(path).encode("utf-8", "backslashreplace").decode()


@contextmanager
def printing() -> Iterator[None]:
    """Around what prints. When the pipe is closed, the block ends there. Raises ArealError: the disk is full."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _discard()
        raise ArealError(f"the standard output can't be written: {error.strerror}") from None


def _discard() -> None:
    """What Python still has of it, and flushes at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def page(*, soft_wrap: bool = False) -> "Console":
    """The standard output, for use in `printing`."""
    from rich.console import Console

    class Page(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the program with exit code 1

    console = Page(highlight=False, soft_wrap=soft_wrap)
    console.width = max(console.width, _LEAST_COLUMNS)
    return console


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block by an exception, so that what is unfinished is removed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_SIGNALLED + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
