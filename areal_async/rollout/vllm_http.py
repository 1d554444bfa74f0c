"""A vLLM server as seen from the controller: HTTP over a Unix socket or a URL.

What always holds: every status is read and every call has a deadline; nothing is sent twice from here (whoever calls
decides, by `RequestFailed.retryable`); there are as many connections as requests in flight; an answer that broke off
gives its tokens in `StreamBroken.partial`; closing the stream (a deadline, a cancelled task) makes vLLM abort the
request.

It doesn't choose servers, count attempts or fit prompts: `rollout.session` does. A token id outside the vocabulary
must never be sent: it kills a vLLM 0.32 server that was started without a tokenizer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Final, Self

import msgspec
import numpy as np

from areal_async.messages import Version
from areal_async.rollout.answer import Answer
from areal_async.rollout.http import Http
from areal_async.rollout.pulse import Errors
from areal_async.rollout.types import (
    Completion,
    RequestFailed,
    Sampling,
    SwapFailed,
    SwapStage,
    SwapTimes,
    Tokens,
    WeightsDiffer,
)

CONTROL_DEADLINE_S: Final = 30.0  # short calls; a pause waits for the forward pass that runs, a long prefill at most
UPDATE_DEADLINE_S: Final = 600.0  # loading weights: memory bandwidth, but hundreds of gigabytes are possible
BODY_IN_ERROR_CHARS: Final = 2000  # a 500's body holds the reason, sometimes with a whole traceback
RETRYABLE_4XX: Final = frozenset({408, 429})
ENGINE_ID_PREFIX: Final = "generate-tokens-"  # vLLM puts it before the request ids of /inference/v1/generate

GENERATE: Final = "/inference/v1/generate"

# Words that tell one refusal from another: vLLM 0.32 answers 500 to all of them.
UPDATE_OPEN: Final = "already active"  # to /start_weight_update
NO_UPDATE_OPEN: Final = "without a matching start_weight_update"  # to /finish_weight_update
FILE_DIFFERS: Final = "Start server and trainer from the same model"  # of our plug-in: engines.vllm.manifest.compare


class VllmClient:
    """One server. Use as `async with VllmClient("0", "unix:/run/…/server-0.sock") as client:`.

    name: for messages. address: `unix:PATH` or `http://HOST:PORT`. ended: answers that have ended so far, well or not.
    errors: of the server's own, for whoever watches it.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._http = Http(address)
        self._encode = msgspec.json.Encoder().encode
        self._running: dict[str, tuple[Answer, asyncio.Timeout]] = {}
        self._hung_up = ""
        self._tokens_ended = 0
        self.ended = 0
        self.errors = Errors()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections; nothing if that is done."""
        await self._http.close()

    # ------------------------------------------------------------------------------------------------- answers

    async def generate(
        self, token_ids: Sequence[int] | Tokens, sampling: Sampling, request_id: str, deadline_s: float
    ) -> Completion:
        """One answer to the prompt `token_ids`.

        request_id: unique at this server, a new one for each attempt. deadline_s: seconds from now.
        Raises StreamBroken with what had arrived; RequestFailed for an HTTP error or an answer that can't be right.
        """
        return (await self.answer(token_ids, sampling, request_id, deadline_s)).completion()

    async def answer(
        self, token_ids: Sequence[int] | Tokens, sampling: Sampling, request_id: str, deadline_s: float
    ) -> Answer:
        """As `generate`, before the versions are read: at a handshake the server has no version of this run yet."""
        answer = Answer(self.name, request_id)
        if self._hung_up:
            raise answer.broken(self._hung_up)
        body = self._encode(_request(token_ids, sampling, request_id))
        status, why = 200, b""
        try:
            async with asyncio.timeout(deadline_s) as limit:
                self._running[request_id] = answer, limit
                status, why = await self._http.send(GENERATE, body, answer.feed)
        except TimeoutError as error:
            if not answer.finished:
                raise answer.broken(self._hung_up or f"its deadline of {deadline_s:g} s passed") from error
        except OSError as error:
            if not answer.finished:
                if not answer.length:
                    self.errors.failed(f"{type(error).__name__}: {error}")
                raise answer.broken(f"{type(error).__name__}: {error}") from error
        finally:
            self._running.pop(request_id, None)
            self.ended += 1
            self._tokens_ended += answer.length
        if status != 200:
            refused = self._refused(GENERATE, status, why)
            if status >= 500:
                self.errors.failed(str(refused))
            raise refused
        if not answer.finished:
            raise answer.broken("the stream ended without a finish reason")
        return answer

    async def generate_whole(self, request: object, deadline_s: float) -> bytes:
        """The server's answer to a request that isn't streamed, as it came (`rollout.given_tokens` reads it)."""
        return await self._call("POST", GENERATE, self._encode(request), deadline_s)

    @property
    def running(self) -> int:
        """Answers that are waited for."""
        return len(self._running)

    @property
    def tokens(self) -> int:
        """That have arrived, of all answers so far, those that still grow included."""
        return self._tokens_ended + sum(answer.length for answer, _ in self._running.values())

    def tokens_so_far(self, request_id: str) -> int:
        """How many tokens of a running answer have arrived; 0 if there is none with this id."""
        running = self._running.get(request_id)
        return running[0].length if running is not None else 0

    def hang_up(self, why: str) -> None:
        """The server can't be used any more: its answers break off now, with what had arrived, and there are no new
        ones."""
        self._hung_up = why
        now = asyncio.get_running_loop().time()
        for _, limit in self._running.values():
            if not limit.expired():
                limit.reschedule(now)

    async def abort(self, request_id: str) -> None:
        """End a request whose connection may still be open somewhere; an unknown id is no error."""
        await self._post("/inference/v1/abort_requests", {"request_ids": [ENGINE_ID_PREFIX + request_id]})

    async def abort_all(self) -> None:
        """End every request at this server, whoever sent it."""
        await self._post("/abort_requests", {})

    # ------------------------------------------------------------------------------------------------- weights

    async def check_weights(self, info: Mapping[str, str]) -> None:
        """Compare the file of `info` (as for `update_weights`) with the server's model; nothing is loaded.

        Raises WeightsDiffer that names the parameters that differ; RequestFailed where they couldn't be compared.
        """
        try:
            await self._post("/init_weight_transfer_engine", {"init_info": dict(info)})
        except RequestFailed as error:
            if FILE_DIFFERS in str(error):
                raise WeightsDiffer(str(error), status=error.status, retryable=False) from error
            raise

    async def world_size(self) -> int:
        """Workers of the server: tensor, pipeline and data parallel ones."""
        return msgspec.json.decode(await self._get("/get_world_size"), type=_WorldSize).world_size

    async def join_transfer(self, info: Mapping[str, object], deadline_s: float) -> None:
        """Have all workers join a communicator (transport nccl); answers when all of its ranks are there."""
        await self._call("POST", "/init_weight_transfer_engine", self._encode({"init_info": info}), deadline_s)

    async def leave_transfer(self) -> None:
        """Have them leave the communicator that they are in; no error if there is none."""
        await self._post("/shutdown_weight_transfer_engine")

    async def pause(self) -> None:
        """Freeze running answers and drop their KV cache: it is rebuilt under whatever weights are there then."""
        await self._post("/pause?mode=keep&clear_cache=true")

    async def start_weight_update(self) -> None:
        """Open the layers. From here on the server must not be resumed unless `finish_weight_update` succeeded."""
        await self._post("/start_weight_update")

    async def update_weights(self, info: Mapping[str, object], deadline_s: float = UPDATE_DEADLINE_S) -> None:
        """Load weights; info: of the transfer engine, `{"path": …}` for a file."""
        await self._call("POST", "/update_weights", self._encode({"update_info": dict(info)}), deadline_s)

    async def finish_weight_update(self, version: Version, deadline_s: float = UPDATE_DEADLINE_S) -> None:
        """Close the layers, which packs what is still unpacked; tokens are labelled `version` from now on."""
        body = self._encode({"weight_version": str(version)})
        await self._call("POST", "/finish_weight_update", body, deadline_s)

    async def close_layers(self) -> None:
        """Leave no layer open, whatever was loaded into them: the next update loads all of them anew.

        After an update that failed vLLM says that none is active, and leaves the layers open; an update that is begun
        and finished without weights closes them.
        """
        try:
            await self.start_weight_update()
        except RequestFailed as error:
            if UPDATE_OPEN not in str(error):
                raise
        await self._post("/finish_weight_update", {"weight_version": None})

    async def label_weights(self, version: Version) -> None:
        """Call the weights that the server was started with `version`; tokens are labelled so from now on."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def resume(self) -> None:
        """Let frozen answers go on."""
        await self._post("/resume")

    async def is_paused(self) -> bool:
        return msgspec.json.decode(await self._get("/is_paused"), type=_Paused).is_paused

    async def weight_version(self) -> str:
        """The label of the server's weights; "default" until it was given a version."""
        return msgspec.json.decode(await self._get("/weight_info"), type=_WeightInfo).weight_version

    async def swap(self, version: Version, info: Mapping[str, str], deadline_s: float = UPDATE_DEADLINE_S) -> SwapTimes:
        """Give the server the weights of `version` in the middle of its answers.

        Raises SwapFailed. A failure before the update began is followed by resume. After it the server is never
        resumed: its layers may be half-loaded under the old label. A cancelled swap leaves it as it is, paused.
        """
        steps: list[tuple[SwapStage, Callable[[], Awaitable[None]]]] = [
            ("pause", self.pause),
            ("start", self.start_weight_update),
            ("update", lambda: self.update_weights(info, deadline_s)),
            ("finish", lambda: self.finish_weight_update(version, deadline_s)),
            ("resume", self.resume),
        ]
        times = []
        for stage, call in steps:
            begun = perf_counter()
            try:
                await call()
            except RequestFailed as error:
                raise await self._swap_failed(version, stage, error) from error
            times.append(perf_counter() - begun)
        return SwapTimes(*times)

    async def _swap_failed(self, version: Version, stage: SwapStage, error: RequestFailed) -> SwapFailed:
        usable = stage == "pause" or (stage == "start" and error.status is not None and await self._nothing_open())
        fate = "It goes on under its old weights."
        if usable:
            try:
                await self.resume()
            except RequestFailed as second:
                usable, fate = False, f"It could not be resumed either ({second}); it must be restarted."
        elif stage == "resume":
            fate = "It has the new weights and stands still; it must be restarted."
        else:
            fate = "Its layers may be half-loaded: it stays paused and must be restarted."
        return SwapFailed(
            f"server {self.name} could not take version {version}, at the stage {stage!r}: {error} {fate}",
            version=version, stage=stage, server_usable=usable,
        )  # fmt: skip

    async def _nothing_open(self) -> bool:
        """Whether no update is open, after the server has refused to begin one. Only its own words count. (An engine
        that fails while it opens the layers counts as closed too; it can't compute then, and dies at the next token.)

        Where one was open, by whatever hand, it has been closed with weights missing: the server must be restarted.
        """
        try:
            await self._post("/finish_weight_update", {"weight_version": None})
        except RequestFailed as error:
            return NO_UPDATE_OPEN in str(error)
        return False

    # ------------------------------------------------------------------------------------------------ questions

    async def health(self, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Raises RequestFailed unless the server says that it is well."""
        await self._call("GET", "/health", b"", deadline_s)

    async def server_info(self) -> "ServerInfo":
        """What the server was started with (a development route)."""
        return msgspec.json.decode(await self._get("/server_info?config_format=json"), type=ServerInfo)

    async def takes_token(self, token_id: int) -> bool:
        """Whether `token_id` is an entry of the server's output layer. Asked by a logit bias of 0, which vLLM checks
        before anything is computed; as a prompt token an id outside the vocabulary would kill the server."""
        params = {"max_tokens": 1, "detokenize": False, "logit_bias": {str(token_id): 0.0}}
        try:
            await self._post(GENERATE, {"token_ids": [0], "sampling_params": params})
        except RequestFailed as error:
            if error.status == 400 and "out-of-vocab" in str(error):
                return False
            raise
        return True

    async def _get(self, path: str) -> bytes:
        return await self._call("GET", path, b"", CONTROL_DEADLINE_S)

    async def _post(self, path: str, body: object = None) -> bytes:
        return await self._call("POST", path, b"" if body is None else self._encode(body), CONTROL_DEADLINE_S)

    async def _call(self, method: str, path: str, body: bytes, deadline_s: float) -> bytes:
        try:
            async with asyncio.timeout(deadline_s):
                status, answer = await self._http.ask(method, path, body)
        except TimeoutError as error:
            raise RequestFailed(
                f"server {self.name} did not answer {path} within {deadline_s:g} s", status=None, retryable=True
            ) from error
        except OSError as error:
            raise RequestFailed(
                f"server {self.name} ({self.address}) can't be reached for {path}: {type(error).__name__}: {error}",
                status=None, retryable=True,
            ) from error  # fmt: skip
        if status != 200:
            raise self._refused(path, status, answer)
        return answer

    def _refused(self, path: str, status: int, body: bytes) -> RequestFailed:
        return RequestFailed(
            f"server {self.name} answered {status} to {path}: {_reason(body)}",
            status=status,
            retryable=status >= 500 or status in RETRYABLE_4XX,
        )


class _Paused(msgspec.Struct):
    is_paused: bool


class _WorldSize(msgspec.Struct):
    world_size: int


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _ModelConfig(msgspec.Struct):
    model: str
    dtype: str
    max_model_len: int
    logprobs_mode: str


class _WeightTransfer(msgspec.Struct):
    backend: str


class _VllmConfig(msgspec.Struct):
    model_config: _ModelConfig
    weight_transfer_config: _WeightTransfer | None = None


class ServerInfo(msgspec.Struct):
    """The part of vLLM's `/server_info` that a handshake compares."""

    vllm_config: _VllmConfig


class _SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """vLLM's names. `logprobs` 0 is "of the drawn token"; `ignore_eos`: only our own stop tokens end an answer."""

    n: int = 1
    max_tokens: int
    min_tokens: int = 0
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    logprobs: int
    ignore_eos: bool
    detokenize: bool


class _Request(msgspec.Struct):
    request_id: str
    token_ids: Sequence[int]
    sampling_params: _SamplingParams
    stream: bool


class _ErrorBody(msgspec.Struct):
    message: str


class _Failure(msgspec.Struct):
    error: str | _ErrorBody


def _request(token_ids: Sequence[int] | Tokens, sampling: Sampling, request_id: str) -> _Request:
    return _Request(
        request_id=request_id,
        token_ids=token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids,
        sampling_params=_SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            stop_token_ids=sampling.stop_token_ids,
            seed=sampling.seed,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        ),
        stream=True,
    )


def _reason(body: bytes) -> str:
    """What a server's error body says, for people."""
    try:
        error = msgspec.json.decode(body, type=_Failure).error
    except msgspec.DecodeError:
        text = body.decode(errors="replace")
    else:
        text = error if isinstance(error, str) else error.message
    return text.strip()[:BODY_IN_ERROR_CHARS] or "(an empty body)"
