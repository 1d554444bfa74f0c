"""How likely a server finds tokens that are there already: their log-probabilities, as if it had drawn them.

What always holds: a log-probability is that of the token after the temperature, given all tokens before it, under the
weights that the server holds; where the server has none (NaN, -inf) it is the -9999.0 that vLLM writes.

vLLM 0.32 gives the log-probabilities of a prompt's tokens in one request, but prompt tokens pass no sampler: whatever
the request's temperature and the server's `--logprobs-mode` say, theirs are at temperature 1. At any other one the next
token is asked about after each beginning of the sequence, by a request that draws one token (and throws it away).
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.rollout.types import LogProbs, RequestFailed, Tokens
from areal_async.rollout.vllm_http import VllmClient

AS_DRAWN: Final = 1.0  # the temperature at which a prompt's log-probabilities are those of drawn tokens


class _Sampling(msgspec.Struct, omit_defaults=True):
    """`logprob_token_ids`: whose log-probabilities are wanted, whichever token is drawn. vLLM wants as many `logprobs`
    as there are of them, and leaves the last out where another token was drawn: so each stands there twice."""

    temperature: float
    logprob_token_ids: tuple[int, int]
    max_tokens: int
    logprobs: int
    ignore_eos: bool
    detokenize: bool
    prompt_logprobs: int | None = None


class _Request(msgspec.Struct):
    token_ids: Sequence[int]
    sampling_params: _Sampling
    stream: bool = False


class _Value(msgspec.Struct, gc=False):
    logprob: float


class _Drawn(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Content(msgspec.Struct, gc=False):
    top_logprobs: list[_Drawn] = []


class _LogProbs(msgspec.Struct, gc=False):
    content: list[_Content]


class _Choice(msgspec.Struct, gc=False):
    logprobs: _LogProbs


class _Answer(msgspec.Struct, gc=False):
    """prompt_logprobs: of each prompt token, by its id; nothing for the first, which has nothing before it."""

    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Value] | None] | None = None


_DECODER: Final = msgspec.json.Decoder(_Answer)


async def logprobs_of(
    client: VllmClient, token_ids: Tokens, wanted: npt.NDArray[np.bool_], temperature: float, deadline_s: float
) -> LogProbs:
    """Of the tokens of one sequence. wanted: bool [n], which of them, never the first. Answers float32 [wanted].

    deadline_s: of one request. Raises RequestFailed.
    """
    places = np.flatnonzero(wanted)
    if temperature == AS_DRAWN:
        found = await _by_prompt(client, token_ids[: places[-1] + 1].tolist(), deadline_s)
        return np.array([found[place - 1] for place in places], np.float32)
    ids = token_ids.tolist()
    answers = [await _ask(client, ids[:place], ids[place], temperature, deadline_s) for place in places]
    return np.array(
        [_next(client, answer, ids[place]) for place, answer in zip(places, answers, strict=True)], np.float32
    )


async def _by_prompt(client: VllmClient, ids: list[int], deadline_s: float) -> list[float]:
    """Of all tokens but the first. The last one isn't in the prompt: a sequence that fills the context leaves no room
    for one more."""
    *prompt, last = ids
    answer = await _ask(client, prompt, last, AS_DRAWN, deadline_s, prompt_logprobs=0)
    given = answer.prompt_logprobs or []
    if len(given) != len(prompt):
        raise _nonsense(client, f"log-probabilities of {len(given)} of {len(prompt)} prompt tokens")
    found = []
    for token, values in zip(prompt[1:], given[1:], strict=True):
        if values is None or str(token) not in values:
            raise _nonsense(client, f"no log-probability of the prompt token {token}")
        found.append(values[str(token)].logprob)
    return [*found, _next(client, answer, last)]


async def _ask(
    client: VllmClient,
    prompt: Sequence[int],
    token: int,
    temperature: float,
    deadline_s: float,
    prompt_logprobs: int | None = None,
) -> _Answer:
    sampling = _Sampling(
        temperature=temperature,
        logprob_token_ids=(token, token),
        max_tokens=1,
        logprobs=2,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=prompt_logprobs,
    )
    body = await client.generate_whole(_Request(prompt, sampling), deadline_s)
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise _nonsense(client, f"an answer that can't be read: {error}") from error


def _next(client: VllmClient, answer: _Answer, token: int) -> float:
    for drawn in answer.choices[0].logprobs.content[0].top_logprobs if answer.choices else ():
        if drawn.token_id == token:
            return drawn.logprob
    raise _nonsense(client, f"no log-probability of the token {token} that it was asked about")


def _nonsense(client: VllmClient, what: str) -> RequestFailed:
    return RequestFailed(
        f"server {client.name}: it gave {what}; areal-async needs vLLM 0.32", status=None, retryable=False
    )
