"""What passes between a rollout and a server: sampling, answers, parts of answers, and how things fail.

What always holds: the arrays of an answer have one length; every log-probability is finite; nothing in here does I/O.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.errors import ServerError
from areal_async.messages import FinishReason, Version

Tokens: TypeAlias = npt.NDArray[np.int32]
LogProbs: TypeAlias = npt.NDArray[np.float32]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. No top-p, top-k or penalties: the trainer would have to apply the same mask.

    temperature: the trainer divides its logits by the same number; 0, which is greedy, is for evaluations.
    max_tokens, min_tokens: of the answer. stop_token_ids: tokens that end it (the drawn one is part of the answer); the
    server's own idea of an end of sequence is not used. seed: of this one answer; None: the server's.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    min_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """What had arrived of an answer that broke off: token_ids int32 [n], logprobs float32 [n]; n may be 0.

    A server says which version drew a token only when the answer ends, so there are none here.
    """

    token_ids: Tokens
    logprobs: LogProbs


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A whole answer. token_ids int32 [n], logprobs float32 [n] (after the temperature), versions int32 [n], n >= 1."""

    token_ids: Tokens
    logprobs: LogProbs
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a server must be to serve a run. vocab_size: entries of the output layer, as in the model's config.json.
    context_tokens: prompt + answer that must fit. dtype: "float32", "bfloat16" or "float16". backend: its weight
    transfer engine."""

    vocab_size: int
    context_tokens: int
    dtype: str
    backend: str = "areal_file"


class SwapTimes(NamedTuple):
    """Seconds that each call of a swap took. Answers stood still for their sum, `total_s`, at most."""

    pause_s: float
    start_s: float
    update_s: float
    finish_s: float
    resume_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


SwapStage: TypeAlias = Literal["join", "pause", "start", "update", "finish", "resume"]


class RequestFailed(ServerError):
    """A server answered a request with an error, with nonsense, or not at all.

    status: of the HTTP answer, None where there was none or it was 200. retryable: whether the same request may
    succeed if it is sent again, here or elsewhere; never for a 4xx, other than 408 and 429.
    """

    def __init__(self, message: str, *, status: int | None, retryable: bool) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable


class WeightsDiffer(RequestFailed):
    """The weights that the trainer publishes are not those of the server's model: names, shapes or dtypes differ."""


class StreamBroken(RequestFailed):
    """An answer broke off (connection, server or deadline); `partial` is what had arrived, and is good."""

    def __init__(self, message: str, partial: Partial) -> None:
        super().__init__(message, status=None, retryable=True)
        self.partial = partial


class SwapFailed(ServerError):
    """A server could not be given new weights.

    stage: the call that failed. server_usable: True: it goes on under its old weights, try again; False: its layers
    may be half-loaded, it stays paused and must be restarted.
    """

    def __init__(self, message: str, *, version: Version, stage: SwapStage, server_usable: bool) -> None:
        super().__init__(message)
        self.version = version
        self.stage = stage
        self.server_usable = server_usable
