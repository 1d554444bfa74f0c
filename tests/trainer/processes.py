"""Children of the trainer's slow tests."""

import asyncio
import os
import signal
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
