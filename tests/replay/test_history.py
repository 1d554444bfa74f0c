"""Which steps of a log survived, and where training again can begin: made-up logs, and a plain second opinion."""

import random
import shutil
from contextlib import closing
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from areal_async.controller.checkpoints import MARKER, folder_of
from areal_async.errors import ConfigError, LogError
from areal_async.log.format import payload_path
from areal_async.log.turns import read_turns
from areal_async.messages import CheckpointDone, Minibatch, Train, TrainSample
from areal_async.replay.history import Batches, read_history
from areal_async.replay.trainer import plan
from areal_async.testing.small_run import write_small_run

from .steps import Recorder, make_run_folder, record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_folder(tmp_path)


MOVES = st.lists(st.sampled_from(["train", "train", "train", "lose", "late", "checkpoint", "back"]), max_size=12)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(moves=MOVES, pick=st.randoms(use_true_random=False))
def test_of_each_step_the_last_one_that_was_done_survives(
    moves: list[str], pick: random.Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Steps are done, are lost with their trainer, are answered too late; training goes back: the newest branch of each
    step that was done and not gone back behind."""
    folder = tmp_path_factory.mktemp("walk")
    config = write_small_run(folder / "small")
    log = Recorder(folder, config)
    survived: dict[int, int] = {}
    made = {0}
    with closing(log.log):
        for move in moves:
            step = len(survived)
            if move == "back":
                to = pick.choice(sorted(made))
                made = {version for version in made if version <= to}
                survived = {s: branch for s, branch in survived.items() if s < to}
                log.back(to)
                continue
            if move == "checkpoint":
                made.add(step)
                log.log.append(CheckpointDone(at=0.0, version=step, branch=log.branch, seconds=0.0, nbytes=0))
                continue
            log.sample(step)
            log.sent(step)
            if move == "train":
                log.done(step)
                survived[step] = log.branch
            else:
                to = max(made)
                survived = {s: branch for s, branch in survived.items() if s < to}
                log.back(to)
                if move == "late":
                    log.done(step, log.branch - 1)
        log.log.flush()
    if not survived:
        with pytest.raises(LogError, match="no training step"):
            read_history(folder / "log")
        return
    history = read_history(folder / "log")
    assert {step.step: step.branch for step in history.steps} == survived
    assert [step.step for step in history.steps] == list(range(len(survived)))
    assert set(history.checkpoints) | {0} == made


def test_where_the_arrays_of_early_steps_are_gone_it_begins_at_the_first_checkpoint_behind_them(run: Path) -> None:
    log = record(run, segment_bytes=1)  # a segment a sample
    with closing(log.log):
        for step in range(6):
            log.sample(step)
            log.sent(step)
            log.done(step)
            if step in (1, 3):
                log.checkpoint(run, step + 1)
        log.released(0, 1, 2)
        log.log.flush()
    for segment in (1, 2):
        payload_path(run / "log", segment).unlink()
    planned = plan(run / "log", (), None, None)
    assert (planned.version, [step.step for step in planned.steps]) == (2, [2, 3, 4, 5])
    assert planned.checkpoint == folder_of(run / "checkpoints", 2)
    assert "step 0: sample 0.0" in planned.said[0]
    assert [step.step for step in plan(run / "log", (), "step-4", 1).steps] == [4]
    with pytest.raises(LogError, match=r"--from model: step 0 can't be trained again: the arrays of its sample 0\.0"):
        plan(run / "log", (), "model", None)
    with pytest.raises(ConfigError, match="there are: model, step-2, step-4"):
        plan(run / "log", (), "step-3", None)
    (folder_of(run / "checkpoints", 2) / MARKER).unlink()
    assert plan(run / "log", (), None, None).version == 4
    (folder_of(run / "checkpoints", 4) / MARKER).unlink()
    with pytest.raises(LogError, match="step 0 can't be trained again"):
        plan(run / "log", (), None, None)


def test_a_checkpoint_of_a_branch_that_is_over_is_none(run: Path) -> None:
    log = record(run)
    with closing(log.log):
        for step in range(3):
            log.sample(step)
            log.sent(step)
            log.done(step)
        log.checkpoint(run, 2)
        log.back(0)
        for step in range(3):
            log.sent(step)
            log.done(step)
        # of the new branch, but what is on the disk is of the old one
        log.log.append(CheckpointDone(at=0.0, version=2, branch=1, seconds=0.0, nbytes=0))
        log.sample(3)
        log.sent(3)
        log.done(3, branch=0)  # too late: it answers nothing of this branch
        log.log.flush()
    planned = plan(run / "log", (), None, None)
    assert (planned.version, [step.step for step in planned.steps]) == (0, [0, 1, 2])
    assert planned.said == ("3 step(s) were done in vain, on branches that training went back behind: left out",)
    with pytest.raises(ConfigError, match=r"there are: model$"):
        plan(run / "log", (), "step-2", None)


def test_arrays_are_those_of_the_attempt_that_was_trained_and_gone_once_released(run: Path) -> None:
    log = record(run)
    with closing(log.log):
        log.sample(0)
        log.sent(0, ranks=2)
        log.done(0)
        log.released(0)
        log.log.flush()
    batches, recorded = Batches(run / "log"), read_turns(run / "log")
    assert recorded is not None
    turns = list(recorded.turns)
    for turn in turns[:-1]:
        batches.seen(turn)
    (train,) = turns[-2].commands
    assert isinstance(train, Train)
    lengths, token_ids, loss_mask, logprobs, versions = batches.part(train, 0)
    assert (lengths.tolist(), token_ids.tolist(), loss_mask.tolist()) == ([3], [0, 1, 2], [0, 1, 1])
    assert (logprobs.tolist(), versions.tolist()) == ([-0.5] * 3, [0] * 3)
    dtypes = [array.dtype for array in batches.part(train, 1)]  # of a rank without a sample
    assert dtypes == [np.int32, np.int32, np.uint8, np.float32, np.int32]
    batches.seen(turns[-1])
    with pytest.raises(LogError, match=r"sample 0\.0, attempt 0 is trained, but no record has its arrays"):
        batches.part(train, 0)


def test_arrays_come_in_the_order_in_which_micro_batches_name_them(run: Path) -> None:
    log = record(run)
    with closing(log.log):
        for step in range(4):
            log.sample(step)
        samples = tuple(TrainSample(f"{step}.0", 0, 1.0) for step in range(4))
        parts = (Minibatch(2.0, (((3, 0), ()), ((1,), ()))), Minibatch(2.0, (((),), ((2,),))))
        log.log.append(Train(step=0, branch=0, groups=(0,), samples=samples, minibatches=parts))
        log.log.flush()
    batches, recorded = Batches(run / "log"), read_turns(run / "log")
    assert recorded is not None
    for turn in recorded.turns:
        batches.seen(turn)
    (train,) = turn.commands
    assert isinstance(train, Train)
    assert [batches.part(train, rank)[1].tolist() for rank in (0, 1)] == [[3, 4, 5, 0, 1, 2], [1, 2, 3, 2, 3, 4]]


@pytest.mark.parametrize(
    ("options", "begin", "wrong"),
    [
        (("model.path=/nowhere",), None, "model.path: /nowhere: holds no config.json; name the run's first model"),
        (("train.lrr=1",), None, "no such key; did you mean train.lr"),
        (("data.epochs=2",), None, "data.epochs: changes nothing of what is asked here"),
        ((), "40", "--from 40: should be model or step-N"),
        ((), "step-x", "--from step-x: should be model or step-N"),
    ],
)
def test_what_can_be_known_before_a_process_is_started(
    run: Path, options: tuple[str, ...], begin: str | None, wrong: str
) -> None:
    log = record(run)
    with closing(log.log):
        log.sample(0)
        log.sent(0)
        log.done(0)
        log.log.flush()
    with pytest.raises(ConfigError, match=wrong):
        plan(run / "log", options, begin, None)


def test_another_model_is_refused_and_other_settings_of_before_a_resume_are_told(run: Path, tmp_path: Path) -> None:
    log = record(run)
    with closing(log.log):
        log.sample(0)
        log.sent(0)
        log.done(0)
        log.log.flush()
    before = (run / "config.yaml").read_text().replace("train: {", "train: {lr: 0.5, ")
    (run / "config-1.yaml").write_text(before)
    (said,) = plan(run / "log", (), None, None).said
    assert "config-1.yaml: before a resume the trainer had other settings (lr 0.5, now 1e-06)" in said
    assert plan(run / "log", ("train.lr=0.5",), None, None).said == ()
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "small" / "model", other)
    assert plan(run / "log", (f"model.path={other}",), None, None).config.model.path == str(other)  # it was moved
    (other / "model.safetensors").write_text("other weights")
    with pytest.raises(ConfigError, match="not the model that the run began with"):
        plan(run / "log", (f"model.path={other}",), None, None)
