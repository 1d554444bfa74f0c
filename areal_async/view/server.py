"""The view's server: routes, who may ask them, and what goes with every answer.

What always holds: it only reads (GET and HEAD); every answer, errors too, has the security headers; whoever lacks the
token, or asks for a host that isn't this machine, gets nothing of a run; an error is one line of JSON, and no error of
one run keeps another from being shown.
"""

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import msgspec
from aiohttp import web

from areal_async.errors import ArealError
from areal_async.view.files import FAST, INDEX, Files, pack
from areal_async.view.run import Run
from areal_async.view.runs import RunFolders
from areal_async.view.token import Access

logger = logging.getLogger("areal_async")

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADERS: Final = {
    # Plotly sets styles of elements; pictures of figures are saved as data and blobs
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
PACKED_FROM_BYTES: Final = 1 << 12


class Server:
    """Answers for these runs. Made in a running loop."""

    def __init__(self, folders: RunFolders, access: Access) -> None:
        self._folders = folders
        self._access = access
        self._files = Files()
        self._open: dict[str, Run] = {}

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded])
        run = "/api/runs/{run}"
        app.add_routes([
            web.get("/", self._page),
            web.get("/static/{name}", self._static),
            web.get("/api/runs", self._runs),
            web.get("/api/figures", self._figures),
            web.get(f"{run}/overview", self._overview),
            web.get(f"{run}/config", self._config),
        ])  # fmt: skip
        return app

    # ------------------------------------------------------------------------------------------------------- answers

    async def _page(self, request: web.Request) -> web.Response:
        return await self._file(request, INDEX)

    async def _static(self, request: web.Request) -> web.Response:
        return await self._file(request, request.match_info["name"])

    async def _runs(self, request: web.Request) -> web.Response:
        return await _json(request, await self._folders.rows())

    async def _figures(self, request: web.Request) -> web.Response:
        return await _json(request, [])

    async def _overview(self, request: web.Request) -> web.Response:
        return await _json(request, await self._run(request).overview(int(request.query.get("since", "0"))))

    async def _config(self, request: web.Request) -> web.Response:
        return web.Response(text=self._run(request).config())

    def _run(self, request: web.Request) -> Run:
        key = request.match_info["run"]
        folder = self._folders.folder(key)
        if folder is None:
            raise web.HTTPNotFound(text=f"there is no run {key!r}")
        return self._open.setdefault(key, Run(folder, key))

    async def _file(self, request: web.Request, name: str) -> web.Response:
        """A file of the page; 304 where the browser has it."""
        file = self._files.file(name)
        if file is None:
            raise web.HTTPNotFound(text=f"the page has no file {name!r}")
        headers = {"ETag": f'"{file.version}"', "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if any(tag.value in (file.version, "*") for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        body = file.body
        if _takes_gzip(request):
            body = await file.packed()
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, content_type=file.kind, charset="utf-8", headers=headers)

    # -------------------------------------------------------------------------------------------------------- guard

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await self._answer(request, handler)
        response.headers.update(HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _refusal(error.status, error.text or error.reason)
        except ArealError as error:
            return _refusal(404, str(error))


def _takes_gzip(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "")


async def _json(request: web.Request, answer: object) -> web.Response:
    body = msgspec.json.encode(answer)
    headers = {"Vary": "Accept-Encoding"}
    if len(body) >= PACKED_FROM_BYTES and _takes_gzip(request):
        body = await pack(body, FAST)
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=body, content_type="application/json", headers=headers)


def _refusal(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=json.dumps({"error": text}).encode(), content_type="application/json")
