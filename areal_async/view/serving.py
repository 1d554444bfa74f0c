"""Listens, and ends in order: the server as a program.

What always holds: the port is taken before anything of a run is read; when it ends, no task, file or folder of it is
left; SIGINT, SIGTERM and SIGHUP (its terminal is closed) end it.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from areal_async.errors import ConfigError
from areal_async.view.opened import OpenRuns
from areal_async.view.place import scratch
from areal_async.view.runs import RunFolders
from areal_async.view.server import Server
from areal_async.view.token import Access

LEAVE_S: Final = 0.5  # for answers that are under way
LISTENS: Final = "0A"  # in /proc/net/tcp
COMMAND: Final = 120  # characters of another process's command line


async def serve(folders: RunFolders, access: Access, port: int, ready: Callable[[int], None]) -> None:
    """Until a signal ends it. ready: told of the port. Errors: ConfigError: it can't listen there."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    async with listening(folders, access, port) as bound:
        ready(bound)
        await ended.wait()


@contextlib.asynccontextmanager
async def listening(folders: RunFolders, access: Access, port: int) -> AsyncIterator[int]:
    """Answers until it is left. The port; errors: ConfigError: it can't listen there."""
    with _taken(access.host, port) as taken, scratch() as place:
        async with asyncio.TaskGroup() as tasks:
            runs = OpenRuns(folders, tasks, place)
            app = Server(runs, access).application()
            runner = web.AppRunner(  # who goes away isn't worked for any more
                app, access_log=None, logger=_http_log(), shutdown_timeout=LEAVE_S, handler_cancellation=True
            )
            await runner.setup()
            try:
                await web.SockSite(runner, taken).start()
                yield taken.getsockname()[1]
            finally:
                await runner.cleanup()
                runs.close()


def _http_log() -> logging.Logger:
    """aiohttp's own, without what others have sent that is no HTTP: their business, and anybody can send it."""
    log = logging.getLogger("areal_async.view.http")
    log.addFilter(_is_ours)
    return log


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def _taken(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"command line: view: {_why_not(host, port, error)}") from None


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: is in use{holder(port)}; `--port 0` takes any that is free"
    if error.errno == errno.EACCES:
        return f"--port {port}: only root may take it; from 1024 on anybody may"
    why = (error.strerror or str(error)).partition(" (while")[0]  # create_server adds the address
    return f"--host {host}: can't be listened on: {why}; leave it out for this machine alone"


def holder(port: int) -> str:
    """` by pid 7 (areal-async view runs)`: who listens on the port of this machine; "" where it can't be known."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            if any(os.readlink(file) in sockets for file in folder.iterdir()):
                command = (folder.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f" by pid {folder.parent.name} ({command[:COMMAND]})"
    return ""


def _listening(port: int) -> set[str]:
    """Inodes of sockets."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found
