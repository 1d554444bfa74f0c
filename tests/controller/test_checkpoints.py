"""Checkpoints on the disk, and samples that left memory: what a resume rests on."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_async.controller.checkpoints import Checkpoints, CheckpointState, read_state
from areal_async.controller.crew import Crew
from areal_async.controller.samples import Samples
from areal_async.errors import LogError
from areal_async.messages import (
    AnyEvent,
    Checkpoint,
    CheckpointDone,
    Failed,
    Release,
    SampleDone,
    SampleId,
    Scored,
    StartSample,
    Train,
)
from areal_async.rollout.workflow import Prompt


class Recorder:
    """A `Checkpoints` by itself, ranks that write one file, and what happens in which order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.order: list[str] = []
        self.told: asyncio.Queue[AnyEvent] = asyncio.Queue()

    async def save(self, path: Path, id: str) -> int:
        self.order.append(f"saved {id}")
        (path / "rank-0").write_bytes(b"weights")
        return 7

    async def sync(self) -> None:
        complete = sorted(path.parent.name for path in self.root.glob("*/COMPLETE"))
        self.order.append(f"log synced beside {', '.join(complete)}")

    def checkpoints(self, crew: Crew) -> Checkpoints:
        return Checkpoints(
            self.root, "mine", crew, save=self.save, sync=self.sync, log_bytes=lambda: 5,
            take=self.told.put_nowait, now=lambda: 1.0,
        )  # fmt: skip

    async def write(self, version: int, keep: tuple[int, ...] = ()) -> AnyEvent:
        async with asyncio.TaskGroup() as group:
            made = self.checkpoints(Crew(group))
            made.start(Checkpoint(version=version, branch=0, keep=keep))
            event = await self.told.get()
            if isinstance(event, CheckpointDone):
                made.recorded(event)
        made.close()
        return event


async def test_a_checkpoint_is_complete_after_the_log_and_others_go_after_its_event(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "checkpoints")
    for version, keep in ((1, ()), (2, (1,)), (3, (2,))):
        event = await recorder.write(version, keep)
        assert isinstance(event, CheckpointDone)
        assert (event.version, event.nbytes) == (version, 7)
    assert sorted(path.name for path in recorder.root.iterdir()) == ["step-2", "step-3"]
    assert recorder.order == [
        "saved checkpoint 1 branch 0", "log synced beside ", "log synced beside step-1",
        "saved checkpoint 2 branch 0", "log synced beside step-1", "log synced beside step-1, step-2",
        "saved checkpoint 3 branch 0", "log synced beside step-1, step-2", "log synced beside step-1, step-2, step-3",
    ]  # fmt: skip


async def test_what_the_end_of_a_run_has_interrupted_is_removed_then(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "checkpoints")
    await recorder.write(1)
    async with asyncio.TaskGroup() as group:
        crew = Crew(group)
        made = recorder.checkpoints(crew)
        made.start(Checkpoint(version=2, branch=0, keep=()))
        event = await recorder.told.get()
        assert isinstance(event, CheckpointDone)
        made.recorded(event)
        await crew.dismiss()
        assert len(list(recorder.root.iterdir())) == 2
        await made.tidy()
        assert [path.name for path in recorder.root.iterdir()] == ["step-2"]
        await made.tidy()
    made.close()


async def test_what_a_dead_controller_was_to_remove_is_removed_by_the_next(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "checkpoints")
    for version, keep in ((1, ()), (2, (1,)), (3, (1, 2))):
        await recorder.write(version, keep)
    recorder.order.clear()
    async with asyncio.TaskGroup() as group:
        made = recorder.checkpoints(Crew(group))
        made.resumed((2, 0))
    made.close()
    assert [path.name for path in recorder.root.iterdir()] == ["step-2"]
    assert recorder.order == ["log synced beside step-1, step-2, step-3"]


async def test_one_of_a_branch_that_is_over_is_replaced(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "checkpoints")
    old = recorder.root / "step-3"
    old.mkdir(parents=True)
    (old / "of-the-old-branch").touch()
    (old / "COMPLETE").touch()
    assert isinstance(await recorder.write(3), CheckpointDone)
    assert sorted(path.name for path in old.iterdir()) == ["COMPLETE", "rank-0", "state.json"]


@pytest.mark.parametrize("where", ["write_bytes", "rename", "touch"])
async def test_a_full_disk_leaves_no_half_checkpoint_and_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """P29: in the ranks' data, before the folder has its name, between data and marker."""
    recorder = Recorder(tmp_path / "checkpoints")
    await recorder.write(1)
    method = getattr(Path, where)

    def full(self: Path, *arguments: Any) -> Any:
        if "step-2" in str(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return method(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Path, where, full)
        event = await recorder.write(2, (1,))
    assert isinstance(event, Failed)
    assert (event.of, event.id) == ("checkpoint", "2")
    assert "version 2 has no checkpoint" in event.why
    assert "No space left on device; the run goes on without it" in event.why
    assert [path.name for path in recorder.root.iterdir()] == ["step-1"]
    assert isinstance(await recorder.write(2, (1,)), CheckpointDone)


def test_a_state_tells_of_files_that_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    state = CheckpointState(
        run="r", version=1, branch=0, at=1.0, written="2026-01-01T00:00:00+00:00", log_bytes=1, files={"a": 2}
    )
    (folder / "state.json").write_bytes(msgspec.json.encode(state))
    (folder / "a").write_bytes(b"12")
    assert read_state(folder) is None  # no marker
    (folder / "COMPLETE").touch()
    assert read_state(folder) == state
    (folder / "a").write_bytes(b"1")
    assert read_state(folder) is None
    assert "has 1 bytes, not 2" in caplog.text


# ----------------------------------------------------------------------------------------------- samples come back


def test_a_sample_that_left_memory_is_the_same_when_it_comes_back() -> None:
    rng = np.random.default_rng(3)
    stored: dict[tuple[SampleId, int], list[Any]] = {}

    def prompt_at(position: int) -> Prompt:
        return Prompt([1, 2], f"prompt {position}", None, position, 10 * position)

    samples = Samples(lambda sample, attempt: [array.copy() for array in stored[sample, attempt]], prompt_at)
    names = [f"{group}.0" for group in range(3)]
    for number, name in enumerate(names):
        n = 5 + number
        stored[name, 1] = [
            rng.integers(0, 99, n, np.int32), np.array([0, 0] + [1] * (n - 2), np.uint8),
            rng.normal(size=n).astype(np.float32), np.array([-1, -1] + [number] * (n - 2), np.int32),
        ]  # fmt: skip
        samples.seen(
            Scored(at=0, sample="9.9", attempt=0, verdict="right", reward=1.0),
            [StartSample(sample=name, attempt=1, position=number, server="0", floor=0)],
        )
        late = SampleDone(
            at=0, sample=name, attempt=0, oldest=0, newest=0, prompt_tokens=9, length=1, loss_tokens=1, finish="length"
        )
        samples.seen(late, [])  # of an attempt that is over
        samples.seen(msgspec.structs.replace(late, attempt=1, prompt_tokens=2, length=n - 2, finish="stop"), [])
        samples.seen(Scored(at=0, sample=name, attempt=1, verdict="right", reward=0.5 * number), [])
    command = msgspec.convert(
        {
            "kind": "train", "step": 0, "branch": 0, "groups": [0, 1, 2], "samples": [[n, 1, 0.1] for n in names],
            "minibatches": [[1.0, [[[2], [0]], [[1], []]]]],
        },
        Train,
    )  # fmt: skip
    first = [samples.part(command, rank) for rank in range(2)]
    assert [kept.reward for kept in samples.of(command)] == [0.0, 0.5, 1.0]
    assert samples["2.0"].prompt.row == 20
    assert samples["2.0"].by_version == {2: 5}
    samples.drop(names)
    assert not samples
    again = [samples.part(command, rank) for rank in range(2)]
    for before, after in zip(first, again, strict=True):
        for one, other in zip(before, after, strict=True):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()
    samples.seen(Scored(at=0, sample="9.9", attempt=0, verdict="right", reward=1.0), [release(names[0])])
    samples.drop(names)
    with pytest.raises(LogError, match=r"sample 0\.0 is asked for, but it never ended, or was released"):
        samples["0.0"]
    samples["1.0"]


def release(name: SampleId) -> Release:
    return Release(samples=(name,))
