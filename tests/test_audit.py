"""Audits of logs: those that a core made, in whatever order, hold; and each lie is found and named."""

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard, TypeVar, get_args

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace

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
    Cancel,
    CheckpointDone,
    Event,
    Finish,
    Forget,
    GroupRead,
    Joined,
    Publish,
    Published,
    ReadGroup,
    Release,
    RolledBack,
    Rules,
    SampleDone,
    Score,
    Scored,
    StartSample,
    StepDone,
    Swap,
    Swapped,
    Train,
    TrainSample,
    WhenOlder,
    Woke,
    group_of,
)
from areal_async.testing.recipes import scripted
from areal_async.wire.arrays import Array

from .core import test_broken_rules as broken
from .core import world as world_of_tests
from .core.test_any_order import AnyOrder
from .core.test_going_back import GoingBack
from .core.world import World, make_rules

Message = TypeVar("Message")

TOLD_AGAIN = (SampleDone, Scored, StepDone, Published, GroupRead)


def records(world: World) -> list[AnyRecord]:
    """The log that the walk would have written. What a test told again, with its old time, is told at its own time, as
    far as that makes no difference; else it is left out."""
    found: list[AnyRecord] = [world.first_rules]
    at = 0.0
    seen: set[int] = set()
    for event, commands in world.log:
        if (event.at < at or id(event) in seen) and not isinstance(event, TOLD_AGAIN):
            continue
        seen.add(id(event))
        found.append(replace(event, at=at) if event.at < at else event)
        at = max(at, event.at)
        found += commands
    return found


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
    monkeypatch.setattr(world_of_tests, "hold", lambda _condition, _what: None)
    break_it(monkeypatch)
    for seed in range(20):
        with contextlib.suppress(Exception):  # some come to nothing, or to an error of the tests' own books
            broken.walk(seed, changes)
    assert name in {found for world in worlds for found in audit(records(world)).found}


# ---------------------------------------------------------------------------------------------------------------- lies

Log: TypeAlias = list[AnyRecord]
Lie: TypeAlias = Callable[[Log], Log]


@functools.cache
def _true_log() -> tuple[AnyRecord, ...]:
    rules = make_rules(
        **{"batch_groups": 2, "group_size": 2, "steps": 6, "max_staleness": 2, "retries": 1, "min_group": 2},
        **{"max_failures": 100, "servers": 2, "checkpoint_steps": 2, "checkpoint_keep": 1, "drop_equal": True},
        max_trainer_restarts=5,
    )
    world = World(rules, servers=2).start()
    world.settle("publish", "swap", "read")
    world.answer(("sample", "0.0", "0"), "failed")
    world.settle("sample")
    for member in range(2):
        world.answer(("score", f"1.{member}", "0"), 1.0)  # equal rewards: group 1 is filtered
    world.settle("score", "read", "sample", outcome="mixed")
    while world.trained < 3:
        key = next(iter(world.pending))
        world.answer(key, "mixed" if key[0] == "score" else 1.0)
    world.roll_back(2)
    world.run_out(outcome="mixed")
    return tuple(records(world))


@pytest.fixture
def log() -> Log:
    """Six steps of two groups; one attempt fails, group 1 is filtered, from version 3 training goes back to 2."""
    return list(_true_log())


def place(log: Log, kind: type[Message], **fields: object) -> int:
    """Where the last message of this kind with these fields is."""
    return max(
        number
        for number, record in enumerate(log)
        if isinstance(record, kind) and all(getattr(record, name) == value for name, value in fields.items())
    )


def change(log: Log, number: int, **fields: Any) -> Log:
    return [*log[:number], replace(log[number], **fields), *log[number + 1 :]]


def without(log: Log, number: int) -> Log:
    return [*log[:number], *log[number + 1 :]]


def with_more(log: Log, number: int, *more: AnyRecord) -> Log:
    """Put behind the record of this number."""
    return [*log[: number + 1], *more, *log[number + 1 :]]


def trains(log: Log, step: int) -> tuple[int, Train]:
    number = place(log, Train, step=step)
    found = log[number]
    assert isinstance(found, Train)
    return number, found


def a_group_is_trained_twice(log: Log) -> Log:
    _, first = trains(log, 0)
    number, last = trains(log, 5)
    return change(log, number, groups=(first.groups[0], last.groups[1]), samples=first.samples[:2] + last.samples[2:])


def a_step_is_trained_twice(log: Log) -> Log:
    _, train = trains(log, 4)
    return with_more(log, place(log, Published, version=5), train)


def a_filtered_group_is_trained(log: Log) -> Log:
    number, train = trains(log, 4)
    samples = (TrainSample("1.0", 0, 0.5), TrainSample("1.1", 0, -0.5), *train.samples[2:])
    return change(log, number, groups=(1, train.groups[1]), samples=samples)


def a_cancelled_group_is_trained(log: Log) -> Log:
    cancelled = log[place(log, Cancel)]
    assert isinstance(cancelled, Cancel)
    group = group_of(cancelled.sample)
    number, train = trains(log, 5)
    samples = (TrainSample(f"{group}.0", 0, 0.5), TrainSample(f"{group}.1", 0, -0.5), *train.samples[2:])
    return change(log, number, groups=(group, train.groups[1]), samples=samples)


def a_check_ends_after_its_training(log: Log) -> Log:
    number, train = trains(log, 4)
    check = place(log, Scored, sample=train.samples[0].sample)
    return with_more(without(log, check), number - 1, replace(log[check], at=log[number + 1].at))


def a_check_never_ends(log: Log) -> Log:
    return without(log, place(log, Scored, sample=trains(log, 4)[1].samples[0].sample))


def an_answer_never_comes(log: Log) -> Log:
    name = trains(log, 4)[1].samples[0].sample
    for kind in (SampleDone, Score, Scored):
        log = without(log, place(log, kind, sample=name))
    return log


def a_group_lacks_a_sample(log: Log) -> Log:
    number, train = trains(log, 4)
    rank = ((tuple(range(len(train.samples) - 1)),),)
    return change(log, number, samples=train.samples[:-1], minibatches=(replace(train.minibatches[0], ranks=rank),))


def an_older_attempt_is_trained(log: Log) -> Log:
    number, train = next((n, r) for n, r in enumerate(log) if isinstance(r, Train) and 0 in r.groups)
    samples = tuple(replace(entry, attempt=0) if entry.sample == "0.0" else entry for entry in train.samples)
    assert samples != train.samples
    return change(log, number, samples=samples)


def a_sample_is_twice_in_a_step(log: Log) -> Log:
    number, train = trains(log, 4)
    return change(log, number, samples=(*train.samples[:-1], train.samples[0]))


def an_answer_is_too_old(log: Log) -> Log:
    _, train = trains(log, 5)
    return change(log, place(log, SampleDone, sample=train.samples[0].sample), oldest=0)


def an_answer_is_from_the_future(log: Log) -> Log:
    return change(log, place(log, SampleDone), newest=40)


def a_step_is_skipped(log: Log) -> Log:
    for kind, fields in ((Train, {"step": 4}), (StepDone, {"step": 4}), (Publish, {"version": 5})):
        log = without(log, place(log, kind, **fields))
    return log


def a_step_is_never_done(log: Log) -> Log:
    return without(log, place(log, StepDone, step=4))


def another_batch_comes_after_going_back(log: Log) -> Log:
    number, train = trains(log, 2)
    return change(log, number, samples=(replace(train.samples[0], advantage=0.25), *train.samples[1:]))


def other_groups_come_after_going_back(log: Log) -> Log:
    number, train = trains(log, 2)
    return change(log, number, groups=train.groups[::-1])


def a_divisor_is_wrong(log: Log) -> Log:
    number, train = trains(log, 4)
    return change(log, number, minibatches=(replace(train.minibatches[0], divisor=1.5),))


def a_sample_is_in_no_micro_batch(log: Log) -> Log:
    number, train = trains(log, 4)
    return change(log, number, minibatches=(replace(train.minibatches[0], ranks=(((0, 1, 2),),)),))


def a_sample_is_invented(log: Log) -> Log:
    number = place(log, SampleDone)
    return with_more(log, number - 1, replace(log[number], sample="999.0"))


def an_attempt_is_invented(log: Log) -> Log:
    return change(log, place(log, SampleDone), attempt=7)


def a_position_is_skipped(log: Log) -> Log:
    """And all that follows is moved by one."""
    number = place(log, ReadGroup, position=11)
    moved = [
        replace(r, position=r.position + 1) if isinstance(r, ReadGroup | StartSample) and r.position >= 11 else r
        for r in log[number:]
    ]
    return log[:number] + moved


def a_position_is_asked_twice(log: Log) -> Log:
    return change(log, place(log, ReadGroup), position=0)


def what_is_asked_again_comes_late(log: Log) -> Log:
    """After training went back, new prompts first."""
    back = place(log, RolledBack)
    numbers = [n for n, record in enumerate(log) if n > back and isinstance(record, ReadGroup)][:3]
    positions = [log[number].position for number in numbers]
    for number, position in zip(numbers, positions[::-1], strict=True):
        log = change(log, number, position=position)
    return log


def a_prompt_is_another_one(log: Log) -> Log:
    back = log[place(log, RolledBack)]
    again = next(r for r in log[log.index(back) :] if isinstance(r, ReadGroup))
    return change(log, place(log, GroupRead, group=again.group), row=77)


def a_group_number_is_left_out(log: Log) -> Log:
    return change(log, place(log, ReadGroup), group=99)


def too_many_groups_are_admitted(log: Log) -> Log:
    number, count = place(log, ReadGroup), sum(isinstance(record, ReadGroup) for record in log)
    last = log[number]
    assert isinstance(last, ReadGroup)
    more = [ReadGroup(group=count + n, position=last.position + 1 + n) for n in range(8)]
    return with_more(log, number, *more)


def a_floor_changes(log: Log) -> Log:
    number = place(log, StartSample)
    return change(log, number, floor=log[number].floor - 1)


def a_sample_starts_below_its_floor(log: Log) -> Log:
    first = place(log, Swapped, version=0)
    return change(log, place(log, StartSample), server="nobody") if first else log


def a_stopped_sample_is_not_stopped(log: Log) -> Log:
    return without(log, place(log, Cancel))


def a_running_sample_is_stopped(log: Log) -> Log:
    number = place(log, StartSample)
    return with_more(log, number, Cancel(sample=log[number].sample, attempt=0))


def a_failed_attempt_has_no_end(log: Log) -> Log:
    return without(log, place(log, StartSample, attempt=1))


def nobody_checks_an_answer(log: Log) -> Log:
    return without(log, place(log, Score))


def a_server_loads_what_was_not_published(log: Log) -> Log:
    number = place(log, Swap)
    return change(log, number, version=log[number].version + 1, location="1/7")


def a_server_loads_older_weights(log: Log) -> Log:
    number = place(log, Swap)
    return change(log, number, version=log[number].version - 1, location=f"1/{log[number].version - 1}")


def a_server_says_what_nobody_asked(log: Log) -> Log:
    number = place(log, Swapped)
    return change(log, number, version=log[number].version + 1)


def a_version_is_published_that_is_not_there(log: Log) -> Log:
    return change(log, place(log, Published, version=5), version=9)


def a_sample_is_released_early(log: Log) -> Log:
    number, train = trains(log, 5)
    return with_more(log, number - 2, Release(samples=(train.samples[0].sample,)))


def a_checkpoint_could_still_ask_for_it(log: Log) -> Log:
    number = place(log, StepDone, step=4)
    return with_more(log, number, Release(samples=(trains(log, 4)[1].samples[0].sample,)))


def a_live_sample_is_forgotten(log: Log) -> Log:
    number, train = trains(log, 5)
    return with_more(log, number - 2, Forget(samples=(train.samples[0].sample,)))


def training_goes_back_to_no_checkpoint(log: Log) -> Log:
    number = place(log, RolledBack)
    log = change(log, number, to=1)
    return change(log, place(log, Joined, peer="trainer"), version=1)


def a_checkpoint_is_invented(log: Log) -> Log:
    number = place(log, StepDone, step=4)
    return with_more(log, number + 2, CheckpointDone(at=log[number].at, version=5, branch=1, seconds=0.0, nbytes=1))


def time_runs_backwards(log: Log) -> Log:
    number = place(log, StepDone, step=3)
    return change(log, number, at=log[number].at - 30.0)


def something_is_commanded_after_the_end(log: Log) -> Log:
    return [*log, ReadGroup(group=50, position=50)]


def the_run_ends_before_its_last_step(log: Log) -> Log:
    return [*log[: place(log, Published, version=4) + 1], Finish(reason="steps_done")]


def a_resume_changes_the_batch(log: Log) -> Log:
    rules = log[0]
    assert isinstance(rules, Rules)
    return change(log, place(log, RolledBack), resumed=replace(rules, max_staleness=9))


def a_step_is_put_off(log: Log) -> Log:
    """The one that was trained before, after training went back."""
    number, _ = trains(log, 2)
    return with_more(log, number - 1, Woke(at=max(r.at for r in log[:number] if isinstance(r, Event))))


LIES: dict[Lie, str] = {
    a_group_is_trained_twice: "group.twice",
    a_step_is_trained_twice: "step.order",
    a_filtered_group_is_trained: "group.dead",
    a_cancelled_group_is_trained: "group.dead",
    a_check_ends_after_its_training: "sample.unscored",
    a_check_never_ends: "sample.unscored",
    an_answer_never_comes: "sample.undone",
    a_group_lacks_a_sample: "sample.left",
    an_older_attempt_is_trained: "sample.attempt",
    a_sample_is_twice_in_a_step: "sample.twice",
    an_answer_is_too_old: "lag.over",
    an_answer_is_from_the_future: "sample.version",
    a_step_is_skipped: "step.order",
    a_step_is_never_done: "publish.other",
    another_batch_comes_after_going_back: "step.other",
    other_groups_come_after_going_back: "step.other",
    a_divisor_is_wrong: "step.divisor",
    a_sample_is_in_no_micro_batch: "step.split",
    a_sample_is_invented: "sample.unknown",
    an_attempt_is_invented: "sample.unknown",
    a_position_is_skipped: "prompt.skipped",
    a_position_is_asked_twice: "prompt.twice",
    what_is_asked_again_comes_late: "prompt.order",
    a_prompt_is_another_one: "prompt.changed",
    a_group_number_is_left_out: "group.number",
    too_many_groups_are_admitted: "admission.over",
    a_floor_changes: "group.floor",
    a_sample_starts_below_its_floor: "sample.floor",
    a_stopped_sample_is_not_stopped: "missing.cancel",
    a_running_sample_is_stopped: "sample.cancel",
    a_failed_attempt_has_no_end: "missing.start",
    nobody_checks_an_answer: "missing.score",
    a_server_loads_what_was_not_published: "swap.unpublished",
    a_server_loads_older_weights: "swap.backwards",
    a_server_says_what_nobody_asked: "swap.untold",
    a_version_is_published_that_is_not_there: "publish.untold",
    a_sample_is_released_early: "release.trained",
    a_checkpoint_could_still_ask_for_it: "release.early",
    a_live_sample_is_forgotten: "sample.forget",
    training_goes_back_to_no_checkpoint: "rollback.checkpoint",
    a_checkpoint_is_invented: "checkpoint.untold",
    time_runs_backwards: "time.backwards",
    something_is_commanded_after_the_end: "end.command",
    the_run_ends_before_its_last_step: "end.reason",
    a_resume_changes_the_batch: "resume.rules",
    a_step_is_put_off: "step.late",
}


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
