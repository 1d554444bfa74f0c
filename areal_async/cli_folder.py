"""Where a command line's RUN has its log.

What always holds: a run folder, a copy of one, or the log folder in it are all the same.
"""

from pathlib import Path
from typing import Final

from areal_async.errors import ConfigError

LOG_NAME: Final = "decisions.log"


def log_folder(command: str, path: Path) -> Path:
    """command: for the error. Errors: ConfigError where there is no log."""
    if path.name in ("", ".."):  # what lies beside the log is looked for by the folder's name
        path = path.resolve()
    for folder in (path / "log", path):
        if (folder / LOG_NAME).is_file():
            return folder
    kind = "no such folder" if not path.exists() else f"holds no log/{LOG_NAME}"
    raise ConfigError(f"command line: {command}: {path}: {kind}; name a run folder (runs/NAME-TIME)")
