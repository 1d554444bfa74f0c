"""The client of a vLLM server, against a scripted one: no token that arrived is lost, and nothing wrong is believed."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import HandshakeError
from areal_async.rollout.answer import Answer
from areal_async.rollout.handshake import handshake, probe
from areal_async.rollout.types import Completion, ModelIdentity, RequestFailed, Sampling, StreamBroken, SwapFailed
from areal_async.rollout.vllm_http import VllmClient
from areal_async.testing.vllm_server import (
    Break,
    Fault,
    Say,
    ScriptedServer,
    Stall,
    Status,
    drawn_logprob,
    drawn_token,
)

from .waiting import until

GENERATE = "/inference/v1/generate"
INFO = {"path": "/dev/shm/weights"}
PROMPT = [1, 2, 3]
IDENTITY = ModelIdentity(vocab_size=128, context_tokens=4096, dtype="float32")


@pytest.fixture
def uds() -> Iterator[str]:
    """Path of a socket; short, since it may have 107 bytes at most."""
    with TemporaryDirectory(prefix="aa-") as folder:
        yield str(Path(folder) / "s")


@pytest.fixture
async def server(uds: str) -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(uds, label="7") as running:
        yield running


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[VllmClient]:
    async with VllmClient("0", f"unix:{server.uds}") as connected:
        yield connected


def sampling(max_tokens: int = 40, seed: int = 5, stop: tuple[int, ...] = ()) -> Sampling:
    return Sampling(temperature=1.0, max_tokens=max_tokens, stop_token_ids=stop, seed=seed)


def assert_drawn(answer: Completion, versions: list[int], seed: int = 5) -> None:
    """The answer is what the scripted server drew with these versions, token for token."""
    assert answer.versions.tolist() == versions
    assert answer.token_ids.tolist() == [drawn_token(seed, v, i, 128) for i, v in enumerate(versions)]
    assert answer.logprobs.tolist() == [drawn_logprob(seed, v, i) for i, v in enumerate(versions)]


# -------------------------------------------------------------------------------------------------------- answers


async def test_an_answer_is_tokens_logprobs_and_versions(client: VllmClient) -> None:
    answer = await client.generate(PROMPT, sampling(40), "a", 5.0)
    assert [str(a.dtype) for a in (answer.token_ids, answer.logprobs, answer.versions)] == ["int32", "float32", "int32"]
    assert answer.finish_reason == "length"
    assert_drawn(answer, [7] * 40)


async def test_a_stop_token_ends_an_answer_and_belongs_to_it(client: VllmClient) -> None:
    stop = drawn_token(5, 7, 19, 128)
    answer = await client.generate(np.array(PROMPT, dtype=np.int32), sampling(40, stop=(stop,)), "a", 5.0)
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == stop


async def test_the_request_says_everything_that_sampling_needs(client: VllmClient, server: ScriptedServer) -> None:
    await client.generate(PROMPT, sampling(3, seed=11, stop=(4, 5)), "id-1", 5.0)
    sent = server.requests[0]
    assert (sent.request_id, sent.token_ids, sent.stream) == ("id-1", PROMPT, True)
    assert (sent.sampling_params.seed, sent.sampling_params.stop_token_ids) == (11, (4, 5))


@pytest.mark.parametrize(
    ("fault", "deadline_s", "kept", "why"),
    [
        (Break(20), 5.0, 20, "ClientPayloadError|closed|reset|Reset"),
        (Stall(20), 0.3, 20, "deadline of 0.3 s"),
        (Break(0), 5.0, 0, "ClientPayloadError|closed|reset|Reset"),
        (Say(16, b'data: {"error": {"message": "engine died", "code": 500}}\n\n'), 5.0, 16, "engine died"),
        (Say(16, b""), 5.0, 16, "without a finish reason"),
        (Say(16, b'data: {"choices": [{"token_ids": [], "finish_reason": "abort"}]}\n\n'), 5.0, 16, "'abort'"),
    ],
)
async def test_tokens_that_arrived_before_a_break_are_kept(
    client: VllmClient, server: ScriptedServer, fault: Fault, deadline_s: float, kept: int, why: str
) -> None:
    server.chunk_tokens = 4
    server.order(GENERATE, fault)
    with pytest.raises(StreamBroken, match=why) as caught:
        await client.generate(PROMPT, sampling(40), "a", deadline_s)
    partial = caught.value.partial
    assert caught.value.retryable
    assert partial.token_ids.tolist() == [drawn_token(5, 7, i, 128) for i in range(kept)]
    assert partial.logprobs.tolist() == [drawn_logprob(5, 7, i) for i in range(kept)]


def last_chunk(**changes: object) -> bytes:
    choice = {
        "token_ids": [3],
        "logprobs": {"content": [{"logprob": -1.0}]},
        "finish_reason": "length",
        "weight_versions": [{"version": "7", "start": 0, "end": 1}],
    }
    return b"data: " + msgspec.json.encode({"choices": [choice | changes]}) + b"\n\n"


@pytest.mark.parametrize(
    ("raw", "why", "retryable"),
    [
        (last_chunk(finish_reason="repetition"), "reason 'repetition'", False),
        (last_chunk(logprobs={"content": [{"logprob": -9999.0}]}), "log-probability of token 0 .id 3. is -9999", True),
        (last_chunk(logprobs={"content": [{"logprob": 1e999}]}), "can't be read", False),
        (last_chunk(logprobs=None), "1 tokens and 0 log-prob", False),
        (last_chunk(weight_versions=None), "version spans .none.", False),
        (last_chunk(weight_versions=[{"version": "7", "start": 0, "end": 2}]), "version spans", False),
        (last_chunk(weight_versions=[{"version": "7", "start": 1, "end": 1}]), "version spans", False),
        (last_chunk(weight_versions=[{"version": "default", "start": 0, "end": 1}]), "never given a version", False),
        (b"data: {nonsense\n\n", "can't be read", False),
        (b'data: {"error": {"message": "prompt too long", "code": 400}}\n\n', "prompt too long", False),
    ],
)
async def test_an_answer_that_cannot_be_right_is_an_error(
    client: VllmClient, server: ScriptedServer, raw: bytes, why: str, retryable: bool
) -> None:
    server.order(GENERATE, Say(0, raw))
    with pytest.raises(RequestFailed, match=why) as caught:
        await client.generate(PROMPT, sampling(1), "a", 5.0)
    assert caught.value.retryable is retryable
    assert not isinstance(caught.value, StreamBroken)


async def test_a_whole_answer_is_kept_though_the_connection_breaks_after_it(
    client: VllmClient, server: ScriptedServer
) -> None:
    server.order(GENERATE, Say(0, last_chunk()))  # no [DONE] after it
    assert (await client.generate(PROMPT, sampling(1), "a", 5.0)).token_ids.tolist() == [3]


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (404, False), (408, True), (429, True), (500, True)])
async def test_an_http_error_says_whether_to_try_again(
    client: VllmClient, server: ScriptedServer, status: int, retryable: bool
) -> None:
    server.order(GENERATE, Status(status, "because"))
    with pytest.raises(RequestFailed, match=f"server 0 answered {status} to {GENERATE}: because") as caught:
        await client.generate(PROMPT, sampling(1), "a", 5.0)
    assert (caught.value.status, caught.value.retryable) == (status, retryable)
    assert server.calls == [GENERATE]  # nothing is repeated in here


async def test_a_server_that_is_not_there_is_a_broken_stream_without_tokens(uds: str) -> None:
    async with VllmClient("0", f"unix:{uds}") as client:
        with pytest.raises(StreamBroken, match="No such file") as caught:
            await client.generate(PROMPT, sampling(1), "a", 5.0)
        assert len(caught.value.partial.token_ids) == 0
        with pytest.raises(RequestFailed, match="can't be reached for /health"):
            await client.health()


async def test_a_cancelled_request_closes_its_connection(client: VllmClient, server: ScriptedServer) -> None:
    server.order(GENERATE, Stall(4))
    task = asyncio.create_task(client.generate(PROMPT, sampling(40), "a", 60.0))
    await until(lambda: server.open_now == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: server.open_now == 0)


async def test_an_abort_ends_the_request_and_keeps_its_tokens(client: VllmClient, server: ScriptedServer) -> None:
    server.token_s, server.chunk_tokens = 0.01, 2
    task = asyncio.create_task(client.generate(PROMPT, sampling(4000), "a", 60.0))
    await until(lambda: server.open_now == 1)
    await client.abort("a")
    with pytest.raises(StreamBroken, match="'abort'"):
        await task


async def test_a_server_that_is_given_up_breaks_its_answers_off_and_takes_no_more(
    client: VllmClient, server: ScriptedServer
) -> None:
    server.chunk_tokens = 4
    server.order(GENERATE, Stall(8))
    task = asyncio.create_task(client.generate(PROMPT, sampling(40), "a", 60.0))
    await until(lambda: client.tokens_so_far("a") == 8)
    client.hang_up("it is paused for good")
    with pytest.raises(StreamBroken, match="after 8 tokens: it is paused for good") as caught:
        await task
    assert len(caught.value.partial.token_ids) == 8
    with pytest.raises(StreamBroken, match="after 0 tokens: it is paused for good"):
        await client.generate(PROMPT, sampling(40), "b", 60.0)
    assert client.tokens_so_far("a") == 0
    await until(lambda: server.open_now == 0)


@pytest.mark.slow
async def test_as_many_requests_in_flight_as_asked_for(client: VllmClient, server: ScriptedServer) -> None:
    """P24: an HTTP client's usual limit is 100 connections."""
    await client.pause()  # none ends before all have begun
    tasks = [asyncio.create_task(client.generate(PROMPT, sampling(1), str(i), 100.0)) for i in range(256)]
    await until(lambda: server.open_now == 256)
    await client.resume()
    answers = await asyncio.gather(*tasks)
    assert {len(answer.token_ids) for answer in answers} == {1}
    assert server.open_most == 256


async def test_connections_are_used_again(client: VllmClient, server: ScriptedServer) -> None:
    for i in range(3):
        await client.generate(PROMPT, sampling(40), str(i), 5.0)
    connector = client._http._session.connector
    assert connector is not None
    assert sum(len(idle) for idle in connector._conns.values()) == 1


@pytest.fixture(scope="session")
def libuv() -> None:
    """libuv opens two pipes when it is first used in a process, and keeps them."""
    uvloop.new_event_loop().close()


@pytest.mark.usefixtures("libuv")
def test_over_uvloop(uds: str) -> None:
    """The loop of `areal-async run`; its transports are classes of their own."""

    async def main() -> None:
        async with ScriptedServer(uds, label="7") as server, VllmClient("0", f"unix:{uds}") as client:
            assert_drawn(await client.generate(PROMPT, sampling(40), "a", 5.0), [7] * 40)
            server.chunk_tokens = 4
            server.order(GENERATE, Break(20))
            with pytest.raises(StreamBroken, match="after 20 tokens"):
                await client.generate(PROMPT, sampling(40), "b", 5.0)

    uvloop.run(main())


async def test_over_tcp(uds: str) -> None:
    from aiohttp import web

    async with ScriptedServer(uds, label="7") as server:
        site = web.TCPSite(server._runner, "127.0.0.1", 0)
        await site.start()
        port = server._runner.addresses[-1][1]
        async with VllmClient("0", f"http://127.0.0.1:{port}") as client:
            assert_drawn(await client.generate(PROMPT, sampling(40), "a", 5.0), [7] * 40)


@given(
    stream=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
)
def test_an_answer_does_not_depend_on_how_its_bytes_were_cut(stream: list[int], cuts: list[int]) -> None:
    total, raw = sum(stream), b""
    position = 0
    for size in stream:
        drawn = range(position, position + size)
        position += size
        raw += b"data: " + msgspec.json.encode({
            "choices": [{
                "token_ids": list(drawn),
                "logprobs": {"content": [{"logprob": -1.0 - t} for t in drawn]},
                "finish_reason": "stop" if position == total else None,
                "weight_versions": [{"version": "2", "start": 0, "end": total}] if position == total else None,
            }]
        }) + b"\n\n: keep-alive\n\n"  # fmt: skip
    raw += b"data: [DONE]\n\n"
    answer = Answer("0", "a")
    borders = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    for begin, end in itertools.pairwise(borders):
        answer.feed(raw[begin:end])
    whole = answer.completion()
    assert whole.token_ids.tolist() == list(range(total))
    assert whole.logprobs.tolist() == [-1.0 - t for t in range(total)]
    assert whole.versions.tolist() == [2] * total


# ---------------------------------------------------------------------------------------------------------- swaps


async def test_a_swap_in_the_middle_of_an_answer(client: VllmClient, server: ScriptedServer) -> None:
    server.token_s, server.chunk_tokens = 0.002, 4
    task = asyncio.create_task(client.generate(PROMPT, sampling(100), "a", 30.0))
    await until(lambda: client.tokens_so_far("a") >= 20)
    times = await client.swap(8, INFO)
    answer = await task
    old = int((answer.versions == 7).sum())
    assert 0 < old < 100
    assert_drawn(answer, [7] * old + [8] * (100 - old))
    assert server.calls[1:] == [
        "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume",
    ]  # fmt: skip
    assert times.total_s == sum(times) > 0


async def test_a_swap_that_fails_before_it_began_leaves_the_server_serving(
    client: VllmClient, server: ScriptedServer
) -> None:
    server.order("/pause", Status(500, "no"))
    with pytest.raises(SwapFailed, match=r"version 8.*'pause'.*no.*goes on") as caught:
        await client.swap(8, INFO)
    assert (caught.value.stage, caught.value.server_usable) == ("pause", True)
    assert server.calls[-1] == "/resume"
    assert (await client.generate(PROMPT, sampling(4), "a", 5.0)).versions.tolist() == [7] * 4
    await client.swap(8, INFO)


@pytest.mark.parametrize(
    ("path", "stage", "fault"),
    [
        ("/start_weight_update", "start", Stall()),  # nobody knows whether it will begin after all
        ("/start_weight_update", "start", Break()),
        ("/update_weights", "update", Status(500, "no")),
        ("/update_weights", "update", Stall()),
        ("/update_weights", "update", Break()),
        ("/finish_weight_update", "finish", Status(500, "no")),
        ("/finish_weight_update", "finish", Stall()),
        ("/finish_weight_update", "finish", Break()),
    ],
)
async def test_after_an_update_began_the_server_is_never_resumed(
    client: VllmClient, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, path: str, stage: str, fault: Fault
) -> None:
    monkeypatch.setattr("areal_async.rollout.vllm_http.CONTROL_DEADLINE_S", 0.3)
    server.order(path, fault)
    with pytest.raises(SwapFailed, match="must be restarted") as caught:
        await client.swap(8, INFO, deadline_s=0.3)
    assert (caught.value.stage, caught.value.server_usable, caught.value.version) == (stage, False, 8)
    assert "/resume" not in server.calls
    assert server.paused


async def test_a_server_that_refuses_to_begin_goes_on(client: VllmClient, server: ScriptedServer) -> None:
    """It says itself that no update is open, so its layers are what they were."""
    server.order("/start_weight_update", Status(500, "no"))
    with pytest.raises(SwapFailed, match=r"'start'.*no.*goes on") as caught:
        await client.swap(8, INFO)
    assert caught.value.server_usable
    assert server.calls[-3:] == ["/start_weight_update", "/finish_weight_update", "/resume"]
    assert (await client.generate(PROMPT, sampling(4), "a", 5.0)).versions.tolist() == [7] * 4


async def test_an_update_that_somebody_else_began_is_no_place_to_go_on_from(
    client: VllmClient, server: ScriptedServer
) -> None:
    await client.pause()
    await client.start_weight_update()
    with pytest.raises(SwapFailed, match=r"already active.*must be restarted") as caught:
        await client.swap(8, INFO)
    assert not caught.value.server_usable
    assert server.paused


async def test_a_server_that_stands_still_after_its_update_must_be_restarted(
    client: VllmClient, server: ScriptedServer
) -> None:
    server.order("/resume", Status(500, "no"))
    with pytest.raises(SwapFailed, match="has the new weights and stands still") as caught:
        await client.swap(8, INFO)
    assert (caught.value.stage, caught.value.server_usable) == ("resume", False)


async def test_a_server_that_can_be_neither_paused_nor_resumed_is_not_usable(
    client: VllmClient, server: ScriptedServer
) -> None:
    server.order("/pause", Status(500))
    server.order("/resume", Status(500))
    with pytest.raises(SwapFailed, match="could not be resumed either") as caught:
        await client.swap(8, INFO)
    assert not caught.value.server_usable


# ----------------------------------------------------------------------------------------------------- handshakes


async def test_a_handshake_leaves_a_good_server_as_it_is(client: VllmClient, server: ScriptedServer) -> None:
    server.label = "default"
    await handshake(client, IDENTITY)
    assert not server.paused
    assert "/resume" not in server.calls


async def test_a_server_that_a_dead_controller_left_paused_is_cleaned_up(uds: str) -> None:
    async with ScriptedServer(uds, paused=True) as server, VllmClient("0", f"unix:{uds}") as client:
        await handshake(client, IDENTITY)
        assert not server.paused
        assert server.calls.index("/abort_requests") < server.calls.index("/resume")


async def test_an_update_that_a_dead_controller_left_open_is_closed(client: VllmClient, server: ScriptedServer) -> None:
    await client.pause()
    await client.start_weight_update()
    await handshake(client, IDENTITY)
    await client.swap(8, INFO)
    assert (server.paused, server.label) == (False, "8")


@pytest.mark.parametrize(
    ("started", "what"),
    [
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, "--enable-scale-out"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"dtype": "bfloat16"}, "computes in bfloat16.*--dtype float32"),
        ({"backend": "nccl"}, "backend is 'nccl'.*--weight-transfer-config"),
        ({"max_model_len": 4095}, "context has 4095 tokens.*need 4096"),
        ({"vocab_size": 127}, "vocabulary is smaller than the 128"),
        ({"vocab_size": 129}, "vocabulary is larger than the 128"),
    ],
)
async def test_a_server_that_cannot_be_used_is_told_why(
    uds: str, started: dict[str, bool | str | int], what: str
) -> None:
    async with ScriptedServer(uds, **started) as server, VllmClient("3", f"unix:{server.uds}") as client:  # type: ignore[arg-type]
        with pytest.raises(HandshakeError, match=f"server 3 .*can't be used: .*{what}"):
            await handshake(client, IDENTITY)


@pytest.mark.parametrize("path", ["/health", "/is_paused", "/server_info", GENERATE])
async def test_a_server_that_fails_in_a_handshake_is_named(
    client: VllmClient, server: ScriptedServer, path: str
) -> None:
    server.order(path, Status(500, "sick"))
    with pytest.raises(HandshakeError, match=r"server 0 .*sick.*restart|server 0 .*sick.*vLLM 0.32"):
        await handshake(client, IDENTITY)


async def test_a_probe_needs_no_version(client: VllmClient, server: ScriptedServer) -> None:
    server.label = "default"
    tokens, logprobs = await probe(client, np.array(PROMPT, dtype=np.int32), 20, 0.7)
    assert (tokens.shape, str(tokens.dtype), logprobs.shape, str(logprobs.dtype)) == ((20,), "int32", (20,), "float32")
    assert server.requests[-1].sampling_params.temperature == 0.7
