"""A disk that fills in a run: nothing is carried out, that is said, and the run goes on when there is room."""

import asyncio
import errno
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from areal_async.config import Config
from areal_async.controller import turn
from areal_async.controller.growing_file import GrowingFile
from areal_async.controller.turn import Turn
from areal_async.errors import DiskFull, LogError
from areal_async.log import format as fmt
from areal_async.log import reader
from areal_async.log.writer import RunLog
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Finish,
    Rules,
    SampleDone,
    StopRequested,
    Train,
    Woke,
)

from ..waiting import until

RULES = Rules(
    seed=1, steps=2, batch_groups=2, group_size=2, max_staleness=1, max_concurrent=4, minibatches=1, ranks=1,
    max_tokens_per_microbatch=64,
    max_new_tokens=4096,
)  # fmt: skip


class Disk:
    """full: what a write, and the making of a file, meets. error: with which error."""

    def __init__(self) -> None:
        self.full = False
        self.error = errno.ENOSPC


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk()
    real_write, real_open = os.write, os.open

    def check() -> None:
        if found.full:
            raise OSError(found.error, os.strerror(found.error))

    def write(fd: int, data: bytes) -> int:
        check()
        return real_write(fd, data)

    def open_(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not os.path.exists(path):
            check()
        return real_open(path, flags, mode)

    monkeypatch.setattr(fmt.os, "write", write)
    monkeypatch.setattr(fmt.os, "open", open_)
    yield found
    monkeypatch.undo()


class EchoingCore:
    """Gives one command for each event: a Cancel with the event's time."""

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        return [Cancel(sample=str(event.at), attempt=0)]

    def next_wakeup(self) -> float | None:
        return None


class Bench:
    """A turn on its own: what it carried out, what broke it."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self.carried_out: list[str] = []
        self.seen: list[float] = []
        self.broken: list[Exception] = []
        self.turn = Turn(
            EchoingCore(),  # type: ignore[arg-type]
            log,
            carry_out=lambda command: self.carried_out.append(command.sample),  # type: ignore[union-attr]
            seen=lambda event, _: self.seen.append(event.at),
            broken=self.broken.append,
            now=lambda: 0.0,
        )


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(turn, "TRY_S", 0.01)
    with closing(RunLog(tmp_path, 1 << 20)) as log:
        log.append(RULES)
        made = Bench(log)
        yield made
        made.turn.close()


async def test_nothing_is_carried_out_until_there_is_room(
    bench: Bench, disk: Disk, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    bench.turn.take(Woke(at=1.0))
    await until(lambda: bench.carried_out == ["1.0"])
    disk.full = True
    bench.turn.take(Woke(at=2.0))
    bench.turn.take(Woke(at=3.0))
    await until(lambda: "no room to write the log" in caplog.text)
    for at in (4.0, 5.0, 6.0):
        bench.turn.take(StopRequested(at=at))
        await asyncio.sleep(0.02)
    assert bench.carried_out == ["1.0"]
    assert bench.seen == [1.0, 2.0, 3.0]  # of those that came before it was known
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1  # not with every try
    assert f"{tmp_path / fmt.DECISIONS_NAME}: no room to write the log (No space left on device)" in caplog.text
    assert "then the run goes on" in errors[0].getMessage()
    assert "MB are free there" in errors[0].getMessage()
    disk.full = False
    await until(lambda: len(bench.carried_out) == 6)
    assert bench.carried_out == ["1.0", "2.0", "3.0", "4.0", "5.0", "6.0"]
    assert "there is room again; the run goes on after" in caplog.text
    assert bench.broken == []
    told = [record.message for record in reader.read_records(tmp_path)][1:]
    assert [message.at for message in told if not isinstance(message, Cancel)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [message.sample for message in told if isinstance(message, Cancel)] == bench.carried_out


async def test_it_is_said_again_and_again(
    bench: Bench, disk: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "SAY_S", 0.03)
    disk.full = True
    bench.turn.take(Woke(at=1.0))
    await until(lambda: caplog.text.count("no room to write the log") >= 3)
    disk.full = False
    await until(lambda: bench.carried_out == ["1.0"])


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
async def test_a_full_disk_is_told_from_a_broken_one(bench: Bench, disk: Disk, full: int) -> None:
    disk.full, disk.error = True, full
    bench.turn.take(Woke(at=1.0))
    await asyncio.sleep(0.05)
    assert bench.broken == []
    disk.error = errno.EIO
    await until(lambda: bool(bench.broken))
    assert isinstance(bench.broken[0], LogError)
    assert not isinstance(bench.broken[0], DiskFull)
    assert "can't be written: [Errno 5] Input/output error" in str(bench.broken[0])
    disk.full = False
    bench.turn.take(Woke(at=2.0))
    await asyncio.sleep(0.05)
    assert bench.carried_out == []


async def test_a_sync_waits_for_room(bench: Bench, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.full = True
    bench.log.put("0.0", 0, [np.arange(5)])
    sync = asyncio.create_task(bench.turn.sync())
    await until(lambda: "no room to write the log" in caplog.text)
    bench.turn.take(Woke(at=1.0))
    await asyncio.sleep(0.03)
    assert not sync.done()
    assert bench.seen == []  # the event waits, too
    disk.full = False
    await asyncio.wait_for(sync, 60)
    await until(lambda: bench.carried_out == ["1.0"])


async def test_a_run_that_is_over_does_not_wait_for_room(bench: Bench, disk: Disk) -> None:
    disk.full = True
    bench.turn.take(Woke(at=1.0))
    await asyncio.sleep(0.02)
    bench.turn.close()
    with pytest.raises(DiskFull):
        await bench.turn.sync()
    disk.full = False
    await asyncio.sleep(0.03)
    assert bench.carried_out == []


def test_a_segment_grows_on_where_there_is_no_room_for_the_next(tmp_path: Path, disk: Disk) -> None:
    """`put` can't wait: it is called where answers end."""
    with closing(RunLog(tmp_path, 200)) as log:
        log.append(RULES)
        disk.full = True
        for number in range(5):
            log.put(f"{number}.0", 0, [np.full(20, number)])
        disk.full = False
        for number in range(5, 8):
            log.put(f"{number}.0", 0, [np.full(20, number)])
        log.flush()
        assert fmt.payload_segments(tmp_path) == [1, 2, 3, 4]
        for number in range(8):
            assert log.get(f"{number}.0", 0)[0].tolist() == [number] * 20


def test_metrics_wait_for_room_and_stay_whole(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(GrowingFile(path)) as file:
        file.write(b"1\n")
        disk.full = True
        file.write(b"2\n")
        file.write(b"3\n")
        assert path.read_bytes() == b"1\n"
        disk.full = False
        file.write(b"4\n")
        assert path.read_bytes() == b"1\n2\n3\n4\n"
        disk.full, disk.error = True, errno.EIO
        with pytest.raises(OSError, match="Input/output"):
            file.write(b"5\n")
        disk.full = False
    assert path.read_bytes() == b"1\n2\n3\n4\n5\n"


# --------------------------------------------------------------------------------------------- a real disk, a real run


def _may_mount() -> bool:
    tried = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True, check=False,
    )  # fmt: skip
    return tried.returncode == 0


@pytest.mark.slow
def test_a_run_on_a_disk_that_fills_twice(make_config: Callable[..., Config], tmp_path: Path) -> None:
    if not _may_mount():
        pytest.skip("no file system may be mounted here")
    make_config()
    disk = tmp_path / "disk"
    disk.mkdir()
    books, server_book = tmp_path / "books.jsonl", tmp_path / "server_book.jsonl"
    config = tmp_path / "config.yaml"
    text = config.read_text().replace("train: {steps: 4", "train: {steps: 8")
    config.write_text(text + "checkpoint: {every_steps: 2, keep: 2}\n")
    script = Path(__file__).with_name("run_on_small_disk.py")
    # After the run the disk is copied out: it goes with the namespace
    command = '"$@" && cp -r "$0/run" "$0/../after"'
    result = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", command, disk,
         sys.executable, script, config, disk, books, server_book],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["steps"], told["reason"]) == (8, "steps_done")
    assert len(told["seen"]) == 2
    for seen in told["seen"]:
        assert seen["before"] == seen["after"]
        assert all(seen["before"])
    errors = [line for line in told["said"] if line.startswith("ERROR")]
    assert len(errors) == 2, told["said"]
    assert all("no room to write the log (No space left on device)" in line and str(disk) in line for line in errors)
    assert sum("there is room again" in line for line in told["said"]) == 2
    trained = [(line["step"], line["samples"]) for line in map(json.loads, books.read_text().splitlines())]
    assert [step for step, _ in trained] == list(range(8))
    assert max(Counter(sample for _, samples in trained for sample in samples).values()) == 1
    check_log(tmp_path / "after", trained)
    kept = [path for path in (tmp_path / "after" / "checkpoints").iterdir() if (path / "COMPLETE").exists()]
    assert kept, told["said"]
    assert not list((tmp_path / "after" / "checkpoints").glob(".*"))


def check_log(run: Path, trained: list[tuple[int, list[str]]]) -> None:
    """Whole, each command once, as the trainer's own books have it; every sample can be read; each row is there."""
    records = list(reader.read_records(run / "log", on_torn=pytest.fail))
    steps = [record.message for record in records if isinstance(record.message, Train)]
    assert [(step.step, sorted(entry.sample for entry in step.samples)) for step in steps] == [
        (step, sorted(samples)) for step, samples in trained
    ]
    done = {}
    for record in records:
        if isinstance(record.message, SampleDone):
            assert record.payload is not None
            done[record.message.sample] = reader.read_payload(run / "log", record.payload).sample
    assert {entry.sample for step in steps for entry in step.samples} <= done.keys()
    assert all(asked == found for asked, found in done.items())
    assert sum(isinstance(record.message, Finish) for record in records) == 1
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(8))
    for row in rows:
        assert row["ledger"]["trained"] == (row["step"] + 1) * 4
