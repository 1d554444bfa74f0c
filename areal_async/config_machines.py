"""What a configuration asks of its machines: GPUs, how weights get from one to another, ranks that come from elsewhere.

What always holds: nothing is started or loaded; an option that would do nothing, or that can't work with the others, is
named together with what to set instead. Part of `config_check`.
"""

import re
from collections.abc import Iterator
from typing import Final

from areal_async.config import Config
from areal_async.config_options import Finding
from areal_async.errors import ConfigError
from areal_async.launch.placement import gpus_here, place, spelled

HERE: Final = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[?::1\]?")
_GPUS: Final = re.compile(r"(\d+(-\d+)?|GPU-[\w-]+|MIG-[\w-]+)(,(\d+(-\d+)?|GPU-[\w-]+|MIG-[\w-]+))*")


def findings(config: Config) -> Iterator[Finding]:
    yield from _transport(config)
    yield from _elsewhere(config)
    yield from _gpus(config, gpus_here())


def _transport(config: Config) -> Iterator[Finding]:
    weights, servers = config.weights, config.own_servers + len(config.rollout.urls)
    if weights.transport == "disk" and weights.folder is None:
        yield "weights.folder", "missing, and weights.transport is disk: name a folder that all hosts see"
    if weights.transport != "disk" and weights.folder is not None:
        yield "weights.folder", f"is only read by disk, and weights.transport is {weights.transport}; leave it out"
    if weights.transport != "nccl" and weights.nccl_address is not None:
        yield (
            "weights.nccl_address",
            f"is only read by nccl, and weights.transport is {weights.transport}; leave it out",
        )
    if weights.transport != "nccl":
        return
    if weights.nccl_address is None:
        what = "missing, and weights.transport is nccl: HOST:PORT on the host of trainer rank 0"
        yield "weights.nccl_address", f"{what}; try 127.0.0.1:29600 if all is on this host"
    if weights.wave != servers:
        yield "weights.wave", f"{weights.wave}: with nccl all {servers} servers load a version together; try {servers}"
    if config.own_servers and not gpus_here():
        yield "weights.transport", "nccl goes from GPU to GPU, and this machine has none; try shm"


def _elsewhere(config: Config) -> Iterator[Finding]:
    train, transport = config.train, config.weights.transport
    if transport == "shm":
        away = [url for url in config.rollout.urls if not url.startswith("unix:") and not _is_here(url)]
        if away:
            yield "weights.transport", f"shm doesn't reach {away[0]}, which is on another host; try disk or nccl"
        if train.listen is not None and not _is_here(train.listen):
            what = "shm: trainer ranks on other hosts (train.listen) write into their own shared memory"
            yield "weights.transport", f"{what}; try disk or nccl"
    if train.listen is not None:
        for key, value in (("train.gpus", train.gpus), ("train.cores", train.cores)):
            if value is not None:
                yield key, "does nothing with train.listen, where the ranks are started by hand; leave it out"


def _is_here(url: str) -> bool:
    host = url.partition("://")[2].partition("/")[0].rpartition(":")[0] or url.partition("://")[2]
    return HERE.fullmatch(host) is not None


def _gpus(config: Config, here: tuple[str, ...]) -> Iterator[Finding]:
    server, train = config.server, config.train
    if server.tensor_parallel > 1 and config.own_servers and not here:
        yield "server.tensor_parallel", f"{server.tensor_parallel}: this machine has no GPUs to share a model; try 1"
    given = [
        ("server.gpus", server.gpus, config.own_servers, server.tensor_parallel, "server.tensor_parallel"),
        ("train.gpus", train.gpus if train.listen is None else None, 1, train.ranks, "train.ranks"),
    ]
    wrong = False
    for key, value, parts, each, counted in given:
        for what in _listed(value, parts, each, counted, here) if value is not None else ():
            wrong = True
            yield key, what
    if not wrong:
        try:
            place(config, here)
        except ConfigError as error:
            yield "server.gpus", str(error)


def _listed(value: str, parts: int, each: int, counted: str, here: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with a list of GPUs for `parts` processes, `each` for one."""
    lists = value.split("|")
    malformed = [part for part in lists if not _GPUS.fullmatch(part)]
    if malformed:
        yield f"{malformed[0]!r} is no list of GPUs; write them as 0, 0-3 or 0,2, and | between two servers"
        return
    if len(lists) != parts:
        yield f"names GPUs for {len(lists)}, and there are {parts} to give them to; try {'|'.join(lists[:1] * parts)}"
    for part in lists:
        count = len(spelled(part).split(","))
        if count != each:
            yield f"{part} are {count} GPUs, and {counted} is {each}; name {each}"
    missing = sorted({gpu for part in lists for gpu in spelled(part).split(",") if gpu.isdecimal()} - set(here))
    if not here:
        yield "this machine has no GPUs; leave it out to run on the CPU"
    elif missing and all(gpu.isdecimal() for gpu in here):
        yield f"this machine has the GPUs {', '.join(here)}, not {', '.join(missing)}"
