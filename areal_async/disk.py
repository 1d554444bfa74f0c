"""Having what was written on the disk itself, for all processes that write checkpoints or weights.

What always holds: it returns when the disk has it; an OSError says that nobody knows.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk. Blocks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
