"""Children of the trainer's slow tests."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 150.0


@asynccontextmanager
async def process(argv: list[str], env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child and all that it starts, ended at the latest with the block."""
    child = await asyncio.create_subprocess_exec(
        *argv,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | env,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
            await child.communicate()


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", module, *arguments]


def run_to_the_end(argv: list[str]) -> None:
    """Fails with the end of its stderr unless it ends well, in time."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as child:
        try:
            _, stderr = child.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            child.terminate()  # torchrun ends its ranks, which have sessions of their own
            _, stderr = child.communicate()
    assert child.returncode == 0, stderr[-4000:]
