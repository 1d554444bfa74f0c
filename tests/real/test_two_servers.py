"""Two vLLM servers, one of which is killed in the middle of answers: trained samples hold tokens of both."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from areal_async.config import Config
from areal_async.controller import Controller, RunResult
from areal_async.log.reader import read_payload, read_records
from areal_async.messages import Joined, Lost, Note, Published, Restart, Swap, Swapped, Train
from areal_async.rollout.fleet import Fleet
from areal_async.rollout.types import Completion, Sampling
from areal_async.rollout.vllm_http import VllmClient

from ..waiting import until

pytestmark = pytest.mark.slow

Quickstart = Callable[..., Config]
READ_S = 0.1  # what a server has written is read by then
LIMIT_S = 900.0  # about 80 s on two free cores
STATES = ("trained", "filtered", "stale", "failed", "cancelled", "outstanding", "training")


class Book:
    """What every client is asked: (server, prompt, versions of the answer, empty if it broke off), by request id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, tuple[str, list[int], list[int]]] = {}
        generate = VllmClient.generate

        async def noted(
            client: VllmClient, token_ids: Sequence[int], sampling: Sampling, request_id: str, deadline_s: float
        ) -> Completion:
            self.asked[request_id] = client.name, list(token_ids), []
            answer = await generate(client, token_ids, sampling, request_id, deadline_s)
            self.asked[request_id][2].extend(answer.versions.tolist())
            return answer

        monkeypatch.setattr(VllmClient, "generate", noted)


async def test_a_server_killed_in_the_middle_of_answers(
    quickstart: Quickstart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9: its answers go on at the other from exactly what had arrived, none is lost, and it comes back."""
    book = Book(monkeypatch)
    config = quickstart(
        "rollout.servers=2", "server.cores='0|1'", "train.cores=null", "train.steps=1000", "rollout.retries=0"
    )
    async with asyncio.timeout(LIMIT_S), Controller(config) as run:
        killing: asyncio.Task[None] | None = None
        restarts, back_at = 0, 0
        async for row in run.steps():
            restarts += row.restarts  # its death was noticed; until then it is there, as before
            servers = run._parts._servers
            if killing is None and "1" in servers._lives:
                killing = asyncio.create_task(_kill_in_the_middle(servers._lives["1"], servers.fleet))
            live = servers.fleet._live.get("1")
            back_at = back_at or (row.step if restarts and live is not None and live.version > 1 else 0)
            if back_at and row.step > back_at + 2:
                run.stop()
        result = run.result()
    events = [record.message for record in read_records(result.folder / "log")]
    ledger = result.rows[-1].ledger
    assert ledger["samples_admitted"] == sum(ledger[f"samples_{state}"] for state in STATES)
    assert ledger["samples_failed"] == ledger["samples_cancelled"] == 0
    assert max(row.lag_max for row in result.rows) <= config.rollout.max_staleness
    assert max(row.mismatch_max for row in result.rows) <= 1e-4  # of continued answers too
    both = [sample for sample in _continued(result, events, book) if sample in _trained(events)]
    print(f"{len(both)} trained samples with tokens of both servers, in {result.seconds:.0f} s")
    assert both
    (lost,) = [event for event in events if isinstance(event, Lost)]
    after = events[events.index(lost) :]
    assert "SIGKILL" in lost.why
    assert [type(e) for e in after if isinstance(e, Restart | Joined)] == [Restart, Joined]
    told = next(e for e in after if isinstance(e, Swap) and e.server == "1")
    assert told.version == max(e.version for e in events[: events.index(told)] if isinstance(e, Published))
    assert next(e for e in after if isinstance(e, Swapped) and e.server == "1").version == told.version


async def _kill_in_the_middle(life: Any, fleet: Fleet) -> None:
    """Kill the server's process in the middle of several answers, once the other one could go on with them."""

    def now() -> bool:
        other, live = fleet._live.get("0"), fleet._live.get("1")
        both = other is not None and live is not None and other.version >= live.version
        return both and sum(answer.length >= 16 for answer, _ in life.client._running.values()) >= 4

    while True:
        await until(now, LIMIT_S)
        os.kill(life.child.pid, signal.SIGSTOP)  # it may have ended them all by now, unread
        await asyncio.sleep(READ_S)
        if now():
            break
        os.kill(life.child.pid, signal.SIGCONT)
    os.kill(life.child.pid, signal.SIGKILL)


def _continued(result: RunResult, events: list[Any], book: Book) -> list[str]:
    """Samples with tokens of both servers; each one's second prompt is the first one and the tokens that were kept."""
    log = result.folder / "log"
    payloads = [read_payload(log, record.payload) for record in read_records(log) if record.payload is not None]
    arrays = {payload.sample: payload.arrays for payload in payloads}
    found = []
    for note in (event for event in events if isinstance(event, Note) and event.what == "continued"):
        sample, kept = note.data["sample"], note.data["tokens"]
        if sample not in arrays or note.data["request"] != 1:
            continue
        token_ids, mask, logprobs, versions = arrays[sample]
        prompt = int(np.argmax(mask))
        first, second = f"{sample}-{note.data['attempt']}-0", f"{sample}-{note.data['attempt']}-0-1"
        assert (book.asked[first][0], book.asked[second][0]) == (note.data["from"], note.data["to"]) == ("1", "0")
        assert kept >= 1
        assert book.asked[first][1] == token_ids[:prompt].tolist()
        assert book.asked[second][1] == token_ids[: prompt + kept].tolist()
        assert len(token_ids) == len(mask) == len(logprobs) == len(versions)
        assert len(set(versions[prompt : prompt + kept].tolist())) == 1
        assert versions[prompt + kept :].tolist() == book.asked[second][2] != []
        found.append(sample)
    return found


def _trained(events: list[Any]) -> set[str]:
    return {entry.sample for event in events if isinstance(event, Train) for entry in event.samples}
