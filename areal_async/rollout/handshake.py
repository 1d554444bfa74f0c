"""Whether a server can be used for a run, found out before its first sample.

What always holds: a server that passed has the routes that are needed, serves a model with the run's vocabulary,
context and dtype, gives log-probabilities after the temperature, labels its tokens with versions, and isn't paused. A
server that doesn't gets a HandshakeError that names it, what is wrong and what to do.

The server's tokenizer is not compared: it is never used. Token ids go in and come out, and what ends an answer stands
in every request. Whether its log-probabilities agree with the trainer's is for the controller to compare, with `probe`.
"""

from typing import Final

import msgspec
import numpy as np

from areal_async.errors import HandshakeError
from areal_async.rollout.types import LogProbs, ModelIdentity, RequestFailed, Sampling, Tokens
from areal_async.rollout.vllm_http import ServerInfo, VllmClient

PROBE_DEADLINE_S: Final = 120.0  # the first request of a server may wait for kernels to be compiled
PROBE_TOKENS: Final = 2  # enough to see whether spans and log-probabilities come
_PROMPT: Final[Tokens] = np.array([0], dtype=np.int32)  # every vocabulary has a token 0


async def handshake(client: VllmClient, expect: ModelIdentity) -> None:
    """Raise HandshakeError unless the server is one that serves `expect`."""
    await _alive(client)
    await _development_routes(client)
    _same_model(client, expect, await _info(client))
    await _not_paused(client)
    await _generates(client)
    await _same_vocabulary(client, expect)


async def probe(client: VllmClient, token_ids: Tokens, n: int, temperature: float) -> tuple[Tokens, LogProbs]:
    """n tokens drawn after the prompt `token_ids`, and their log-probabilities: int32 [n], float32 [n].

    Raises RequestFailed.
    """
    sampling = Sampling(temperature=temperature, max_tokens=n, stop_token_ids=())
    answer = await client.answer(token_ids, sampling, "areal-async-probe", PROBE_DEADLINE_S)
    answer.covered()
    drawn = answer.partial()
    return drawn.token_ids, drawn.logprobs


async def _alive(client: VllmClient) -> None:
    try:
        await client.health()
    except RequestFailed as error:
        raise _no(client, f"it isn't well: {error}", "look at its stderr, and restart it") from error


async def _development_routes(client: VllmClient) -> None:
    try:
        await client.is_paused()
    except RequestFailed as error:
        if error.status == 404:
            raise _no(
                client, "it has no routes to pause it and to update its weights",
                "start the server with VLLM_SERVER_DEV_MODE=1 in its environment",
            ) from error  # fmt: skip
        raise _no(client, str(error), "look at its stderr, and restart it") from error


async def _info(client: VllmClient) -> ServerInfo:
    try:
        return await client.server_info()
    except (RequestFailed, msgspec.DecodeError) as error:
        raise _no(client, f"it can't say how it was started: {error}", "use vLLM 0.32") from error


def _same_model(client: VllmClient, expect: ModelIdentity, info: ServerInfo) -> None:
    model, transfer = info.vllm_config.model_config, info.vllm_config.weight_transfer_config
    backend = transfer.backend if transfer else "none"
    dtype = model.dtype.removeprefix("torch.")
    if backend != expect.backend:
        raise _no(
            client, f"its weight transfer backend is {backend!r}, the run uses {expect.backend!r}",
            f"""start the server with --weight-transfer-config '{{"backend": "{expect.backend}"}}'""",
        )  # fmt: skip
    if model.logprobs_mode != "processed_logprobs":
        raise _no(
            client, f"its log-probabilities are {model.logprobs_mode!r}, not those after the temperature",
            "start the server with --logprobs-mode processed_logprobs",
        )  # fmt: skip
    if dtype != expect.dtype:
        raise _no(
            client, f"it computes in {dtype}, the run publishes {expect.dtype}",
            f"start the server with --dtype {expect.dtype}",
        )  # fmt: skip
    if model.max_model_len < expect.context_tokens:
        raise _no(
            client, f"its context has {model.max_model_len} tokens, prompt and answer need {expect.context_tokens}",
            f"start the server with --max-model-len {expect.context_tokens}, or lower rollout.max_new_tokens",
        )  # fmt: skip


async def _not_paused(client: VllmClient) -> None:
    """Clean up after a controller that died in the middle of a swap. Nobody waits for what runs there; the layers are
    closed if they are open, and the weights, whatever they are now, are all replaced by the first swap of this run."""
    try:
        if await client.is_paused():
            await client.abort_all()
            await client.close_layers()
            await client.resume()
    except RequestFailed as error:
        raise _no(client, f"it was left paused, and can't be cleaned up: {error}", "restart it") from error


async def _generates(client: VllmClient) -> None:
    try:
        await probe(client, _PROMPT, PROBE_TOKENS, temperature=1.0)
    except RequestFailed as error:
        if error.status == 403:
            raise _no(
                client, "its route /inference/v1/generate is switched off", "start the server with --enable-scale-out"
            ) from error
        raise _no(client, f"it can't answer a prompt: {error}", "look at its stderr, and restart it") from error


async def _same_vocabulary(client: VllmClient, expect: ModelIdentity) -> None:
    try:
        has_last = await client.takes_token(expect.vocab_size - 1)
        has_next = await client.takes_token(expect.vocab_size)
    except RequestFailed as error:
        raise _no(client, f"it can't be asked for its vocabulary: {error}", "use vLLM 0.32") from error
    if not has_last or has_next:
        size = "smaller" if not has_last else "larger"
        raise _no(
            client, f"its vocabulary is {size} than the {expect.vocab_size} entries of the run's model",
            "start the server with the model that the run trains (model.path)",
        )  # fmt: skip


def _no(client: VllmClient, what: str, remedy: str) -> HandshakeError:
    return HandshakeError(f"server {client.name} ({client.address}) can't be used: {what}; {remedy}")
