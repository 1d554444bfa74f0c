"""Published weights: one safetensors file a version, in shared memory for the servers of this host, or on a disk that
other hosts see too.

What always holds: a file under its final name is complete (it is written under another name, on a disk synced, then
renamed); room is looked for before anything is written; what the controller frees, and all of it at the end, is given
back.
"""

import os
import shutil
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

from areal_async import disk
from areal_async.errors import TrainerError
from areal_async.messages import Version

SHM: Final = Path("/dev/shm")
MIB: Final = 1 << 20
HEADER_BYTES: Final = 1 * MIB  # names and offsets; a model with 1,000 tensors has about 0.1 MiB of them


class Publisher:
    """Files `<folder>/<prefix>-v<version>.safetensors`. The folder is made if it isn't there."""

    def __init__(self, prefix: str, folder: Path = SHM) -> None:
        self._prefix = prefix
        self._folder = folder
        self._versions: set[Version] = set()

    def path(self, version: Version) -> Path:
        return self._folder / f"{self._prefix}-v{version}.safetensors"

    def publish(self, version: Version, tensors: dict[str, Tensor]) -> tuple[Path, int]:
        """Write `tensors` (on the CPU, contiguous) as `version`; where, and how many bytes. Raises TrainerError."""
        self._check_room(version, sum(tensor.nbytes for tensor in tensors.values()) + HEADER_BYTES)
        path = self.path(version)
        # a folder, for safetensors first writes a file beside it that has a name of its own: whoever takes away what a
        # killed rank has left has to know it
        partial = self._folder / f"{self._prefix}.partial" / path.name
        try:
            partial.parent.mkdir(exist_ok=True)
            save_file(tensors, partial, metadata={"format": "pt", "version": str(version)})
            nbytes = partial.stat().st_size
            if self._folder != SHM:  # another host may read it, and a name must not be there before its bytes are
                disk.sync(partial)
            partial.rename(path)
            if self._folder != SHM:
                disk.sync(self._folder)
        except Exception as error:  # safetensors raises its own class when the folder fills up meanwhile
            raise TrainerError(f"version {version} could not be published to {path}: {error}") from error
        finally:
            shutil.rmtree(partial.parent, ignore_errors=True)
        self._versions.add(version)
        return path, nbytes

    def free(self, versions: tuple[Version, ...]) -> None:
        """Give back the memory of these versions; those that aren't there are passed over."""
        for version in versions:
            self.path(version).unlink(missing_ok=True)
            self._versions.discard(version)

    def close(self) -> None:
        """Give back everything."""
        self.free(tuple(self._versions))

    def _check_room(self, version: Version, needed: int) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            room = os.statvfs(self._folder)
        except OSError as error:
            raise TrainerError(
                f"version {version} can't be published: weights.folder: {self._folder}: {error.strerror}"
            ) from error
        free = room.f_bavail * room.f_frsize
        if free < needed:
            there = ", ".join(f"v{v}" for v in sorted(self._versions)) or "no version of ours"
            remedy = "make room there, or name another weights.folder"
            if self._folder == SHM:
                remedy = f"enlarge it (mount -o remount,size=… {self._folder}, or docker run --shm-size)"
            raise TrainerError(
                f"version {version} can't be published: {self._folder} has {free / MIB:.0f} MiB free, "
                f"{needed / MIB:.0f} needed ({there} in it); {remedy}"
            )
