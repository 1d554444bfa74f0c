"""A made-up log of training steps, one sample each, beside a configuration."""

import shutil
from pathlib import Path

import msgspec
import numpy as np

from areal_async.config_file import load_config
from areal_async.controller.checkpoints import MARKER, STATE, CheckpointState, folder_of
from areal_async.controller.resuming import digest_of_model
from areal_async.log.writer import RunLog
from areal_async.messages import (
    CheckpointDone,
    Minibatch,
    Note,
    Release,
    RolledBack,
    SampleDone,
    StepDone,
    Train,
    TrainSample,
    Woke,
)
from areal_async.testing.small_run import write_small_run
from areal_async.wire.arrays import Array

NOWHERE = 1 << 30


class Recorder:
    """Writes the log of a run whose steps train one sample each."""

    def __init__(self, folder: Path, config: Path, segment_bytes: int = NOWHERE) -> None:
        self.log = RunLog(folder / "log", segment_bytes)
        self.at = 0.0
        self.branch = 0
        settings = load_config(config)
        self.log.append(settings.rules)
        digest = digest_of_model(Path(settings.model.path))
        self.log.append(Note(at=0.0, what="run", data={"name": "small", "model.path": digest}))
        self.log.append(Woke(at=0.0))

    def sample(self, step: int) -> None:
        arrays: list[Array] = [np.arange(3, dtype=np.int32) + step, np.array([0, 1, 1], np.uint8)]
        arrays += [np.full(3, -0.5, np.float32), np.full(3, step, np.int32)]
        name = f"{step}.0"
        done = SampleDone(
            at=self.at, sample=name, attempt=0, oldest=step, newest=step, prompt_tokens=1, length=2, loss_tokens=2,
            finish="stop",
        )  # fmt: skip
        self.log.append(done, self.log.put(name, 0, arrays))

    def sent(self, step: int, ranks: int = 1) -> None:
        parts = (((0,),), *[((),)] * (ranks - 1))
        sample = TrainSample(f"{step}.0", 0, 1.0)
        minibatch = Minibatch(2.0, parts)
        self.log.append(
            Train(step=step, branch=self.branch, groups=(step,), samples=(sample,), minibatches=(minibatch,))
        )

    def done(self, step: int, branch: int | None = None) -> None:
        of = self.branch if branch is None else branch
        self.log.append(StepDone(at=self.at, step=step, branch=of, metrics={"loss": float(step)}))

    def back(self, to: int) -> None:
        self.branch += 1
        self.log.append(RolledBack(at=self.at, to=to, why="by test"))

    def checkpoint(self, root: Path, version: int) -> None:
        self.log.append(CheckpointDone(at=self.at, version=version, branch=self.branch, seconds=0.0, nbytes=0))
        folder = folder_of(root / "checkpoints", version)
        folder.mkdir(parents=True)
        state = CheckpointState(
            run="small", version=version, branch=self.branch, at=0.0, written="", log_bytes=0, files={}
        )
        (folder / STATE).write_bytes(msgspec.json.encode(state))
        (folder / MARKER).touch()

    def released(self, *steps: int) -> None:
        self.log.append(Release(samples=tuple(f"{step}.0" for step in steps)))


def make_run_folder(folder: Path) -> Path:
    """A run folder with a configuration, and the model that this names."""
    run = folder / "run"
    run.mkdir()
    shutil.copyfile(write_small_run(folder / "small"), run / "config.yaml")
    return run


def record(run: Path, segment_bytes: int = NOWHERE) -> Recorder:
    return Recorder(run, run / "config.yaml", segment_bytes)
