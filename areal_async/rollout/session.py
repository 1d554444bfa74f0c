"""A sample's conversation with the server that it was placed on, and with another one where that breaks off.

What always holds: token ids in and out; every sampled token has a log-probability and a version; a request asks for no
more tokens than the context has room for; no request goes to a server with weights older than the group's floor; tokens
that arrived are kept, whatever happens to their server, and what is still missing is asked as the continuation of
exactly these; each request has an id and a seed of its own, and one that broke off is aborted before the next is sent.

A request is repeated here and nowhere below. A session outlives weight swaps without any of this, since a server goes
on with its requests under the new weights.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from areal_async.errors import ServerError
from areal_async.messages import FinishReason, SampleId, Version
from areal_async.rollout.fleet import Fleet, Live
from areal_async.rollout.types import Completion, Partial, RequestFailed, Sampling, StreamBroken

SEED_BITS: Final = 0x7FFF_FFFF  # vLLM takes a signed 64-bit seed; 31 bits are safe in every client
REPEATS: Final = 3  # requests in a row without a token, after the first: what three repeats don't mend isn't a hiccup
PAUSE_S: Final = 0.5  # before the first of them, then twice as long each: time to notice that a server is dead
ABORT_DEADLINE_S: Final = 2.0  # of a courtesy; the closed connection is an abort too

Noting = Callable[[str, dict[str, str | int]], None]
"""Told of what a session did beyond the plain path: what, and the data of a `Note`."""


def sample_seed(run_seed: int, sample: SampleId, attempt: int, turn: int, request: int = 0) -> int:
    """Seed of one request: the same run gives the same, whatever the order in which requests are sent."""
    again = f"/{request}" if request else ""
    return zlib.crc32(f"{run_seed}/{sample}/{attempt}/{turn}{again}".encode()) & SEED_BITS


def unnoted(what: str, data: dict[str, str | int]) -> None:
    """For sessions that no log is kept of."""


class Session:
    """What a workflow generates with.

    server: that the sample is placed on; the one that answered last from then on. floor: no request goes to a server
    with older weights. sampling: the run's; `generate` may lower `max_tokens` (and a workflow may pass its own).
    context: the model's, in tokens. vocab_size: entries of its output layer. deadline_s: of the whole attempt, from
    now on, enforced by whoever runs the workflow. To be made in a running loop.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        server: str,
        floor: Version,
        sample: SampleId,
        attempt: int,
        run_seed: int,
        sampling: Sampling,
        context: int,
        vocab_size: int,
        deadline_s: float,
        note: Noting = unnoted,
    ) -> None:
        self.sample = sample
        self.attempt = attempt
        self.sampling = sampling
        self._fleet = fleet
        self._server = server
        self._floor = floor
        self._run_seed = run_seed
        self._context = context
        self._vocab_size = vocab_size
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + deadline_s
        self._note = note
        self._turn = 0
        self._finished_tokens = 0
        self._growing: dict[int, _Growing] = {}

    @property
    def tokens_so_far(self) -> int:
        """Tokens that were sampled for it, those of answers that still grow included."""
        return self._finished_tokens + sum(answer.tokens_so_far for answer in self._growing.values())

    async def generate(self, token_ids: list[int], sampling: Sampling | None = None) -> Completion:
        """Have the model go on after `token_ids` (1 to context − 1 of them).

        Errors: ServerError where the prompt leaves no room, or no server could answer; the attempt has then failed.
        """
        chosen = self.sampling if sampling is None else sampling
        room = self._context - len(token_ids)
        if room < 1 or not token_ids:
            raise ServerError(
                f"sample {self.sample}: a prompt of {len(token_ids)} tokens does not fit the context of "
                f"{self._context}; it was not sent"
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:  # such an id would end the server
            raise ServerError(
                f"sample {self.sample}: token ids must lie in [0, {self._vocab_size}), those of the prompt are "
                f"{min(token_ids)} to {max(token_ids)}; it was not sent"
            )
        turn = self._turn
        self._turn += 1
        chosen = msgspec.structs.replace(chosen, max_tokens=min(chosen.max_tokens, room))
        answer = self._growing[turn] = _Growing(token_ids, chosen, self.sample, self.attempt, turn)
        try:
            completion = await self._answer(answer)
        finally:
            del self._growing[turn]
        self._finished_tokens += len(completion.token_ids)
        return completion

    async def _answer(self, answer: "_Growing") -> Completion:
        """The whole answer, by as many requests as it takes. Raises what the last of them failed with."""
        repeats = 0
        avoid: Live | None = None
        error: RequestFailed | None = None
        while True:
            live = await self._fleet.server(self._server, self._floor, avoid)
            self._tell(answer, live, error)
            self._server = live.name
            answer.ask(live)
            version = live.version
            try:
                return answer.finish(await self._request(answer, live))
            except StreamBroken as broken:
                error, arrived = broken, answer.keep(broken.partial, version)
            except RequestFailed as failed:
                error, arrived = failed, 0
            if not error.retryable or self._clock() >= self._deadline:
                raise error
            live.suspected.set()
            if error.status is None:
                await self._abort(answer, live)
            if (whole := answer.whole()) is not None:
                self._note("completed", answer.data(live.name, live.name, error))
                return whole
            repeats = 0 if arrived else repeats + 1
            if repeats > REPEATS:
                raise error
            if not arrived or self._fleet.find(self._server, self._floor, live) in (live, None):
                await self._pause(live, PAUSE_S * 2 ** max(0, repeats - 1))
            if live.gone.is_set():
                repeats = max(0, repeats - 1)  # that it said nothing was no fault of the request
            avoid = live

    async def _request(self, answer: "_Growing", live: Live) -> Completion:
        live.load += 1
        try:
            return await live.client.generate(
                answer.token_ids(),
                answer.rest(sample_seed(self._run_seed, self.sample, self.attempt, answer.turn, answer.requests - 1)),
                request_id=answer.request_id,
                deadline_s=self._deadline - self._clock(),
            )
        finally:
            live.load -= 1

    async def _abort(self, answer: "_Growing", live: Live) -> None:
        """It may still be running there: the connection broke, not the server."""
        if live.gone.is_set():
            return
        with contextlib.suppress(ServerError, TimeoutError):
            async with asyncio.timeout(ABORT_DEADLINE_S):
                await live.client.abort(answer.request_id)

    async def _pause(self, live: Live, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await live.gone.wait()

    def _tell(self, answer: "_Growing", live: Live, error: RequestFailed | None) -> None:
        """Note where a request goes, unless it is the first one and goes where the sample was placed."""
        if error is None and live.name == self._server:
            return
        what = "continued" if answer.length else "moved" if live.name != self._server else "repeated"
        self._note(what, answer.data(self._server, live.name, error))


class _Growing:
    """One answer, over as many requests as it takes. requests: sent so far. length: tokens that are kept."""

    def __init__(self, prompt: list[int], sampling: Sampling, sample: SampleId, attempt: int, turn: int) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self._sample = sample
        self._attempt = attempt
        self._pieces: list[Completion] = []
        self._live: Live | None = None
        self._inferred = 0
        self.turn = turn
        self.requests = 0
        self.length = 0

    @property
    def request_id(self) -> str:
        first = f"{self._sample}-{self._attempt}-{self.turn}"
        return first if self.requests <= 1 else f"{first}-{self.requests - 1}"

    @property
    def tokens_so_far(self) -> int:
        running = self._live.client.tokens_so_far(self.request_id) if self._live is not None else 0
        return self.length + running

    def ask(self, live: Live) -> None:
        """The next request goes to this server."""
        self._live = live
        self._inferred = 0
        self.requests += 1

    def token_ids(self) -> list[int]:
        """What the model is to go on after."""
        if not self._pieces:
            return self._prompt
        return [*self._prompt, *(token for piece in self._pieces for token in piece.token_ids.tolist())]

    def rest(self, seed: int) -> Sampling:
        """How what is missing is drawn."""
        return msgspec.structs.replace(
            self._sampling,
            max_tokens=self._sampling.max_tokens - self.length,
            min_tokens=max(0, self._sampling.min_tokens - self.length),
            seed=seed,
        )

    def keep(self, partial: Partial, version: Version) -> int:
        """Tokens of a request that broke off, with the oldest version that can have drawn them; how many they are."""
        self._live = None
        self._inferred = len(partial.token_ids)
        if self._inferred:
            versions = np.full(self._inferred, version, np.int32)
            self._add(Completion(partial.token_ids, partial.logprobs, versions, "length"))
        return self._inferred

    def whole(self) -> Completion | None:
        """The answer, if what is kept is all of it: only its end was never told."""
        if not self._pieces:
            return None
        if int(self._pieces[-1].token_ids[-1]) in self._sampling.stop_token_ids:
            return self._joined("stop")
        return self._joined("length") if self.length >= self._sampling.max_tokens else None

    def finish(self, last: Completion) -> Completion:
        """The answer, whose last request has ended as it should."""
        self._add(last)
        return self._joined(last.finish_reason)

    def data(self, source: str, target: str, error: RequestFailed | None) -> dict[str, str | int]:
        """Of a note. tokens: kept so far; inferred: of those, what the last request brought before it broke off."""
        return {
            "sample": self._sample,
            "attempt": self._attempt,
            "turn": self.turn,
            "request": self.requests,
            "from": source,
            "to": target,
            "tokens": self.length,
            "inferred": self._inferred,
            "why": "it is lost, or its weights are too old" if error is None else str(error),
        }

    def _add(self, piece: Completion) -> None:
        self._live = None
        self._pieces.append(piece)
        self.length += len(piece.token_ids)

    def _joined(self, finish: FinishReason) -> Completion:
        if len(self._pieces) == 1 and self._pieces[0].finish_reason == finish:
            return self._pieces[0]
        return Completion(
            token_ids=np.concatenate([piece.token_ids for piece in self._pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in self._pieces]),
            versions=np.concatenate([piece.versions for piece in self._pieces]),
            finish_reason=finish,
        )
