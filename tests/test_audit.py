"""Audits of logs: those that a core made, in whatever order, hold; and each lie is found and named."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard, get_args

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from areal_async import cli
from areal_async.audit import auditor
from areal_async.audit.report import Report
from areal_async.config import Config
from areal_async.controller import Controller
from areal_async.core import resuming
from areal_async.log.reader import Record
from areal_async.log.writer import RunLog
from areal_async.messages import (
    AnyRecord,
    ReadGroup,
    Rules,
    SampleDone,
    Swapped,
    WhenOlder,
)
from areal_async.testing.recipes import scripted
from areal_async.wire.arrays import Array

from .audit_lies import LIES, Lie, Log, more_groups, place, records, time_runs_backwards, true_log
from .core import test_broken_rules as broken
from .core import world, world_checks
from .core.test_any_order import AnyOrder
from .core.test_going_back import GoingBack
from .core.world import World


def audit(messages: Sequence[AnyRecord]) -> Report:
    return auditor.audit_records(Record(message, None, 16 + 100 * number) for number, message in enumerate(messages))


def check(world: World) -> None:
    report = audit(records(world))
    assert report.found == {}, "\n".join(map(str, report.findings[:5]))


class Walk(AnyOrder):
    """Whatever happened, in whatever order: the log that it left holds."""

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            check(self.world)


class WalkBack(GoingBack):
    """So does that of a run that went back, was killed, resumed, stopped."""

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            check(self.world)


WALKS = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(WhenOlder))
@pytest.mark.parametrize("walk", [Walk, WalkBack])
def test_whatever_happened_the_log_holds(walk: type[Walk | WalkBack], policy: WhenOlder) -> None:
    run_state_machine_as_test(type(f"{walk.__name__}{policy}", (walk,), {"policy": policy}), settings=WALKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "changes", "name"),
    [
        (broken.no_batch_test_and_no_last_look, broken.WAIT, "lag.over"),
        (broken.no_batch_test, broken.WAIT, "step.behind"),
        (broken.a_batch_is_trained_twice_and_tables_are_not_looked_at, broken.WAIT, "group.twice"),
        (broken.one_more_version_is_allowed, broken.TRAIN, "admission.over"),
        (broken.a_failed_sample_keeps_its_group_waiting, broken.WAIT, "missing.start"),
        (broken.late_groups_run_on_and_no_last_look, broken.DROP, "group.dead"),
        (broken.a_stale_prompt_is_not_asked_again, broken.REQUEUE, "prompt.order"),
        (broken.the_mask_is_a_version_too_low, broken.MASK, "lag.mask"),
        (broken.everybody_waits, broken.MASK, "step.late"),
        (broken.late_deadlines_come_first, broken.TRAIN, "step.turn"),
        (broken.cut_answers_are_trained, broken.CUT, "sample.filtered"),
        (broken.the_divisor_counts_tokens_whatever_is_asked, broken.CUT, "step.divisor"),
        (broken.rewards_are_not_scaled, broken.SCALED, "group.dead"),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else "-"),
)
def test_an_error_of_the_core_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    changes: dict[str, object],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The core is broken on purpose, and nobody looks while it runs: its log tells."""
    worlds: list[World] = []

    class Kept(World):
        def __init__(self, rules: Rules, *, servers: int) -> None:
            worlds.append(self)
            super().__init__(rules, servers=servers)

    monkeypatch.setattr(broken, "World", Kept)
    for looking in (world, world_checks):
        monkeypatch.setattr(looking, "hold", lambda _condition, _what: None)
    break_it(monkeypatch)
    for seed in range(20):
        with contextlib.suppress(Exception):  # some come to nothing, or to an error of the tests' own books
            broken.walk(seed, changes)
    assert name in {found for world in worlds for found in audit(records(world)).found}


@pytest.fixture
def log() -> Log:
    return list(true_log())


def test_the_true_log_holds(log: Log) -> None:
    report = audit(log)
    assert report.proven, report.findings[:3]
    assert report.groups == {
        **{"admitted": 15, "trained": 12, "filtered": 1, "stale": 0, "failed": 0, "cancelled": 2},
        **{"outstanding": 0, "training": 0},
    }
    assert report.samples["admitted"] == sum(count for end, count in report.samples.items() if end != "admitted")
    assert report.attempts == {1: 27, 2: 1}
    assert [step.branch for step in report.steps] == [0, 0, 1, 1, 1, 1]
    assert (report.dead_steps, report.checkpoints, report.end) == ({0: 1}, [4], "steps_done")


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_lie_is_found(log: Log, lie: Lie) -> None:
    report = audit(lie(log))
    assert not report.proven
    assert LIES[lie] in report.found, "\n".join(map(str, report.findings[:5]))


def test_one_group_too_many_is_one_too_many(log: Log) -> None:
    held = max(record.version for record in log[: place(log, ReadGroup)] if isinstance(record, Swapped))
    room = (held + log[0].max_staleness + 1) * 2 - 12
    assert "admission.over" not in audit(more_groups(log, room)).found
    assert audit(more_groups(log, room + 1)).found["admission.over"] == 1


def test_a_log_may_end_anywhere(log: Log) -> None:
    """A run that was killed, or goes on: what was to follow the last event may be missing."""
    for length in range(0, len(log), 4):
        report = audit(log[:length])
        assert report.proven, (length, report.findings[:3])
        assert report.groups["admitted"] == sum(n for end, n in report.groups.items() if end != "admitted")
        assert report.samples["admitted"] == sum(n for end, n in report.samples.items() if end != "admitted")


def test_what_a_resume_may_change_is_what_the_core_allows() -> None:
    assert auditor.CHANGEABLE == resuming.CHANGEABLE


# ------------------------------------------------------------------------------------------------- on disk, by command


def write(folder: Path, log: Log, *, wrong: Mapping[str, int] = MappingProxyType({})) -> Path:
    """A run folder with this log, and with the arrays of its samples. wrong: samples -> one more loss-mask token."""
    with contextlib.closing(RunLog(folder / "log", segment_bytes=1500)) as run_log:
        for record in log:
            ref = run_log.put(record.sample, record.attempt, arrays(record, wrong)) if is_done(record) else None
            run_log.append(record, ref)
    return folder


def is_done(record: AnyRecord) -> TypeGuard[SampleDone]:
    return isinstance(record, SampleDone)


def arrays(done: SampleDone, wrong: Mapping[str, int]) -> list[Array]:
    """token ids, loss mask, log-probabilities, versions of prompt and answer."""
    mask = np.zeros(done.prompt_tokens + done.length, np.uint8)
    mask[done.prompt_tokens - wrong.get(done.sample, 0) :] = 1
    versions = np.where(mask, done.newest, -1).astype(np.int32)
    versions[done.prompt_tokens] = done.oldest
    return [np.arange(len(mask), dtype=np.int32), mask, np.zeros(len(mask), np.float32), versions]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["audit", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def json_of(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, str(folder), "--json", *options)
    return code, json.loads(out)


def test_a_run_folder_is_audited(log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, log)
    code, out, _ = run(capsys, str(tmp_path), "--payloads")
    assert code == 0
    assert "everything holds" in out
    assert "lag   2         10" in out
    assert "back at 57.0 s (the trainer was lost): version 3 -> 2, branch 1: the trainer died" in out
    code, report = json_of(capsys, tmp_path / "log")
    assert (code, report["proven"], report["payloads"]) == (0, True, 26)


def test_a_reference_to_another_sample_is_found(log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_log = RunLog(tmp_path / "log", segment_bytes=1 << 20)
    refs = [run_log.put(record.sample, record.attempt, arrays(record, {})) for record in log if is_done(record)]
    following = iter([refs[1], refs[0], *refs[2:]])
    for record in log:
        run_log.append(record, next(following) if is_done(record) else None)
    run_log.close()
    code, report = json_of(capsys, tmp_path)
    assert (code, report["found"]) == (1, {"payload.other": 2})
    assert report["findings"][0]["about"] == "sample 0.1"


def test_arrays_that_are_not_as_the_log_says(log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, log, wrong={"2.0": 1})
    assert json_of(capsys, tmp_path)[0] == 0  # by the heads alone it can't be seen
    code, report = json_of(capsys, tmp_path, "--payloads")
    assert (code, report["found"]) == (1, {"payload.content": 1})
    path = tmp_path / "log" / "payload-000002.seg"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, report = json_of(capsys, tmp_path, "--payloads")
    assert (code, report["found"]["payload.damaged"]) == (1, 1)
    assert f"{path}: corrupt record at offset" in report["findings"][-1]["text"]


def test_the_beginning_of_a_segment_that_no_reference_leads_to(
    log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume would refuse the file."""
    write(tmp_path, log)
    path = tmp_path / "log" / "payload-000001.seg"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    code, report = json_of(capsys, tmp_path, "--payloads")
    assert (code, report["found"]) == (1, {"payload.damaged": 1})
    assert f"{path}: not a payloads file of areal-async" in report["findings"][0]["text"]


def test_a_segment_may_only_be_gone_with_what_is_released(
    log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, log) / "log"
    last = len(list(folder.glob("payload-*.seg")))
    (folder / "payload-000001.seg").unlink()  # step 0 to 3 were released when the checkpoint of version 4 was made
    assert json_of(capsys, tmp_path)[0] == 0
    (folder / f"payload-{last:06d}.seg").unlink()
    code, report = json_of(capsys, tmp_path)
    assert (code, report["found"]) == (1, {"payload.missing": 1})


def test_a_torn_end_is_said_and_corruption_is_refused(
    log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, log) / "log" / "decisions.log"
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    code, out, _ = run(capsys, str(tmp_path))
    assert code == 0
    assert f"{path}: torn end: the last" in out
    path.write_bytes(data[:9000] + bytes([data[9000] ^ 1]) + data[9001:])
    code, out, _ = run(capsys, str(tmp_path))
    assert code == 1
    assert f"{path}: corrupt record at offset" in out
    path.write_bytes(data[:20])
    assert run(capsys, str(tmp_path))[0] == 0


def test_what_is_no_run_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, str(tmp_path))[::2] == (
        2,
        f"command line: audit: {tmp_path}: holds no log/decisions.log; name a run folder (runs/NAME-TIME)\n",
    )
    assert run(capsys, str(tmp_path / "nowhere"))[0] == 2


def test_findings_are_told_with_their_place(log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, time_runs_backwards(log))
    code, out, _ = run(capsys, str(tmp_path))
    assert code == 1
    assert "time.backwards: StepDone: it is of " in out
    assert "(record " in out


@pytest.mark.slow
async def test_the_log_of_a_real_run_holds(
    make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("train.steps=8", "rollout.max_staleness=3", "checkpoint.every_steps=3")
    async with Controller(config, recipes=scripted(token_s=0.004, step_s=0.02)) as controller:
        result = await controller.run()
    code, report = json_of(capsys, result.folder, "--payloads")
    assert (code, report["found"], report["end"]) == (0, {}, "steps_done")
    assert len(report["steps"]) == 8
    assert report["checkpoints_made"] >= 2
