"""HTTP/1.1 to one server, with as little work per chunk as asyncio allows.

What always holds: as many connections as requests in flight, each with one request at a time; bytes of an answer go to
the caller's function in the callback that received them, without waking a task; a request that ends early (cancelled,
deadline, an error of the caller's function) closes its connection, which the server takes as an abort.

Why not aiohttp: it took 140 µs a request and 40 µs a chunk; the whole controller may take 150 µs a sample. The parser
is httptools (llhttp), as in uvicorn. No redirects, proxies, cookies, compression: a vLLM server uses none of them.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final, TypeAlias, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

KEEP_ALIVE_S: Final = 3.0  # below uvicorn's 5 s, so that no request is written to a connection it is about to close
CONNECT_DEADLINE_S: Final = 10.0  # a server that listens accepts at once; this is for a network's worst moments
QUEUE_FULL_S: Final = 0.005  # a server accepts some thousands a second

Sink: TypeAlias = Callable[[bytes], None]


class Http:
    """Connections to `address`: `unix:PATH`, `http://HOST:PORT` or `https://HOST:PORT`."""

    def __init__(self, address: str) -> None:
        self._address = address
        url = urlsplit(address)
        self._host = "localhost" if url.scheme == "unix" else url.netloc
        self._idle: list[_Connection] = []

    async def send(self, method: str, path: str, body: bytes, sink: Sink) -> tuple[int, bytes]:
        """One request; its status, and the body unless the status is 200: then the body went to `sink`, in pieces.

        Raises OSError (ConnectionError among them) where there is no answer, and whatever `sink` raises.
        """
        connection = self._unused() or await self._connect()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        status, error = await connection.exchange(head.encode("ascii") + body, sink)
        if connection.reusable:
            self._idle.append(connection)
        return status, error

    async def close(self) -> None:
        """Close what is idle; requests in flight are their tasks' to end."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    def _unused(self) -> "_Connection | None":
        """The connection that was used last; older ones have aged and are closed on the way."""
        while self._idle:
            connection = self._idle.pop()
            if connection.fresh:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        url = urlsplit(self._address)
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                if url.scheme == "unix":
                    sock = await _unix_socket(self._address.removeprefix("unix:"))
                    return (await loop.create_unix_connection(_Connection, sock=sock))[1]
                tls = ssl.create_default_context() if url.scheme == "https" else None
                port = url.port or (443 if tls else 80)
                return (await loop.create_connection(_Connection, url.hostname or "", port, ssl=tls))[1]
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {CONNECT_DEADLINE_S:g} s") from error


async def _unix_socket(path: str) -> socket.socket:
    """A connected socket. Where the server's queue of new connections is full (a burst of thousands), the kernel says
    EAGAIN; asyncio takes that for "soon" and hands out a socket that isn't connected. So it is tried again here."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                await asyncio.sleep(QUEUE_FULL_S)
    except BaseException:
        sock.close()
        raise


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = HttpResponseParser(self)
        self._reply: asyncio.Future[tuple[int, bytes]] | None = None
        self._sink: Sink
        self._error_body = b""
        self._lost = False
        self._idle_since_s = 0.0
        self.reusable = False

    @property
    def fresh(self) -> bool:
        return not self._lost and self._loop.time() - self._idle_since_s < KEEP_ALIVE_S

    def close(self) -> None:
        self._transport.close()

    async def exchange(self, request: bytes, sink: Sink) -> tuple[int, bytes]:
        self._sink, self._error_body, self.reusable = sink, b"", False
        self._reply = self._loop.create_future()
        self._transport.write(request)
        try:
            return await self._reply
        finally:
            self._reply = None
            if not self.reusable:
                self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's isn't one by its bases

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(ConnectionError(f"the answer isn't HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._fail(error or ConnectionResetError("the server closed the connection"))

    # httptools' callbacks

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._error_body += body
            return
        try:
            self._sink(body)
        except Exception as error:  # handed to the task that waits; in here it would be lost in the parser
            self._fail(error)

    def on_message_complete(self) -> None:
        if self._reply is None or self._reply.done():
            return
        status = self._parser.get_status_code()
        # After a 500 uvicorn hangs up; the next request, one of a swap perhaps, must not run into that.
        self.reusable = status == 200 and self._parser.should_keep_alive() and not self._lost
        self._idle_since_s = self._loop.time()
        self._reply.set_result((status, self._error_body))

    def _fail(self, error: Exception) -> None:
        self.reusable = False
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
