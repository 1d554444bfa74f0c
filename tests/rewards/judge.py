"""A judge for the reward `http` that fails in every way a server can, and keeps books of what it was asked."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Asked:
    form: dict[str, object]
    headers: dict[str, str]
    port: int
    at: float


@dataclass
class Books:
    """asked: every request that came, in order. written: bytes of the endless answer."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    written: int = 0
    release: threading.Event = field(default_factory=threading.Event)

    def count(self) -> Counter[object]:
        return Counter(asked.form["id"] for asked in self.asked)


class Server:
    """Does what a check's `answer` says: `503 503 right`, one word for each time that its id is asked."""

    def __init__(self, books: Books) -> None:
        self._books = books

    async def judge(self, request: web.Request) -> web.StreamResponse:
        form = json.loads(await request.read())
        peer = request.transport.get_extra_info("peername") if request.transport else ("", 0)
        before = self._books.count()[form["id"]]
        self._books.asked.append(Asked(form, dict(request.headers), peer[1], time.monotonic()))
        words = form["answer"].split()
        word, _, value = words[min(before, len(words) - 1)].partition(":")
        return await self._do(word, value, request)

    async def _do(self, word: str, value: str, request: web.Request) -> web.StreamResponse:
        match word:
            case "sleep":
                await asyncio.sleep(float(value))
                return web.json_response({"reward": 1})
            case "hang":
                while not self._books.release.is_set():  # noqa: ASYNC110 - set by another thread
                    await asyncio.sleep(0.01)
                return web.json_response({"reward": 1})
            case "reset":
                assert request.transport
                request.transport.abort()
                return web.Response()
            case "half":
                return await self._stream(request, [b'{"reward": '], length=100)
            case "endless":
                return await self._stream(request, endless())
            case "raw":
                return web.Response(text=value, content_type="application/json")
            case "later":
                return web.Response(status=429, headers={"Retry-After": value.replace("_", " ")})
            case "moved":
                return web.Response(status=307, headers={"Location": "/elsewhere"})
            case "given":
                return web.json_response({"reward": float(value), "reason": "as I see it", "model": "mine"})
            case "verdict":
                return web.json_response({"verdict": value, "reason": "said so", "extracted": "42"})
            case status:
                return web.Response(status=int(status), text="the\n  server says why" + "!" * 1000)

    async def _stream(self, request: web.Request, pieces: Iterable[bytes], length: int = 0) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = length or None
        await response.prepare(request)
        for piece in pieces:
            try:
                await response.write(piece)
            except ConnectionError:
                return response
            self._books.written += len(piece)
        assert request.transport
        request.transport.abort()
        return response


def endless() -> Iterator[bytes]:
    yield b'{"reason": "'
    for _ in range(1000):
        yield b"x" * (1 << 18)


@contextmanager
def serving() -> Iterator[Books]:
    """The judge, in a thread of its own."""
    books, started, over = Books(), threading.Event(), threading.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/{path}", Server(books).judge)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        books.url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        started.set()
        while not over.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        await runner.cleanup()

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(asyncio.run, serve())
        started.wait()
        try:
            yield books
        finally:
            books.release.set()
            over.set()
            running.result()
