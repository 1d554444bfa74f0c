"""A recorded run's workers, played to a live controller."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_async.config import Config
from areal_async.controller import Controller, RunResult
from areal_async.errors import ConfigError, Released, RunFailed
from areal_async.log.format import payload_path
from areal_async.log.reader import read_payload
from areal_async.log.turns import read_turns
from areal_async.log.writer import RunLog
from areal_async.messages import (
    AnyRecord,
    CheckpointDone,
    Publish,
    Published,
    Release,
    Rules,
    SampleDone,
    Score,
    Scored,
    StartSample,
    StepDone,
    Train,
    Woke,
    group_of,
)
from areal_async.rollout.session import Session
from areal_async.rollout.workflow import Prompt, Sample
from areal_async.testing.given import Given, NotGiven
from areal_async.testing.recipes import scripted
from areal_async.testing.recorded import Graded, RecordedRun, recorded

Make = Callable[..., Config]
TIMES = {
    "time_s", "step_s", "trainer_wait_s", "swap_pause_s", "trainer_idle_share", "rollout_idle_share",
    "rollout_idle_by_server", "both_busy_share", "waited_for",
}  # fmt: skip


async def run(config: Config, folder: Path, **recipes: Any) -> RunResult:
    async with Controller(config, run_dir=folder, **recipes) as live:
        return await live.run()


def log_of(folder: Path) -> Any:
    found = read_turns(folder / "log")
    assert found is not None
    return found


def rows(result: RunResult) -> list[dict[str, Any]]:
    return [{k: v for k, v in msgspec.to_builtins(row).items() if k not in TIMES} for row in result.rows]


def batches(folder: Path) -> list[Train]:
    return [command for turn in log_of(folder).turns for command in turn.commands if isinstance(command, Train)]


def answers(folder: Path) -> dict[str, Any]:
    """Arrays and what was said of each sample, without versions and times."""
    found: dict[str, Any] = {}
    for turn in log_of(folder).turns:
        match turn.event:
            case SampleDone() as done:
                token_ids, mask, logprobs, _ = read_payload(folder / "log", turn.payload).arrays
                found[done.sample] = (token_ids.tolist(), mask.tolist(), logprobs.tolist(), done.finish)
            case Scored() as scored:
                found[scored.sample] += (scored.verdict, scored.reward)
    return found


@pytest.mark.slow
async def test_a_synchronous_run_comes_out_the_same(make_config: Make, tmp_path: Path) -> None:
    config = make_config("rollout.max_staleness=0", "train.steps=3")
    first = await run(config, tmp_path / "first", recipes=scripted(token_s=0.0002, step_s=0.01))
    again = await run(config, tmp_path / "again", recipes=recorded(tmp_path / "first", pace=0.5))
    assert batches(tmp_path / "again") == batches(tmp_path / "first")
    assert rows(again) == rows(first)
    assert answers(tmp_path / "again") == answers(tmp_path / "first")


@pytest.mark.slow
async def test_an_asynchronous_run_has_every_recorded_answer(make_config: Make, tmp_path: Path) -> None:
    """Batches may be others, since durations are never quite the same; answers and verdicts are those of each id, and
    versions are of the live run's own swaps."""
    config = make_config("rollout.max_staleness=2", "train.steps=6", "rollout.stop_token_ids=[]")
    first = await run(config, tmp_path / "first", recipes=scripted(token_s=0.004, step_s=0.02))
    again = await run(config, tmp_path / "again", recipes=recorded(tmp_path / "first", pace=0.5))
    assert again.steps == first.steps == 6
    assert answers(tmp_path / "again") == answers(tmp_path / "first")
    assert {row.step: (row.loss, row.grad_norm, row.entropy) for row in again.rows} == {
        row.step: (row.loss, row.grad_norm, row.entropy) for row in first.rows
    }
    assert any(row.mixed_share for row in again.rows), "answers live through swaps here, too"
    assert all(row.lag_max <= 2 for row in again.rows)


class TwoTurns:
    """A question, the answer's length said by somebody else, and a second answer."""

    async def run(self, session: Session, prompt: Prompt) -> Sample:
        first = await session.generate(prompt.token_ids)
        said = [len(first.token_ids) % 64, 5]
        before = [*prompt.token_ids, *first.token_ids.tolist(), *said]
        second = await session.generate(before)
        between = len(first.token_ids), len(said), len(second.token_ids)
        return Sample(
            np.array([*before, *second.token_ids], np.int32),
            np.repeat(np.array([0, 1, 0, 1], np.uint8), [len(prompt.token_ids), *between]),
            np.concatenate(
                [np.zeros(len(prompt.token_ids)), first.logprobs, np.zeros(len(said)), second.logprobs]
            ).astype(np.float32),
            np.concatenate(
                [np.full(len(prompt.token_ids), -1), first.versions, np.full(len(said), -1), second.versions]
            ).astype(np.int32),
            len(prompt.token_ids),
            second.finish_reason,
        )


@pytest.mark.slow
async def test_answers_of_several_turns_and_what_is_not_recorded(make_config: Make, tmp_path: Path) -> None:
    """Of each turn its own tokens; a live run that goes on after the recorded one's end is told so."""
    config = make_config("train.steps=2", "rollout.max_new_tokens=24", "rollout.retries=0")
    await run(config, tmp_path / "first", recipes=scripted(), workflow=TwoTurns())
    played = recorded(tmp_path / "first", pace=0)
    await run(config, tmp_path / "again", recipes=played, workflow=TwoTurns())
    assert answers(tmp_path / "again") == answers(tmp_path / "first")
    longer = make_config("train.steps=9", "rollout.max_new_tokens=24", "rollout.retries=0")
    with pytest.raises(RunFailed, match=r"has no answer for request \d+\.\d+-0-0 .*it was not finished there"):
        await run(longer, tmp_path / "longer", recipes=played, workflow=TwoTurns())


# ------------------------------------------------------------------------------------------------ what is found where

RULES = Rules(
    seed=1, steps=1, batch_groups=1, group_size=2, max_staleness=0, max_concurrent=4, minibatches=1, ranks=1,
    max_tokens_per_microbatch=64, max_new_tokens=32,
)  # fmt: skip
PROMPTS = {0: [1, 2], 1: [3], 2: [3], 7: [4, 4]}
ANSWER = [10, 11, 12, 13]


def answer_of(group: int, member: int) -> list[int]:
    return [token + group + 20 * member for token in ANSWER]


def start(sample: str, attempt: int = 0) -> StartSample:
    return StartSample(sample=sample, attempt=attempt, position=0, server="0", floor=0)


def done(at: float, sample: str, attempt: int = 0, finish: Any = "stop") -> SampleDone:
    prompt = len(PROMPTS[group_of(sample)])
    return SampleDone(
        at=at, sample=sample, attempt=attempt, oldest=0, newest=0, prompt_tokens=prompt, length=4, loss_tokens=3,
        finish=finish,
    )  # fmt: skip


def a_log(folder: Path, *more: AnyRecord) -> Path:
    """Groups 0, 1, 2 and 7; of 1 and 2 the prompts are equal. The third token of each answer is somebody else's."""
    told: list[AnyRecord] = [Woke(at=0.0)]
    for group in PROMPTS:
        for member in range(2):
            name = f"{group}.{member}"
            told += [start(name), done(2.0 + group, name, finish="length" if group == 7 else "stop")]
            told += [Score(sample=name, attempt=0)]
            told += [Scored(at=3.0 + group, sample=name, attempt=0, verdict="right", reward=float(group))]
    told += [Train(step=0, branch=0, groups=(0,), samples=(), minibatches=()), Publish(version=1, branch=0)]
    told += [StepDone(at=20.0, step=0, branch=0, metrics={"loss": 0.5}, skipped="NaN")]
    told += [Published(at=20.5, version=1, branch=0, location="x", nbytes=1)]
    told += [CheckpointDone(at=21.0, version=1, branch=0, seconds=0.25, nbytes=1), *more]
    with closing(RunLog(folder / "log", 1 << 20)) as log:
        log.append(RULES)
        for record in told:
            if not isinstance(record, SampleDone):
                log.append(record)
                continue
            group, member = group_of(record.sample), int(record.sample[-1])
            tokens = [*PROMPTS[group], *answer_of(group, member)]
            mask = np.array([0] * len(PROMPTS[group]) + [1, 1, 0, 1], np.uint8)
            logprobs = np.where(mask, -0.5, 0).astype(np.float32)
            arrays = [np.array(tokens, np.int32), mask, logprobs, np.zeros(len(tokens), np.int32)]
            log.append(record, log.put(record.sample, record.attempt, arrays))
    return folder


def test_answers_are_found_by_id_and_by_prompt(tmp_path: Path) -> None:
    played = RecordedRun(a_log(tmp_path) / "log", pace=0.5)
    first, second = answer_of(0, 1)[:2], answer_of(0, 1)[3:]
    assert played.answer("areal-async-probe", [0]) is None
    whole = played.answer("0.1-0-0", PROMPTS[0])
    assert whole is not None
    assert (whole.token_ids, whole.logprobs, whole.finish) == (first, [-0.5, -0.5], "stop")
    # its second turn, in a later attempt: what it said, and somebody else's token, come before
    told = [*PROMPTS[0], *answer_of(0, 1)[:3]]
    assert played.answer("0.1-3-1", told) == Given(second, [-0.5], "stop", whole.seconds / 2)
    # a stream that broke off after one token goes on there
    assert played.answer("0.1-0-0-1", [*PROMPTS[0], first[0]]) == Given([first[1]], [-0.5], "stop", whole.seconds / 2)
    # the same prompt under another number: the same member of the nearest group that had it
    by_prompt = played.answer("5.1-0-0", PROMPTS[7])
    assert by_prompt is not None
    assert by_prompt.token_ids == answer_of(7, 1)[:2]
    assert played.answer("3.0-0-0", [3]).token_ids == answer_of(2, 0)[:2]  # type: ignore[union-attr]
    assert played.answer("0.0-0-0", [3]).token_ids == answer_of(1, 0)[:2]  # type: ignore[union-attr]
    last = played.answer("7.0-0-1", [*PROMPTS[7], *answer_of(7, 0)[:3]])
    assert last is not None
    assert last.finish == "length"
    for request, asked, why in [
        ("9.0-0-0", [99], r"sample 9\.0: it was not finished there"),
        ("0.0-0-0", [99], r"sample 0\.0: it goes on after other tokens there"),
        ("0.0-0-0", [1, 2, *answer_of(0, 0)], "it goes on after other tokens there"),  # nothing comes after these
    ]:
        with pytest.raises(NotGiven, match=why):
            played.answer(request, asked)


def test_verdicts_are_of_the_answer_and_the_prompt(tmp_path: Path) -> None:
    played = RecordedRun(a_log(tmp_path) / "log", pace=0.5)
    response = {group: np.array(answer_of(group, 0), np.int32) for group in PROMPTS}
    assert played.graded("1.0", [3], response[1]) == Graded("right", 1.0, 0.5)
    assert played.graded("4.0", [3], response[2]) == Graded("right", 2.0, 0.5)  # whatever number the prompt has now
    with pytest.raises(NotGiven, match=r"sample 1\.0: it answered otherwise there"):
        played.graded("1.0", [3], response[0])
    with pytest.raises(NotGiven, match="answers of an evaluation are in no log"):
        played.graded("eval.1.0", [3], response[1])


def test_steps_are_as_recorded(tmp_path: Path) -> None:
    again = StepDone(at=40.0, step=0, branch=1, metrics={"loss": 0.25})
    train = Train(step=0, branch=1, groups=(0,), samples=(), minibatches=())
    played = RecordedRun(a_log(tmp_path, Woke(at=39.0), train, again) / "log", pace=0.5)
    assert played.step(0) == ({"loss": 0.25}, "", 0.5), "the surviving branch's"
    assert played.checkpoint_s(1) == 0.125
    assert played.publish_s(1) == pytest.approx(0.5 * 10.5)
    assert played.publish_s(2) == 0
    with pytest.raises(NotGiven, match="has not trained step 1; its last one is 0"):
        played.step(1)


def test_a_log_that_can_not_be_played_is_refused_before_anything_starts(tmp_path: Path) -> None:
    everybody = tuple(f"{group}.{member}" for group in PROMPTS for member in range(2))
    folder = a_log(tmp_path / "run", Release(samples=everybody))
    assert recorded(folder) is not None
    payload_path(folder / "log", 1).unlink()
    with pytest.raises(Released, match=r"sample \d\.\d, attempt 0 was released"):
        recorded(folder)
    with pytest.raises(ConfigError, match="holds no log/decisions"):
        recorded(tmp_path)
