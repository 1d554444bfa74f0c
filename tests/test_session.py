"""What a session asks for, and how it goes on where a server doesn't: with every token that arrived, exactly once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_async.errors import ServerError
from areal_async.messages import Version
from areal_async.rollout import session as sessions
from areal_async.rollout.fleet import Fleet, Live
from areal_async.rollout.session import REPEATS, Session, sample_seed
from areal_async.rollout.types import Completion, RequestFailed, Sampling
from areal_async.rollout.vllm_http import VllmClient
from areal_async.testing.vllm_server import (
    Break,
    Fault,
    Say,
    ScriptedServer,
    Slow,
    Stall,
    Status,
    drawn_logprob,
    drawn_token,
)

from .waiting import until

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
INFO = {"path": "/dev/shm/weights"}
PROMPT = [1, 2, 3]
CONTEXT, VOCAB = 4096, 128

Notes = list[tuple[str, dict[str, str | int]]]


class House:
    """Scripted servers `0`, `1`, … at these versions, and sessions that are placed on the first."""

    def __init__(self, servers: list[ScriptedServer], fleet: Fleet, lives: list[Live]) -> None:
        self.servers = servers
        self.fleet = fleet
        self.lives = lives
        self.notes: Notes = []

    def session(self, floor: Version = 0, deadline_s: float = 30.0, **changes: object) -> Session:
        given: dict[str, object] = {"server": "0", "sample": "3.1", "max_tokens": 40, "stop": (), **changes}
        return Session(
            self.fleet,
            server=str(given["server"]),
            floor=floor,
            sample=str(given["sample"]),
            attempt=2,
            run_seed=5,
            sampling=Sampling(temperature=1.0, max_tokens=given["max_tokens"], stop_token_ids=given["stop"]),  # type: ignore[arg-type]
            context=CONTEXT,
            vocab_size=VOCAB,
            deadline_s=deadline_s,
            note=lambda what, data: self.notes.append((what, data)),
        )

    def asked(self) -> list[tuple[str, str, list[int], int]]:
        """(server, request id, prompt, max_tokens) of all requests."""
        return [
            (Path(server.uds).stem, r.request_id, r.token_ids, r.sampling_params.max_tokens)
            for server in self.servers
            for r in server.requests
        ]


Open = Callable[..., "House"]


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="aa-") as path:
        yield Path(path)


async def open_house(stack: AsyncExitStack, folder: Path, versions: list[Version]) -> House:
    servers, lives, fleet = [], [], Fleet()
    for number, version in enumerate(versions):
        uds = str(folder / str(number))
        server = ScriptedServer(uds, label=str(version), chunk_tokens=4)
        servers.append(await stack.enter_async_context(server))
        lives.append(fleet.join(await stack.enter_async_context(VllmClient(str(number), f"unix:{uds}"))))
        fleet.swapped(lives[-1], version)
    return House(servers, fleet, lives)


@pytest.fixture
async def house(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    """Server 0 at version 7, server 1 at version 8; no pause is longer than a few hundredths of a second."""
    monkeypatch.setattr(sessions, "PAUSE_S", 0.01)
    async with AsyncExitStack() as stack:
        yield await open_house(stack, folder, [7, 8])


def seed(request: int = 0, turn: int = 0) -> int:
    return sample_seed(5, "3.1", 2, turn, request)


def assert_drawn(answer: Completion, pieces: list[tuple[int, Version, int]]) -> None:
    """The answer is what the scripted servers drew: pieces of (seed, version, tokens), each from its own start."""
    drawn = [(s, v, i) for s, v, n in pieces for i in range(n)]
    assert answer.token_ids.tolist() == [drawn_token(s, v, i, VOCAB) for s, v, i in drawn]
    assert answer.logprobs.tolist() == [drawn_logprob(s, v, i) for s, v, i in drawn]
    assert answer.versions.tolist() == [v for _, v, _ in drawn]
    assert [str(a.dtype) for a in (answer.token_ids, answer.logprobs, answer.versions)] == ["int32", "float32", "int32"]


# ------------------------------------------------------------------------------------------------- what is sent


async def test_the_answer_is_limited_to_what_fits(house: House) -> None:
    """P21: a prompt of 2,089 tokens and max_tokens 2,048 in a context of 4,096."""
    await house.session(max_tokens=2048).generate([1] * 2089)
    assert house.asked()[0][3] == 2007


@pytest.mark.parametrize(
    ("prompt", "why"),
    [([1] * 44249, "does not fit the context"), ([], "does not fit"), ([128], r"\[0, 128\)"), ([-1], r"\[0, 128\)")],
)
async def test_a_prompt_that_cannot_be_answered_is_not_sent(house: House, prompt: list[int], why: str) -> None:
    with pytest.raises(ServerError, match=why):
        await house.session().generate(prompt)
    assert not house.asked()


async def test_each_request_has_an_id_and_a_seed_of_its_own(house: House) -> None:
    session = house.session()
    await session.generate([1])
    await session.generate([1])
    assert [asked[1] for asked in house.asked()] == ["3.1-2-0", "3.1-2-1"]
    seeds = [request.sampling_params.seed for request in house.servers[0].requests]
    assert seeds == [sample_seed(5, "3.1", 2, 0), sample_seed(5, "3.1", 2, 1)]
    assert len({sample_seed(5, "3.1", 2, turn, request) for turn in range(9) for request in range(9)}) == 81
    assert not house.notes


# ------------------------------------------------------------------------------------------- broken answers go on


@pytest.mark.parametrize("fault", [Break(20), Say(20, b'data: {"error": {"message": "engine died"}}\n\n')])
async def test_a_broken_answer_goes_on_elsewhere_from_what_arrived(house: House, fault: Fault) -> None:
    house.servers[0].order(GENERATE, fault)
    session = house.session()
    answer = await session.generate(PROMPT)
    assert_drawn(answer, [(seed(), 7, 20), (seed(1), 8, 20)])
    kept = answer.token_ids[:20].tolist()
    assert house.asked() == [("0", "3.1-2-0", PROMPT, 40), ("1", "3.1-2-0-1", PROMPT + kept, 20)]
    assert house.servers[0].calls.count(ABORT) == 1  # it lives, and may go on with the answer
    (what, data), *others = house.notes
    assert not others
    assert what == "continued"
    assert (data["sample"], data["from"], data["to"], data["tokens"], data["inferred"]) == ("3.1", "0", "1", 20, 20)
    await session.generate(PROMPT)
    assert house.asked()[-1][0] == "1"  # the next turn stays there, without a word
    assert len(house.notes) == 1
    assert session.tokens_so_far == 80


async def test_a_broken_answer_goes_on_at_the_same_server_if_there_is_no_other(house: House) -> None:
    house.fleet.lose(house.lives[1], "gone")
    house.servers[0].order(GENERATE, Break(12), Break(8))
    answer = await house.session().generate(PROMPT)
    assert_drawn(answer, [(seed(), 7, 12), (seed(1), 7, 8), (seed(2), 7, 20)])
    assert [len(asked[2]) for asked in house.asked()] == [3, 15, 23]
    assert [data["tokens"] for _, data in house.notes] == [12, 20]


async def test_the_tokens_of_a_broken_answer_get_the_oldest_version_they_can_have(house: House) -> None:
    """The server swapped in the middle of it, and which tokens came before that was never told."""
    house.servers[0].token_s = 0.005
    house.servers[0].order(GENERATE, Break(20))
    task = asyncio.create_task(house.session().generate(PROMPT))
    await until(lambda: house.lives[0].client.tokens_so_far("3.1-2-0") >= 8)
    house.fleet.loading(house.lives[0], 9)
    await house.lives[0].client.swap(9, INFO)
    house.fleet.swapped(house.lives[0], 9)
    answer = await task
    assert answer.versions.tolist() == [7] * 20 + [8] * 20


@pytest.mark.parametrize(("loading", "oldest"), [(9, 7), (5, 5)])
async def test_a_request_that_begins_while_its_server_loads_may_get_either(
    house: House, loading: Version, oldest: Version
) -> None:
    """5: training went back."""
    house.fleet.lose(house.lives[1], "gone")
    house.fleet.loading(house.lives[0], loading)
    house.servers[0].order(GENERATE, Break(4))
    answer = await house.session().generate(PROMPT)
    assert answer.versions.tolist() == [oldest] * 4 + [7] * 36


@pytest.mark.parametrize(("after", "stops", "finish"), [(40, False, "length"), (20, True, "stop")])
async def test_an_answer_whose_end_was_not_told_is_whole(house: House, after: int, stops: bool, finish: str) -> None:
    """All tokens arrived, the last chunk's end didn't: nothing is asked again."""
    stop = (drawn_token(seed(), 7, 19, VOCAB),) if stops else ()
    content = [{"logprob": drawn_logprob(seed(), 7, i)} for i in range(after)]
    tokens = [drawn_token(seed(), 7, i, VOCAB) for i in range(after)]
    raw = b"data: " + msgspec.json.encode({"choices": [{"token_ids": tokens, "logprobs": {"content": content}}]})
    house.servers[0].order(GENERATE, Say(0, raw + b"\n\n"))
    answer = await house.session(stop=stop).generate(PROMPT)
    assert answer.finish_reason == finish
    assert_drawn(answer, [(seed(), 7, after)])
    assert len(house.asked()) == 1
    assert [what for what, _ in house.notes] == ["completed"]


async def test_a_lost_server_gives_up_its_answers_at_once(house: House) -> None:
    """One that stands still for good, such as after half an update; its connections are open."""
    house.servers[0].order(GENERATE, Stall(8))
    task = asyncio.create_task(house.session().generate(PROMPT))
    await until(lambda: house.lives[0].client.tokens_so_far("3.1-2-0") == 8)
    assert house.fleet.lose(house.lives[0], "half-loaded")
    assert not house.fleet.lose(house.lives[0], "half-loaded")
    assert_drawn(await task, [(seed(), 7, 8), (seed(1), 8, 32)])
    assert ABORT not in house.servers[0].calls


# -------------------------------------------------------------------------------------------------- who is asked


@pytest.mark.slow
async def test_a_sample_whose_server_is_gone_goes_to_the_least_loaded(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        house = await open_house(stack, folder, [7, 7, 7])
        house.fleet.lose(house.lives[0], "gone")
        house.servers[1].order(GENERATE, *[Slow(0.2)] * 2)
        house.servers[2].order(GENERATE, *[Slow(0.2)] * 2)
        await asyncio.gather(*(house.session(sample=f"4.{n}").generate(PROMPT) for n in range(4)))
        assert [len(server.requests) for server in house.servers] == [0, 2, 2]
        assert {(what, data["from"]) for what, data in house.notes} == {("moved", "0")}


async def test_no_request_goes_below_the_floor(house: House) -> None:
    house.servers[1].order(GENERATE, Break(20))
    answer = await house.session(floor=8, server="0").generate(PROMPT)  # 0 is at version 7
    assert [asked[0] for asked in house.asked()] == ["1", "1"]
    assert (answer.versions == 8).all()


async def test_who_finds_no_server_waits_for_one(house: House) -> None:
    task = asyncio.create_task(house.session(floor=9).generate(PROMPT))
    await until(lambda: "1 requests wait for a server with version 9 or newer" in house.fleet.waits())
    assert "server 0 (version 7), server 1 (version 8)" in house.fleet.waits()
    await house.lives[0].client.swap(9, INFO)
    house.fleet.swapped(house.lives[0], 9)
    async with asyncio.timeout(60):
        assert (await task).versions.tolist() == [9] * 40
    assert house.fleet.waits() == ""


async def test_who_waits_can_be_cancelled(house: House) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await house.session(floor=9).generate(PROMPT)
    assert house.fleet.waits() == ""


# -------------------------------------------------------------------------------------- what is repeated, and not


async def test_what_can_never_succeed_is_not_repeated(house: House) -> None:
    """P21: a 400."""
    house.servers[0].order(GENERATE, Status(400, "prompt too long"))
    with pytest.raises(RequestFailed, match="prompt too long"):
        await house.session().generate(PROMPT)
    assert house.servers[0].calls == [GENERATE]
    assert not house.servers[1].calls


@pytest.mark.parametrize("code", [408, 429, 500, 503])
async def test_a_server_that_refuses_for_now_is_not_asked_alone(house: House, code: int) -> None:
    house.servers[0].order(GENERATE, Status(code, "later"))
    assert_drawn(await house.session().generate(PROMPT), [(seed(1), 8, 40)])
    assert [(what, data["to"]) for what, data in house.notes] == [("moved", "1")]
    assert ABORT not in house.servers[0].calls  # nothing had begun


async def test_a_log_probability_that_is_none_is_asked_again_and_then_given_up(house: House) -> None:
    """P22: what came with it isn't kept, and the repeats are bounded."""
    bad = b'data: {"choices": [{"token_ids": [3], "logprobs": {"content": [{"logprob": -9999.0}]}, '
    bad += b'"finish_reason": "length", "weight_versions": [{"version": "7", "start": 0, "end": 1}]}]}\n\n'
    for server in house.servers:
        server.order(GENERATE, *[Say(0, bad)] * 2)
    with pytest.raises(RequestFailed, match="log-probability of token 0"):
        await house.session().generate(PROMPT)
    asked = house.asked()
    assert len(asked) == 1 + REPEATS
    assert len({request for _, request, _, _ in asked}) == len(asked)
    assert all(prompt == PROMPT for _, _, prompt, _ in asked)


@pytest.mark.slow
async def test_repeats_without_a_token_are_bounded_and_tokens_forgive_them(house: House) -> None:
    house.fleet.lose(house.lives[1], "gone")
    never = [Break(0)] * REPEATS
    house.servers[0].order(GENERATE, *never, Break(8), *never, Break(8), *never)
    answer = await house.session().generate(PROMPT)
    assert answer.versions.tolist() == [7] * 40
    assert len(house.asked()) == 3 * REPEATS + 3
    house.servers[0].order(GENERATE, *never, Break(0))
    with pytest.raises(RequestFailed, match="after 0 tokens"):
        await house.session().generate(PROMPT)


async def test_nothing_is_repeated_after_the_deadline(house: House) -> None:
    house.servers[0].order(GENERATE, Stall(8))
    with pytest.raises(RequestFailed, match="deadline"):
        await house.session(deadline_s=0.2).generate(PROMPT)
    assert len(house.asked()) == 1


async def test_a_connection_that_is_reset_after_the_start_gives_one_answer(house: House) -> None:
    """P22: the first request goes on at its server for whoever listens; only what was heard is taken, and once."""
    house.servers[0].token_s = 0.01
    task = asyncio.create_task(house.session().generate(PROMPT))
    await until(lambda: house.lives[0].client.tokens_so_far("3.1-2-0") >= 8)
    house.lives[0].client.hang_up("reset")
    house.lives[0].client._hung_up = ""  # a reset of one connection, not the end of the server
    answer = await task
    kept = int((answer.versions == 7).sum())
    assert_drawn(answer, [(seed(), 7, kept), (seed(1), 8, 40 - kept)])
    assert "3.1-2-0" in house.servers[0]._aborted


@pytest.mark.slow
async def test_answers_in_flight_live_through_a_swap_and_the_next_begins_with_it(house: House) -> None:
    """P23: 16 in flight when the server's weights change; each goes on, old tokens keep their version."""
    house.servers[0].token_s = 0.01  # the first one is not to end before the last one has begun
    running = [asyncio.create_task(house.session(sample=f"1.{n}").generate(PROMPT)) for n in range(16)]
    await until(lambda: all(house.lives[0].client.tokens_so_far(f"1.{n}-2-0") >= 8 for n in range(16)))
    await house.lives[0].client.swap(8, INFO)
    house.fleet.swapped(house.lives[0], 8)
    for n, answer in enumerate(await asyncio.gather(*running)):
        old = int((answer.versions == 7).sum())
        assert 0 < old < 40
        whole = [(7, i) if i < old else (8, i) for i in range(40)]
        own = sample_seed(5, f"1.{n}", 2, 0)
        assert answer.token_ids.tolist() == [drawn_token(own, v, i, VOCAB) for v, i in whole]
        assert answer.versions.tolist() == [v for v, _ in whole]
    house.servers[0].token_s = 0.0
    assert (await house.session(sample="1.0").generate(PROMPT)).versions.tolist() == [8] * 40
    assert not house.notes
    assert len(house.asked()) == 17


BREAKS = st.lists(st.integers(0, 12), max_size=6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(breaks=st.lists(BREAKS, min_size=2, max_size=2), stop_at=st.integers(0, 60), limit=st.integers(1, 40))
async def test_however_it_breaks_the_arrays_are_one_answer(
    monkeypatch: pytest.MonkeyPatch, breaks: list[list[int]], stop_at: int, limit: int
) -> None:
    """Wherever the streams of two servers break: one length, exact prefixes, no token twice, none after the end."""
    monkeypatch.setattr(sessions, "PAUSE_S", 0.0)
    monkeypatch.setattr(sessions, "REPEATS", 20)
    stop = drawn_token(seed(), 7, stop_at, VOCAB)
    with TemporaryDirectory(prefix="aa-") as path:
        async with AsyncExitStack() as stack:
            house = await open_house(stack, Path(path), [7, 8])
            for server, after in zip(house.servers, breaks, strict=True):
                server.order(GENERATE, *(Break(tokens) for tokens in after))
            answer = await house.session(max_tokens=limit, stop=(stop,)).generate(PROMPT)
            by_request = sorted(house.asked(), key=lambda asked: int(asked[1].removeprefix("3.1-2-0").strip("-") or 0))
    tokens = answer.token_ids.tolist()
    assert len(tokens) == len(answer.logprobs) == len(answer.versions) <= limit
    assert answer.finish_reason == ("stop" if tokens[-1] == stop else "length")
    assert stop not in tokens[:-1]
    assert answer.finish_reason == "stop" or len(tokens) == limit
    assert np.isfinite(answer.logprobs).all()
    begins = []
    for _, _, prompt, max_tokens in by_request:
        begin = len(prompt) - len(PROMPT)
        assert prompt == PROMPT + tokens[:begin]
        assert max_tokens == limit - begin
        begins.append(begin)
    expected: list[int] = []
    for number, (begin, end) in enumerate(zip(begins, [*begins[1:], len(tokens)], strict=True)):
        version = 7 + int(by_request[number][0])
        expected += [drawn_token(seed(number), version, i, VOCAB) for i in range(end - begin)]
    assert tokens == expected
