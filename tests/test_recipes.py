"""What children are started with: each option of the configuration changes the command."""

import pytest

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
    argv, env = trainer_command(connect="ipc://x", spec="s", ranks=2, cores="0-1|2,3")
    assert argv[:3] == ["taskset", "-c", "0-1,2,3"]
    assert env == {"OMP_NUM_THREADS": "2"}
    assert count_cores("0,2-5") == 5
