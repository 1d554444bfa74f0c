"""Recorded tokens shown to a server again: which samples, what is asked, what is told of the differences."""

import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from areal_async.cli import main
from areal_async.config_file import dump_config, load_config
from areal_async.controller.checkpoints import MARKER, STATE, CheckpointState
from areal_async.controller.servers import start_server
from areal_async.errors import ConfigError
from areal_async.launch.recipes import Recipes
from areal_async.log.format import payload_path
from areal_async.messages import Release, RolledBack, StepDone, Version
from areal_async.replay.finished import read_finished
from areal_async.replay.server import FIRST, TOLERANCE, WORST, Compared, chosen, compare
from areal_async.replay.weights import folder_of
from areal_async.rollout.given_tokens import logprobs_of
from areal_async.rollout.text import Text
from areal_async.rollout.types import LogProbs, RequestFailed, Sampling, Tokens
from areal_async.rollout.vllm_http import VllmClient
from areal_async.specs import server_identity
from areal_async.testing.small_run import write_small_run

from .written import Said, write_log

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_run(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def text(config: Path) -> Text:
    return Text(str(config.parent / "model"))


def nothing_yet(version: Version = 0, tolerance: float = 1e-3) -> Compared:
    return Compared(version=version, model="m", dtype="float32", temperature=1.0, tolerance=tolerance)


# --------------------------------------------------------------------------------------------------- which samples


def test_only_samples_of_the_weights_that_are_at_hand_are_asked_about(config: Path, tmp_path: Path) -> None:
    log = write_log(
        config,
        tmp_path / "run",
        [
            Said("1.0", (3, 4), versions=(0, 1)),
            Said("1.1", (3,), versions=(0,)),
            Said("1.2", (3,), versions=(2,)),
            Said("1.3", (3,), None, versions=(0,)),
            Said("1.4", (3,), None, versions=(0,), reward=1.0),
            RolledBack(at=1.0, to=1, why="so"),
            Said("2.0", (3,), versions=(2,)),
            Said("2.1", (3,), versions=(2,)),
        ],
    )
    finished = read_finished(log)
    first, second = nothing_yet(0), nothing_yet(2)
    assert [a.sample for a in chosen(finished, 0, None, first)] == ["1.1", "1.4"]
    assert [a.sample for a in chosen(finished, 2, 1, second)] == ["2.0"]
    assert (first.mixed, first.other_version, first.lost_branch, first.unused, first.left) == (1, 3, 0, 1, 0)
    assert (second.mixed, second.other_version, second.lost_branch, second.unused, second.left) == (1, 2, 1, 1, 1)


# ------------------------------------------------------------------------------------------------------ differences

LOGPROBS = st.lists(st.floats(-20, 0, width=32), min_size=1, max_size=5)
NOISE = st.lists(st.sampled_from([0.0, 1e-6, 9e-4, 2e-3, 0.5, 9000.0]), min_size=5, max_size=5)


@settings(max_examples=5, derandomize=True, deadline=None)
@given(drawn=st.lists(st.tuples(LOGPROBS, NOISE), min_size=1, max_size=6), places=st.integers(1, 4), seed=st.integers())
def test_differences_do_not_depend_on_who_answers_first(
    drawn: list[tuple[list[float], list[float]]],
    places: int,
    seed: int,
    config: Path,
    text: Text,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    said = [Said(f"1.{n}", range(len(values)), logprobs=values) for n, (values, _) in enumerate(drawn)]
    log = write_log(config, tmp_path_factory.mktemp("run") / "run", said, about=False)
    now = {n: one.whole().logprobs[4:] - np.float32(noise[: len(one.tokens)])
           for n, (one, (_, noise)) in enumerate(zip(said, drawn, strict=True))}  # fmt: skip
    turns = iter(np.random.default_rng(seed % 1000).permutation(len(said) * 4).tolist())
    answers = read_finished(log).answers
    order = iter(range(len(answers)))

    async def ask(token_ids: Tokens, wanted: npt.NDArray[np.bool_]) -> LogProbs:
        number = next(order)
        assert token_ids[wanted].tolist() == list(said[number].tokens)
        for _ in range(next(turns)):
            await asyncio.sleep(0)
        return now[number]

    result = nothing_yet()
    asyncio.run(compare(log, answers, ask, text, result, places=places))
    expected = [(one.sample, k, abs(float(now[n][k]) - float(one.whole().logprobs[4 + k])))
                for n, one in enumerate(said) for k in range(len(one.tokens))]  # fmt: skip
    differences = [difference for _, _, difference in expected]
    assert (result.samples, result.tokens) == (len(said), len(expected))
    assert result.max_difference == max(differences)
    assert result.mean_difference == pytest.approx(math.fsum(differences) / len(differences))
    assert [token.difference for token in result.worst] == sorted(differences, reverse=True)[:WORST]
    over = [(sample, k) for sample, k, difference in expected if difference > 1e-3]
    assert result.over == len(over)
    assert result.samples_over == len({sample for sample, _ in over})
    firsts = [(sample, k) for n, (sample, k) in enumerate(over) if sample not in {s for s, _ in over[:n]}]
    assert [(token.sample, token.place) for token in result.first_over] == firsts[:FIRST]


async def test_what_is_gone_is_counted_and_an_error_is_raised_as_it_is(
    config: Path, text: Text, tmp_path: Path
) -> None:
    said = [Said(f"1.{n}", (3,)) for n in range(3)]
    log = write_log(config, tmp_path / "run", [*said, Release(samples=("1.1",))], segment_bytes=1)
    answers = read_finished(log).answers
    payload_path(log, answers[1].payload.segment).unlink()

    async def same(token_ids: Tokens, wanted: npt.NDArray[np.bool_]) -> LogProbs:
        return np.array([-0.5], np.float32)

    async def refuse(token_ids: Tokens, wanted: npt.NDArray[np.bool_]) -> LogProbs:
        raise RequestFailed("no", status=400, retryable=False)

    result = nothing_yet()
    await compare(log, answers, same, text, result, places=2)
    assert (result.samples, result.released, result.max_difference, result.over) == (2, 1, 0.0, 0)
    with pytest.raises(RequestFailed, match="no"):
        await compare(log, answers, refuse, text, nothing_yet(), places=2)


# ------------------------------------------------------------------------------------------------------ what is asked


class Scripted(VllmClient):
    """Answers as vLLM does; the log-probability of token t after n others is −(n + t / 100 + temperature / 1000)."""

    def __init__(self, spoil: str = "") -> None:
        self.name, self.spoil, self.asked = "0", spoil, list[dict[str, Any]]()

    async def generate_whole(self, request: object, deadline_s: float) -> bytes:
        asked = msgspec.to_builtins(request)
        self.asked.append(asked)
        ids, sampling = asked["token_ids"], asked["sampling_params"]
        heat = sampling["temperature"] / 1000

        def entry(token: int, before: int, heat: float) -> dict[str, float]:
            return {"token_id": token, "logprob": -(before + token / 100 + heat), "rank": 1}

        wanted = sampling["logprob_token_ids"][0]
        top = [entry(0, len(ids), heat), entry(wanted, len(ids), heat)]
        answer: dict[str, Any] = {"choices": [{"token_ids": [0], "logprobs": {"content": [{"top_logprobs": top}]}}]}
        if "prompt_logprobs" in sampling:
            given = [{str(token): entry(token, n, 0.001)} for n, token in enumerate(ids)]
            answer["prompt_logprobs"] = [None, *given[1:]]
        if self.spoil == "short":
            answer["prompt_logprobs"] = answer["prompt_logprobs"][:-1]
        if self.spoil == "other":
            answer["prompt_logprobs"][-1] = {"999": {"logprob": -1.0}}
        if self.spoil == "none":
            answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = []
        if self.spoil == "nonsense":
            return b'{"choices": [{"logprobs": null}]}'
        return json.dumps(answer).encode()


TOKENS = np.array([5, 6, 7, 8, 9], np.int32)
WANTED = np.array([0, 0, 1, 0, 1], bool)


@pytest.mark.parametrize(("temperature", "requests"), [(1.0, [[5, 6, 7, 8]]), (0.7, [[5, 6], [5, 6, 7, 8]])])
async def test_which_requests_are_made(temperature: float, requests: list[list[int]]) -> None:
    """At temperature 1 one for all; the last token is drawn, so that a full context has room for it."""
    client = Scripted()
    found = await logprobs_of(client, TOKENS, WANTED, temperature, 1.0)
    assert [asked["token_ids"] for asked in client.asked] == requests
    assert all(asked["sampling_params"]["temperature"] == temperature for asked in client.asked)
    assert all(asked["sampling_params"]["max_tokens"] == 1 for asked in client.asked)
    heat = temperature / 1000
    assert found == pytest.approx([-(2 + 0.07 + heat), -(4 + 0.09 + heat)], abs=1e-6)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        ("short", "log-probabilities of 3 of 4 prompt tokens"),
        ("other", "no log-probability of the prompt token 8"),
        ("none", "no log-probability of the token 9"),
        ("nonsense", "an answer that can't be read"),
    ],
)
async def test_an_answer_that_is_not_one_is_an_error(spoil: str, what: str) -> None:
    with pytest.raises(RequestFailed, match=what):
        await logprobs_of(Scripted(spoil), TOKENS, WANTED, 1.0, 1.0)


# ---------------------------------------------------------------------------------------------------------- weights


def test_which_weights_are_at_hand(config: Path, tmp_path: Path) -> None:
    run, first = tmp_path / "run", config.parent / "model"
    steps = [StepDone(at=1.0, step=step, branch=0, metrics={}) for step in range(6)]
    again = [StepDone(at=3.0, step=step, branch=1, metrics={}) for step in range(2, 5)]
    log = write_log(config, run, [*steps, RolledBack(at=2.0, to=2, why="so"), *again])
    for version, branch in ((2, 0), (3, 1), (4, 0)):
        checkpoint(run / "checkpoints" / f"step-{version}", version, branch)
    finished, settings, work = read_finished(log), load_config(config), tmp_path / "work"
    work.mkdir()

    def folder(version: Version, model: Path | None = None) -> Path:
        return folder_of(version, model, run, settings, finished, work)

    assert folder(0) == first
    with pytest.raises(ConfigError, match=r"those of 0 \(model.path\), 2 \(checkpoint\), 3 \(checkpoint\) are"):
        folder(4)
    with pytest.raises(ConfigError, match=r"--version 5: its weights are not at hand"):
        folder(5)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert folder(5) == run / "model"
    with pytest.raises(ConfigError, match=r"3 \(checkpoint\), 5 \(.*run/model\) are"):
        folder(6)
    assert folder(9, first) == first
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        folder(9, tmp_path)

    made = folder(3)
    assert {path.name for path in made.iterdir()} == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "model-0.safetensors", "model-1.safetensors",
        "model.safetensors.index.json",
    }  # fmt: skip
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {"a.weight": "model-0.safetensors", "b.weight": "model-1.safetensors"}
    assert load_file(made / "model-1.safetensors")["b.weight"].tolist() == [3.0, 1.0]


def checkpoint(folder: Path, version: Version, branch: int) -> None:
    folder.mkdir(parents=True)
    for rank, name in enumerate("ab"):
        weight = np.array([version, rank], np.float32)
        save_file(
            {f"weight/{name}.weight": weight, f"exp_avg/{name}.weight": weight}, folder / f"trainer-{rank}.safetensors"
        )
    (folder / "trainer.json").write_text(json.dumps({"form": 1, "version": version, "ranks": 2}))
    state = CheckpointState(
        run="r", version=version, branch=branch, at=0.0, written="2026-01-01", log_bytes=0, files={}
    )
    (folder / STATE).write_bytes(msgspec.json.encode(state))
    (folder / MARKER).touch()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--model", "m"], "--model: of which version? name it: --version N"),
        (["--version", "3"], "no sample has only tokens that this version drew (0 samples have tokens of several"),
        (["--tolerance", "loss=1"], "--tolerance loss=1: must be one number that isn't negative"),
        (["--tolerance", "-1"], "--tolerance -1: must be one number that isn't negative"),
        (["reward.timeout_s=1"], "reward.timeout_s: changes nothing of what is asked here"),
    ],
)
def test_a_wrong_command_line(
    words: Sequence[str], what: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(config, tmp_path / "run", [Said("1.0", (3,))], about=False)
    assert main(["replay", str(log.parent), "--peer", "server", *words]) == 2
    assert what in capsys.readouterr().err
    assert main(["replay", str(log.parent), "--version", "3"]) == 2
    assert "--version: has a meaning only with --peer server" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- real vLLM

PLACE = 5  # of the token that is flipped
FLIPPED = 3  # the sample that it is in
PROBLEMS = 16
COLD = 4  # of them, asked at another temperature, too: that takes a request a token


def drawn_by_a_real_server(folder: Path) -> list[Said]:
    """Answers of the quickstart's model at temperature 1, the last one as long as the context; each asked about again
    at once, and so are answers at another temperature."""
    config = load_config(QUICKSTART, ["server.max_num_seqs=32"])
    text = Text(config.model.path, config.data.chat_template)
    rows = [json.loads(line) for line in Path(config.data.train[0]).read_text().splitlines()[:PROBLEMS]]
    prompts = [np.array(text.encode(row["prompt"]), np.int32) for row in rows]

    async def draw() -> list[Said]:
        async with AsyncExitStack() as stack:
            client, _ = await start_server(
                stack, config, Recipes(), name="0", model=config.model.path, socket=folder / "s",
                stderr=folder / "server.log", cores="0", identity=server_identity(config, text),
            )  # fmt: skip
            await client.label_weights(0)
            warm = await one_temperature(client, text, prompts, 1.0)
            cold = await one_temperature(client, text, prompts[-COLD:], 0.7)
            assert any(a.tokens != b.tokens for a, b in zip(warm[-COLD:], cold, strict=True))
            pair = np.array([3, 4], np.int32)
            shortest = [await logprobs_of(client, pair, np.array([False, True]), t, 60.0) for t in (1.0, 1.0 + 1e-9)]
            assert shortest[0] == pytest.approx(shortest[1], abs=1e-4)
            return warm

    return asyncio.run(draw())


async def one_temperature(client: VllmClient, text: Text, prompts: Sequence[Tokens], temperature: float) -> list[Said]:
    async def one(number: int, prompt: Tokens) -> Said:
        last = number == len(prompts) - 1
        sampling = Sampling(
            temperature=temperature,
            max_tokens=text.context - len(prompt) if last else 100,
            stop_token_ids=() if last else text.eos_token_ids,
            seed=number,
        )
        answer = await client.generate(prompt, sampling, f"{temperature} {number}", 60.0)
        said = Said(f"{number}.0", answer.token_ids.tolist(), logprobs=answer.logprobs.tolist(), prompt=prompt.tolist())
        whole = said.whole()
        now = await logprobs_of(client, whole.token_ids, whole.loss_mask != 0, temperature, 60.0)
        assert np.abs(now - answer.logprobs).max() < TOLERANCE["float32"]
        return said

    said = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    assert len(said[-1].prompt) + len(said[-1].tokens) == text.context
    return said


@pytest.mark.slow
def test_a_real_server_finds_the_token_that_was_flipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = drawn_by_a_real_server(tmp_path)
    tokens = list(said[FLIPPED].tokens)
    tokens[PLACE] = 3 + (tokens[PLACE] - 2) % 18
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(load_config(QUICKSTART, ["server.max_num_seqs=32"])))
    log = write_log(
        config, tmp_path / "run", [*said[:FLIPPED], replace(said[FLIPPED], tokens=tokens), *said[FLIPPED + 1 :]]
    )
    assert main(["replay", str(log.parent), "--peer", "server", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["samples"], told["tokens"]) == (PROBLEMS, sum(len(one.tokens) for one in said))
    assert [(token["sample"], token["place"]) for token in told["first_over"]] == [(f"{FLIPPED}.0", PLACE)]
    assert {token["sample"] for token in told["worst"]} == {f"{FLIPPED}.0"}
