"""Real vLLM servers for benchmarks, without a controller.

What always holds: a server ends with its block, under a guard as in a run; its weights are labelled version 0.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from areal_async.errors import ServerError
from areal_async.launch.child import Child, ChildSpec
from areal_async.launch.recipes import vllm_command
from areal_async.rollout.vllm_http import VllmClient

START_S: Final = 300.0
LOOK_S: Final = 0.25
STOP_S: Final = 1.0


class Shape(msgspec.Struct):
    """What is read of a model's config.json."""

    vocab_size: int
    max_position_embeddings: int


def shape(model: Path) -> Shape:
    return msgspec.json.decode((model / "config.json").read_bytes(), type=Shape)


@contextlib.asynccontextmanager
async def server(
    model: Path,
    *,
    dtype: str = "float32",
    cores: str = "0",
    context: int | None = None,
    max_num_seqs: int = 192,
    stream_interval: int = 16,
    kv_space_gib: int = 1,
    seed: int = 1,
) -> AsyncIterator[VllmClient]:
    """A vLLM server that is ready."""
    with tempfile.TemporaryDirectory(prefix="aa-bench-") as folder:
        socket = Path(folder) / "server.sock"
        argv, env = vllm_command(
            uds=str(socket),
            model=str(model),
            dtype=dtype,
            cores=cores,
            kv_space_gib=kv_space_gib,
            enforce_eager=True,
            max_model_len=context or shape(model).max_position_embeddings,
            stream_interval=stream_interval,
            max_num_seqs=max_num_seqs,
            seed=seed,
        )
        spec = ChildSpec(name="server 0", argv=tuple(argv), env=env, stderr_path=Path(folder) / "stderr.log")
        child = await Child.start(spec)
        try:
            async with VllmClient("0", f"unix:{socket}") as client:
                await until_healthy(client, child)
                await client.label_weights(0)
                yield client
        finally:
            await child.stop(STOP_S)


async def until_healthy(client: VllmClient, child: Child) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(ServerError):
            await client.health()
            return
        if time.monotonic() > deadline:
            sys.exit(f"the server was not ready after {START_S:g} s: {child.why()}")
        await asyncio.sleep(LOOK_S)


def weights_file(model: Path, dtype: str, to: Path) -> dict[str, str]:
    """Write the model's weights as a trainer publishes them; what a swap is told of them."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = {}
    for part in sorted(model.glob("*.safetensors")):
        tensors |= {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in load_file(part).items()}
    save_file(tensors, to, metadata={"format": "pt"})
    return {"path": str(to)}


def middle(values: Sequence[float]) -> float:
    """The median."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
