"""Real DeepSpeed ranks that come over TCP: torchrun, `areal-async worker trainer`, a shared folder for the weights."""

import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors import safe_open

from areal_async.controller.remote_ranks import write_connection
from areal_async.errors import WireError
from areal_async.messages import Hello, JoinServers, Probe, ProbeResult, Publish, Published, StepDone
from areal_async.wire.router import Router

from .processes import DEADLINE_S, process
from .world import CONFIGS, make_batch, save_tiny_model, spec_for

pytestmark = pytest.mark.slow

SECRET = "8f2d-secret-of-the-test"
RANKS = 2


def content(location: str) -> tuple[set[str], int]:
    with safe_open(location, framework="pt") as weights:
        return set(weights.keys()), Path(location).stat().st_size


async def test_two_ranks_over_tcp_train_and_publish(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", CONFIGS["qwen2, tied"])
    spec = spec_for(model, transport="disk", publish_folder=str(tmp_path / "weights"), shm_prefix="areal-t")
    hellos: dict[str, Hello] = {}
    here = asyncio.Event()

    def joined(hello: Hello) -> None:
        hellos[hello.name] = hello
        if len(hellos) == RANKS:
            here.set()

    with tempfile.TemporaryDirectory(prefix="aa-") as short:
        local = f"ipc://{short}/w"
        async with Router(local, SECRET, joined, lambda *_: None, listen="tcp://127.0.0.1:0") as router:
            path = write_connection(tmp_path, router, SECRET, RANKS, spec)
            argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            argv += ["-m", "areal_async", "worker", "trainer", "--connect", str(path)]
            async with process(argv, {}) as child:
                errors = asyncio.create_task(child.stderr.read())
                async with asyncio.timeout(DEADLINE_S):
                    await here.wait()
                seen = [word for one in psutil.Process(child.pid).children(recursive=True) for word in one.cmdline()]
                assert not [word for word in seen if SECRET in word]
                assert any("--connection" in word for word in seen), "the process has become the rank"

                async def ask(message: object, arrays: list[list[object]], id: str) -> list[object]:
                    asked = (
                        router.request(f"trainer.{rank}", message, arrays[rank], id=id, deadline_s=DEADLINE_S)
                        for rank in range(RANKS)
                    )
                    return [answer for answer, _ in await asyncio.gather(*asked)]

                train, arrays = make_batch(samples=8, minibatches=2, ranks=RANKS, per_micro=2)
                done = await ask(train, arrays, "train 0")
                assert [(d.step, d.skipped) for d in done if isinstance(d, StepDone)] == [(0, "")] * RANKS
                published, _ = await ask(Publish(version=1, branch=0), [[], []], "publish 1")
                assert isinstance(published, Published)
                assert published.location == str(tmp_path / "weights" / "areal-t-v1.safetensors")
                assert content(published.location) == (
                    {p.name for p in hellos["trainer.0"].parameters}, published.nbytes
                )  # fmt: skip
                for rank in range(RANKS):
                    router.goodbye(f"trainer.{rank}")
                assert await child.wait() == 0
                said = (await errors).decode()
    assert SECRET not in said
    assert not list((tmp_path / "weights").iterdir()), "what was published stayed behind"


async def test_a_rank_that_sends_over_nccl_says_that_it_needs_gpus_and_goes_on(tmp_path: Path) -> None:
    """The transport beside the other requests, in a real rank; what NCCL itself does is for tools/gpu."""
    model = save_tiny_model(tmp_path / "model", CONFIGS["llama"])
    spec = spec_for(model, transport="nccl", publish_dtype="bfloat16")
    here = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="aa-") as short:
        async with Router(
            f"ipc://{short}/w", SECRET, lambda _: here.set(), lambda *_: None, "tcp://127.0.0.1:0"
        ) as router:
            path = write_connection(tmp_path, router, SECRET, 1, spec)
            argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
            argv += ["-m", "areal_async", "worker", "trainer", "--connect", str(path)]
            async with process(argv, {}) as child:
                errors = asyncio.create_task(child.stderr.read())
                async with asyncio.timeout(DEADLINE_S):
                    await here.wait()
                published, _ = await router.request(
                    "trainer.0", Publish(version=0, branch=0), id="publish 0", deadline_s=DEADLINE_S
                )
                assert isinstance(published, Published)
                assert published.location == "nccl:0"
                join = JoinServers(host="127.0.0.1", port=1, world=2)
                with pytest.raises(WireError, match=r"weights\.transport: nccl needs GPUs"):
                    await router.request("trainer.0", join, id="join", deadline_s=DEADLINE_S)
                tokens = [np.arange(5, dtype=np.int32)]
                answer, _ = await router.request("trainer.0", Probe(id="p"), tokens, id="p", deadline_s=DEADLINE_S)
                assert isinstance(answer, ProbeResult)
                router.goodbye("trainer.0")
                assert await child.wait() == 0
                await errors
