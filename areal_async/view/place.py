"""Where what is read of logs is kept while somebody looks: a folder for temporary files.

What always holds: it is gone when it is left, with all that is in it; where there can be none, one line says why.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from areal_async.errors import ConfigError


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Errors: ConfigError: nobody may write there."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="areal-view-")
    except OSError as error:
        raise ConfigError(
            "command line: view: what is read of a log needs a folder for temporary files, and none can be written "
            f"({error.strerror}); set TMPDIR to one"
        ) from None
    with folder as name:
        yield Path(name)
