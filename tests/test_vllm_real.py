"""The client and the weight plug-in against a real vLLM server with a tiny random model.

What must hold: after a swap the server computes with the new weights in every kind of tensor (a transformers forward
pass is the judge), also for the rest of an answer that was under way; and each token carries the version that drew it.
"""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_async.launch.recipes import vllm_command
from areal_async.rollout.handshake import handshake, probe
from areal_async.rollout.types import Completion, ModelIdentity, RequestFailed, Sampling, StreamBroken, SwapFailed
from areal_async.rollout.vllm_http import VllmClient

from .waiting import until, wait_until

pytestmark = pytest.mark.slow

VOCAB = 200
CONTEXT = 2048
LONG = 1900  # tokens of answers that take seconds: nothing that stalls for less lets one end before its middle
START_S = 240.0  # 20 s on a free machine
PROMPT = [3, 4, 5, 6, 7]
WEIGHTS = f"/dev/shm/areal-async-test-{os.getpid()}.safetensors"
CLOSE = 1e-4  # nats; float32 on both sides agrees to about 1e-6
KINDS = (
    "embed_tokens.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_proj.bias",
    "k_proj.bias", "v_proj.bias", "gate_proj.weight", "up_proj.weight", "down_proj.weight", "input_layernorm.weight",
    "post_attention_layernorm.weight", "model.norm.weight", "lm_head.weight",
)  # fmt: skip

State = dict[str, torch.Tensor]
Growing = dict[str, "asyncio.Task[Completion]"]


@dataclass
class Running:
    """A server, and the model that it was started from. version: of its present weights."""

    address: str
    model: Qwen2ForCausalLM
    start: State
    tied: bool
    version: int = 0

    def logprobs(self, weights: State, tokens: list[int], temperature: float = 1.0) -> np.ndarray[Any, Any]:
        """Log-probability of each token after the first, given those before it."""
        self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0, :-1] / temperature
            picked = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return np.asarray(picked)

    async def swap(self, client: VllmClient, weights: State) -> int:
        """Publish and load; the version that it became."""
        save_file(weights, WEIGHTS)
        try:
            await client.swap(self.version + 1, {"path": WEIGHTS})
        finally:
            os.unlink(WEIGHTS)  # not needed any more once the swap has answered
        self.version += 1
        return self.version


def tiny_model(tied: bool) -> Qwen2ForCausalLM:
    """3 layers, hidden 128, no value that a test could mistake for another: biases and norms are random too."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=tied, initializer_range=0.1,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def changed(weights: State, kind: str, seed: int) -> State:
    """The same weights, with the tensors of this kind moved by noise."""
    generator = torch.Generator().manual_seed(seed)

    def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.endswith(kind):
            return tensor
        size = 0.3 if name.endswith("bias") or "norm" in name else 0.05
        return tensor + size * torch.randn(tensor.shape, generator=generator)

    return {name: moved(name, tensor) for name, tensor in weights.items()}


@pytest.fixture(scope="module", params=["tied", "untied"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    shared_before = set(os.listdir("/dev/shm"))
    with TemporaryDirectory(prefix="aa-") as folder:
        model = tiny_model(tied=request.param == "tied")
        model.save_pretrained(f"{folder}/model")
        start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        argv, env = vllm_command(
            uds=f"{folder}/s", model=f"{folder}/model", dtype="float32", cores="0", kv_space_gib=1, enforce_eager=True,
            max_model_len=CONTEXT, stream_interval=8, max_num_seqs=64, seed=0,
            extra=["--max-num-batched-tokens", "128"],  # so few that a recompute is always cut into parts
        )  # fmt: skip
        with open(f"{folder}/log", "wb") as log:
            process = subprocess.Popen(argv, env=os.environ | env, stdout=log, stderr=log, start_new_session=True)
        try:
            if not asyncio.run(well(f"unix:{folder}/s", process)):
                pytest.fail(f"the server did not start:\n{Path(folder, 'log').read_text()[-3000:]}")
            yield Running(f"unix:{folder}/s", model, start, request.param == "tied")
        finally:
            end(process)
    wait_until(lambda: set(os.listdir("/dev/shm")) <= shared_before, 20)


async def well(address: str, process: "subprocess.Popen[bytes]") -> bool:
    """Wait until the server is well; False if it ended, or took too long."""
    deadline = time.monotonic() + START_S
    async with VllmClient("0", address) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                await client.health()
            except RequestFailed:
                await asyncio.sleep(0.5)
            else:
                return True
    return False


def end(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to the whole group, which lets vLLM remove its shared memory; SIGKILL to what is left of it."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(120)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


@pytest.fixture
async def client(server: Running) -> AsyncIterator[VllmClient]:
    async with VllmClient("0", server.address) as connected:
        yield connected


def sampling(max_tokens: int, seed: int = 1, temperature: float = 1.0) -> Sampling:
    return Sampling(temperature=temperature, max_tokens=max_tokens, stop_token_ids=(), seed=seed)


async def test_handshake_and_probe(server: Running, client: VllmClient) -> None:
    await handshake(client, ModelIdentity(vocab_size=VOCAB, context_tokens=CONTEXT, dtype="float32"))
    await client.pause()
    await handshake(client, ModelIdentity(vocab_size=VOCAB, context_tokens=CONTEXT, dtype="float32"))
    for temperature in (0.6, 1.0):  # before any version was loaded; log-probabilities are those after the temperature
        tokens, logprobs = await probe(client, np.array(PROMPT, dtype=np.int32), 16, temperature)
        expected = server.logprobs(server.start, PROMPT + tokens.tolist(), temperature)[-16:]
        np.testing.assert_allclose(logprobs, expected, atol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_tensor_is_swapped(server: Running, client: VllmClient, kind: str) -> None:
    weights = changed(server.start, kind, seed=1)
    if kind == "lm_head.weight" and server.tied:
        pytest.skip("tied: there is no such tensor")
    version = await server.swap(client, weights)
    answer = await client.generate(PROMPT, sampling(24), f"kind-{kind}", 60.0)
    tokens = PROMPT + answer.token_ids.tolist()
    assert answer.versions.tolist() == [version] * 24
    np.testing.assert_allclose(answer.logprobs, server.logprobs(weights, tokens)[-24:], atol=CLOSE)
    # and it is no accident: with the old weights they would have been others
    assert np.abs(answer.logprobs - server.logprobs(server.start, tokens)[-24:]).max() > 100 * CLOSE


async def test_swaps_in_the_middle_of_answers(server: Running, client: VllmClient) -> None:
    """Tokens before a swap have the old weights' log-probabilities; those after it are what a full recompute of the
    whole sequence under the new weights gives, and the spans say exactly which are which."""
    states: dict[int, State] = {}
    states[await server.swap(client, server.start)] = server.start
    growing = answers_that_grow(client, 8, tokens=LONG, name="mid")
    for seed, tokens in ((2, 40), (3, 160)):
        weights = server.start
        for kind in KINDS:
            weights = changed(weights, kind, seed)
        assert await all_have(client, growing, tokens)
        states[await server.swap(client, weights)] = weights
    answers = await asyncio.gather(*growing.values())
    assert {v for answer in answers for v in answer.versions.tolist()} == set(states)
    for answer in answers:
        assert (np.diff(answer.versions) >= 0).all()
        assert_recomputed(server, answer, states)


def answers_that_grow(client: VllmClient, count: int, tokens: int, name: str) -> Growing:
    """Answers of so many tokens, with the seeds 0, 1, …"""
    return {
        f"{name}-{seed}": asyncio.create_task(client.generate(PROMPT, sampling(tokens, seed), f"{name}-{seed}", 120.0))
        for seed in range(count)
    }


async def all_have(client: VllmClient, growing: Growing, tokens: int) -> bool:
    """True once each has so many tokens; False if one is over before."""

    def one_is_over() -> bool:
        return any(answer.done() for answer in growing.values())

    await until(lambda: one_is_over() or all(client.tokens_so_far(name) >= tokens for name in growing))
    return not one_is_over()


def assert_recomputed(server: Running, answer: Completion, states: dict[int, State]) -> None:
    n = len(answer.token_ids)
    for version, weights in states.items():
        expected = server.logprobs(weights, PROMPT + answer.token_ids.tolist())[-n:]
        mine = answer.versions == version
        np.testing.assert_allclose(answer.logprobs[mine], expected[mine], atol=CLOSE)


async def test_a_swap_of_equal_weights_changes_no_token(server: Running, client: VllmClient) -> None:
    """Rebuilding the cache, in parts, takes nothing from the random numbers of a seeded answer."""
    await server.swap(client, server.start)
    undisturbed = await asyncio.gather(*answers_that_grow(client, 4, tokens=150, name="undisturbed").values())
    for attempt in range(10):  # so few tokens that it may come too late, and so few that no rounding tips one over
        growing = answers_that_grow(client, 4, tokens=150, name=f"disturbed-{attempt}")
        await all_have(client, growing, 24)
        last = await server.swap(client, server.start)
        disturbed = await asyncio.gather(*growing.values())
        assert [a.token_ids.tolist() for a in disturbed] == [a.token_ids.tolist() for a in undisturbed]
        if all(set(answer.versions.tolist()) == {last - 1, last} for answer in disturbed):
            return
    pytest.fail("no swap came in the middle of the answers")


async def test_the_same_seed_gives_the_same_answer(server: Running, client: VllmClient) -> None:
    await server.swap(client, server.start)
    first, again, other = [
        await client.generate(PROMPT, sampling(32, seed), f"seed-{i}", 60.0) for i, seed in enumerate((7, 7, 8))
    ]
    assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()


async def test_a_deadline_keeps_what_arrived_and_frees_the_server(server: Running, client: VllmClient) -> None:
    await server.swap(client, server.start)
    await client.generate(PROMPT, sampling(LONG, seed=3), "warm-up", 60.0)  # the first one after a start is slow
    begun = time.monotonic()
    await client.generate(PROMPT, sampling(LONG, seed=3), "in-time", 60.0)
    third_s = (time.monotonic() - begun) / 3
    with pytest.raises(StreamBroken) as caught:
        await client.generate(PROMPT, sampling(LONG, seed=3), "late", third_s)
    got = caught.value.partial.token_ids.tolist()
    assert 0 < len(got) < LONG
    async with asyncio.timeout(third_s):  # by itself it would have gone on for twice as long
        while await requests_at(client):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    whole = await client.generate(PROMPT, sampling(len(got), seed=3), "whole", 60.0)
    assert whole.token_ids.tolist() == got


async def requests_at(client: VllmClient) -> float:
    """How many requests the server has, running and waiting."""
    _, metrics = await client._http.ask("GET", "/metrics", b"")
    counts = re.findall(rb"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.]+)$", metrics, re.MULTILINE)
    assert len(counts) == 2
    return sum(float(count) for count in counts)


async def test_a_prompt_that_does_not_fit_is_refused_for_good(server: Running, client: VllmClient) -> None:
    with pytest.raises(RequestFailed, match="maximum model length") as caught:
        await client.generate([3] * (CONTEXT + 1), sampling(1), "long", 60.0)
    assert (caught.value.status, caught.value.retryable) == (400, False)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("missing", r"is missing: model\.layers\.0\.mlp\.down_proj\.weight"),
        ("extra", r"is not in the server's model: model\.layers\.9\.mlp\.down_proj\.weight"),
        (
            "shape",
            r"another shape: model\.layers\.0\.mlp\.down_proj\.weight \(the server has \(128, 256\), ",
        ),
        (
            "dtype",
            r"another dtype: model\.layers\.0\.mlp\.down_proj\.weight \(the server has F32, .* BF16",
        ),
        ("no file", "can't be read"),
    ],
)
async def test_a_file_that_does_not_fit_is_named_and_not_loaded(
    server: Running, client: VllmClient, wrong: str, what: str
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    weights = dict(server.start)
    match wrong:
        case "missing":
            del weights[name]
        case "extra":
            weights["model.layers.9.mlp.down_proj.weight"] = torch.zeros(1)
        case "shape":
            weights[name] = torch.zeros(128, 128)
        case "dtype":
            weights[name] = weights[name].bfloat16()
    if wrong != "no file":
        save_file(weights, WEIGHTS)
    try:
        with pytest.raises(RequestFailed, match=what):
            await client.check_weights({"path": WEIGHTS})
        answer = await client.generate(PROMPT, sampling(8), f"wrong-{wrong}", 60.0)
        assert answer.versions.tolist() == [server.version] * 8
    finally:
        if os.path.exists(WEIGHTS):  # noqa: ASYNC240 (shared memory)
            os.unlink(WEIGHTS)


async def test_a_swap_that_fails_after_it_began_leaves_the_server_paused(server: Running, client: VllmClient) -> None:
    """Nobody may ask it for a token then; what a handshake does to it makes it good again, with weights of its own."""
    await server.swap(client, server.start)
    with pytest.raises(SwapFailed, match="must be restarted") as caught:
        await client.swap(server.version + 1, {"path": WEIGHTS})  # there is no such file now
    assert (caught.value.stage, caught.value.server_usable) == ("update", False)
    assert await client.is_paused()
    await assert_a_handshake_mends(server, client)


@pytest.mark.parametrize("loaded", [False, True])
async def test_an_update_that_nobody_finished(server: Running, client: VllmClient, loaded: bool) -> None:
    """A controller died in the middle of a swap; another one must not go on from there, and can clean up."""
    await server.swap(client, server.start)
    await client.pause()
    await client.start_weight_update()
    if loaded:
        save_file(changed(server.start, "q_proj.weight", seed=4), WEIGHTS)
        await client.update_weights({"path": WEIGHTS})
        os.unlink(WEIGHTS)
    await assert_a_handshake_mends(server, client)
    await client.pause()
    await client.start_weight_update()
    with pytest.raises(SwapFailed, match="already active") as caught:
        await client.swap(server.version + 1, {"path": WEIGHTS})
    assert (caught.value.stage, caught.value.server_usable) == ("start", False)
    assert await client.is_paused()
    await assert_a_handshake_mends(server, client)


async def assert_a_handshake_mends(server: Running, client: VllmClient) -> None:
    await handshake(client, ModelIdentity(vocab_size=VOCAB, context_tokens=CONTEXT, dtype="float32"))
    weights = server.start
    for kind in KINDS:
        weights = changed(weights, kind, seed=5)
    version = await server.swap(client, weights)
    answer = await client.generate(PROMPT, sampling(24), f"mended-{version}", 60.0)
    assert answer.versions.tolist() == [version] * 24
    assert_recomputed(server, answer, {version: weights})


async def test_a_server_that_refuses_to_begin_goes_on(
    server: Running, client: VllmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own words tell that no update is open; then it is resumed, and answers as before."""
    version = await server.swap(client, server.start)

    async def refused() -> None:
        await client._post("/update_weights", {"update_info": {"path": WEIGHTS}})  # vLLM: 500, nothing is open

    monkeypatch.setattr(client, "start_weight_update", refused)
    with pytest.raises(SwapFailed, match="goes on under its old weights") as caught:
        await client.swap(version + 1, {"path": WEIGHTS})
    assert (caught.value.stage, caught.value.server_usable) == ("start", True)
    answer = await client.generate(PROMPT, sampling(24), "goes-on", 60.0)
    assert answer.versions.tolist() == [version] * 24
    assert_recomputed(server, answer, {version: server.start})
