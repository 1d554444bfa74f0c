"""Evaluation: pass@k, and evaluations in the middle of a run with scripted servers, which nothing else stops for."""

import asyncio
import io
import itertools
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from areal_async.config import Config
from areal_async.controller import Controller, RunResult
from areal_async.controller.evaluate import evaluate
from areal_async.controller.evaluating import AnswerLine, Evaluation, Evaluations, check_version, in_words
from areal_async.controller.examiner import Answered, Examiner, Problems, Tally, pass_at, pass_at_k
from areal_async.controller.samples import Kept
from areal_async.errors import ConfigError, RunFailed, ServerError
from areal_async.log.reader import read_payload, read_records
from areal_async.messages import Evaluate, EvaluationDone, Failed, SampleDone, SampleId, ScoreResult, StepDone, Swap
from areal_async.report import summary
from areal_async.rollout.session import Session, sample_seed
from areal_async.rollout.text import Text
from areal_async.rollout.vllm_http import VllmClient
from areal_async.rollout.workflow import Prompt, Sample, SingleTurn
from areal_async.testing.recipes import scripted
from areal_async.testing.trainer import VOCAB_SIZE
from areal_async.testing.vllm_server import ScriptedServer, drawn_token

from ..waiting import PATIENCE_S, until

Make = Callable[..., Config]
EOS = ord("z") - 33


# ------------------------------------------------------------------------------------------------------------- pass@k


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(case: tuple[int, int, int]) -> None:
    n, right, k = case
    subsets = list(itertools.combinations(range(n), k))
    share = sum(any(member < right for member in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, right, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_chen_et_al() -> None:
    """Their numerically stable product form: 1 − Π (1 − k / i) for i from n − c + 1 to n."""
    for n, right, k in ((200, 10, 100), (200, 1, 10), (64, 33, 32), (10, 0, 1), (10, 10, 10)):
        product = 1.0 if n - right >= k else 0.0
        for i in range(n - right + 1, n + 1):
            product *= 1 - k / i
        assert pass_at_k(n, right, k) == pytest.approx(1 - product, abs=1e-12)


def test_pass_at_leaves_out_problems_with_too_few_scored_answers() -> None:
    found = pass_at([(4, 1), (1, 1), (0, 0)], 4)
    assert found == {1: (0.25 + 1.0) / 2, 2: 0.5, 4: 1.0}
    assert list(pass_at([(6, 3)], 6)) == [1, 2, 4]
    assert pass_at([(0, 0)], 4) == {}
    with pytest.raises(ValueError, match="pass@3 of 0 right answers among 2"):
        pass_at_k(2, 0, 3)


def test_a_tally_tells_success_from_reward(prompt: Prompt) -> None:
    """Rewards of ±5, no reward, and an answer that was cut; success is a reward over 0."""
    tally = Tally(2, 2, 0.0)
    for problem, member, reward, finish in ((0, 0, 5.0, "stop"), (0, 1, -5.0, "stop"), (1, 0, None, "length")):
        kept = Kept(answer(prompt, [3, 3], finish), 0, prompt)
        verdict = "infrastructure" if reward is None else "given"
        tally.add(Answered(problem, member, kept, ScoreResult(sample="", attempt=0, verdict=verdict, reward=reward)))
    result = tally.result(1.0)
    assert (result.score, result.pass_at, result.unscored) == (0.0, {1: 0.5, 2: 1.0}, 1)
    assert (result.tokens, result.truncated_share) == (6, pytest.approx(1 / 3))
    assert result.verdicts == {"given": 2, "infrastructure": 1}


@pytest.fixture
def prompt() -> Prompt:
    return Prompt([1, 2], "1+1=", "2", 0, 0)


def answer(prompt: Prompt, versions: list[int], finish: str = "stop") -> Sample:
    n = len(prompt.token_ids)
    return Sample(
        token_ids=np.array([*prompt.token_ids, *versions], np.int32),
        loss_mask=np.array([0] * n + [1] * len(versions), np.uint8),
        logprobs=np.zeros(n + len(versions), np.float32),
        versions=np.array([-1] * n + versions, np.int32),
        prompt_tokens=n,
        finish=finish,  # type: ignore[arg-type]
    )


def test_a_token_of_another_version_is_found(prompt: Prompt) -> None:
    right = ScoreResult(sample="", attempt=0, verdict="right", reward=1.0)
    check_version(Answered(0, 0, Kept(answer(prompt, [4, 4, 4]), 0, prompt), right), 4)
    with pytest.raises(ServerError, match=r"problem 3, answer 2: its tokens are of version 4, 5, not 4"):
        check_version(Answered(2, 1, Kept(answer(prompt, [4, 4, 5]), 0, prompt), right), 4)


# ------------------------------------------------------------------------------------------ one server, in this process


async def judge(sample: SampleId, kept: Kept) -> ScoreResult:
    return ScoreResult(sample=sample, attempt=0, verdict="right", reward=1.0)


async def test_no_more_answers_at_a_time_than_places(make_config: Make, tmp_path: Path) -> None:
    config = make_config("eval.samples=2", "eval.limit=10", "eval.temperature=0", "eval.max_new_tokens=7")
    text = Text(config.model.path, "plain")
    running = most = 0

    async def slow(sample: SampleId, kept: Kept) -> ScoreResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await until(lambda: most >= 2)  # the first one waits for another
        running -= 1
        return await judge(sample, kept)

    found: list[Answered] = []
    paused = ScriptedServer(str(tmp_path / "s"), label="3", token_s=0.0005, paused=True)
    async with paused as server, client(tmp_path) as asked, asyncio.TaskGroup() as group:
        examiner = Examiner(config, text, Problems(config, text), SingleTurn(), slow, places=4)
        group.create_task(examiner.examine(asked, 3, "eval-v3-0", found.append))
        await until(lambda: server.open_now == 4)  # all places are taken before the first answer goes on
        await asked.resume()
    assert examiner.answers == len(found) == 20
    assert server.open_most == 4
    assert 2 <= most <= 4
    assert {request.sampling_params.temperature for request in server.requests} == {0.0}
    assert {request.sampling_params.max_tokens for request in server.requests} == {7}
    assert {(one.problem, one.member) for one in found} == set(itertools.product(range(10), range(2)))
    assert len({request.sampling_params.seed for request in server.requests}) == 20


def client(folder: Path) -> VllmClient:
    return VllmClient("0", f"unix:{folder / 's'}")


async def test_weights_that_change_in_the_middle_fail_the_evaluation(make_config: Make, tmp_path: Path) -> None:
    """And the files of a failed evaluation are not there."""
    events: list[Any] = []
    one = ScriptedServer(str(tmp_path / "s"), label="3", token_s=0.001, chunk_tokens=1)
    async with one as server, client(tmp_path) as asked:
        evaluations, run = begin(make_config("eval.limit=4"), asked, tmp_path, events)
        run.create_task(relabel(server, "4"))
        async with run:
            evaluations.start(Evaluate(version=3, server="0"))
    (failed,) = events
    assert isinstance(failed, Failed)
    assert (failed.of, failed.id) == ("evaluation", "3")
    assert "the server was given other weights in the middle" in failed.why
    assert list((tmp_path / "eval").iterdir()) == []


async def relabel(server: ScriptedServer, label: str) -> None:
    while not server.open_now:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.005)
    server.label = label


class Tasks:
    """A crew without a run: `async with` waits for its tasks."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    def create_task(self, work: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    def start(self, work: Any, name: str) -> asyncio.Task[None]:
        self.create_task(work)
        return self.tasks[-1]

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)


def begin(
    config: Config, asked: VllmClient, folder: Path, events: list[Any], died: bool = False
) -> tuple[Evaluations, Tasks]:
    async def has_died(server: str) -> bool:
        return died

    text, tasks = Text(config.model.path, "plain"), Tasks()
    results: list[Evaluation] = []
    evaluations = Evaluations(
        config, text, Problems(config, text), SingleTurn(), judge, {"0": asked}, folder / "eval",
        tasks, has_died=has_died, done=results.append, take=events.append, now=lambda: 1.0,  # type: ignore[arg-type]
    )  # fmt: skip
    return evaluations, tasks


@pytest.mark.slow
async def test_an_evaluation_whose_server_is_lost_ends_without_a_word(make_config: Make, tmp_path: Path) -> None:
    events: list[Any] = []
    async with ScriptedServer(str(tmp_path / "s"), label="3", token_s=0.01) as server, client(tmp_path) as asked:
        evaluations, run = begin(make_config("eval.limit=4"), asked, tmp_path, events)
        async with run:
            evaluations.start(Evaluate(version=3, server="0"))
            while not server.open_now:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert evaluations.progress == "evaluates version 3: 0 of 4 answers"
            evaluations.lost("1")
            await asyncio.sleep(0)
            assert evaluations.progress
            evaluations.lost("0")
        assert (events, evaluations.progress) == ([], "")
        async with run:  # and is begun again: other names at the server and the checks, the same questions
            evaluations.start(Evaluate(version=3, server="0"))
    (done,) = events
    assert isinstance(done, EvaluationDone)
    assert (done.version, done.n, done.score) == (3, 4, 1.0)
    ids = [request.request_id for request in server.requests]
    assert len(ids) == len(set(ids))


# -------------------------------------------------------------------------------------------------------- a whole run


def records(result: RunResult) -> list[Any]:
    return [record.message for record in read_records(result.folder / "log")]


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain_answer(seed: int, version: int, limit: int = 64) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < limit and (not tokens or tokens[-1] != EOS):
        tokens.append(drawn_token(seed, version, len(tokens), VOCAB_SIZE))
    return tokens


EVALUATED = (
    "train.steps=6", "eval.every_steps=2", "eval.samples=2", "eval.limit=12", "eval.max_concurrent=3",
    "rollout.max_concurrent=16", "seed=5",
)  # fmt: skip


@pytest.mark.slow
async def test_a_run_with_evaluations(make_config: Make, tmp_path: Path) -> None:
    config, book = make_config(*EVALUATED), tmp_path / "book.jsonl"
    async with Controller(config, recipes=scripted(token_s=0.0005, step_s=0.02, server_book=book)) as run:
        result = await run.run()
    told = records(result)
    answered_with_these_words(result, config)
    asked_of_one_version(result, json_lines(book))
    rollouts_went_on(told)
    in_the_files(result)
    on_the_terminal(result)
    log = result.folder / "log"
    kept = [read_payload(log, record.payload) for record in read_records(log) if record.payload is not None]
    assert not [payload.sample for payload in kept if "eval" in payload.sample]
    for row in result.rows:
        assert row.ledger["samples_admitted"] == 2 * row.ledger["admitted"]


def answered_with_these_words(result: RunResult, config: Config) -> None:
    """What the weights of that version answer to a seed of problem and member alone."""
    text = Text(config.model.path, "plain")
    for evaluation in result.evaluations:
        path = result.folder / "eval" / f"version-{evaluation.version}.jsonl"
        lines = [msgspec.json.decode(line, type=AnswerLine) for line in path.read_bytes().splitlines()]
        assert {(line.problem, line.member) for line in lines} == set(itertools.product(range(12), range(2)))
        for line in lines:
            seed = sample_seed(5, f"eval.{line.problem}.{line.member}", 0, 0)
            tokens = plain_answer(seed, evaluation.version)
            assert (line.length, line.answer) == (len(tokens), text.decode(tokens))
            assert (line.prompt, line.expected) == (f"{line.problem}+{line.problem}=", str(2 * line.problem))
            assert (line.verdict, line.reward) in (("wrong", 0.0), ("no_answer", 0.0))
        assert evaluation.tokens == sum(line.length for line in lines)
        assert (evaluation.score, evaluation.pass_at) == (0.0, {1: 0.0, 2: 0.0})
        assert (evaluation.n, evaluation.samples) == (12, 2)


def asked_of_one_version(result: RunResult, book: list[dict[str, Any]]) -> None:
    asked = [(entry["label"], entry["request_id"]) for entry in book if entry["request_id"].startswith("eval.")]
    assert {int(label) for label, _ in asked} == {evaluation.version for evaluation in result.evaluations}
    assert len(asked) == 24 * len(result.evaluations)


def rollouts_went_on(told: list[Any]) -> None:
    """While an evaluation ran, answers of rollouts came and steps were done; its server was swapped only after it."""
    finished, steps, after = [], 0, False
    for begin, end in spans(told):
        during = told[begin:end]
        assert not [message for message in during if isinstance(message, Swap)]
        finished.append(sum(isinstance(message, SampleDone) for message in during))
        steps += sum(isinstance(message, StepDone) for message in during)
        after |= any(isinstance(message, Swap) for message in told[end : end + 2])
    assert len(finished) >= 2
    assert all(count >= 4 for count in finished[:-1]), finished  # the last one runs when all is trained
    assert steps
    assert after


def spans(told: list[Any]) -> list[tuple[int, int]]:
    """Where the evaluations begin and end in the log."""
    begins = [at for at, message in enumerate(told) if isinstance(message, Evaluate)]
    ends = [at for at, message in enumerate(told) if isinstance(message, EvaluationDone)]
    return list(zip(begins, ends, strict=True))


def in_the_files(result: RunResult) -> None:
    """Each evaluation in a file of its own, in eval/results.jsonl, and, but for the last one, in a row."""
    evaluations = result.evaluations
    assert [one.version for one in evaluations] == sorted({one.version for one in evaluations})
    assert evaluations[-1].version == 6
    folder = result.folder / "eval"
    lines = (folder / "results.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Evaluation) for line in lines] == list(evaluations)
    for one in evaluations:
        assert msgspec.json.decode((folder / f"version-{one.version}.json").read_bytes(), type=Evaluation) == one
    rows = json_lines(result.folder / "metrics.jsonl")
    before = 0.0
    for row in rows:  # it has the last one that ended since the row before
        ended = [(one.version, one.score) for one in evaluations if before < one.time_s <= row["time_s"]]
        before = row["time_s"]
        assert (row["eval_version"], row["eval_score"]) == (ended[-1] if ended else (None, None))
        assert (row["eval_version"] is None) == (row["eval_score"] is None) == (row["eval_pass_at"] == {})
    assert not list(folder.glob("*.part"))


def on_the_terminal(result: RunResult) -> None:
    first = result.evaluations[0].version
    console = Console(file=io.StringIO(), width=200, record=True)
    summary(result, console)
    text = console.export_text()
    assert (
        f"score 0.000 → 0.000 (versions {first} and 6), best 0.000 (version {first}); pass@2 of the last one 0.000"
        in text
    )
    assert f"the trainer stood idle for {sum(row.trainer_wait_s for row in result.rows[1:]):.1f} s" in text
    assert in_words(result.evaluations[-1]).startswith(
        "evaluation of version 6: score 0.000, pass@2 0.000 (12 problems × 2) in "
    )


class FailsWhenExamined:
    async def run(self, session: Session, prompt: Prompt) -> Sample:
        if session.sample.startswith("eval."):
            raise ZeroDivisionError("only in an evaluation")
        return await SingleTurn().run(session, prompt)


@pytest.mark.slow  # three tries, a pause between them
async def test_a_workflow_that_raises_in_evaluations_is_told_with_its_traceback(make_config: Make) -> None:
    config = make_config("train.steps=1000", "eval.every_steps=1", "rollout.retries=1")
    with pytest.raises(RunFailed, match=r"(?s)3 evaluations in a row failed.*ZeroDivisionError: only in an evaluation"):
        async with Controller(config, workflow=FailsWhenExamined(), recipes=scripted(step_s=0.05)) as run:
            await run.run()


@pytest.mark.slow  # a server starts again
async def test_an_evaluation_is_done_again_when_its_server_dies(make_config: Make, tmp_path: Path) -> None:
    config = make_config(
        "train.steps=8", "rollout.servers=2", "eval.every_steps=2", "eval.limit=12", "eval.max_concurrent=2",
    )  # fmt: skip
    async with asyncio.timeout(PATIENCE_S), Controller(config, recipes=scripted(token_s=0.001, step_s=0.05)) as run:
        running = asyncio.create_task(run.run())
        await until(lambda: "evaluates version" in run.phase)
        killed = [message.server for message in so_far(run.folder) if isinstance(message, Evaluate)][-1]
        child = run._parts._servers._lives[killed].child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        result = await running
    told = records(result)
    begun = [message.version for message in told if isinstance(message, Evaluate)]
    assert len(begun) > len(result.evaluations)
    assert result.evaluations[-1].version == 8
    assert [message.version for message in told if isinstance(message, EvaluationDone)] == [
        one.version for one in result.evaluations
    ]
    assert result.rows[-1].ledger["samples_failed"] == 0
    assert not list((result.folder / "eval").glob("*.part"))


def so_far(folder: Path) -> list[Any]:
    return [record.message for record in read_records(folder / "log")]


async def test_evaluations_need_data(make_config: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.every_steps: there is nothing to evaluate on"):
        async with Controller(make_config("eval.every_steps=1", "data.eval=null"), recipes=scripted()):
            pass
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
async def test_a_fresh_server_tells_pass_at_k(make_config: Make, model: Path) -> None:
    config = make_config("eval.samples=4", "eval.limit=5")
    result = await evaluate(config, model, progress=lambda done, of: None, recipes=scripted())
    assert (result.n, result.samples, result.pass_at) == (5, 4, {1: 0.0, 2: 0.0, 4: 0.0})
    assert json.loads(msgspec.json.encode(result))["pass_at"] == {"1": 0.0, "2": 0.0, "4": 0.0}
    assert math.isfinite(result.seconds)
