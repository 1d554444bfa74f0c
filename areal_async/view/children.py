"""Children that do for the view what would keep its loop for long.

What always holds: a child has the lowest priority, and is gone when whoever wanted it leaves, however that happens.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

NICENESS: Final = 19
SAID_BYTES: Final = 4_000  # of its stderr
LINE_BYTES: Final = 1 << 20


@contextlib.asynccontextmanager
async def child(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """environment: None: this one. It is gone when this is left, however that happens."""
    pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    started = await asyncio.create_subprocess_exec(
        *command, stdin=none, stdout=pipe, stderr=pipe, limit=LINE_BYTES, env=environment
    )
    try:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, started.pid, NICENESS)
        yield started
    finally:
        if started.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                started.kill()
        await started.wait()


async def last_words(stream: asyncio.StreamReader) -> str:
    """The last line of what it said."""
    said = b""
    while some := await stream.read(SAID_BYTES):
        said = (said + some)[-SAID_BYTES:]
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
