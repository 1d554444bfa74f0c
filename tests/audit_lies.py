"""A log that is true, and lies about it: what `test_audit` has found.

What always holds: each lie changes the log of the same walk in one place, or in as many as it takes to tell it well.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import replace

from areal_async.messages import (
    AnyRecord,
    Cancel,
    Checkpoint,
    CheckpointDone,
    DataEnded,
    Evaluate,
    Event,
    Failed,
    Finish,
    Forget,
    GroupRead,
    Joined,
    Lost,
    Publish,
    Published,
    ReadGroup,
    Release,
    Restart,
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
    Woke,
    group_of,
)

from .core.world import World, make_rules

Message = TypeVar("Message")
Log: TypeAlias = list[AnyRecord]
Lie: TypeAlias = Callable[[Log], Log]


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


@functools.cache
def true_log() -> tuple[AnyRecord, ...]:
    """Six steps of two groups; one attempt fails, group 1 is filtered, from version 3 training goes back to 2."""
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
    return change(log, place(log, SampleDone, sample=train.samples[0].sample), oldest=train.step - 3)


def an_answer_is_below_its_floor(log: Log) -> Log:
    name = trains(log, 5)[1].samples[0].sample
    start = log[place(log, StartSample, sample=name)]
    assert isinstance(start, StartSample)
    return change(log, place(log, SampleDone, sample=name), oldest=start.floor - 1)


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


def more_groups(log: Log, count: int) -> Log:
    """Admitted behind the last one of the true log: they are then 12 + count, handed over or outstanding."""
    number, groups = place(log, ReadGroup), sum(isinstance(record, ReadGroup) for record in log)
    last = log[number]
    assert isinstance(last, ReadGroup)
    more = [ReadGroup(group=groups + n, position=last.position + 1 + n) for n in range(count)]
    return with_more(log, number, *more)


def too_many_groups_are_admitted(log: Log) -> Log:
    return more_groups(log, 8)


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
    before = max(record.at for record in log[:number] if isinstance(record, Event))
    return change(log, number, at=before - 0.001)


def something_is_commanded_after_the_end(log: Log) -> Log:
    return [*log, ReadGroup(group=50, position=50)]


def the_run_ends_before_its_last_step(log: Log) -> Log:
    return [*log[: place(log, Published, version=4) + 1], Finish(reason="steps_done")]


def a_resume_changes_the_batch(log: Log) -> Log:
    rules = log[0]
    assert isinstance(rules, Rules)
    return change(log, place(log, RolledBack), resumed=replace(rules, max_staleness=9))


def a_run_goes_on_after_too_many_failures(log: Log) -> Log:
    """A group that was read is refused."""
    number = place(log, GroupRead)
    read, first = log[number], log[0]
    assert isinstance(read, GroupRead)
    assert isinstance(first, Rules)
    failed = Failed(at=read.at, of="group", id=str(read.group), why="too long")
    return [replace(first, max_failures=0), *log[1:number], failed, Woke(at=read.at)]


def a_run_goes_on_without_updates(log: Log) -> Log:
    return change(log, place(log, StepDone, step=4), skipped="the loss is nan")


def a_step_is_put_off(log: Log) -> Log:
    """The one that was trained before, after training went back."""
    number, _ = trains(log, 2)
    return with_more(log, number - 1, Woke(at=max(r.at for r in log[:number] if isinstance(r, Event))))


def there_are_fewer_places(log: Log) -> Log:
    return change(log, 0, max_concurrent=4)


def a_checkpoint_is_to_stay_that_never_was(log: Log) -> Log:
    return change(log, place(log, Checkpoint, version=4), keep=(1,))


def other_weights_are_evaluated(log: Log) -> Log:
    return with_more(log, place(log, Published, version=4), Evaluate(version=4, server="server0"))


def two_evaluations_at_once(log: Log) -> Log:
    number = place(log, Swapped)
    held = log[number]
    assert isinstance(held, Swapped)
    return with_more(log, number, *[Evaluate(version=held.version, server=held.server)] * 2)


def a_group_is_invented(log: Log) -> Log:
    return change(log, place(log, GroupRead), group=500)


def tokens_lose_their_gradient(log: Log) -> Log:
    return change(log, trains(log, 4)[0], mask_below=1)


def the_rules_are_told_again(log: Log) -> Log:
    return with_more(log, 40, log[0])


def samples_stay_on_the_disk(log: Log) -> Log:
    return without(log, place(log, Release))


def the_data_go_on_after_their_end(log: Log) -> Log:
    number = place(log, GroupRead, group=3)
    return with_more(log, number - 1, DataEnded(at=log[number].at, group=3))


def a_version_is_published_twice(log: Log) -> Log:
    number = place(log, Publish, version=5)
    return with_more(log, number, log[number])


def training_goes_forward_instead(log: Log) -> Log:
    return change(log, place(log, RolledBack), to=5)


def training_goes_back_to_what_was_released(log: Log) -> Log:
    return change(log, place(log, RolledBack), to=0)


def training_goes_back_untold(log: Log) -> Log:
    return without(log, place(log, Restart))


def an_answer_is_empty(log: Log) -> Log:
    name = trains(log, 5)[1].samples[0].sample
    return change(log, place(log, SampleDone, sample=name), prompt_tokens=0, length=0, loss_tokens=0)


def a_stranger_is_trained(log: Log) -> Log:
    number, train = trains(log, 4)
    stranger = trains(log, 5)[1].samples[0]
    return change(log, number, samples=(*train.samples[:-1], stranger))


def a_step_is_too_small(log: Log) -> Log:
    number, train = trains(log, 4)
    return change(log, number, groups=train.groups[:1])


def a_server_loads_twice(log: Log) -> Log:
    number = place(log, Swap)
    return with_more(log, number, log[number])


def a_server_loads_what_was_lost(log: Log) -> Log:
    swap = log[place(log, Swap, version=2, branch=0)]
    return with_more(log, place(log, Lost), swap)


def the_trainer_begins_elsewhere(log: Log) -> Log:
    return change(log, place(log, Joined, peer="trainer"), version=1)


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
    an_answer_is_below_its_floor: "lag.floor",
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
    a_run_goes_on_after_too_many_failures: "missing.fail",
    a_run_goes_on_without_updates: "missing.fail",
    a_step_is_put_off: "step.late",
    there_are_fewer_places: "admission.places",
    a_checkpoint_is_to_stay_that_never_was: "checkpoint.keep",
    other_weights_are_evaluated: "evaluation.other",
    two_evaluations_at_once: "evaluation.two",
    a_group_is_invented: "group.unknown",
    tokens_lose_their_gradient: "lag.mask",
    the_rules_are_told_again: "log.rules",
    samples_stay_on_the_disk: "missing.release",
    the_data_go_on_after_their_end: "prompt.end",
    a_version_is_published_twice: "publish.early",
    training_goes_forward_instead: "rollback.range",
    training_goes_back_to_what_was_released: "rollback.released",
    training_goes_back_untold: "rollback.untold",
    an_answer_is_empty: "sample.empty",
    a_stranger_is_trained: "sample.stranger",
    a_step_is_too_small: "step.size",
    a_server_loads_twice: "swap.busy",
    a_server_loads_what_was_lost: "swap.old",
    the_trainer_begins_elsewhere: "trainer.version",
}
