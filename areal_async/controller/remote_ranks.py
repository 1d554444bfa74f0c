"""Trainer ranks that are started by hand, on this host or others: what they are told, and what the person is told.

What always holds: `connect.json` can be read only by its owner, from its first byte on; the secret stands in it and
nowhere else, in no argument and no log; a start that waits in vain says which ranks are missing.
"""

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from areal_async.errors import LaunchError
from areal_async.messages import PROTOCOL, TrainerConnection, TrainerSpec
from areal_async.wire.router import Router

ANY_HOST: Final = ("0.0.0.0", "*", "[::]")
SHOWN_RANKS: Final = 8
FILE: Final = "connect.json"


def write_connection(folder: Path, router: Router, secret: str, ranks: int, spec: TrainerSpec) -> Path:
    """Write what `areal-async worker trainer` needs into `folder`. Errors: LaunchError."""
    assert router.listening is not None
    connection = TrainerConnection(
        protocol=PROTOCOL,
        address=advertised(router.listening),
        public_key=router.public_key,
        secret=secret,
        ranks=ranks,
        spec=spec,
    )
    path = folder / FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(connection)))
    except OSError as error:
        raise LaunchError(f"{path}: can't be written for the trainer ranks: {error.strerror}") from error
    return path


def advertised(address: str) -> str:
    """The address that others connect to: this host's name where the controller listens on all of its addresses."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return f"tcp://{socket.gethostname() if host in ANY_HOST else host}:{port}"


def instructions(path: Path, ranks: int, *, again: bool) -> str:
    """What to type for the ranks to come. again: after a loss."""
    torchrun = "torchrun --nnodes=NODES --node-rank=N --nproc-per-node=GPUS --master-addr=HOST --master-port=PORT"
    before = (
        "a trainer rank was lost, and this run can't start ranks on other hosts: end what is left of torchrun on each "
        f"of them (Ctrl-C), copy {path} there again (it names the checkpoint to begin with), and start torchrun again. "
    )
    return (
        f"{before if again else ''}waiting for {ranks} trainer rank(s). On each of their hosts, with {path} copied "
        f"there (it holds the run's secret):\n  {torchrun} -m areal_async worker trainer --connect {path}"
    )


async def wait_for_ranks(there: Awaitable[None], missing: Callable[[], list[str]], timeout_s: float) -> None:
    """Return when all are there, which `there` waits for. Errors: LaunchError that names those that aren't; whatever
    `there` raises."""
    try:
        async with asyncio.timeout(timeout_s):
            await there
    except TimeoutError:
        names = missing()
        more = f" and {len(names) - SHOWN_RANKS} more" if len(names) > SHOWN_RANKS else ""
        raise LaunchError(
            f"{len(names)} trainer rank(s) have not joined within train.start_timeout_s = {timeout_s:g} s: "
            f"{', '.join(names[:SHOWN_RANKS])}{more}; look at what torchrun says on their hosts (docs/nodes.md)"
        ) from None


def remove_published(spec: TrainerSpec) -> None:
    """What ranks that were killed have left in the folder, as far as this host sees it."""
    with contextlib.suppress(OSError):
        for path in Path(spec.publish_folder).glob(f"{spec.shm_prefix}-v*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(Path(spec.publish_folder) / f"{spec.shm_prefix}.partial", ignore_errors=True)
