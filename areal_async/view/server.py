"""The view's server: which addresses there are, who may ask them, and what goes with every answer.

What always holds: it only reads (GET and HEAD); every answer, errors too, has the security headers; whoever lacks the
token, or asks for a host that isn't this machine, gets nothing of a run; an error is one line of JSON, and no error of
one run keeps another from being shown. At most `AT_ONCE` answers, and as many files, are in memory at a time, however
many ask and however slowly they take them.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import msgspec
from aiohttp import web

from areal_async.errors import ArealError, ConfigError
from areal_async.view.figures import FIGURES
from areal_async.view.files import FAST, INDEX, Files, pack
from areal_async.view.opened import OpenRuns
from areal_async.view.questions import Fields, WrongQuestion, sample_query
from areal_async.view.run import NotThere, Run
from areal_async.view.token import VARIABLE, Access

logger = logging.getLogger("areal_async")

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADERS: Final = {
    # Plotly sets styles of elements; pictures of figures are saved as data and blobs
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
PACKED_FROM_BYTES: Final = 1 << 12
AT_ONCE: Final = 32  # answers of 1 MB or so; a page asks for a few at a time
TAKEN_WITHIN_S: Final = 60.0  # whoever is slower than about 20 kB/s is hung up on: others wait for the place
LONGEST_ID: Final = 100  # characters; of a server, which people name, too
WIDTH: Final = 1200  # pixels, where nobody says
WIDTH_MOST: Final = 16_384
LAST_STEP: Final = (1 << 63) - 1
FOR_EVER_S: Final = 1e12
NO_TOKEN: Final = (
    "open the address that `areal-async view` has printed (…/?token=…), or send the token as a bearer; it is the one "
    f"of --token or {VARIABLE}"
)


class Server:
    """Answers for these runs. Made in a running loop."""

    def __init__(self, runs: OpenRuns, access: Access) -> None:
        self._opened = runs
        self._access = access
        self._files = Files()
        self._answers, self._pages = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(AT_ONCE)  # so none waits for both

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded])
        run = "/api/runs/{run}"
        app.add_routes([
            web.get("/", self._page),
            web.get("/static/{name}", self._static),
            web.get("/api/runs", self._runs),
            web.get("/api/figures", self._figures),
            web.get(f"{run}/overview", self._overview),
            web.get(f"{run}/lags", self._lags),
            web.get(f"{run}/timeline", self._timeline),
            web.get(f"{run}/story", self._story),
            web.get(f"{run}/samples", self._samples),
            web.get(f"{run}/samples/{{sample}}", self._sample),
            web.get(f"{run}/peers", self._peers),
            web.get(f"{run}/config", self._config),
        ])  # fmt: skip
        return app

    # ------------------------------------------------------------------------------------------------------- answers

    async def _page(self, request: web.Request) -> web.Response:
        return await self._file(request, INDEX)

    async def _static(self, request: web.Request) -> web.Response:
        return await self._file(request, request.match_info["name"])

    async def _runs(self, request: web.Request) -> web.Response:
        Fields(request.query, ())
        return await _json(request, await self._opened.folders.rows())

    async def _figures(self, request: web.Request) -> web.Response:
        Fields(request.query, ())
        return await _json(request, FIGURES)

    async def _overview(self, request: web.Request) -> web.Response:
        since = Fields(request.query, ("since",)).whole("since", 0)
        return await _json(request, await self._run(request).overview(since))

    async def _lags(self, request: web.Request) -> web.Response:
        fields = Fields(request.query, ("from", "to"))
        begin, end = fields.whole("from", 0), fields.whole("to", LAST_STEP)
        return await _json(request, await self._run(request).lags(begin, end))

    async def _timeline(self, request: web.Request) -> web.Response:
        fields = Fields(request.query, ("from", "to", "width", "open"))
        begin, end = fields.number("from", 0.0), fields.number("to", FOR_EVER_S)
        if end <= begin:
            raise WrongQuestion(f"to: {end:g} is not after from ({begin:g})")
        width = min(fields.whole("width", WIDTH, least=1), WIDTH_MOST)
        opened = [name for name in fields.text("open").split(",") if name] if "open" in request.query else None
        return await _json(request, await self._run(request).timeline(begin, end, width, opened))

    async def _story(self, request: web.Request) -> web.Response:
        about = Fields(request.query, ("id",)).text("id")
        if not about:
            raise WrongQuestion("id: is missing; name a sample (12.3), a group (12), `step 6`, `server 0`, trainer …")
        _check_id(about)
        return await _json(request, await self._run(request).story(about))

    async def _samples(self, request: web.Request) -> web.Response:
        return await _json(request, await self._run(request).samples(sample_query(request.query)))

    async def _sample(self, request: web.Request) -> web.Response:
        Fields(request.query, ())
        name = request.match_info["sample"]
        _check_id(name)
        return await _json(request, await self._run(request).sample(name))

    async def _peers(self, request: web.Request) -> web.Response:
        Fields(request.query, ())
        return await _json(request, await self._run(request).peers())

    async def _config(self, request: web.Request) -> web.Response:
        Fields(request.query, ())
        return web.Response(text=self._run(request).config())

    def _run(self, request: web.Request) -> Run:
        return self._opened.run(request.match_info["run"])

    async def _file(self, request: web.Request, name: str) -> web.Response:
        """A file of the page; 304 where the browser has it."""
        file = self._files.file(name)
        if file is None:
            raise NotThere(f"{name[:80]!r}: the page has no such file")
        headers = {"ETag": f'"{file.version}"', "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if any(tag.value in (file.version, "*") for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        body = file.body
        if _takes_gzip(request):
            body = await file.packed()
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, content_type=file.kind, charset="utf-8", headers=headers)

    # --------------------------------------------------------------------------------------------------------- guard

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = self._refused(request)
        if refused is not None:
            return _dressed(refused)
        if handler == self._story:  # it waits for its own place
            return _dressed(await _answered(request, handler))
        async with self._pages if handler in (self._page, self._static) else self._answers:
            response = _dressed(await _answered(request, handler))
            await _send(request, response)
        return response

    def _refused(self, request: web.Request) -> web.Response | None:
        """What is answered instead, before anything is looked at; None where the request may be answered."""
        if not self._access.knows_host(request.headers.get("Host", "")):
            return _error(
                403, f"this server is asked as {request.headers.get('Host', '')[:80]!r}; open it as localhost"
            )
        if request.method not in ("GET", "HEAD"):
            return _error(405, f"{request.method[:20]}: this server only shows; GET and HEAD", Allow="GET, HEAD")
        if request.path == "/" and self._access.token and "token" in request.query:
            return self._let_in(request.query["token"])
        if not self._access.lets_in(request.headers, request.cookies):
            return _error(401, NO_TOKEN, **{"WWW-Authenticate": "Bearer"})
        return None

    def _let_in(self, token: str) -> web.Response:
        """The token becomes a cookie, and leaves the address: those are shown, kept and sent on."""
        if not self._access.knows_token(token):
            return _error(401, f"the token in the address is wrong: {NO_TOKEN}")
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._access.cookie, token, httponly=True, samesite="Strict", path="/")
        return response


def _dressed(response: web.StreamResponse) -> web.StreamResponse:
    response.headers.update(HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    return response


async def _send(request: web.Request, response: web.StreamResponse) -> None:
    """Until little of it is left in memory, which aiohttp by itself doesn't wait for."""
    try:
        async with asyncio.timeout(TAKEN_WITHIN_S):
            await response.prepare(request)
            await response.write_eof()
            await asyncio.sleep(0)  # uvloop writes, and finds out how much is left, at the end of its turn
            await request.writer.drain()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # it has gone away
    if isinstance(response, web.Response):
        response.body = None  # aiohttp holds the answer until the connection asks again


def _check_id(text: str) -> None:
    if len(text) > LONGEST_ID or not text.isprintable():
        raise WrongQuestion(f"id: {text[:40]!r} can be none: it is too long, or has characters that no id has")


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The answer, or what went wrong, in one line."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return _error(404, f"{request.path[:80]!r}: there is no such address")
    except web.HTTPException as error:
        return _error(error.status, error.reason)
    except WrongQuestion as error:
        return _error(400, str(error))
    except NotThere as error:
        return _error(404, str(error))
    except ConfigError as error:  # of an id that can be none
        return _error(400, str(error).removeprefix("command line: trace: "))
    except ArealError as error:
        return _error(500, str(error))
    except OSError as error:
        return _error(500, f"{error.filename or 'a file'}: can't be read: {error.strerror or error}")
    except sqlite3.Error as error:
        return _error(500, f"what was read of the run can't be looked through: {error} (its place is TMPDIR)")
    except Exception:  # the others are still shown; whoever started the server has to know
        logger.exception("areal-async view: %s could not be answered", request.path_qs)
        return _error(500, f"{request.path[:80]!r} could not be answered: an error of areal-async; its terminal has it")


def _takes_gzip(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "")


async def _json(request: web.Request, answer: object) -> web.Response:
    body = msgspec.json.encode(answer)
    headers = {"Vary": "Accept-Encoding"}
    if len(body) >= PACKED_FROM_BYTES and _takes_gzip(request):  # also here: it may come through a slow tunnel
        body = await pack(body, FAST)
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=body, content_type="application/json", headers=headers)


def _error(status: int, text: str, **headers: str) -> web.Response:
    body = msgspec.json.encode({"error": " ".join(text.split())})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
