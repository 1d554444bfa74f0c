"""The file that somebody has named for what a command makes.

What always holds: under the name there is the whole file, or what was there before. What isn't a file (a device such as
/dev/null, a pipe, /dev/stdout) is written to and stays what it is; of a link the file that it leads to is written.
"""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from areal_async.errors import ArealError, ConfigError

_LONGEST: Final = 40  # characters of the name that are in the unfinished file's: names have 255 bytes


def check(option: str, path: Path) -> None:
    """What can be known before there is anything to write. option: for the error. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(f"command line: {option} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"command line: {option} {path}: there is no folder {path.parent}")


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Open for writing; what was written is under the name when the block has ended without an error. Until then it is
    `.NAME.….partial`. Raises ArealError: it can't be written."""
    target = Path(os.path.realpath(path))
    try:
        if not is_replaceable(path):
            with path.open("wb") as file:
                yield file
            return
        partial = target.with_name(f".{target.name[:_LONGEST]}.{secrets.token_hex(4)}.partial")
        try:
            with partial.open("xb") as file:
                yield file
            os.replace(partial, target)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ArealError(f"{path}: can't be written: {error.strerror}") from None


def is_replaceable(path: Path) -> bool:
    """Whether it is a file, or one may be made there."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True
