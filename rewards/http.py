"""The reward `http`: a reward model or a judge behind a URL, asked by the worker itself.

Each check is one POST of JSON, answered by JSON (docs/rewards.md has both forms). A thread with an asyncio loop asks,
so that connections live on between checks; a second one decodes tokens and writes bodies.

What always holds:
- whatever the judge does, the check ends by its deadline, which counts from when it got its place among the
  `http.connections`, and its outcome says what happened;
- no failure of the judge is one of the answer: it is `infrastructure`, never a number, never `timeout`;
- a request is repeated only where nothing can have been done with it: there was no connection, or the judge refused it;
- what is read of an answer is bounded; redirections aren't followed, and proxies of the environment aren't used, so
  that answers and token go nowhere else.
"""

import array
import asyncio
import contextlib
import datetime
import email.utils
import os
import queue
import random
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, NamedTuple, Self

import aiohttp
import msgspec
import yarl

from areal_async.errors import RewardError
from areal_async.messages import HttpOptions, RewardSpec, ScoreResult, ScoreTask
from areal_async.rewards.decoding import Decode, load_decoder
from areal_async.rewards.sums import HTTP, alone, terms, weighed
from areal_async.rewards.verdicts import Outcome, given, result_of

ANSWER_LIMIT_BYTES: Final = 1 << 20  # a judge's reasons are short; one that writes for ever must not fill the memory
HEAD_CHARACTERS: Final = 300  # of an answer that isn't one, for people
WHY_CHARACTERS: Final = 4000
EXTRACTED_CHARACTERS: Final = 1000
KEEP_ALIVE_S: Final = 3.0  # below uvicorn's and node's 5 s, so that no request is written to a connection being closed
BACKOFF_S: Final = 0.25  # before the second try; doubled for each further one, times 0.5 to 1.5
BACKOFF_LIMIT_S: Final = 8.0
END_LIMIT_S: Final = 10.0
REFUSED: Final = frozenset({429, 502, 503, 504})  # these say that nothing was done


class Endpoint(NamedTuple):
    """token: "" if none is sent."""

    url: yarl.URL
    token: str


def endpoint(options: HttpOptions) -> Endpoint:
    """Where to ask. RewardError if the options can't be right; nothing is sent."""
    if options.url is None:
        raise RewardError(
            "reward.http.url is not set; write where answers are sent, such as http://127.0.0.1:8100/score"
        )
    try:
        url = yarl.URL(options.url)
    except ValueError as error:
        raise RewardError(
            f"reward.http.url: {options.url!r} is no URL ({error}); write http://HOST:PORT/PATH"
        ) from None
    if url.scheme not in ("http", "https") or not url.host:
        raise RewardError(f"reward.http.url: {options.url!r} has no host; write http://HOST:PORT/PATH, or https://")
    if url.user is not None or url.password is not None:
        raise RewardError(
            "reward.http.url has a password, which would stand in the run's files; put the token into an environment "
            "variable and name that in reward.http.token_env"
        )
    return Endpoint(url, _token(options.token_env))


def _token(variable: str | None) -> str:
    if variable is None:
        return ""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise RewardError(
            f"reward.http.token_env: there is no {variable} in the environment; export it before the run is started"
        )
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise RewardError(f"reward.http.token_env: what {variable} holds is no bearer token (ASCII without spaces)")
    return token


class Answer(msgspec.Struct, frozen=True):
    """What a judge answers: `reward` or `verdict`, one of the two. Other fields are its own affair."""

    reward: float | None = None
    verdict: Literal["right", "wrong", "no_answer", "bad_data"] | None = None
    reason: str | None = None
    extracted: str | None = None


_ANSWER: Final = msgspec.json.Decoder(Answer)  # takes no NaN and no infinity


class Judge:
    """Has answers judged; a context manager. Entering it raises RewardError if the options can't be right.

    `submit` and `next_result` may be called from two threads, and never wait for the network (`next_result` for a
    result). Each submitted check gets exactly one result, unless `close` comes first.
    """

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        self._endpoint = endpoint(spec.http)
        self._shown = str(self._endpoint.url.with_query(None))  # a query may hold a key, and results are kept
        (self._term,) = (term for term in terms(spec.function) if term.name == HTTP)
        self._alone = alone(terms(spec.function))
        self._results: queue.SimpleQueue[tuple[int, ScoreResult] | None] = queue.SimpleQueue()
        self._started = threading.Event()
        # daemon: a name server that doesn't answer must not hold the worker's end
        self._thread = threading.Thread(target=self._run, name="http rewards", daemon=True)
        self._checks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._closing = False

    def __enter__(self) -> Self:
        self._decode = load_decoder(self._spec.model_path)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise RewardError(f"the thread that asks {self._shown} failed: {self._failure!r}")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, number: int, task: ScoreTask, token_ids: bytes) -> None:
        """Have an answer judged. number: comes back with the result. token_ids: int32 in native order."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: `next_result` says why
            self._loop.call_soon_threadsafe(self._begin, number, task, token_ids)

    def next_result(self) -> tuple[int, ScoreResult] | None:
        """Wait for the next result, in the order of finishing; None once this is closed."""
        found = self._results.get()
        if found is None and self._failure is not None:
            raise RewardError(f"the thread that asks {self._shown} failed") from self._failure
        return found

    def close(self) -> None:
        """Hang up on everything that is being asked."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(END_LIMIT_S)

    # ------------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._failure = error
        self._started.set()
        self._results.put(None)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        places = self._spec.http.connections
        self._places = asyncio.Semaphore(places)
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # of what is compressed nobody knows how long it is
        }
        if self._endpoint.token:
            headers["Authorization"] = f"Bearer {self._endpoint.token}"
        with ThreadPoolExecutor(1, "http bodies") as self._bodies:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=places, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # `_asked` has the one deadline
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers,
                auto_decompress=False,
            ) as self._session:
                self._started.set()
                await self._stop.wait()
                for check in self._checks:
                    check.cancel()
                await asyncio.gather(*self._checks, return_exceptions=True)

    def _begin(self, number: int, task: ScoreTask, token_ids: bytes) -> None:
        check = self._loop.create_task(self._check(number, task, token_ids))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)

    async def _check(self, number: int, task: ScoreTask, token_ids: bytes) -> None:
        body: bytes | Outcome
        began = time.monotonic()
        try:
            body = await self._loop.run_in_executor(self._bodies, body_of, task, token_ids, self._decode)
            if isinstance(body, bytes):
                async with self._places:
                    began = time.monotonic()
                    found = await self._asked(body, random.Random(f"{task.sample} {task.attempt}"))
            else:
                found = body
        except Exception:  # a bug of ours, which is no fault of the answer
            found = Outcome("infrastructure", traceback.format_exc()[-WHY_CHARACTERS:])
        if not self._alone:
            found = weighed(self._term, found, self._spec.values)
        self._results.put((number, result_of(task, found, self._spec.values, time.monotonic() - began)))

    async def _asked(self, body: bytes, jitter: random.Random) -> Outcome:
        """Ask until there is an answer, no further try, or no time."""
        tries = self._spec.http.retries + 1
        failure = ""
        try:
            async with asyncio.timeout(self._spec.timeout_s) as limit:
                for tried in range(1, tries + 1):
                    found = await self._try(body)
                    if isinstance(found, Outcome):
                        return found
                    failure = f"try {tried} of {tries}: {found.why}"
                    wait_s = max(found.wait_s, _backoff_s(tried, jitter))
                    if tried < tries and self._loop.time() + wait_s >= (limit.when() or 0.0):
                        return self._failed(f"{failure}; to try again {wait_s:.3g} s later is after the deadline")
                    if tried < tries:
                        await asyncio.sleep(wait_s)
        except TimeoutError:
            before = f"; before that, {failure}" if failure else ""
            return self._failed(f"no answer within {self._spec.timeout_s:g} s{before}")
        return self._failed(failure)

    async def _try(self, body: bytes) -> "Outcome | _Again":
        try:
            async with self._session.post(self._endpoint.url, data=body, allow_redirects=False) as response:
                try:
                    head = await _read(response)
                except BaseException:
                    response.close()  # in the middle of an answer: hang up, don't drain
                    raise
                if response.status in REFUSED:
                    return _Again(f"it answered {response.status}{_head(head)}", _retry_after_s(response))
                if len(head) > ANSWER_LIMIT_BYTES:
                    response.close()
                    why = f"its answer has more than {ANSWER_LIMIT_BYTES} bytes"
                    return self._failed(f"{why}; it should be a few{_head(head)}")
                return self._judged(response.status, head)
        except aiohttp.ClientSSLError as error:
            return self._failed(f"no secure connection: {error}")
        except aiohttp.ClientConnectorError as error:
            return _Again(f"no connection ({error.strerror or error}); does it run, and is reward.http.url right?", 0.0)
        except aiohttp.ClientResponseError as error:  # as text it has the whole URL
            return self._failed(f"its answer is no HTTP{_head(error.message.encode())}")
        except aiohttp.ClientError as error:
            return self._failed(f"{type(error).__name__} in the middle of the exchange, not repeated: {error}")

    def _judged(self, status: int, body: bytes) -> Outcome:
        if not 200 <= status < 300:
            what = "; a redirection isn't followed, write the place it leads to" if 300 <= status < 400 else ""
            return self._failed(f"it answered {status}{what}{_head(body)}")
        try:
            answer = _ANSWER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._failed(f"its answer can't be read ({error}){_head(body)}")
        reason, extracted = (answer.reason or "")[:WHY_CHARACTERS], (answer.extracted or "")[:EXTRACTED_CHARACTERS]
        if answer.verdict is not None and answer.reward is None:
            return Outcome(answer.verdict, reason, extracted)
        if answer.reward is not None and answer.verdict is None:
            return given(answer.reward, reason, extracted)
        return self._failed(f"its answer needs `reward` or `verdict`, one of the two{_head(body)}")

    def _failed(self, why: str) -> Outcome:
        # settled: what may be repeated has been; the judge may have read, or be reading, what failed otherwise
        return Outcome("infrastructure", f"{self._shown}: {why}", settled=True)


class _Again(NamedTuple):
    """A try after which another is safe. wait_s: what the judge asks for."""

    why: str
    wait_s: float


def body_of(task: ScoreTask, token_ids: bytes, decode: Decode) -> bytes | Outcome:
    """The JSON that is sent; an outcome if there can be none. It takes long for long answers."""
    response = decode(array.array("i", token_ids).tolist()) if task.response is None else task.response
    form = {
        "id": task.sample,
        "prompt": task.prompt,
        "response": response,
        "answer": task.answer,
        "finish": task.finish,
        "columns": {name: msgspec.msgpack.decode(value) for name, value in task.columns.items()},
    }
    try:
        return msgspec.json.encode(form)
    except (TypeError, ValueError) as error:
        return Outcome("bad_data", f"the data row can't be written as JSON: {error}")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, or a little more than may be read of it."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > ANSWER_LIMIT_BYTES:
            break
    return bytes(body)


def _head(body: bytes) -> str:
    text = " ".join(body[: 4 * HEAD_CHARACTERS].decode(errors="replace").split())
    return f": {text[:HEAD_CHARACTERS]}" if text else ""


def _backoff_s(tried: int, jitter: random.Random) -> float:
    return min(BACKOFF_S * 2.0 ** (tried - 1), BACKOFF_LIMIT_S) * jitter.uniform(0.5, 1.5)


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    """Seconds that the judge asks to wait (RFC 9110, 10.2.3: a number or a date); 0 if it doesn't say, or in no way
    that can be read."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        at = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if at.tzinfo is None:
        at = at.replace(tzinfo=datetime.UTC)
    wait_s: float = (at - datetime.datetime.now(datetime.UTC)).total_seconds()
    return max(0.0, wait_s)
