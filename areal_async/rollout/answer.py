"""An answer of vLLM's `/inference/v1/generate`, put together from the chunks of its stream.

What always holds: tokens and log-probabilities that were fed stay available, whatever comes after them; an answer is
complete only if its spans give every token exactly one version; a log-probability that isn't one (not finite, or the
-9999.0 that vLLM puts in the place of NaN, -inf and missing values) is an error and never a number.

One line of the stream is one JSON object; msgspec decodes the few fields that are needed straight into structs and
skips the rest, about 0.11 µs a token.
"""

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.messages import FinishReason
from areal_async.rollout.types import Completion, Partial, RequestFailed, StreamBroken

MISSING_LOGPROB: Final = -9999.0  # what vLLM writes for NaN, -inf, or a drawn token without a log-probability
FINISHED: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length"}
PUT_OFF: Final = frozenset({"abort", "error"})  # the server gave up the request, not the model: the tokens are good


class Span(msgspec.Struct, gc=False):
    """Tokens [start, end) of the answer were drawn by weights labelled `version`."""

    version: str
    start: int
    end: int


class _LogProb(msgspec.Struct, gc=False):
    logprob: float


class _LogProbs(msgspec.Struct, gc=False):
    content: list[_LogProb] | None = None


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int]
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class _Error(msgspec.Struct, gc=False):
    message: str
    code: int = 500


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    error: _Error | None = None


_DECODER: Final = msgspec.json.Decoder(_Chunk)
_DATA: Final = b"data: "


class Answer:
    """Collects one stream. server, request_id: only for messages.

    Any method raises RequestFailed where the server's words can't be taken at face value.
    """

    def __init__(self, server: str, request_id: str) -> None:
        self._where = f"server {server}, request {request_id}"
        self._rest = b""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[Span] = []
        self._finish: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the last token has arrived (the stream's own end may still be missing)."""
        return self._finish is not None

    @property
    def length(self) -> int:
        """Tokens that have arrived."""
        return len(self._token_ids)

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream, cut anywhere. Raises StreamBroken where the server says that it gave up."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                self._take(event)

    def partial(self) -> Partial:
        """What has arrived so far."""
        return Partial(np.array(self._token_ids, dtype=np.int32), self._checked_logprobs())

    def completion(self) -> Completion:
        """The whole answer; to be asked for once `finished`."""
        if self._finish not in FINISHED:
            raise self._nonsense(f"it ended for the reason {self._finish!r}, which areal-async doesn't know")
        if not self._token_ids:
            raise self._nonsense("it ended without a token")
        return Completion(
            token_ids=np.array(self._token_ids, dtype=np.int32),
            logprobs=self._checked_logprobs(),
            versions=self._versions(),
            finish_reason=FINISHED[self._finish],
        )

    def covered(self) -> list[Span]:
        """The version spans: one after another, from token 0 to the last."""
        expected = 0
        for span in self._spans:
            if span.start != expected or span.end <= span.start:
                break
            expected = span.end
        if expected != len(self._token_ids) or not self._spans:
            said = ", ".join(f"[{s.start}, {s.end}) version {s.version}" for s in self._spans) or "none"
            raise self._nonsense(
                f"its version spans ({said}) don't give each of its {len(self._token_ids)} tokens one version; "
                "areal-async needs vLLM 0.32"
            )
        return self._spans

    def broken(self, why: str) -> StreamBroken:
        """The error for a stream that broke off here."""
        return StreamBroken(
            f"{self._where}: the answer broke off after {len(self._token_ids)} tokens: {why}", self.partial()
        )

    def _take(self, event: bytes) -> None:
        try:
            chunk = _DECODER.decode(event[len(_DATA) :])
        except msgspec.DecodeError as error:  # a null or missing log-probability among them
            raise self._nonsense(f"a chunk of its stream can't be read: {error}") from error
        if chunk.error is not None:
            raise self._said(chunk.error)
        for choice in chunk.choices:
            self._add(choice)

    def _said(self, error: _Error) -> RequestFailed:
        """An error inside the stream: once it has begun, vLLM refuses prompts there too, under the status 200."""
        if 400 <= error.code < 500:
            return RequestFailed(f"{self._where}: refused: {error.message}", status=error.code, retryable=False)
        return self.broken(f"the server said: {error.message}")

    def _add(self, choice: _Choice) -> None:
        logprobs = (choice.logprobs.content if choice.logprobs else None) or []
        if len(logprobs) != len(choice.token_ids):
            raise self._nonsense(f"a chunk has {len(choice.token_ids)} tokens and {len(logprobs)} log-probabilities")
        self._token_ids += choice.token_ids
        self._logprobs += [entry.logprob for entry in logprobs]
        if choice.finish_reason in PUT_OFF:
            raise self.broken(f"the server ended it for the reason {choice.finish_reason!r}")
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
            self._spans = choice.weight_versions or []

    def _checked_logprobs(self) -> npt.NDArray[np.float32]:
        logprobs = np.array(self._logprobs, dtype=np.float32)
        if len(logprobs) and not (logprobs.min() > MISSING_LOGPROB and logprobs.max() < np.inf):  # NaN fails both
            at = int(np.argmin((logprobs > MISSING_LOGPROB) & (logprobs < np.inf)))
            raise RequestFailed(
                f"{self._where}: the log-probability of token {at} (id {self._token_ids[at]}) is {logprobs[at]}: "
                "missing, or the model's output isn't finite",
                status=None,
                retryable=True,
            )
        return logprobs

    def _versions(self) -> npt.NDArray[np.int32]:
        versions = np.empty(len(self._token_ids), dtype=np.int32)
        for span in self.covered():
            if not span.version.isdecimal():
                raise self._nonsense(
                    f"its weights are labelled {span.version!r}: the server was never given a version by this run"
                )
            versions[span.start : span.end] = int(span.version)
        return versions

    def _nonsense(self, what: str) -> RequestFailed:
        return RequestFailed(f"{self._where}: {what}", status=None, retryable=False)
