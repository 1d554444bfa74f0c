"""HTTP to one server, over aiohttp.

What always holds: as many connections as requests in flight; no timeout of the library's own cuts an answer (whoever
calls has deadlines); a request that ends early (cancelled, deadline, an error of the caller's function) closes its
connection, which a vLLM server takes as an abort; a call that isn't an answer has a connection of its own, since
uvicorn hangs up after a 500 and aiohttp has the connection back in its pool before anybody could stop it.
"""

import asyncio
import errno
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import aiohttp

KEEP_ALIVE_S: Final = 3.0  # below uvicorn's 5 s, so that no request is written to a connection it is about to close
CONNECT_DEADLINE_S: Final = 10.0  # a server that listens accepts at once; this is for a network's worst moments
QUEUE_FULL_S: Final = 0.005  # a server accepts some thousands a second
READ_BUFFER_BYTES: Final = 1 << 18  # a chunk of many tokens is read at once

ONE_CALL: Final = {"Connection": "close"}

_QUEUE_FULL: Final = frozenset({errno.EAGAIN, errno.ENOTCONN})

Sink: TypeAlias = Callable[[bytes], None]


class Http:
    """Connections to `address`: `unix:PATH`, `http://HOST:PORT` or `https://HOST:PORT`. Made in a running loop."""

    def __init__(self, address: str) -> None:
        connector: aiohttp.BaseConnector
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            connector = aiohttp.UnixConnector(path, limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._base = "http://localhost"
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._base = address.rstrip("/")
        # total=None: aiohttp's own limit of 300 s is far below the length of some answers
        timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=CONNECT_DEADLINE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers={"Content-Type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def send(self, path: str, body: bytes, sink: Sink) -> tuple[int, bytes]:
        """Post for an answer; its status, and the body unless the status is 200: then it went to `sink`, in pieces.

        Raises OSError (ConnectionError among them) where there is no answer, and whatever `sink` raises.
        """
        return await self._until_sent("POST", path, body, sink, {})

    async def ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """One of the rare calls, on a connection of its own; status and body. Raises as `send`."""
        pieces: list[bytes] = []
        status, error = await self._until_sent(method, path, body, pieces.append, ONE_CALL)
        return status, error or b"".join(pieces)

    async def close(self) -> None:
        await self._session.close()

    async def _until_sent(
        self, method: str, path: str, body: bytes, sink: Sink, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while True:
            try:
                return await self._send(method, path, body, sink, headers)
            except aiohttp.ClientOSError as error:
                if not _never_sent(error) or loop.time() - begun > CONNECT_DEADLINE_S:
                    raise
                await asyncio.sleep(QUEUE_FULL_S)
            except TimeoutError as error:  # aiohttp's, of connecting; deadlines of callers arrive as cancellations
                raise ConnectionError(f"no connection within {CONNECT_DEADLINE_S:g} s") from error
            except aiohttp.ClientError as error:
                raise ConnectionError(f"{type(error).__name__}: {error}") from error

    async def _send(
        self, method: str, path: str, body: bytes, sink: Sink, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        if self._session.closed:
            raise ConnectionError("its connections have been closed: the server was given up")
        async with self._session.request(method, self._base + path, data=body or None, headers=headers) as response:
            try:
                if response.status != 200:
                    return response.status, await response.read()
                async for piece in response.content.iter_any():
                    sink(piece)
            except BaseException:
                response.close()  # in the middle of an answer: hang up, don't drain
                raise
        return 200, b""


def _never_sent(error: aiohttp.ClientOSError) -> bool:
    """Whether the server can't have seen the request, because the socket's queue of new connections was full.

    A burst of thousands fills a Unix socket's queue. The kernel says EAGAIN then; asyncio takes that for "soon" and
    hands out a socket that isn't connected, which fails at the first write.
    """
    return error.errno in _QUEUE_FULL or isinstance(error.__cause__, aiohttp.ClientConnectionResetError)
