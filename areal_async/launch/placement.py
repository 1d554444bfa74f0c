"""Which GPUs the servers and the trainer of a host get.

What always holds: what the configuration names is used as it stands; of the others servers get the first, in order,
`tensor_parallel` each, and the trainer the last, one a rank, so that nobody gets another's; on a machine without GPUs
nobody gets any but by name.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from areal_async.config import Config
from areal_async.errors import ConfigError

DRIVER: Final = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU, where NVIDIA's driver is loaded
_SPAN: Final = re.compile(r"(\d+)-(\d+)")


class Placement(NamedTuple):
    """servers: GPUs of each server that the run starts, None for the CPU (or what vLLM finds). trainer: of all ranks.
    As CUDA_VISIBLE_DEVICES spells them."""

    servers: tuple[str | None, ...]
    trainer: str | None


def gpus_here(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> tuple[str, ...]:
    """Names of the GPUs that this process may use; what `CUDA_VISIBLE_DEVICES` says, else all. Nothing is loaded."""
    said = environment.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        return tuple(part.strip() for part in said.split(",") if part.strip() not in ("", "-1"))
    return tuple(str(number) for number in range(len(list(driver.iterdir())))) if driver.is_dir() else ()


def place(config: Config, here: tuple[str, ...]) -> Placement:
    """Who gets which of the GPUs `here`. Errors: ConfigError where there are too few."""
    server, train = config.server, config.train
    ranks = 0 if train.listen is not None else train.ranks  # with `listen` they are started elsewhere, by hand
    trainer = spelled(train.gpus) if train.gpus is not None and ranks else None
    servers = tuple(spelled(part) for part in server.gpus.split("|")) if server.gpus is not None else ()
    if not here:
        return Placement(servers or (None,) * config.own_servers, trainer)
    each = server.tensor_parallel
    free = [gpu for gpu in here if gpu not in _named(*servers, trainer)]
    needed = (0 if servers else config.own_servers * each) + (0 if trainer else ranks)
    if needed > len(free):
        raise ConfigError(
            f"rollout.servers, server.tensor_parallel, train.ranks: {needed} GPUs are needed, and {len(free)} of those "
            f"here are free ({', '.join(free) or 'none'}); lower one of them, or say who shares which by server.gpus "
            f"and train.gpus"
        )
    given = servers or tuple(",".join(free[each * n : each * (n + 1)]) for n in range(config.own_servers))
    return Placement(given, trainer or (",".join(free[-ranks:]) if ranks else None))


def _named(*lists: str | None) -> set[str]:
    return {gpu for gpus in lists if gpus is not None for gpu in gpus.split(",")}


def spelled(gpus: str) -> str:
    """ "0-2,5" as CUDA_VISIBLE_DEVICES wants it: "0,1,2,5". Other names (UUIDs) stay."""
    numbers: list[str] = []
    for part in gpus.split(","):
        span = _SPAN.fullmatch(part.strip())
        numbers += map(str, range(int(span[1]), int(span[2]) + 1)) if span else [part.strip()]
    return ",".join(numbers)
