"""Checkpoints on the disk: written aside by the ranks, made complete and taken away by the controller.

    checkpoints/step-40/          the ranks' files
                        state.json    whose it is: run, version, branch, run clock, length of the log, the files
                        COMPLETE      the marker, written last
    checkpoints/.step-41.tmp-1f…  one that is being written

What always holds: a folder with the marker is whole and on the disk itself, and so is the log up to its step; a folder
without it is never gone back to. An older checkpoint is taken away only when the log has, on the disk, that a newer one
is complete. What goes wrong is told to the core, and the run goes on.
"""

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from areal_async import disk
from areal_async.controller.crew import Crew
from areal_async.errors import ArealError
from areal_async.messages import AnyEvent, Checkpoint, CheckpointDone, Failed, Version

logger = logging.getLogger("areal_async")

MARKER: Final = "COMPLETE"
STATE: Final = "state.json"
_PREFIX: Final = "step-"
_UNFINISHED: Final = ".step-"

Result = TypeVar("Result")


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """`state.json`. run: its name. at: run clock. written: ISO date and time. log_bytes: length of the decision log,
    which is on the disk up to there. files: path within the folder -> bytes, without the marker and this file."""

    run: str
    version: Version
    branch: int
    at: float
    written: str
    log_bytes: int
    files: dict[str, int]


def folder_of(root: Path, version: Version) -> Path:
    """Where the checkpoint of a version lies. root: the run folder's `checkpoints`."""
    return root / f"{_PREFIX}{version}"


def read_state(folder: Path) -> CheckpointState | None:
    """Of a complete checkpoint; None where the folder is none, says why in the program's log where that is odd."""
    if not (folder / MARKER).is_file():
        return None
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=CheckpointState)
        for name, nbytes in state.files.items():
            if (found := (folder / name).stat().st_size) != nbytes:
                logger.warning("%s: has %d bytes, not %d: this checkpoint isn't used", folder / name, found, nbytes)
                return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s: this checkpoint isn't used: %s", folder, error)
        return None
    return state


def clean(root: Path) -> None:
    """At the start: take away what an earlier controller has begun and not made complete."""
    for folder in (*_all(root), *root.glob(f"{_UNFINISHED}*")):
        if not (folder / MARKER).is_file():
            logger.warning("%s: no complete checkpoint; removed", folder)
            shutil.rmtree(folder, ignore_errors=True)


class Checkpoints:
    """Carries out `Checkpoint`.

    root: `checkpoints` of the run folder. save: has all ranks write into a folder, under a request's id; gives the
    bytes. sync: have all of the log on the disk. log_bytes: length of the decision log. A thread of its own waits for
    the disk: in that of the log, the log's syncs would wait for as long as a model takes.
    """

    def __init__(
        self,
        root: Path,
        run: str,
        crew: Crew,
        *,
        save: Callable[[Path, str], Awaitable[int]],
        sync: Callable[[], Awaitable[None]],
        log_bytes: Callable[[], int],
        take: Callable[[AnyEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._root = root
        self._run = run
        self._crew = crew
        self._save = save
        self._sync = sync
        self._log_bytes = log_bytes
        self._take = take
        self._now = now
        self._keep: dict[tuple[Version, int], tuple[Version, ...]] = {}
        self._only: set[Version] | None = None  # that are to stay; the others are yet to be removed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")

    def close(self) -> None:
        """Waits for what the thread is doing."""
        self._thread.shutdown(wait=True)

    def start(self, command: Checkpoint) -> None:
        self._keep = {(command.version, command.branch): command.keep}
        self._crew.start(self._write(command), f"checkpoint of version {command.version}")

    def recorded(self, event: CheckpointDone) -> None:
        """The event is in the log: the checkpoints that it makes needless may go."""
        keep = self._keep.pop((event.version, event.branch), None)
        if keep is not None:
            self._only = {event.version, *keep}
            self._crew.start(self.tidy(), f"checkpoints beside version {event.version}")

    def resumed(self, returns: Sequence[Version]) -> None:
        """returns: versions that training can go back to. The controller before may have died when a new checkpoint was
        made and the ones that it makes needless were yet to be removed."""
        self._only = set(returns)
        self._crew.start(self.tidy(), "checkpoints of before")

    async def tidy(self) -> None:
        """Take away what the last event has made needless; to be called once more at the end of the run."""
        if (only := self._only) is None:
            return
        try:
            await self._sync()
            await self._in_thread(lambda: _remove([f for f in _all(self._root) if _version(f) not in only]))
        except (OSError, ArealError) as error:
            logger.warning("older checkpoints stay for now: %s", _in_words(error))
        else:
            self._only = None

    async def _write(self, command: Checkpoint) -> None:
        begun = time.monotonic()
        temporary = self._root / f"{_UNFINISHED}{command.version}.tmp-{secrets.token_hex(4)}"
        try:
            try:
                await self._in_thread(lambda: temporary.mkdir(parents=True))
                nbytes = await self._save(temporary, f"checkpoint {command.version} branch {command.branch}")
                await self._sync()  # what led to this version is on the disk before the version is
                state = self._state(command)
                await self._in_thread(lambda: _complete(temporary, folder_of(self._root, command.version), state))
            finally:
                await self._in_thread(lambda: shutil.rmtree(temporary, ignore_errors=True))
        except (OSError, ArealError) as error:
            why = f"version {command.version} has no checkpoint: {_in_words(error)}; the run goes on without it"
            self._take(Failed(at=self._now(), of="checkpoint", id=str(command.version), why=why))
            return
        seconds = time.monotonic() - begun
        logger.info("checkpoint of version %d: %.1f MB in %.1f s", command.version, nbytes / 1e6, seconds)
        self._take(
            CheckpointDone(
                at=self._now(), version=command.version, branch=command.branch, seconds=seconds, nbytes=nbytes
            )
        )

    def _state(self, command: Checkpoint) -> CheckpointState:
        return CheckpointState(
            run=self._run,
            version=command.version,
            branch=command.branch,
            at=round(self._now(), 3),
            written=datetime.now().astimezone().isoformat(timespec="seconds"),
            log_bytes=self._log_bytes(),
            files={},
        )

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Cancelled, it still ends what it does: no half of it goes on behind the run's back."""
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(work)))


def _complete(temporary: Path, folder: Path, state: CheckpointState) -> None:
    """Make a checkpoint of what the ranks wrote. One of the same version is of a branch that is over; it goes first."""
    files = [path for path in temporary.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(temporary)): path.stat().st_size for path in sorted(files)}
    described = temporary / STATE
    described.write_bytes(msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(state, files=sizes))))
    for path in (*files, described, *(path for path in temporary.rglob("*") if path.is_dir()), temporary):
        disk.sync(path)
    _remove([folder] if folder.exists() else [])
    temporary.rename(folder)
    marker = folder / MARKER
    try:
        disk.sync(folder.parent)
        marker.touch()
        disk.sync(marker)
        disk.sync(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove(folders: list[Path]) -> None:
    """The marker first, so that what is left is no checkpoint, whenever this is interrupted."""
    for folder in folders:
        (folder / MARKER).unlink(missing_ok=True)
        disk.sync(folder)
        shutil.rmtree(folder)


def _all(root: Path) -> Iterator[Path]:
    return (path for path in root.glob(f"{_PREFIX}*") if path.is_dir() and path.name[len(_PREFIX) :].isdecimal())


def _version(folder: Path) -> Version:
    return int(folder.name[len(_PREFIX) :])


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
