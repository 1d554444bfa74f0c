"""The scripted trainer's checkpoints: what a test of going back may rely on."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_async.errors import TrainerError
from areal_async.messages import CheckpointSaved, SaveCheckpoint, StepDone
from areal_async.testing.books import read_trainer, surviving
from areal_async.testing.trainer import ScriptedRank
from areal_async.wire.dealer import Request

from .world import make_batch, spec_for


def ask(ranks: list[ScriptedRank], message: Any, arrays: Any = None) -> list[Any]:
    each = arrays or [[]] * len(ranks)
    return [rank._answer(Request("1", message, own))[0] for rank, own in zip(ranks, each, strict=True)]


def trainers(count: int, books: Path, checkpoint: str = "") -> list[ScriptedRank]:
    spec = spec_for(Path(), checkpoint=checkpoint)
    return [ScriptedRank(rank, count, spec, 0.0, books) for rank in range(count)]


def train(ranks: list[ScriptedRank], step: int, branch: int) -> None:
    message, arrays = make_batch(samples=6, minibatches=1, ranks=len(ranks), per_micro=2, step=step, seed=step)
    message = msgspec.structs.replace(message, branch=branch)
    assert all(isinstance(done, StepDone) for done in ask(ranks, message, arrays))


def test_another_number_of_ranks_goes_on_in_the_same_state(tmp_path: Path) -> None:
    books, two = tmp_path / "books.jsonl", trainers(2, tmp_path / "books.jsonl")
    train(two, 0, 0)
    train(two, 1, 0)
    saved = ask(two, SaveCheckpoint(path=str(tmp_path)))
    assert all(isinstance(answer, CheckpointSaved) and answer.version == 2 for answer in saved)
    assert sum(answer.nbytes for answer in saved) == sum(p.stat().st_size for p in tmp_path.glob("rank-*"))
    train(two, 2, 0)
    train(two, 3, 0)
    [one] = trainers(1, books, str(tmp_path))
    with pytest.raises(TrainerError, match="holds version 2 and was asked for step 0"):
        train([one], 0, 1)
    train([one], 2, 1)
    lines = [json.loads(line) for line in books.read_text().splitlines()]
    assert lines[-1]["state"] == lines[4]["state"] != lines[2]["state"]
    assert lines[-1]["samples"] != lines[4]["samples"]  # of one rank, and of all
    assert [(line.step, line.branch, line.rank) for line in surviving(read_trainer(books))] == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
    ]


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    two, books = trainers(2, tmp_path / "books.jsonl"), tmp_path / "books.jsonl"
    ask(two, SaveCheckpoint(path=str(tmp_path)))
    path = tmp_path / "rank-1.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # as a rank leaves it that dies while it writes
    with pytest.raises(TrainerError, match="a rank's file is broken"):
        trainers(1, books, str(tmp_path))
    path.write_bytes(whole.replace(b'"version":0', b'"version":1'))
    with pytest.raises(TrainerError, match="not of one version"):
        trainers(1, books, str(tmp_path))
    path.unlink()
    with pytest.raises(TrainerError, match="the files of some ranks are missing"):
        trainers(1, books, str(tmp_path))
