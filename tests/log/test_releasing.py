"""Samples that nobody needs leave memory, then the disk; the decisions stay, and say why the arrays are gone."""

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.errors import LogError, Released
from areal_async.log import format as fmt
from areal_async.log import reader, writer
from areal_async.log.format import PayloadRef
from areal_async.log.writer import RunLog
from areal_async.messages import Cancel, CheckpointDone, Forget, Release, Rules, SampleDone

RULES = Rules(
    seed=1, steps=2, batch_groups=2, group_size=2, max_staleness=1, max_concurrent=4, minibatches=1, ranks=1,
    max_tokens_per_microbatch=64,
    max_new_tokens=4096,
)  # fmt: skip
SEGMENT = 500  # two samples of `answer` go in


def answer(number: int) -> list[np.ndarray]:
    return [np.full(40, number, np.int32)]


def finish(log: RunLog, number: int, attempt: int = 0) -> PayloadRef:
    ref = log.put(f"{number}.0", attempt, answer(number + 100 * attempt))
    log.append(done(number, attempt), ref)
    return ref


def done(number: int, attempt: int = 0) -> SampleDone:
    return SampleDone(
        at=1.0, sample=f"{number}.0", attempt=attempt, oldest=0, newest=1, prompt_tokens=3, length=5, loss_tokens=5,
        finish="stop",
    )  # fmt: skip


def a_run(folder: Path, samples: int) -> tuple[RunLog, list[PayloadRef]]:
    log = RunLog(folder, SEGMENT)
    log.append(RULES)
    return log, [finish(log, number) for number in range(samples)]


def carry_out(log: RunLog, command: Forget | Release) -> None:
    """As the controller does: the record first."""
    log.append(command)
    log.flush()
    if isinstance(command, Release):
        log.release(command.samples)
    else:
        log.forget(command.samples)


def names(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"{number}.0" for number in numbers)


async def test_a_segment_goes_when_all_of_its_samples_are_released(tmp_path: Path) -> None:
    log, refs = a_run(tmp_path, 7)
    assert [ref.segment for ref in refs] == [1, 1, 1, 2, 2, 2, 3]
    with closing(log):
        carry_out(log, Release(samples=names([0, 2, 3, 6])))
        await log.sync()
        assert fmt.payload_segments(tmp_path) == [1, 2, 3]
        assert log.get("1.0", 0)[0][0] == 1
        carry_out(log, Release(samples=names([1])))
        assert fmt.payload_segments(tmp_path) == [1, 2, 3]  # not before the record is on the disk
        await log.sync()
        assert fmt.payload_segments(tmp_path) == [2, 3]  # 3 is being written
        assert log.get("4.0", 0)[0][0] == 4
        for sample in names([0, 1, 2, 3, 6]):
            assert not log.has(sample, 0)
            with pytest.raises(LogError, match=rf"sample {sample}, attempt 0 is not in the log, or was released"):
                log.get(sample, 0)


async def test_forgotten_samples_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may go back to them. Their segments are kept; looking through one finds all that it has."""
    looked: list[int] = []
    real = reader.index_segment
    monkeypatch.setattr(reader, "index_segment", lambda folder, number: looked.append(number) or real(folder, number))
    log, refs = a_run(tmp_path, 7)
    with closing(log):
        carry_out(log, Forget(samples=names(range(7))))
        await log.sync()
        assert fmt.payload_segments(tmp_path) == [1, 2, 3]
        finish(log, 7)
        for number in (1, 0, 2, 6, 7, 1):
            assert log.has(f"{number}.0", 0)
            assert log.get(f"{number}.0", 0)[0].tolist() == [number] * 40
        assert looked == [refs[1].segment, refs[6].segment]
        assert not log.has("1.0", 1)
        assert not log.has("99.0", 0)
        assert looked == [refs[1].segment, refs[6].segment]
        carry_out(log, Release(samples=names(range(3))))
        await log.sync()
        assert fmt.payload_segments(tmp_path) == [2, 3]


async def test_a_forgotten_sample_that_is_not_written_yet(tmp_path: Path) -> None:
    log, _ = a_run(tmp_path, 2)
    with closing(log):
        log.forget(names([0]))
        assert log.get("0.0", 0)[0][0] == 0


async def test_a_later_attempt_replaces_the_one_before(tmp_path: Path) -> None:
    log, refs = a_run(tmp_path, 3)
    with closing(log):
        finish(log, 3)
        for number in range(3):
            assert finish(log, number, attempt=1).segment > refs[number].segment
        assert log.get("0.0", 0)[0][0] == 0  # still there
        await log.sync()
        assert 1 not in fmt.payload_segments(tmp_path)
        assert log.get("0.0", 1)[0][0] == 100
        assert not log.has("0.0", 0)
    with pytest.raises(Released, match=r"payload-000001\.seg: sample 2\.0, attempt 0 was replaced by its attempt 1"):
        reader.read_payload(tmp_path, refs[2])
    with closing(RunLog(tmp_path, SEGMENT)) as log:
        assert log.get("0.0", 1)[0][0] == 100


async def test_what_was_released_is_told_from_what_is_lost(tmp_path: Path) -> None:
    log, refs = a_run(tmp_path, 7)
    with closing(log):
        for version in (8, 12):
            log.append(CheckpointDone(at=2.0, version=version, branch=0, seconds=0.1, nbytes=9))
        carry_out(log, Release(samples=names(range(3))))
        await log.sync()
    said = (
        r"sample 1\.0, attempt 0 was released after checkpoint 12, and its arrays were deleted; the decisions are kept"
    )
    with pytest.raises(Released, match=rf"payload-000001\.seg: {said}"):
        reader.read_payload(tmp_path, refs[1])
    fmt.payload_path(tmp_path, 2).unlink()
    with pytest.raises(LogError, match="payload segment 2 can't be read: No such file") as caught:
        reader.read_payload(tmp_path, refs[3])
    assert not isinstance(caught.value, Released)


async def test_killed_before_the_segment_was_deleted(tmp_path: Path) -> None:
    """The next run deletes it, and goes on in the segment after the last."""
    log, _ = a_run(tmp_path, 7)
    carry_out(log, Forget(samples=names(range(6))))
    carry_out(log, Release(samples=names(range(3))))
    log.close()
    assert fmt.payload_segments(tmp_path) == [1, 2, 3]
    for _ in range(2):
        with closing(RunLog(tmp_path, SEGMENT)) as log:
            assert not log.has("0.0", 0)
            assert log.get("4.0", 0)[0][0] == 4
            await log.sync()
            assert fmt.payload_segments(tmp_path) == [2, 3]


async def test_nothing_is_deleted_that_a_loss_of_power_could_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record that releases is on the disk before the file goes; if the disk fails, the file stays."""
    did: list[str] = []
    real_sync, real_unlink = os.fdatasync, Path.unlink

    def fdatasync(fd: int) -> None:
        did.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real_sync(fd)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        did.append(f"delete {path.name}")
        real_unlink(path, missing_ok)

    monkeypatch.setattr(writer.os, "fdatasync", fdatasync)
    monkeypatch.setattr(writer.Path, "unlink", unlink)
    log, _ = a_run(tmp_path, 4)
    with closing(log):
        carry_out(log, Release(samples=names(range(3))))
        await log.sync()
        assert did[-2:] == ["decisions.log", "delete payload-000001.seg"]


async def test_what_was_cancelled_is_kept_until_it_is_released(tmp_path: Path) -> None:
    """A run that stops cancels what it is checking; a resume checks the same answers again."""
    log, _ = a_run(tmp_path, 7)
    with closing(log):
        for sample in names(range(3)):
            log.append(Cancel(sample=sample, attempt=0))
        log.flush()
        await log.sync()
    with closing(RunLog(tmp_path, SEGMENT)) as log:
        await log.sync()
        assert log.get("0.0", 0)[0][0] == 0


@pytest.mark.parametrize("again", [False, True])
async def test_an_answer_that_came_as_its_sample_was_cancelled_is_not_kept(tmp_path: Path, again: bool) -> None:
    """It was put, its event waited behind the one that cancelled it, and the core ignores it; also after a kill."""
    log, _ = a_run(tmp_path, 0)
    refs = {number: log.put(f"{number}.0", 0, answer(number)) for number in range(7)}
    for number in range(3):
        log.append(Cancel(sample=f"{number}.0", attempt=0))
        log.append(Cancel(sample=f"{number + 3}.0", attempt=7))
    for number, ref in refs.items():
        log.append(done(number), ref)
    if again:
        log.close()
        log = RunLog(tmp_path, SEGMENT)
    with closing(log):
        assert log.get("1.0", 0)[0][0] == 1
        await log.sync()
        assert fmt.payload_segments(tmp_path) == [2, 3]
        assert log.get("4.0", 0)[0][0] == 4


async def test_arrays_that_no_record_refers_to_are_not_kept(tmp_path: Path) -> None:
    """A controller that was killed between the two files leaves such ones."""
    with closing(RunLog(tmp_path, SEGMENT)) as log:
        log.append(RULES)
        for number in range(4):
            log.put(f"{number}.0", 0, answer(number))
    with closing(RunLog(tmp_path, SEGMENT)) as log:
        assert log.get("0.0", 0)[0][0] == 0
        await log.sync()
        assert fmt.payload_segments(tmp_path) == [2]
        assert not log.has("0.0", 0)
        assert log.has("3.0", 0)


# ------------------------------------------------------------------------------------------------- a loss of power


def test_samples_that_are_gone_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The decision log reached the disk, the end of the arrays didn't: the log ends before the first of those samples,
    and nothing after it counts."""
    log, refs = a_run(tmp_path, 5)
    log.append(Release(samples=names([0])))
    log.close()
    offsets = [record.offset for record in reader.read_records(tmp_path)]
    size = (tmp_path / fmt.DECISIONS_NAME).stat().st_size
    path = fmt.payload_path(tmp_path, 2)
    os.truncate(path, refs[3].offset + 30)
    caplog.set_level(logging.WARNING)
    with closing(RunLog(tmp_path, SEGMENT)) as log:
        assert [log.has(f"{number}.0", 0) for number in range(5)] == [True] * 3 + [False] * 2
        assert f"{path}: torn end: the last 30 bytes, from offset {refs[3].offset} on" in caplog.text
        assert "took the arrays of 2 finished samples (sample 3.0, attempt 0; sample 4.0, attempt 0)" in caplog.text
        assert f"cut at offset {offsets[4]} of {size}, before the record of the first of them" in caplog.text
        assert [record.offset for record in reader.read_records(tmp_path)] == offsets[:4]
        finish(log, 3)
    caplog.clear()
    with closing(RunLog(tmp_path, SEGMENT)) as log:
        assert log.get("3.0", 0)[0][0] == 3
    assert caplog.text == ""


def test_an_older_segment_with_a_torn_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody refers to what is gone; it is cut, and said once."""
    log, refs = a_run(tmp_path, 9)
    carry_out(log, Release(samples=names([2])))
    log.close()
    path = fmt.payload_path(tmp_path, 1)
    os.truncate(path, refs[2].offset + 30)
    for said in (1, 0):
        caplog.clear()
        with closing(RunLog(tmp_path, SEGMENT)) as log:
            assert log.get("1.0", 0)[0][0] == 1
        assert caplog.text.count(f"{path}: torn end: the last 30 bytes, from offset {refs[2].offset} on") == said
        assert path.stat().st_size == refs[2].offset


def test_a_whole_segment_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its name never reached the disk."""
    log, _ = a_run(tmp_path, 5)
    log.close()
    fmt.payload_path(tmp_path, 2).unlink()
    with closing(RunLog(tmp_path, SEGMENT)) as log:
        assert [log.has(f"{number}.0", 0) for number in range(5)] == [True] * 3 + [False] * 2
    assert "(sample 3.0, attempt 0; sample 4.0, attempt 0)" in caplog.text


async def test_a_number_is_not_used_again_while_a_record_has_it(tmp_path: Path) -> None:
    """Or a reference to released arrays would name others."""
    log, refs = a_run(tmp_path, 5)
    carry_out(log, Release(samples=names(range(5))))
    log.close()
    for number in (1, 2):
        fmt.payload_path(tmp_path, number).unlink()
    with closing(RunLog(tmp_path, SEGMENT)) as log:
        assert finish(log, 5).segment == 3
    with pytest.raises(Released, match=r"sample 4\.0"):
        reader.read_payload(tmp_path, refs[4])


def test_arrays_that_a_checkpoint_relied_on_are_not_given_up(tmp_path: Path) -> None:
    """Before a checkpoint all of the log is synced: it was no loss of power that took them."""
    log, refs = a_run(tmp_path, 5)
    log.append(CheckpointDone(at=2.0, version=8, branch=0, seconds=0.1, nbytes=9))
    log.close()
    path = tmp_path / fmt.DECISIONS_NAME
    before = path.read_bytes()
    fmt.payload_path(tmp_path, 1).unlink()
    said = rf"payload-000001\.seg: the arrays of sample 0\.0, attempt 0 \(offset {refs[0].offset}, .* restore it"
    with pytest.raises(LogError, match=said):
        RunLog(tmp_path, SEGMENT)
    assert path.read_bytes() == before


# ----------------------------------------------------------------------------------------------------------- in general


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_needed_is_there_and_what_is_not_goes(data: st.DataObject) -> None:
    """Any mixture of finishing, forgetting, releasing, syncing and starting again, against a plain model."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a disk would take a minute
        against_a_model(Path(folder), data)


def against_a_model(folder: Path, data: st.DataObject) -> None:
    log = RunLog(folder, data.draw(st.sampled_from([1, SEGMENT, 1 << 20])))
    log.append(RULES)
    live: dict[int, tuple[int, PayloadRef]] = {}
    released: set[int] = set()
    numbers = st.integers(0, 12)
    try:
        for _ in range(data.draw(st.integers(1, 40))):
            match data.draw(st.sampled_from(["finish", "finish", "finish", "forget", "release", "sync", "again"])):
                case "finish":
                    number = data.draw(numbers)
                    if number not in released:
                        attempt = live[number][0] + 1 if number in live else 0
                        live[number] = attempt, finish(log, number, attempt)
                case "forget":
                    carry_out(log, Forget(samples=names(data.draw(st.sets(numbers)) & live.keys())))
                case "release":
                    going = data.draw(st.sets(numbers)) & live.keys()
                    released |= going
                    live = {number: place for number, place in live.items() if number not in going}
                    carry_out(log, Release(samples=names(going)))
                case "sync":
                    asyncio.run(log.sync())
                    kept = {ref.segment for _, ref in live.values()} | {log.position()[1]}
                    assert set(fmt.payload_segments(folder)) == kept
                case "again":
                    log.close()
                    log = RunLog(folder, SEGMENT)
            for number, (attempt, _) in live.items():
                if data.draw(st.booleans()):
                    assert log.get(f"{number}.0", attempt)[0].tolist() == [number + 100 * attempt] * 40
            assert not any(log.has(f"{number}.0", 0) for number in released)
    finally:
        log.close()
