"""Where a run keeps its things: the run folder, which stays, and the runtime folder with its sockets, which doesn't.

What always holds: two runs never share a folder, a socket or a name in shared memory, whenever they were started; the
runtime folder can be entered only by the user, and is gone when the run is. Nothing in a run folder says where the
folder lies, so it can be moved. `config.yaml` is the configuration that the run goes on with; the ones before a resume
that changed it are `config-1.yaml`, `config-2.yaml`, … in their order; a kill leaves no half of one.
"""

import glob
import os
import re
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from areal_async.config import Config
from areal_async.config_file import dump_config
from areal_async.controller import remote_ranks
from areal_async.errors import ConfigError
from areal_async.log.format import DECISIONS_NAME
from areal_async.runfiles import CONFIG, earlier_configs


@dataclass(frozen=True)
class RunFolder:
    """root: `runs/NAME-TIME/`. runtime: folder of the sockets. token: names this run in shared memory. config: number
    of its configuration (`runfiles`)."""

    root: Path
    runtime: Path
    token: str
    config: int = 1

    @classmethod
    def create(cls, config: Config, run_dir: Path | None) -> "RunFolder":
        """Make both folders. Errors: ConfigError where `run_dir` holds a run already, or can't be written."""
        root = run_dir if run_dir is not None else _free_name(Path(config.runs_dir), config.name)
        try:
            root.mkdir(parents=True, exist_ok=True)
            if any(root.iterdir()):
                resume = ", or --resume to go on with the run that is in it" if _holds_a_run(root) else ""
                raise ConfigError(
                    f"{root}: not empty; a run needs a folder of its own (leave out --run-dir to get one{resume})"
                )
            for name in ("log", "stderr"):
                (root / name).mkdir()
            (root / CONFIG).write_text(dump_config(config))
        except OSError as error:
            raise ConfigError(f"{root}: the run folder can't be made: {error.strerror}") from error
        return cls(root.resolve(), _runtime(config), secrets.token_hex(4))

    @classmethod
    def find(cls, config: Config, run_dir: Path | None) -> Path:
        """The folder of the run to resume: `run_dir`, or the one of this name that was started last. Errors:
        ConfigError."""
        if run_dir is not None:
            if not _holds_a_run(run_dir):
                raise ConfigError(f"{run_dir}: no run is in this folder (log/decisions.log is missing): can't resume")
            return run_dir.resolve()
        parent = Path(config.runs_dir)
        stamped = re.compile(re.escape(config.name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
        found = [(match[1], int(match[2] or 0), path) for path in parent.glob(f"{glob.escape(config.name)}-*")
                 if (match := stamped.fullmatch(path.name)) and _holds_a_run(path)]  # fmt: skip
        if not found:
            raise ConfigError(f"{parent}: there is no run {config.name}-… to resume (--run-dir names one elsewhere)")
        return max(found)[2].resolve()

    @classmethod
    def reopen(cls, config: Config, root: Path) -> "RunFolder":
        """The folder of a run that is resumed; only who holds the log's lock may do this. Errors: ConfigError."""
        try:
            for name in ("log", "stderr"):
                (root / name).mkdir(exist_ok=True)
            (root / remote_ranks.FILE).unlink(missing_ok=True)  # of ranks that were told of a controller that is gone
            number = _write_config(root, dump_config(config).encode())
        except OSError as error:
            raise ConfigError(f"{root}: the run folder can't be written: {error.strerror}") from error
        return cls(root, _runtime(config), secrets.token_hex(4), number)

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def shm_prefix(self) -> str:
        return f"areal-{self.token}"

    def socket(self, name: str) -> Path:
        return self.runtime / f"{name}.sock"

    def stderr(self, name: str) -> Path:
        return self.root / "stderr" / f"{name}.log"

    def close(self) -> None:
        shutil.rmtree(self.runtime, ignore_errors=True)


def _holds_a_run(root: Path) -> bool:
    """One that has begun, or ended before that: then its folder has a configuration and no sample."""
    log = root / "log"
    begun = (root / CONFIG).is_file() and log.is_dir() and not any(log.glob("payload-*"))
    return begun or (log / DECISIONS_NAME).is_file()


def _write_config(root: Path, text: bytes) -> int:
    """The configuration from now on; the one before is kept where it differs. Its number."""
    current, unfinished = root / CONFIG, root / f".{CONFIG}"
    number = max(earlier_configs(root), default=0) + 1
    before = current.read_bytes() if current.is_file() else text
    if before != text:
        unfinished.write_bytes(before)
        unfinished.rename(root / f"config-{number}.yaml")
        number += 1
    if before != text or not current.is_file():
        unfinished.write_bytes(text)
        unfinished.rename(current)
    return number


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
