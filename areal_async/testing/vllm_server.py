"""A scripted stand-in for a vLLM server: the routes that are used, answers that can be computed, faults on order.

What always holds: which token comes at a position of an answer depends only on the request's seed, the position and
the version of the "weights" at that moment (`drawn_token`, `drawn_logprob`), so a test knows what must arrive; spans
are exact; the order of weight calls is enforced as by vLLM, and recorded in `calls`; each request is written to the
book, if there is one, before it is answered.

With `answers` it says what they give instead: those of a recorded run (`testing.recorded`).

As a program, in another process: `python -m areal_async.testing.vllm_server --uds PATH [--book FILE] [--orders JSON]
[--recorded LOG [--pace P]]`.
"""

import argparse
import asyncio
import socket
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias

import msgspec
from aiohttp import web

from areal_async.testing.given import Answers, Given, NotGiven

FOREVER_S: Final = 3600.0  # a stalled request ends when its connection does
ENGINE_ID_PREFIX: Final = "generate-tokens-"
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Status(msgspec.Struct, frozen=True, tag=True):
    """Answer with this HTTP status and nothing else."""

    code: int
    reason: str = "by script"


class Break(msgspec.Struct, frozen=True, tag=True):
    """Cut the connection after so many tokens, or before the answer of another route."""

    after_tokens: int = 0


class Stall(msgspec.Struct, frozen=True, tag=True):
    """Say nothing more after so many tokens, for ever."""

    after_tokens: int = 0


class Slow(msgspec.Struct, frozen=True, tag=True):
    """Wait so long before each chunk, or before the answer of another route."""

    seconds: float


class Say(msgspec.Struct, frozen=True, tag=True):
    """After so many tokens, send these bytes and end the stream."""

    after_tokens: int
    raw: bytes


class Well(msgspec.Struct, frozen=True, tag=True):
    """Nothing is wrong with this one: the fault is for a later one."""


Fault: TypeAlias = Status | Break | Stall | Slow | Say | Well


class Order(msgspec.Struct, frozen=True):
    """Requests of `path` fail like this: `times` of them, after `skip` that don't."""

    path: str
    fault: Fault
    skip: int = 0
    times: int = 1


class Entry(msgspec.Struct, frozen=True):
    """A line of the book: what was asked of which server (the name of its socket) while its weights were `label`."""

    server: str
    label: str
    request_id: str
    prompt: list[int]
    max_tokens: int
    seed: int | None
    aborted: bool = False


def drawn_token(seed: int, version: int, position: int, vocab_size: int) -> int:
    """The token at `position` of an answer (counted from 0), drawn by the weights of `version`."""
    return zlib.crc32(f"{seed}/{version}/{position}".encode()) % vocab_size


def drawn_logprob(seed: int, version: int, position: int) -> float:
    """Its log-probability: in [-4, 0), exact in float32."""
    return -(1 + zlib.crc32(f"p{seed}/{version}/{position}".encode()) % 1024) / 256.0


class _Sampling(msgspec.Struct):
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}


class _Request(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _Sampling
    request_id: str = ""
    stream: bool = False


@dataclass
class ScriptedServer:
    """`async with ScriptedServer(path) as server:` listens on a Unix socket until the end of the block.

    token_s: seconds a token. chunk_tokens: tokens a chunk (`--stream-interval`).
    dev_mode, scale_out, logprobs_mode, dtype, backend: how it was "started"; see `rollout.handshake`. book: file that
    an `Entry` is appended to for each request and each abort; several servers may share it. answers: what it says in
    place of what it would draw.
    """

    uds: str
    vocab_size: int = 128
    max_model_len: int = 4096
    token_s: float = 0.0
    chunk_tokens: int = 16
    dev_mode: bool = True
    scale_out: bool = True
    logprobs_mode: str = "processed_logprobs"
    dtype: str = "float32"
    backend: str = "areal_file"
    label: str = "default"
    paused: bool = False
    book: Path | None = None
    answers: Answers | None = None

    calls: list[str] = field(default_factory=list, init=False)
    requests: list[_Request] = field(default_factory=list, init=False)
    open_now: int = field(default=0, init=False)
    open_most: int = field(default=0, init=False)
    _faults: defaultdict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque), init=False)
    _updating: bool = field(default=False, init=False)
    _aborted: set[str] = field(default_factory=set, init=False)
    _running: Counter[str] = field(default_factory=Counter, init=False)

    def order(self, path: str, *faults: Fault) -> None:
        """The next requests of `path` fail like this, one each, in this order; later ones don't."""
        self._faults[path].extend(faults)

    def follow(self, order: Order) -> None:
        self.order(order.path, *[Well()] * order.skip, *[order.fault] * order.times)

    async def __aenter__(self) -> Self:
        self._goes = asyncio.Event()
        self._set_paused(self.paused)
        app = web.Application()
        app.add_routes([web.get(path, self._route(handler)) for path, handler in self._gets().items()])
        app.add_routes([web.post(path, self._route(handler)) for path, handler in self._posts().items()])
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.uds)  # as vLLM does it: a file that is there already, left by a killed server, is an error
        await web.SockSite(self._runner, listener).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def _gets(self) -> dict[str, Handler]:
        routes: dict[str, Handler] = {"/health": self._ok, "/v1/models": self._models}
        development: dict[str, Handler] = {
            "/is_paused": self._is_paused,
            "/weight_info": self._weight_info,
            "/server_info": self._server_info,
            "/get_world_size": self._world_size,
        }
        return routes | development if self.dev_mode else routes

    def _posts(self) -> dict[str, Handler]:
        routes: dict[str, Handler] = {
            "/inference/v1/generate": self._generate,
            "/inference/v1/abort_requests": self._abort,
        }
        development: dict[str, Handler] = {
            "/abort_requests": self._abort,
            "/init_weight_transfer_engine": self._ok,
            "/shutdown_weight_transfer_engine": self._ok,
            "/pause": self._pause,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/resume": self._resume,
            "/update_weight_version": self._label,
        }
        return routes | development if self.dev_mode else routes

    def _route(self, handler: Handler) -> Handler:
        """Record the call, and the faults that any route can have."""

        async def answer(request: web.Request) -> web.StreamResponse:
            self.calls.append(request.path)
            faults = self._faults[request.path]
            match faults[0] if faults else None:
                case Status(code, reason):
                    faults.popleft()
                    return web.json_response({"error": {"message": reason}}, status=code)
                case Slow(seconds) if handler != self._generate:
                    faults.popleft()
                    await asyncio.sleep(seconds)
                case Stall() if handler != self._generate:
                    faults.popleft()
                    await asyncio.sleep(FOREVER_S)
                case Break() if handler != self._generate:
                    faults.popleft()
                    assert request.transport is not None
                    request.transport.abort()
                    return web.Response()
                case Well() if handler != self._generate:
                    faults.popleft()
            return await handler(request)

        return answer

    # weights

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        (self._goes.clear if paused else self._goes.set)()

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _pause(self, request: web.Request) -> web.Response:
        assert dict(request.query) == {"mode": "keep", "clear_cache": "true"}
        self._set_paused(True)
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._set_paused(False)
        return web.json_response({"status": "resumed"})

    async def _start(self, request: web.Request) -> web.Response:
        if self._updating:
            return web.json_response({"error": "a weight update is already active"}, status=500)
        self._updating = True
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        wanted = "names" if self.backend == "nccl" else "path"
        if not self._updating or wanted not in body["update_info"]:
            return web.json_response({"error": "start_weight_update must be called before"}, status=500)
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        if not self._updating:
            reason = "finish_weight_update called without a matching start_weight_update."
            return web.json_response({"error": reason}, status=500)
        self._updating = False
        self.label = (await request.json())["weight_version"] or self.label
        return web.json_response({})

    async def _label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({})

    # questions

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": self.max_model_len}]})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _server_info(self, request: web.Request) -> web.Response:
        model = {
            "model": "scripted",
            "dtype": f"torch.{self.dtype}",
            "max_model_len": self.max_model_len,
            "logprobs_mode": self.logprobs_mode,
        }
        config = {"model_config": model, "weight_transfer_config": {"backend": self.backend}}
        return web.json_response({"vllm_config": config})

    # answers

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await request.json()).get("request_ids") or [ENGINE_ID_PREFIX + name for name in self._running]
        names = [name.removeprefix(ENGINE_ID_PREFIX) for name in ids]
        self._aborted.update(names)
        for name in names:
            self._write(Entry(self._name, self.label, name, [], 0, None, aborted=True))
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return web.json_response({"error": {"message": "scale-out is disabled"}}, status=403)
        body = msgspec.json.decode(await request.read(), type=_Request, strict=False)
        outside = [token for token in body.sampling_params.logit_bias if token >= self.vocab_size]
        if outside:
            reason = f"token_id(s) {outside} in logit_bias contain out-of-vocab token ids"
            return web.json_response({"error": {"message": reason}}, status=400)
        try:
            given = self.answers.answer(body.request_id, body.token_ids) if self.answers is not None else None
        except NotGiven as error:
            return web.json_response({"error": {"message": str(error)}}, status=404)
        self.requests.append(body)
        sampling = body.sampling_params
        self._write(Entry(self._name, self.label, body.request_id, body.token_ids, sampling.max_tokens, sampling.seed))
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        self._running[body.request_id] += 1
        try:
            return await self._stream(request, body, given)
        finally:
            self.open_now -= 1
            self._running -= Counter([body.request_id])

    @property
    def _name(self) -> str:
        return Path(self.uds).stem

    def _write(self, entry: Entry) -> None:
        if self.book is not None:
            with self.book.open("ab", buffering=0) as file:
                file.write(msgspec.json.encode(entry) + b"\n")

    async def _stream(self, request: web.Request, body: _Request, given: Given | None) -> web.StreamResponse:
        faults = self._faults["/inference/v1/generate"]
        fault = faults.popleft() if faults else None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        drawing = _Drawing(body, self.vocab_size, given)
        token_s = self.token_s if given is None else given.seconds / max(1, len(given.token_ids))
        while drawing.finish is None:
            await self._goes.wait()
            match fault:
                case Slow(seconds):
                    await asyncio.sleep(seconds)
                case Stall(after) if drawing.position >= after:
                    await asyncio.sleep(FOREVER_S)
                case Break(after) if drawing.position >= after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                case Say(after, raw) if drawing.position >= after:
                    await response.write(raw)
                    return response
            if body.request_id in self._aborted:
                drawing.finish = "abort"
            tokens = min(self.chunk_tokens, fault.after_tokens) if isinstance(fault, Stall | Break | Say) else None
            await response.write(drawing.chunk(tokens or self.chunk_tokens, self.label))
            await asyncio.sleep(token_s * self.chunk_tokens)
        await response.write(b"data: [DONE]\n\n")
        return response


class _Drawing:
    """One answer as it grows. finish: None while it does."""

    def __init__(self, body: _Request, vocab_size: int, given: Given | None = None) -> None:
        self._given = given
        self._sampling = body.sampling_params
        self._seed = body.sampling_params.seed or 0
        self._vocab_size = vocab_size
        self._spans: list[dict[str, str | int]] = []
        self.position = 0
        self.finish: str | None = None

    def chunk(self, tokens: int, label: str) -> bytes:
        """The next tokens (none if aborted), as vLLM writes them."""
        drawn: list[int] = []
        logprobs: list[float] = []
        version = int(label) if label.isdecimal() else -1
        begin = self.position
        while self.finish is None and len(drawn) < tokens:
            token, logprob = self._next(version)
            drawn.append(token)
            logprobs.append(logprob)
            self.position += 1
            self.finish = self._end(token)
        if self._spans and self._spans[-1]["version"] == label:
            self._spans[-1]["end"] = self.position
        elif drawn:
            self._spans.append({"version": label, "start": begin, "end": self.position})
        content = [
            {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": [{"token_id": t, "logprob": p, "rank": 1}]}
            for t, p in zip(drawn, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": self.finish,
            "stop_reason": None,
            "token_ids": drawn,
            "weight_versions": self._spans if self.finish else None,
            "logprobs": {"content": content},
        }
        return b"data: " + msgspec.json.encode({"request_id": "", "usage": None, "choices": [choice]}) + b"\n\n"

    def _next(self, version: int) -> tuple[int, float]:
        if self._given is not None:
            return self._given.token_ids[self.position], self._given.logprobs[self.position]
        token = drawn_token(self._seed, version, self.position, self._vocab_size)
        return token, drawn_logprob(self._seed, version, self.position)

    def _end(self, token: int) -> str | None:
        if self._given is not None and self.position == len(self._given.token_ids):
            return self._given.finish
        if self._given is None and token in self._sampling.stop_token_ids:
            return "stop"
        return "length" if self.position == self._sampling.max_tokens else None


async def _serve(server: ScriptedServer) -> None:
    async with server:
        await asyncio.Event().wait()


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uds", required=True, help="path of the Unix socket")
    parser.add_argument("--vocab-size", type=int, default=128)
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds a token")
    parser.add_argument("--chunk-tokens", type=int, default=16, help="tokens a chunk")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=4096, help="context, tokens")
    parser.add_argument("--backend", default="areal_file", help="weight transfer engine that it says it has")
    parser.add_argument("--book", type=Path, help="file for what was asked")
    parser.add_argument("--orders", default="[]", help="faults: a JSON list of `Order`s")
    parser.add_argument("--recorded", type=Path, help="log folder of a run whose answers it gives")
    parser.add_argument("--pace", type=float, default=1.0, help="by which recorded durations are multiplied")
    args = parser.parse_args()
    answers: Answers | None = None
    if args.recorded is not None:
        from areal_async.testing.recorded import RecordedRun  # it is made of this module

        answers = RecordedRun(args.recorded, args.pace)
    server = ScriptedServer(
        args.uds, args.vocab_size, args.max_model_len, args.token_s, args.chunk_tokens, dtype=args.dtype,
        backend=args.backend, book=args.book, answers=answers,
    )  # fmt: skip
    for order in msgspec.json.decode(args.orders, type=list[Order]):
        server.follow(order)
    asyncio.run(_serve(server))


if __name__ == "__main__":
    main()
