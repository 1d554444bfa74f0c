"""Where a run keeps its things: the run folder, which stays, and the runtime folder with its sockets, which doesn't.

What always holds: two runs never share a folder, a socket or a name in shared memory, whenever they were started; the
runtime folder can be entered only by the user, and is gone when the run is.
"""

import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from areal_async.config import Config
from areal_async.config_file import dump_config
from areal_async.errors import ConfigError


@dataclass(frozen=True)
class RunFolder:
    """root: `runs/NAME-TIME/`. runtime: folder of the sockets. token: names this run in shared memory."""

    root: Path
    runtime: Path
    token: str

    @classmethod
    def create(cls, config: Config, run_dir: Path | None) -> "RunFolder":
        """Make both folders. Errors: ConfigError where `run_dir` holds a run already, or can't be written."""
        root = run_dir if run_dir is not None else _free_name(Path(config.runs_dir), config.name)
        try:
            root.mkdir(parents=True, exist_ok=True)
            if any(root.iterdir()):
                raise ConfigError(
                    f"{root}: not empty; a run needs a folder of its own (leave out --run-dir to get one)"
                )
            for name in ("log", "stderr"):
                (root / name).mkdir()
            (root / "config.yaml").write_text(dump_config(config))
        except OSError as error:
            raise ConfigError(f"{root}: the run folder can't be made: {error.strerror}") from error
        return cls(root.resolve(), _runtime(config), secrets.token_hex(4))

    @property
    def shm_prefix(self) -> str:
        return f"areal-{self.token}"

    def socket(self, name: str) -> Path:
        return self.runtime / f"{name}.sock"

    def stderr(self, name: str) -> Path:
        return self.root / "stderr" / f"{name}.log"

    def close(self) -> None:
        shutil.rmtree(self.runtime, ignore_errors=True)


def _free_name(parent: Path, name: str) -> Path:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1000):
        candidate = parent / (stem if number == 0 else f"{stem}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"{candidate}: the run folder can't be made: {error.strerror}") from error
        return candidate
    raise ConfigError(f"{parent / stem}: a thousand runs of this name were started in this second")


def _runtime(config: Config) -> Path:
    if config.runtime_dir is None:
        return Path(tempfile.mkdtemp(prefix="areal-"))
    parent = Path(config.runtime_dir)
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        raise ConfigError(f"runtime_dir: {parent} belongs to another user; sockets in it would be open to him")
    return Path(tempfile.mkdtemp(prefix="r", dir=parent))
