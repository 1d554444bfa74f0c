"""What a configuration asks of its machines: each combination that can't work is named, with what to set instead."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_async import config_check, config_machines
from areal_async.config import Config
from areal_async.config_check import problems
from areal_async.config_file import Sources

Make = Callable[..., Config]
EIGHT = tuple("01234567")
URLS = "rollout.urls=[http://10.0.0.9:8000,http://127.0.0.1:8001,unix:/run/x.sock]"


def said(config: Config) -> list[str]:
    """All but that the socket of the server by URL isn't there (tests/test_config_check.py)."""
    lines = problems(config, Sources.in_code())
    return [line.partition(": ")[2] for line in lines if "no such socket" not in line]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str, ...]], None]:
    return lambda here: monkeypatch.setattr(config_machines, "gpus_here", lambda: here)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["weights.transport=disk"], ["weights.folder: missing, and weights.transport is disk"]),
        (["weights.folder=/tmp/x"], ["weights.folder: is only read by disk, and weights.transport is shm"]),
        (["weights.nccl_address=h:1"], ["weights.nccl_address: is only read by nccl"]),
        (
            ["weights.transport=nccl", "rollout.servers=2", "train.ranks=1"],
            [
                "weights.nccl_address: missing",
                "weights.wave: 1: with nccl all 2 servers load a version together; try 2",
            ],
        ),
        (["weights.transport=nccl", "weights.nccl_address=h:1", "weights.wave=1"], []),
        ([URLS], ["weights.transport: shm doesn't reach http://10.0.0.9:8000"]),
        (["rollout.urls=[http://127.0.0.1:8001,http://localhost:1,unix:/run/x.sock]"], []),
        (["train.listen=tcp://127.0.0.1:5700"], []),
        (["train.listen=tcp://0.0.0.0:5700"], ["weights.transport: shm: trainer ranks on other hosts"]),
        (["train.listen=tcp://10.0.0.1:5700", "weights.transport=disk", "weights.folder=/tmp/w"], []),
        (
            ["train.listen=tcp://127.0.0.1:1", "train.gpus=0", "train.cores=0"],
            ["train.gpus: does nothing with train.listen", "train.cores: does nothing with train.listen"],
        ),
        (["server.gpus=0|1"], ["server.gpus: names GPUs for 2, and there are 1 to give them to; try 0"]),
        (["server.gpus=0-1"], ["server.gpus: 0-1 are 2 GPUs, and server.tensor_parallel is 1; name 1"]),
        (["server.gpus=0-1", "server.tensor_parallel=2"], []),
        (["server.gpus=first"], ["server.gpus: 'first' is no list of GPUs"]),
        (["server.gpus=9"], ["server.gpus: this machine has the GPUs 0, 1, 2, 3, 4, 5, 6, 7, not 9"]),
        (["train.gpus=6-7"], ["train.gpus: 6-7 are 2 GPUs, and train.ranks is 1; name 1"]),
        (
            ["rollout.servers=8"],
            ["server.gpus: rollout.servers, server.tensor_parallel, train.ranks: 9 GPUs are needed"],
        ),
    ],
)
def test_on_a_machine_with_eight_gpus(
    overrides: list[str], expected: list[str], make_config: Make, gpus: Callable[[tuple[str, ...]], None]
) -> None:
    gpus(EIGHT)
    lines = said(make_config(*overrides))
    assert len(lines) == len(expected), lines
    assert all(line.startswith(what) for line, what in zip(lines, expected, strict=True)), lines


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (["server.tensor_parallel=2"], ["server.tensor_parallel: 2: this machine has no GPUs to share a model; try 1"]),
        (["server.gpus=0"], ["server.gpus: this machine has no GPUs; leave it out to run on the CPU"]),
        (["train.gpus=0"], ["train.gpus: this machine has no GPUs; leave it out to run on the CPU"]),
        (
            ["weights.transport=nccl", "weights.nccl_address=h:1"],
            ["weights.transport: nccl goes from GPU to GPU, and this machine has none; try shm"],
        ),
    ],
)
def test_on_a_machine_without(
    overrides: list[str], expected: list[str], make_config: Make, gpus: Callable[[tuple[str, ...]], None]
) -> None:
    gpus(())
    assert said(make_config(*overrides)) == expected


def test_a_controller_without_gpus_of_its_own_may_use_nccl_elsewhere(
    make_config: Make, gpus: Callable[[tuple[str, ...]], None]
) -> None:
    gpus(())
    assert not said(
        make_config(
            URLS, "weights.transport=nccl", "weights.nccl_address=10.0.0.2:29600", "weights.wave=3",
            "train.listen=tcp://10.0.0.1:5700",
        )
    )  # fmt: skip


def test_room_is_looked_for_where_the_weights_will_be(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disk three versions need room in the folder, and none in shared memory."""
    rooms: dict[str, int] = {"/dev/shm": 200 << 20}
    monkeypatch.setattr(
        config_check.shutil, "disk_usage", lambda path: SimpleNamespace(free=rooms.get(str(path), 1 << 40))
    )
    folder = tmp_path / "not" / "yet"
    config = make_config("weights.transport=disk", f"weights.folder={folder}")
    model = Path(config.model.path)
    weights = next(iter([*model.glob("*.safetensors")]))
    with weights.open("r+b") as file:
        file.truncate(100 << 20)
    assert not said(config)
    rooms[str(tmp_path)] = 299 << 20
    assert said(config) == [
        f"weights.folder: {tmp_path} has 299 MiB free, and three versions of the weights take about 300 MiB; make room "
        f"there, or name another folder"
    ]
