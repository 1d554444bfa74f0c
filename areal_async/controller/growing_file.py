"""A file of the run folder that only grows, and that a full disk doesn't spoil: metrics.

What always holds: what was written is whole and in order once there is room; until then it waits in memory, and the run
isn't ended for it (the run log, which waits for room, says that there is none).
"""

import os
from pathlib import Path

from areal_async.log import format as fmt


class GrowingFile:
    """Made if it isn't there, else written on. mode: who may use a new one, as far as the umask lets him. Errors of all
    methods: OSError, but not for want of room."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
        self._pending = bytearray()

    def write(self, data: bytes) -> int:
        """In the file when this returns, if there is room; else with a later call that finds some."""
        self._pending += data
        self.flush()
        return len(data)

    def flush(self) -> None:
        try:
            fmt.write_all(self._fd, self._pending)
        except OSError as error:
            if error.errno not in fmt.FULL:
                raise

    def close(self) -> None:
        """What there was no room for is lost."""
        self.flush()
        os.close(self._fd)
