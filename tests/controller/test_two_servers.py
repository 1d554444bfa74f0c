"""Whole runs on several scripted servers, some of which die, fail or live elsewhere: no sample is lost."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_async.config import Config
from areal_async.controller import Controller, RunResult
from areal_async.controller.metrics import StepRow
from areal_async.errors import RunFailed
from areal_async.launch.recipes import Command, Recipes
from areal_async.log.reader import read_payload, read_records
from areal_async.messages import Failed, Joined, Lost, Note, Published, Restart, Swap, Swapped
from areal_async.rollout import session as sessions
from areal_async.testing.recipes import scripted
from areal_async.testing.trainer import VOCAB_SIZE
from areal_async.testing.vllm_server import Entry, Order, ScriptedServer, Status

from ..waiting import PATIENCE_S, until

Make = Callable[..., Config]
GENERATE = "/inference/v1/generate"
HANDSHAKE_REQUESTS = 5  # a probe and two questions for the vocabulary; two probes against the trainer
GROUP_STATES = ("trained", "filtered", "stale", "failed", "cancelled", "outstanding", "training")
LONG = ("train.steps=1000", "rollout.max_staleness=3", "rollout.retries=0", "rollout.stop_token_ids=[]")


async def run_until(run: Controller, enough: Callable[[StepRow], bool | Awaitable[bool]]) -> RunResult:
    """Steps until one is enough; then the run is stopped."""
    async with asyncio.timeout(PATIENCE_S):
        async for row in run.steps():
            found = enough(row)
            if found if isinstance(found, bool) else await found:
                run.stop()
    return run.result()


class Life:
    """A server of a run as it is now."""

    def __init__(self, run: Controller, name: str) -> None:
        self._servers = run._parts._servers
        self._name = name

    def killed(self) -> bool:
        """Kill it in the middle of its answers; False if it has none yet that has begun and goes on for a while."""
        life = self._servers._lives.get(self._name)
        if life is None or sum(8 <= answer.length <= 40 for answer, _ in life.client._running.values()) < 2:
            return False
        assert life.child is not None
        os.kill(life.child.pid, signal.SIGKILL)
        return True

    def answers(self) -> bool:
        """Whether tokens of a sample's answer have come from it, which goes on."""
        life = self._servers._lives[self._name]
        return any(answer.length for answer, _ in life.client._running.values())

    def version(self) -> int:
        """Of its weights; -1 while it has none."""
        found = self._servers.fleet._live.get(self._name)
        return found.version if found is not None else -1


def records(result: RunResult) -> list[object]:
    return [record.message for record in read_records(result.folder / "log")]


def answers(result: RunResult) -> dict[str, list[Any]]:
    """The arrays of all finished samples, from the log."""
    log = result.folder / "log"
    found = [read_payload(log, record.payload) for record in read_records(log) if record.payload is not None]
    return {payload.sample: payload.arrays for payload in found}


def entries(book: Path) -> list[Entry]:
    return [msgspec.json.decode(line, type=Entry) for line in book.read_bytes().splitlines()]


def trained(books: Path) -> list[str]:
    return [sample for line in books.read_text().splitlines() for sample in json.loads(line)["samples"]]


def assert_nothing_is_lost(result: RunResult, config: Config) -> None:
    assert result.reason == "stopped"
    for row in result.rows:
        for prefix in ("", "samples_"):
            assert row.ledger[f"{prefix}admitted"] == sum(row.ledger[f"{prefix}{state}"] for state in GROUP_STATES)
        assert row.ledger["samples_failed"] == row.ledger["failed"] == row.ledger["cancelled"] == 0
        assert row.ledger["trained"] == (row.step + 1) * config.train.batch_groups
        assert row.lag_max <= config.rollout.max_staleness


def versions_before(result: RunResult) -> dict[tuple[str, int], int]:
    """Which weights a server had when it was given those of a version, by its name in the book, in its first life."""
    found: dict[tuple[str, int], int] = {}
    has: dict[str, int] = {}
    for event in records(result):
        if isinstance(event, Swapped) and event.server in has:
            found.setdefault((f"server-{event.server}", event.version), has[event.server])
        if isinstance(event, Swapped):
            has[event.server] = event.version
    return found


def assert_exact_continuations(result: RunResult, book: Path) -> dict[str, Entry]:
    """Each request that goes on with an answer has exactly the prompt and the tokens that were kept as its prompt.

    These entries, by sample.
    """
    arrays, found, before = answers(result), {}, versions_before(result)
    by_id = {entry.request_id: entry for entry in entries(book) if not entry.aborted}
    for note in (r for r in records(result) if isinstance(r, Note) and r.what == "continued"):
        sample, tokens = str(note.data["sample"]), note.data["tokens"]
        assert isinstance(tokens, int)
        if sample not in arrays:
            continue  # it was still running when the run was over
        entry = by_id[f"{sample}-{note.data['attempt']}-0-{note.data['request']}"]
        token_ids, mask, _, versions = arrays[sample]
        prompt_tokens = int(np.argmax(mask))
        assert entry.server == f"server-{note.data['to']}"
        assert entry.prompt == token_ids[: prompt_tokens + tokens].tolist()
        assert len(entry.prompt) + entry.max_tokens == prompt_tokens + 64
        first = by_id[f"{sample}-{note.data['attempt']}-0"]
        if note.data["request"] == 1:  # nobody said which weights drew these: what the server had when it was asked
            (oldest,) = set(versions[prompt_tokens : prompt_tokens + tokens].tolist())
            had = int(first.label)  # while it changed them, it may have had those before
            assert oldest in (had, before.get((first.server, had)))
        found[sample] = entry
    return found


@pytest.mark.slow
async def test_a_server_killed_in_the_middle_of_answers(make_config: Make, tmp_path: Path) -> None:
    """Its answers go on at the other from what had arrived; nothing is lost; it comes back with the present weights."""
    books, book = tmp_path / "books.jsonl", tmp_path / "server-book.jsonl"
    config = make_config(*LONG, "rollout.servers=2")
    recipes = scripted(token_s=0.01, step_s=0.1, books=books, server_book=book)
    async with Controller(config, recipes=recipes) as run:
        killed, died, back_at = False, False, 0

        def enough(row: StepRow) -> bool:
            nonlocal killed, died, back_at
            killed = killed or Life(run, "1").killed()
            died = died or (killed and Life(run, "1").version() < 0)
            back_at = back_at or (row.step if died and Life(run, "1").version() > 1 else 0)
            return bool(back_at) and row.step > back_at + 3 and Life(run, "1").answers()

        result = await run_until(run, enough)
    assert_nothing_is_lost(result, config)
    continued = assert_exact_continuations(result, book)
    of_both = set(continued) & set(trained(books))
    assert of_both
    assert all(continued[sample].server == "server-0" for sample in of_both)
    events = records(result)
    (lost,) = [event for event in events if isinstance(event, Lost)]
    assert "SIGKILL" in lost.why
    after = events[events.index(lost) :]
    assert [type(e) for e in after if isinstance(e, Restart | Joined | Lost)] == [Lost, Restart, Joined]
    back = next(e for e in after if isinstance(e, Swapped) and e.server == "1")
    told = next(e for e in after if isinstance(e, Swap) and e.server == "1")
    assert told.version == max(e.version for e in events[: events.index(told)] if isinstance(e, Published)) >= 2
    assert told.version == back.version
    later = [e for e in entries(book) if e.server == "server-1" and e.seed is not None and int(e.label) >= back.version]
    assert later  # and it answers again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "usable"),
    [("/start_weight_update", True), ("/update_weights", False)],
    ids=["before", "after"],
)
async def test_a_swap_that_fails_stops_nobody(make_config: Make, tmp_path: Path, path: str, usable: bool) -> None:
    """Before the update began the server goes on and is swapped again; after it is restarted. The other goes on."""
    book = tmp_path / "server-book.jsonl"
    config = make_config(*LONG, "rollout.servers=2")
    orders = {"server-1": [[Order(path, Status(500, "no memory"), skip=1)]]}
    recipes = scripted(token_s=0.01, step_s=0.1, server_book=book, orders=orders)
    async with Controller(config, recipes=recipes) as run:

        def enough(row: StepRow) -> bool:
            """Server 1 has had another swap since."""
            log = [record.message for record in read_records(run.folder / "log")]
            failed = next((at for at, event in enumerate(log) if isinstance(event, Failed | Lost)), len(log))
            return row.step > 3 and any(isinstance(event, Swapped) and event.server == "1" for event in log[failed:])

        result = await run_until(run, enough)
    assert_nothing_is_lost(result, config)
    assert_exact_continuations(result, book)
    events = records(result)
    failed = [event for event in events if isinstance(event, Failed | Lost)]
    assert [type(event) for event in failed] == [Failed if usable else Lost]
    assert "no memory" in failed[0].why
    assert ("goes on" if usable else "must be restarted") in failed[0].why
    after = events[events.index(failed[0]) :]
    assert any(isinstance(event, Swapped) and event.server == "1" for event in after)
    assert any(isinstance(event, Restart) for event in after) is not usable


@pytest.mark.slow
async def test_servers_that_answer_500_end_the_run_with_that_error(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: no waiting for ever."""
    monkeypatch.setattr(sessions, "PAUSE_S", 0.01)
    sick = [[Order(GENERATE, Status(500, "CUDA error: an illegal memory access"), HANDSHAKE_REQUESTS, 10_000)]]
    config = make_config("rollout.servers=2", "rollout.retries=1", "rollout.max_failures=1")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RunFailed, match=r"(?s)group \d.*answered 500 to /inference.*illegal memory access"):
            async with Controller(config, recipes=scripted(orders={"server-0": sick, "server-1": sick})) as run:
                await run.run()


@pytest.mark.slow
async def test_a_server_of_another_model_ends_the_run_if_it_is_the_only_one(make_config: Make) -> None:
    reason = "model.layers.3 has another shape. Nothing was loaded. Start server and trainer from the same model"
    other = [[Order("/init_weight_transfer_engine", Status(500, reason))]]
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RunFailed, match=r"model\.layers\.3 has another shape"):
            async with Controller(make_config(), recipes=scripted(orders={"server-0": other})) as run:
                await run.run()


@pytest.mark.slow
async def test_a_server_that_never_comes_back_is_left_alone(make_config: Make, tmp_path: Path) -> None:
    config = make_config(*LONG, "rollout.servers=2", "server.max_restarts=1")
    recipes = scripted(token_s=0.005, step_s=0.1)
    lives = 0

    def server(**asked: Any) -> Command:
        nonlocal lives
        lives += Path(asked["uds"]).stem == "server-1"
        if Path(asked["uds"]).stem == "server-1" and lives > 1:
            return ["sh", "-c", "echo 'no such device' >&2; exit 3"], {}
        return recipes.server(**asked)

    async with Controller(config, recipes=Recipes(server=server, trainer=recipes.trainer)) as run:
        killed, left_alone_at = False, 0

        def enough(row: StepRow) -> bool:
            nonlocal killed, left_alone_at
            killed = killed or Life(run, "1").killed()
            if "quarantined" in run._parts._core.story("server 1"):
                left_alone_at = left_alone_at or row.step
            return bool(left_alone_at) and row.step > left_alone_at + 2

        result = await run_until(run, enough)
    assert_nothing_is_lost(result, config)
    lost = [event for event in records(result) if isinstance(event, Lost)]
    assert len(lost) == 2
    assert "could not be started again" in lost[1].why
    assert "no such device" in lost[1].why
    assert lives == 2


@pytest.fixture
def uds() -> Iterator[str]:
    with TemporaryDirectory(prefix="aa-") as folder:
        yield str(Path(folder) / "s")


@pytest.mark.slow
async def test_an_own_server_and_one_by_url(make_config: Make, uds: str, tmp_path: Path) -> None:
    """The one by URL, found paused by a dead controller, serves like the other; it dies, and is taken back."""
    config = make_config(*LONG, "rollout.servers=1", f"rollout.urls=['unix:{uds}']")
    book = tmp_path / "server-book.jsonl"

    def elsewhere(**started: Any) -> ScriptedServer:
        return ScriptedServer(
            uds, vocab_size=VOCAB_SIZE, max_model_len=512, token_s=0.01, chunk_tokens=4, book=book, **started
        )

    first = await elsewhere(paused=True, label="77").__aenter__()
    again: ScriptedServer | None = None
    gone_at = 0
    try:
        async with Controller(config, recipes=scripted(token_s=0.01, step_s=0.1, server_book=book)) as run:

            async def enough(row: StepRow) -> bool:
                nonlocal again, gone_at
                both = min(Life(run, "0").version(), Life(run, "1").version()) >= 0
                if row.step >= 2 and both and not gone_at:
                    gone_at = row.step
                    await first.__aexit__(None, None, None)
                if 0 < gone_at < row.step and again is None and Life(run, "1").version() < 0:
                    os.unlink(uds)
                    again = await elsewhere().__aenter__()
                return (
                    again is not None and bool(again.requests) and again.requests[-1].sampling_params.seed is not None
                )

            result = await run_until(run, enough)
    finally:
        if again is not None:
            await again.__aexit__(None, None, None)
    assert_nothing_is_lost(result, config)
    assert_exact_continuations(result, book)
    events = records(result)
    of_servers = [e for e in events if isinstance(e, Joined | Lost) and e.peer == "server"]
    assert [(type(e), e.id) for e in of_servers[2:]] == [(Lost, "1"), (Joined, "1")]
    assert again is not None
    assert any(request.sampling_params.seed for request in again.requests)
    assert int(again.label) >= 3


@pytest.mark.slow
async def test_the_tokens_of_running_answers_are_known(make_config: Make) -> None:
    """For those who count what a cancelled sample has cost."""
    config = make_config("rollout.stop_token_ids=[]")
    async with Controller(config, recipes=scripted(token_s=0.02)) as run:
        await until(lambda: hasattr(run._parts, "_rollouts") and run._parts._rollouts.tokens_so_far("0.0"))
        rollouts = run._parts._rollouts
        assert 0 < rollouts.tokens_so_far("0.0") <= 64
        assert rollouts.tokens_so_far("9999.0") == 0
