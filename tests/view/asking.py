"""Asks the view's server in a test, and holds it to what every answer must have."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import msgspec
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from areal_async.view import api
from areal_async.view.opened import OpenRuns
from areal_async.view.runs import RunFolders
from areal_async.view.server import HEADERS, Server
from areal_async.view.token import Access


class Asked:
    """client: of the server. opened: its runs."""

    def __init__(self, client: TestClient, runs: OpenRuns) -> None:  # type: ignore[type-arg]
        self.client = client
        self.runs = runs

    async def get(self, path: str, **headers: str) -> ClientResponse:
        return await self.client.get(path, headers=headers, allow_redirects=False)

    async def error(self, path: str, status: int, **headers: str) -> str:
        """The one line of an answer that is an error."""
        answer = await self.get(path, **headers)
        said = await answer.json()
        assert (answer.status, list(said)) == (status, ["error"]), said
        assert HEADERS.items() <= dict(answer.headers).items()
        assert "\n" not in said["error"]
        return str(said["error"])

    async def overview(self, key: str, since: int = 0) -> api.Overview:
        answer = await self.get(f"/api/runs/{quote(key, safe='')}/overview?since={since}")
        assert answer.status == 200, await answer.text()
        return msgspec.json.decode(await answer.read(), type=api.Overview)

    async def read(self, key: str) -> api.Overview:
        """When all of its log was read."""
        async with asyncio.timeout(60):
            seen = await self.overview(key)
            while not seen.reading.done:
                await asyncio.sleep(0.005)
                seen = await self.overview(key)
        return seen


@contextlib.asynccontextmanager
async def asking(path: Path, rights: Access | None = None) -> AsyncIterator[Asked]:
    place = path.parent / "place"
    place.mkdir(exist_ok=True)
    async with asyncio.TaskGroup() as tasks:
        runs = OpenRuns(RunFolders(path), tasks, place)
        server = Server(runs, rights or Access("127.0.0.1", ""))
        try:
            async with TestClient(TestServer(server.application())) as client:
                yield Asked(client, runs)
        finally:
            runs.close()
    assert list(place.iterdir()) == []
