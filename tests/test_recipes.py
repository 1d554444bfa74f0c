"""What children are started with: each option of the configuration changes the command."""

import json
from pathlib import Path

import pytest

from areal_async.config import Config, DataConfig, ModelConfig, RolloutConfig, ServerConfig, TrainConfig
from areal_async.errors import ConfigError
from areal_async.launch.placement import Placement, gpus_here, place, spelled
from areal_async.launch.recipes import count_cores, trainer_command, vllm_command

ASKED = {
    "uds": "/tmp/s", "model": "m", "dtype": "float32", "cores": None, "kv_space_gib": 3, "enforce_eager": False,
    "max_model_len": 256, "stream_interval": 16, "max_num_seqs": 8, "seed": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("model", "other", ["--model", "other"]),
        ("dtype", "bfloat16", ["--dtype", "bfloat16"]),
        ("max_model_len", 99, ["--max-model-len", "99"]),
        ("stream_interval", 128, ["--stream-interval", "128"]),
        ("max_num_seqs", 77, ["--max-num-seqs", "77"]),
        ("enforce_eager", True, ["--enforce-eager"]),
        ("cores", "2-5", ["taskset", "-c", "2-5"]),
        ("tensor_parallel", 4, ["--tensor-parallel-size", "4"]),
        ("gpu_memory", 0.75, ["--gpu-memory-utilization", "0.75"]),
        ("backend", "nccl", ["--weight-transfer-config", '{"backend": "nccl"}']),
        ("extra", ("--foo",), ["--foo"]),
    ],
)
def test_a_servers_option_is_in_its_command(option: str, value: object, expected: list[str]) -> None:
    before, _ = vllm_command(**ASKED)  # type: ignore[arg-type]
    argv, env = vllm_command(**{**ASKED, option: value})  # type: ignore[arg-type]
    assert " ".join(expected) in " ".join(argv)
    assert " ".join(expected) not in " ".join(before)
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_a_trainers_cores_and_threads() -> None:
    argv, env = trainer_command(connect="ipc://x", spec="/run/s", ranks=2, cores="0-1|2,3")
    assert argv[argv.index("--log-dir") + 1] == "/run/torchrun"
    assert argv[:3] == ["taskset", "-c", "0-1,2,3"]
    assert env == {"OMP_NUM_THREADS": "2"}
    assert count_cores("0,2-5") == 5


def test_nothing_of_gpus_where_there_is_none() -> None:
    argv, env = vllm_command(**ASKED)  # type: ignore[arg-type]
    assert not [word for word in argv if "tensor-parallel" in word or "gpu" in word]
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert json.loads(argv[argv.index("--weight-transfer-config") + 1]) == {"backend": "areal_file"}
    assert "CUDA_VISIBLE_DEVICES" not in trainer_command(connect="c", spec="s", ranks=1, cores="0")[1]


def test_gpus_are_given_by_the_environment() -> None:
    assert vllm_command(**ASKED, gpus="2,3")[1]["CUDA_VISIBLE_DEVICES"] == "2,3"  # type: ignore[arg-type]
    argv, env = trainer_command(connect="c", spec="s", ranks=2, cores=None, gpus="6,7")
    assert env == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert argv[argv.index("--nproc-per-node") + 1] == "2"
    assert trainer_command(connect="c", spec="s", ranks=1, cores="3", gpus="0")[1] == {
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
    }


EIGHT = tuple("01234567")


def placed(here: tuple[str, ...] = EIGHT, *, servers: int = 2, ranks: int = 1, **changes: object) -> Placement:
    server = {name: value for name, value in changes.items() if name in ("gpus", "tensor_parallel")}
    train = {"gpus": changes.get("train_gpus"), "listen": changes.get("listen")}
    config = Config(
        name="x",
        model=ModelConfig(path="m"),
        data=DataConfig(train=("d",)),
        rollout=RolloutConfig(servers=servers),
        server=ServerConfig(**server),  # type: ignore[arg-type]
        train=TrainConfig(steps=1, batch_groups=1, ranks=ranks, **train),  # type: ignore[arg-type]
    )
    return place(config, here)


def test_servers_get_the_first_gpus_and_the_trainer_the_last() -> None:
    assert placed(servers=6, ranks=2) == (("0", "1", "2", "3", "4", "5"), "6,7")
    assert placed(servers=2, ranks=2, tensor_parallel=2) == (("0,1", "2,3"), "6,7")
    assert placed(("3", "GPU-ab"), servers=1) == (("3",), "GPU-ab")
    assert placed(servers=0, ranks=1) == ((), "7")


def test_what_is_named_is_used_and_left_to_its_owner() -> None:
    assert placed(gpus="4-5|6,7", tensor_parallel=2) == (("4,5", "6,7"), "3")
    assert placed(train_gpus="0-1", ranks=2) == (("2", "3"), "0,1")
    assert placed(gpus="0|0", train_gpus="0") == (("0", "0"), "0")  # shared because it was said so
    assert placed((), gpus="0|1") == (("0", "1"), None)


def test_a_machine_without_gpus_and_ranks_elsewhere() -> None:
    assert placed(()) == ((None, None), None)
    assert placed(servers=8, ranks=64, listen="tcp://h:1") == (EIGHT, None)


def test_too_few_gpus_are_said() -> None:
    with pytest.raises(ConfigError, match=r"9 GPUs are needed, and 8 of those here are free \(0, 1, .*server\.gpus"):
        placed(servers=7, ranks=2)
    with pytest.raises(ConfigError, match=r"3 GPUs are needed, and 2 of those here are free"):
        placed(servers=3, ranks=6, train_gpus="2-7")


def test_the_gpus_of_this_machine(tmp_path: Path) -> None:
    assert gpus_here({}, tmp_path / "none") == ()
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert gpus_here({}, tmp_path) == ("0", "1")
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "3, 5"}, tmp_path) == ("3", "5")
    assert gpus_here({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == ()
    assert spelled("0-2,5") == "0,1,2,5"
    assert spelled("GPU-1a-2b") == "GPU-1a-2b"
