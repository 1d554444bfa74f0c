"""`checks.jsonl` and `prox/`: whole, of the history that survives, and never a reason for a run to stop or to wait."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from areal_async import runfiles
from areal_async.config import Config
from areal_async.controller import Controller, check_file, proximal
from areal_async.controller.check_file import CheckFile
from areal_async.controller.crew import Crew
from areal_async.controller.proximal import Proximal
from areal_async.controller.samples import Kept, Samples
from areal_async.errors import Released
from areal_async.log.reader import read_payload, read_records
from areal_async.messages import (
    Minibatch,
    Release,
    RolledBack,
    SampleDone,
    SampleId,
    Scored,
    StartSample,
    StepDone,
    StopRequested,
    Train,
    TrainSample,
)
from areal_async.rollout.workflow import Prompt, Sample
from areal_async.runfiles import CHECKS, Check, prox_about, prox_of, prox_path, prox_steps, read_checks
from areal_async.testing.crash import Life, Point
from areal_async.testing.lives import live
from areal_async.testing.recipes import scripted
from areal_async.testing.small_run import write_small_run
from areal_async.testing.trainer import PROX_LOWER
from areal_async.wire.arrays import Array

RIGHT = Check(sample="1.0", attempt=0, at=1.0, verdict="right", reward=1.0)


# --------------------------------------------------------------------------------------------------------- checks.jsonl


async def test_lines_of_checks_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_file, "WRITE_S", 0.005)
    file = CheckFile(tmp_path)
    for _ in range(3):
        file.add(RIGHT)
    assert read_checks(tmp_path) == ([], 0)
    await asyncio.sleep(0.02)
    assert read_checks(tmp_path)[0] == [RIGHT] * 3
    file.add(RIGHT)
    file.close()  # what waits is written at the end
    assert read_checks(tmp_path)[0] == [RIGHT] * 4
    assert (tmp_path / CHECKS).stat().st_mode & 0o777 == 0o600  # as the log: texts are in it


@pytest.mark.parametrize("torn", [b"", b'{"sample":"2.', b"{}", bytes(40)])
async def test_a_line_that_a_kill_has_torn_is_cut(tmp_path: Path, torn: bytes) -> None:
    whole = msgspec.json.encode(RIGHT) + b"\n"
    (tmp_path / CHECKS).write_bytes(whole + torn)
    file = CheckFile(tmp_path)
    file.add(RIGHT)
    file.close()
    assert (tmp_path / CHECKS).read_bytes() == whole + whole


async def test_checks_wait_for_room_and_another_error_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(check_file, "WRITE_S", 0.0)
    real, wrong = os.write, [errno.ENOSPC]

    def write(fd: int, data: bytes) -> int:
        if wrong:
            raise OSError(wrong[0], os.strerror(wrong[0]))
        return real(fd, data)

    file = CheckFile(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        file.add(RIGHT)
        await asyncio.sleep(0.005)
        assert (tmp_path / CHECKS).read_bytes() == b""
        wrong.clear()
        file.add(RIGHT)
        await asyncio.sleep(0.005)
        assert read_checks(tmp_path)[0] == [RIGHT] * 2
        wrong.append(errno.EIO)
        for _ in range(3):
            file.add(RIGHT)
            await asyncio.sleep(0.005)
        wrong.clear()
        file.close()
    assert len([message for message in caplog.messages if "what checks say isn't kept any more" in message]) == 1


# ---------------------------------------------------------------------------------------------------------------- prox/


class World:
    """A run folder, samples that are in memory, and who writes log π_prox of them."""

    def __init__(self, root: Path, group: asyncio.TaskGroup, room: int = 0) -> None:
        self.root = root
        self.samples = Samples(lambda sample, attempt: [], lambda position: None)
        self.crew = Crew(group)
        self.prox = Proximal(root, self.samples, self.crew, room)

    def train(self, step: int, *, branch: int = 0, samples: int = 4, ranks: int = 2) -> Train:
        """A step of samples of 2 prompt tokens and 1, 2, 3 … of the answer; ranks get every ranks-th one."""
        names = [f"{step}.{member}" for member in range(samples)]
        for member, name in enumerate(names):
            length = 3 + member
            self.samples[name] = Kept(
                Sample(
                    np.arange(length, dtype=np.int32), np.array([0, 0] + [1] * (length - 2), np.uint8),
                    np.zeros(length, np.float32), np.zeros(length, np.int32), 2, "stop",
                ),
                0, Prompt([0, 1], "p", None, 0, 0),
            )  # fmt: skip
        parts = tuple(tuple((index,) for index in range(rank, samples, ranks)) for rank in range(ranks))
        return Train(
            step=step, branch=branch, groups=(0,), minibatches=(Minibatch(1.0, parts),),
            samples=tuple(TrainSample(name, 0, 1.0) for name in names),
        )  # fmt: skip

    def answers(self, train: Train, shift: float = 0.0) -> list[list[Array]]:
        """What ranks would send: member + t/100 for token t."""
        found: list[list[Array]] = []
        for part in train.minibatches[0].ranks:
            lengths = [3 + index for (index,) in part]
            values = [np.arange(3 + index) / 100 + index + shift for (index,) in part]
            found.append([np.array(lengths, np.int32), np.concatenate([np.zeros(0), *values]).astype(np.float32)])
        return found

    def keep(self, train: Train, shift: float = 0.0) -> None:
        self.prox.keep(train, self.answers(train, shift))

    def has(self, train: Train, shift: float = 0.0) -> bool:
        """All of its numbers are there."""
        for member, entry in enumerate(train.samples):
            found = prox_of(self.root, train.step, entry.sample)
            expected = (np.arange(2, 3 + member) / 100 + member + shift).astype(np.float32)
            if found is None or not np.array_equal(found, expected):
                return False
        about = prox_about(self.root, train.step)
        return about == runfiles.About(
            step=train.step, branch=train.branch, attempts={entry.sample: 0 for entry in train.samples}
        )


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as group:
        yield World(tmp_path, group)


async def settle(turns: int = 20) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_a_step_is_written_from_all_ranks_without_the_prompts(world: World) -> None:
    steps = [world.train(0, ranks=2), world.train(1, ranks=1), world.train(2, samples=1, ranks=3)]
    for train in steps:
        world.keep(train)
    world.samples.clear()  # they leave memory when the step's end is handled
    await settle()
    assert all(world.has(train) for train in steps)
    assert not list((world.root / "prox").glob(".*"))
    assert (world.root / "prox").stat().st_mode & 0o777 == 0o700


async def test_a_step_goes_when_its_samples_are_released(world: World) -> None:
    steps = [world.train(step) for step in range(3)]
    for train in steps:
        world.keep(train)
    world.prox.release([entry.sample for entry in steps[1].samples])  # before it could be written
    await settle()
    assert prox_steps(world.root) == [0, 2]
    world.prox.release([*("9.0", "9.1"), *(entry.sample for entry in steps[0].samples)])
    assert prox_steps(world.root) == [2]


async def test_steps_that_nobody_needs_stay_while_there_is_room(tmp_path: Path) -> None:
    """As the log keeps the segment that it writes: so a short run has all of its steps."""
    async with asyncio.TaskGroup() as group:
        world = World(tmp_path, group)
        steps = [world.train(step) for step in range(6)]
        world.keep(steps[0])
        world.prox.close()
        nbytes = prox_path(tmp_path, 0).stat().st_size
        world = World(tmp_path, group, room=3 * nbytes)
        steps = [world.train(step) for step in range(6)]
        for train in steps:
            world.keep(train)
            world.prox.release([entry.sample for entry in train.samples])  # also before it was written
        await settle()
        assert prox_steps(tmp_path) == [3, 4, 5]
        world.prox.roll_back(4)
        assert prox_steps(tmp_path) == [3]
        for train in steps[4:]:
            world.keep(msgspec.structs.replace(train, branch=1))
        await settle()
        assert prox_steps(tmp_path) == [3, 4, 5], "what is needed takes no room"
        world.samples.clear()
        again = World(tmp_path, group, room=2 * nbytes)
        again.prox.resume()
        assert prox_steps(tmp_path) == [4, 5]
        again.prox.roll_back(5)
        assert prox_steps(tmp_path) == [4]


async def test_a_step_that_is_trained_again_replaces_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proximal, "PIECE_SAMPLES", 1)
    steps = [world.train(step) for step in range(3)]
    for train in steps[:2]:
        world.keep(train)
    await settle()
    world.keep(steps[2])
    await settle(2)
    assert list((world.root / "prox").glob(".*")), "it is being written"
    world.prox.roll_back(1)
    assert prox_steps(world.root) == [0]
    await settle()
    assert prox_steps(world.root) == [0]
    again = [msgspec.structs.replace(train, branch=1) for train in steps[1:]]
    world.keep(again[0], shift=0.5)
    world.keep(steps[2])
    await settle(3)
    world.keep(again[1], shift=0.5)  # while the other one of its step still waits
    await settle(40)
    assert world.has(steps[0])
    assert all(world.has(train, shift=0.5) for train in again)


async def test_what_still_waits_at_the_end_is_written_then(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proximal, "PIECE_SAMPLES", 1)
    steps = [world.train(step) for step in range(3)]
    for train in steps:
        world.keep(train)
    await settle(3)
    await world.crew.dismiss()
    world.prox.close()
    assert all(world.has(train) for train in steps)
    assert not list((world.root / "prox").glob(".*"))


async def test_what_does_not_fit_or_can_not_be_written_is_told_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    train = world.train(0)
    answers = world.answers(train)
    world.prox.keep(train, [])
    world.prox.keep(train, [[], []])
    for wrong in (
        [answers[1], answers[0]],
        [answers[0], [answers[1][0], answers[1][1][:-1]]],
        [answers[0], [answers[1][0][::-1], answers[1][1]]],
    ):
        Proximal(world.root, world.samples, world.crew, 0).keep(train, wrong)
        assert "log π_prox of step 0 isn't kept" in caplog.text
        caplog.clear()
    await settle()
    assert not (world.root / "prox").exists()
    world.prox.keep(train, [answers[0], []])
    (world.root / "prox").write_text("not a folder")
    world.keep(train)
    await settle()
    assert len(caplog.messages) == 1
    assert "log π_prox of step 0 isn't kept: trainer.1 sent [] for 10 tokens" in caplog.messages[0]
    (world.root / "prox").unlink()
    world.keep(train)
    await settle()
    assert world.has(train)


async def test_a_full_disk_leaves_no_part_of_a_file(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = proximal.zipfile.ZipFile.writestr

    def writestr(self: object, name: object, data: object) -> None:
        if "2.npy" in str(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, name, data)  # type: ignore[arg-type]

    train = world.train(0)
    with monkeypatch.context() as patch:
        patch.setattr(proximal.zipfile.ZipFile, "writestr", writestr)
        world.keep(train)
        await settle()
    assert list((world.root / "prox").iterdir()) == []
    assert "No space left on device" in caplog.text
    assert "step-000000.npz" in caplog.text
    world.keep(train)
    await settle()
    assert world.has(train)


async def test_large_steps_leave_the_event_loop_its_turns(world: World) -> None:
    """200 samples: at least one turn for each 64."""
    world.keep(world.train(0, samples=200))
    turns = 0
    while not prox_steps(world.root):
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 3
    await settle()


async def test_a_resume_keeps_what_the_log_has_and_removes_the_rest(world: World) -> None:
    steps = [world.train(step) for step in range(4)]
    for train in steps:
        world.keep(train)
        for entry in train.samples:
            command = StartSample(sample=entry.sample, attempt=0, position=0, server="0", floor=0)
            world.samples.seen(StopRequested(at=0.0), [command])
            world.samples.seen(
                SampleDone(
                    at=1.0,
                    sample=entry.sample,
                    attempt=0,
                    oldest=0,
                    newest=0,
                    prompt_tokens=2,
                    length=1,
                    loss_tokens=1,
                    finish="stop",
                ),
                [],
            )
    await settle()
    released = tuple(entry.sample for entry in steps[0].samples)
    world.samples.seen(StopRequested(at=2.0), [Release(samples=released)])
    prox_path(world.root, 2).write_bytes(prox_path(world.root, 2).read_bytes()[:-30])
    (world.root / "prox" / ".step-000009.tmp").write_bytes(b"PK")
    world.prox = Proximal(world.root, world.samples, world.crew, 0)
    world.prox.resume()
    assert sorted(path.name for path in (world.root / "prox").iterdir()) == ["step-000001.npz", "step-000003.npz"]
    world.prox.roll_back(3)
    assert prox_steps(world.root) == [1]
    world.prox.release([steps[1].samples[0].sample])
    assert prox_steps(world.root) == []


# ----------------------------------------------------------------------------------------------------------- whole runs


def trained(
    log: Path,
) -> tuple[dict[SampleId, tuple[int, int, int]], set[SampleId], dict[tuple[SampleId, int], Scored]]:
    """Of the history that survived: step, branch and attempt of each trained sample; those that were released; all
    verdicts."""
    sent: dict[tuple[int, int], Train] = {}
    found: dict[SampleId, tuple[int, int, int]] = {}
    released: set[SampleId] = set()
    scored: dict[tuple[SampleId, int], Scored] = {}
    for record in read_records(log):
        match record.message:
            case Train() as train:
                sent[train.step, train.branch] = train
            case StepDone() as done:
                for entry in sent[done.step, done.branch].samples:
                    found[entry.sample] = done.step, done.branch, entry.attempt
            case RolledBack() as back:
                found = {sample: at for sample, at in found.items() if at[0] < back.to}
            case Release() as release:
                released.update(release.samples)
            case Scored() as verdict:
                scored[verdict.sample, verdict.attempt] = verdict
    return found, released, scored


def right_in(run: Path) -> int:
    """Whether `prox/` and `checks.jsonl` are what the log says, with room for all steps; how many samples have the
    numbers that belong to their arrays, where these are still there."""
    places, released, scored = trained(run / "log")
    payloads = {
        (record.message.sample, record.message.attempt): record.payload
        for record in read_records(run / "log")
        if isinstance(record.message, SampleDone) and record.payload is not None
    }
    kept = 0
    for sample, (step, branch, attempt) in places.items():
        found = prox_of(run, step, sample)
        assert found is not None, sample
        about = prox_about(run, step)
        assert about is not None
        assert (about.step, about.branch, about.attempts[sample]) == (step, branch, attempt)
        ref = payloads[sample, attempt]
        assert ref is not None
        try:
            token_ids, mask, logprobs, _ = read_payload(run / "log", ref).arrays
        except Released:  # a resume begins a new segment
            assert sample in released
            continue
        prompt = len(token_ids) - len(found)
        assert prompt > 0
        assert not mask[:prompt].any()
        np.testing.assert_array_equal(found, np.where(mask, logprobs - PROX_LOWER, np.nan)[prompt:].astype(np.float32))
        kept += 1
    assert set(prox_steps(run)) == {place[0] for place in places.values()}
    lines = {(check.sample, check.attempt): check for check in read_checks(run)[0]}
    assert lines.keys() <= scored.keys()
    for key, line in lines.items():
        assert (line.verdict, line.reward, line.at) == (scored[key].verdict, scored[key].reward, scored[key].at)
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_run_keeps_both(make_config: Callable[..., Config], ranks: int) -> None:
    config = make_config(f"train.ranks={ranks}", "train.steps=6", "checkpoint.every_steps=2", "checkpoint.keep=1")
    async with Controller(config, recipes=scripted()) as run:
        result = await run.run()
    places, released, scored = trained(result.folder / "log")
    assert released & places.keys()
    assert right_in(result.folder) == len(places)
    lines, _ = read_checks(result.folder)
    assert {(line.sample, line.attempt) for line in lines} == scored.keys()
    assert len(lines) == len(scored)
    assert all(line.seconds > 0 for line in lines)
    assert any(line.extracted for line in lines)


@pytest.mark.slow
async def test_without_keep_prox_nothing_is_sent_or_written(make_config: Callable[..., Config]) -> None:
    async with Controller(make_config("train.keep_prox=false", "train.steps=2"), recipes=scripted()) as run:
        result = await run.run()
    assert not (result.folder / "prox").exists()
    assert read_checks(result.folder)[0]


@pytest.mark.slow
def test_after_kill_9_and_a_resume_both_are_of_the_history_that_survived(tmp_path: Path) -> None:
    """Killed while step 5 is trained, again while step 4 is trained once more, and then nobody kills it."""
    folder = tmp_path / "r"
    config, run = write_small_run(folder), folder / "run"

    def lived(at: Point | None, *, resume: bool) -> int | None:
        life = Life(
            config=str(config), run_dir=str(run), resume=resume, point=at,
            books=str(folder / "books"), server_book=str(folder / "server-book"),
        )  # fmt: skip
        return live(life).code

    assert lived(Point("sent", 6), resume=False) == -9
    assert prox_steps(run) == [0, 1, 2, 3, 4]
    assert lived(Point("sent", 1), resume=True) == -9
    assert right_in(run) > 0
    assert prox_steps(run) == [0, 1, 2, 3]
    assert lived(None, resume=True) == 0
    assert right_in(run) > 0
