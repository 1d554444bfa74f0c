"""Writes what each check said into `checks.jsonl` of the run folder, for people (`areal_async.runfiles` has the form).

What always holds: a check costs its line's encoding; lines go to the file together, about once a second and at the end,
so `kill -9` loses those of the last second, and nothing else needs them. A full disk makes them wait; what else goes
wrong with the file is told once, and the run goes on without it.
"""

import asyncio
import logging
import os
from pathlib import Path
from typing import Final

import msgspec

from areal_async.controller.growing_file import GrowingFile
from areal_async.runfiles import CHECKS, READ_BYTES, Check

logger = logging.getLogger("areal_async")

WRITE_S: Final = 1.0  # after the first line that waits
MODE: Final = 0o600  # texts of answers and of the data are in it, as in the log


class CheckFile:
    """Of the run folder `root`; written on where it is there, behind its last whole line. Raises OSError."""

    def __init__(self, root: Path) -> None:
        self._path = root / CHECKS
        _cut_torn_end(self._path)
        self._file = GrowingFile(self._path, MODE)
        self._lines = bytearray()
        self._encoder = msgspec.json.Encoder()
        self._timer: asyncio.TimerHandle | None = None
        self._broken = False

    def add(self, check: Check) -> None:
        if self._broken:
            return
        self._encoder.encode_into(check, self._lines, -1)
        self._lines += b"\n"
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_S, self._write)

    def close(self) -> None:
        """Write what waits. What there is no room for is lost."""
        if self._timer is not None:
            self._timer.cancel()
        self._write()
        try:
            self._file.close()
        except OSError as error:
            self._tell(error)

    def _write(self) -> None:
        self._timer = None
        lines, self._lines = self._lines, bytearray()
        try:
            if not self._broken:
                self._file.write(bytes(lines))
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            logger.warning("%s: what checks say isn't kept any more: %s; the run goes on", self._path, error)


def _cut_torn_end(path: Path) -> None:
    """A line that an earlier controller was killed in."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - READ_BYTES))
            tail = file.read()
    except FileNotFoundError:
        return
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        os.truncate(path, size - torn)
