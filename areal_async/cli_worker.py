"""`areal-async worker trainer`: be one trainer rank of a run whose controller is elsewhere, under torchrun.

What always holds: whatever can be wrong before a model is loaded (torchrun's environment, the file, another release) is
said in a line, with exit code 2; then this process becomes the rank (`engines.deepspeed.rank`), which loads torch. The
run's secret stays in the file: it isn't an argument, which every user of the host could read.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from areal_async.errors import ConfigError
from areal_async.messages import PROTOCOL, TrainerConnection

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

FROM_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
RANK_MODULE: Final = "areal_async.engines.deepspeed.rank"

EXAMPLES: Final = """examples:
  one host with 8 GPUs:
    torchrun --standalone --nproc-per-node=8 -m areal_async worker trainer --connect connect.json
  two hosts with 8 GPUs each; the first one is 10.0.0.2 (the second: --node-rank=1):
    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=10.0.0.2 --master-port=29500 \\
      -m areal_async worker trainer --connect connect.json
"""


def add_worker(commands: "Commands") -> None:
    about = "Be a worker of a run whose controller is on another host (train.listen; docs/nodes.md)."
    worker = commands.add_parser(
        "worker",
        help=about,
        description=about,
        epilog="example: torchrun --standalone --nproc-per-node=8 -m areal_async worker trainer --connect connect.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = worker.add_subparsers(required=True, metavar="KIND")
    about = "Be one trainer rank, under torchrun, until the run is over."
    parser = kinds.add_parser(
        "trainer",
        help=about,
        description=about,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--connect", type=Path, required=True, metavar="FILE", help="connect.json, which the run wrote into its folder"
    )
    parser.set_defaults(do=trainer)


def trainer(arguments: argparse.Namespace) -> int:
    """`areal-async worker trainer`. Doesn't return if all is well: the process becomes the rank."""
    connection = read_connection(arguments.connect)
    check_environment(os.environ, connection)
    if not (Path(connection.spec.model_path) / "config.json").is_file():
        raise ConfigError(
            f"command line: worker trainer: this host has no model at {connection.spec.model_path} (model.path of the "
            f"run); it must be there under the same path"
        )
    argv = [sys.executable, "-m", RANK_MODULE, "--connection", str(arguments.connect)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, argv)


def read_connection(path: Path) -> TrainerConnection:
    """The file's content. Errors: ConfigError."""
    try:
        connection = msgspec.json.decode(path.read_bytes(), type=TrainerConnection)
    except OSError as error:
        raise ConfigError(
            f"command line: --connect: {path}: {error.strerror}; copy connect.json from the run folder, while the run "
            f"waits for its ranks"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # the release is compared first in a file that another one wrote; the rest of it may look different
        raise ConfigError(
            f"command line: --connect: {path}: this is no connect.json of this release: {error}"
        ) from None
    if connection.protocol != PROTOCOL:
        raise ConfigError(
            f"command line: --connect: {path}: the controller speaks protocol {connection.protocol}, this installation "
            f"{PROTOCOL}: install the same areal-async on both hosts"
        )
    return connection


def check_environment(environment: Mapping[str, str], connection: TrainerConnection) -> None:
    """Whether torchrun has started this. Errors: ConfigError."""
    missing = [name for name in FROM_TORCHRUN if not environment.get(name, "").isdecimal()]
    if missing:
        raise ConfigError(
            f"command line: worker trainer: {', '.join(missing)} isn't in the environment: start it by torchrun, as in "
            f"torchrun --standalone --nproc-per-node={connection.ranks} -m areal_async worker trainer --connect …"
        )
    world = int(environment["WORLD_SIZE"])
    if world != connection.ranks:
        raise ConfigError(
            f"command line: worker trainer: torchrun starts {world} rank(s) in all, the run wants {connection.ranks} "
            f"(train.ranks): --nnodes × --nproc-per-node must be {connection.ranks}"
        )
