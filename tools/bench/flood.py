"""A server that costs little, so that the controller is what a benchmark measures: it answers from memory.

    python tools/bench/flood.py --uds PATH [--chunk-tokens N] …

What always holds: its answers are a scripted server's to requests without a seed (tokens, log-probabilities, versions,
spans, exact to the token), encoded once for all requests. Thousands of answers grow at the same time.
"""

import argparse
import asyncio
from functools import lru_cache
from typing import Final

import msgspec
import uvloop
from aiohttp import web

from areal_async.testing.vllm_server import ScriptedServer, drawn_logprob, drawn_token

CACHED_CHUNKS: Final = 1 << 15
DONE: Final = b"data: [DONE]\n\n"


class Flood(ScriptedServer):
    """stop tokens are not looked at: an answer has `max_tokens` tokens. token_s: seconds a token, between chunks."""

    async def _stream(self, request: web.Request, body) -> web.StreamResponse:  # type: ignore[no-untyped-def]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.requests.clear()  # millions of them
        limit, position = body.sampling_params.max_tokens, 0
        spans: list[tuple[str, int]] = []  # version, end
        while position < limit:
            await self._goes.wait()
            if body.request_id in self._aborted:
                break
            begin, position = position, min(limit, position + self.chunk_tokens)
            if spans and spans[-1][0] == self.label:
                spans[-1] = (self.label, position)
            else:
                spans.append((self.label, position))
            last = position == limit
            head, tail = encoded(begin, position, self.label, self.vocab_size)
            await response.write(head + (b'"length"' if last else b"null") + tail + (said(spans) if last else UNSAID))
            await asyncio.sleep(self.token_s * (position - begin))
        await response.write(DONE)
        return response


UNSAID: Final = b',"weight_versions":null}]}\n\n'


def said(spans: list[tuple[str, int]]) -> bytes:
    begins = [0, *(end for _, end in spans)]
    named = [{"version": label, "start": at, "end": end} for at, (label, end) in zip(begins, spans, strict=False)]
    return b',"weight_versions":' + msgspec.json.encode(named) + b"}]}\n\n"


@lru_cache(maxsize=CACHED_CHUNKS)
def encoded(begin: int, end: int, label: str, vocab_size: int) -> tuple[bytes, bytes]:
    """A chunk as vLLM writes it, up to the finish reason, and after it."""
    version = int(label) if label.isdecimal() else -1
    drawn = [drawn_token(0, version, at, vocab_size) for at in range(begin, end)]
    logprobs = [drawn_logprob(0, version, at) for at in range(begin, end)]
    content = [
        {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": [{"token_id": t, "logprob": p, "rank": 1}]}
        for t, p in zip(drawn, logprobs, strict=True)
    ]
    head = b'data: {"request_id":"","usage":null,"choices":[{"index":0,"stop_reason":null,"finish_reason":'
    ids, probabilities = msgspec.json.encode(drawn), msgspec.json.encode({"content": content})
    return head, b',"token_ids":' + ids + b',"logprobs":' + probabilities


async def serve(server: ScriptedServer) -> None:
    async with server:
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--vocab-size", type=int, default=128)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--chunk-tokens", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=8192)
    options = parser.parse_args()
    server = Flood(options.uds, options.vocab_size, options.max_model_len, options.token_s, options.chunk_tokens)
    uvloop.run(serve(server))


if __name__ == "__main__":
    main()
