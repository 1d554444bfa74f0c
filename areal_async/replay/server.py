"""Recorded answers shown to a real server again: does it find each token as likely as the one that drew it?

What always holds: only answers whose every drawn token is of the one version that is asked are compared, so that the
weights are the same; each difference is kept with the token's place, until the worst ones are known; nothing of the run
is changed. When it ends, in whatever way, the server and its folder are gone.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from math import fsum
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.config import Config
from areal_async.controller.controller import first_cause
from areal_async.controller.servers import start_server
from areal_async.errors import ServerError
from areal_async.launch.recipes import Recipes
from areal_async.messages import SampleId, Version
from areal_async.replay.finished import Answer, Finished, read_sample
from areal_async.rollout.given_tokens import logprobs_of
from areal_async.rollout.text import Text
from areal_async.rollout.types import LogProbs, Tokens
from areal_async.rollout.workflow import Sample
from areal_async.specs import server_identity

# Largest |difference| of one token's log-probability. On the CPU that recorded it is 0: vLLM's decoding and its prefill
# give the same bits. Two implementations (server and trainer) differ by at most 3e-5 in float32, and by some tenths on
# unlikely tokens in bfloat16; this is more: another machine adds in another order (docs/replay.md has the figures).
TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.5}
WORST: Final = 10  # tokens that are told
FIRST: Final = 10  # samples of which the first token over the tolerance is told
PLACES: Final = 64  # samples that are asked about at a time
DEADLINE_S: Final = 600.0  # of a request: a long prefill on a CPU

Ask: TypeAlias = Callable[[Tokens, npt.NDArray[np.bool_]], Awaitable[LogProbs]]
"""The server's log-probabilities of the tokens of one sequence that the mask names: float32 [of these]."""


class TokenDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One token. place: its number in the response, from 0. recorded, server: its log-probability then and now."""

    sample: SampleId
    attempt: int
    place: int
    token_id: int
    text: str
    recorded: float
    server: float
    difference: float


class Compared(msgspec.Struct, kw_only=True):
    """max_difference, mean_difference: of |log-probability now − recorded|, over tokens. over: tokens above the
    tolerance, in `samples_over` samples. first_over: in each of the first of these, the first such token; what comes
    after it was read with it. worst: the largest differences. Samples that were left out: mixed: tokens of several
    versions; other_version: all of another one; lost_branch: of a branch that training left; released: arrays gone;
    unused: never taken by the run; left: beyond the limit."""

    version: Version
    model: str
    dtype: str
    temperature: float
    tolerance: float
    samples: int = 0
    tokens: int = 0
    max_difference: float = 0.0
    mean_difference: float = 0.0
    over: int = 0
    samples_over: int = 0
    first_over: list[TokenDifference] = []
    worst: list[TokenDifference] = []
    mixed: int = 0
    other_version: int = 0
    lost_branch: int = 0
    released: int = 0
    unused: int = 0
    left: int = 0
    seconds: float = 0.0


def chosen(finished: Finished, version: Version, limit: int | None, result: Compared) -> list[Answer]:
    """The answers to ask about, in the order of the log; the others are counted in `result`."""
    found: list[Answer] = []
    for answer in finished.answers:
        if answer.verdict is None and not answer.by_workflow:
            result.unused += 1
        elif answer.oldest != answer.newest:
            result.mixed += 1
        elif answer.newest != version:
            result.other_version += 1
        elif answer.lost_branch:
            result.lost_branch += 1
        elif limit is not None and len(found) == limit:
            result.left += 1
        else:
            found.append(answer)
    return found


async def ask_server(
    log: Path,
    answers: Sequence[Answer],
    config: Config,
    model: Path,
    result: Compared,
    *,
    progress: Callable[[int, int], None] = lambda done, whole: None,
    recipes: Recipes | None = None,
) -> None:
    """Start a server from the folder `model`, ask it about the answers, and put what came of it into `result`.

    Errors: LaunchError, HandshakeError, ServerError; LogError where arrays are missing.
    """
    begun = time.monotonic()
    text = Text(str(model), config.data.chat_template)
    with tempfile.TemporaryDirectory(prefix="areal-") as folder:
        async with AsyncExitStack() as stack:
            cores = config.server.cores
            identity = msgspec.structs.replace(server_identity(config, text), backend="areal_file")
            client, child = await start_server(
                stack,
                config,
                recipes or Recipes(),
                name="0",
                model=str(model),
                socket=Path(folder) / "server.sock",
                stderr=Path(folder) / "server.log",
                cores=cores.split("|")[0] if cores else None,
                identity=identity,
            )
            temperature = config.rollout.temperature

            async def ask(token_ids: Tokens, wanted: npt.NDArray[np.bool_]) -> LogProbs:
                return await logprobs_of(client, token_ids, wanted, temperature, DEADLINE_S)

            places = min(PLACES, config.server.max_num_seqs)
            try:
                await compare(log, answers, ask, text, result, places=places, progress=progress)
            except ServerError as error:
                if child.is_running:
                    raise
                raise ServerError(f"{error}. {child.why()}") from error
    result.seconds = round(time.monotonic() - begun, 1)


async def compare(
    log: Path,
    answers: Sequence[Answer],
    ask: Ask,
    text: Text,
    result: Compared,
    *,
    places: int,
    progress: Callable[[int, int], None] = lambda done, whole: None,
) -> None:
    """Ask about all answers, `places` at a time, and add the differences up in their order. Errors: what `ask` raises;
    LogError."""
    tally = _Tally(text, result)
    found: dict[int, tuple[Sample, LogProbs] | None] = {}
    work = iter(enumerate(answers))

    async def place() -> None:
        for number, answer in work:
            sample = read_sample(log, answer)
            if sample is None:
                found[number] = None
            else:
                found[number] = sample, await ask(sample.token_ids, sample.loss_mask != 0)
            while tally.next in found:
                tally.add(answers[tally.next], found.pop(tally.next))
                progress(tally.next, len(answers))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(places):
                group.create_task(place())
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from None
    tally.end()


class _Tally:
    """Differences added up in the order of the answers. next: the number of the next one."""

    def __init__(self, text: Text, result: Compared) -> None:
        self._text = text
        self._result = result
        self._sums: list[float] = []
        self.next = 0

    def add(self, answer: Answer, found: tuple[Sample, LogProbs] | None) -> None:
        self.next += 1
        result = self._result
        if found is None:
            result.released += 1
            return
        sample, server = found
        places = np.flatnonzero(sample.loss_mask)
        recorded = sample.logprobs[places]
        differences = np.abs(server.astype(np.float64) - recorded)
        result.samples += 1
        result.tokens += len(places)
        result.max_difference = max(result.max_difference, float(differences.max()))
        self._sums.append(float(differences.sum()))
        over = np.flatnonzero(~(differences <= result.tolerance))
        result.over += len(over)
        result.samples_over += bool(len(over))

        def token(index: int) -> TokenDifference:
            place, token_id = int(places[index]), int(sample.token_ids[places[index]])
            return TokenDifference(
                sample=answer.sample,
                attempt=answer.attempt,
                place=place - sample.prompt_tokens,
                token_id=token_id,
                text=self._text.decode_all([token_id]),
                recorded=float(recorded[index]),
                server=float(server[index]),
                difference=float(differences[index]),
            )

        if len(over) and len(result.first_over) < FIRST:
            result.first_over.append(token(int(over[0])))
        least = result.worst[-1].difference if len(result.worst) == WORST else -1.0
        largest = (index for index in np.argsort(-differences)[:WORST].tolist() if differences[index] > least)
        result.worst = _largest([*result.worst, *map(token, largest)])

    def end(self) -> None:
        self._result.mean_difference = fsum(self._sums) / max(self._result.tokens, 1)


def _largest(tokens: Iterable[TokenDifference]) -> list[TokenDifference]:
    return sorted(tokens, key=lambda token: -token.difference)[:WORST]
