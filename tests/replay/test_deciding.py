"""The core's decisions again: nothing differs where nothing was changed, and what was changed is found where it shows.

What is changed here is one field of one event, one command of the log, or one rule of the core; the recorded runs are
those of `tests/logs`, and (slow) runs of every kind that are made for it.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_async.controller.resuming import read
from areal_async.controller.samples import Samples
from areal_async.core import admission, advantages, batches, restarts
from areal_async.core.ledger import Group, Ledger
from areal_async.core.orchestrator import Orchestrator
from areal_async.errors import LogError
from areal_async.log.reader import read_records
from areal_async.log.turns import Turn
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Checkpoint,
    CheckpointDone,
    GroupRead,
    Joined,
    Lost,
    Minibatch,
    Note,
    Published,
    ReadGroup,
    Release,
    Restart,
    RolledBack,
    Rules,
    SampleDone,
    Scored,
    StartSample,
    StepDone,
    Swapped,
    Train,
    TrainSample,
    Woke,
)
from areal_async.replay.deciding import Decided, Difference, Field, _concerned, begin, decide
from areal_async.replay.naming import named, names

from .logs import BOTH, DROP, WAIT, Recording, bodies, recording, write
from .runs import KINDS, LOOPS, make

ROOT = Path(__file__).parent.parent.parent


def again(recorded: Recording) -> list[Decided]:
    return list(decide(Orchestrator(recorded.rules), recorded.turns))


def difference(recorded: Recording) -> Difference | None:
    return again(recorded)[-1].difference


def flipped(log: Path, kind: type[AnyEvent], which: dict[str, Any], change: dict[str, Any]) -> tuple[Recording, int]:
    """The recording with one event changed, and the number of that event."""
    whole = recording(log)

    def is_it(turn: Turn) -> bool:
        return isinstance(turn.event, kind) and all(getattr(turn.event, key) == it for key, it in which.items())

    number = whole.first(is_it)
    turn = whole.turns[number]
    turn.event = msgspec.structs.replace(turn.event, **change)
    return whole, number


# -------------------------------------------------------------------------------------------------- nothing was changed


@pytest.mark.parametrize("log", BOTH, ids=lambda log: log.name)
def test_a_recorded_run_is_decided_again(log: Path) -> None:
    """For ever: a rule of the core that changes this changes what old runs can be resumed by."""
    whole = recording(log)
    told = again(whole)
    assert [decided.commands for decided in told] == [turn.commands for turn in whole.turns]
    assert not any(decided.difference or decided.missing for decided in told)
    kinds = {type(message) for turn in whole.turns for message in (turn.event, *turn.commands)}
    assert {Lost, Restart, RolledBack, Checkpoint, CheckpointDone, Release, Woke} <= kinds
    assert (log / "decisions.log").stat().st_size < 100_000


@pytest.mark.parametrize("log", BOTH, ids=lambda log: log.name)
def test_wherever_a_controller_was_killed_nothing_differs(log: Path) -> None:
    """The log ends after any record: what is missing is what the next controller writes."""
    whole = recording(log)
    for number in range(8, len(whole.turns), 19):
        turn = whole.turns[number]
        for kept in range(len(turn.commands) + 1):
            last = Turn(turn.number, turn.event, None, turn.offset, turn.commands[:kept], turn.offsets[:kept], [], True)
            *_, decided = decide(Orchestrator(whole.rules), [*whole.turns[:number], last])
            assert decided.difference is None
            assert decided.missing == tuple(turn.commands[kept:])


def train(*advantages: float) -> Train:
    samples = tuple(TrainSample(f"{number}.0", 0, advantage) for number, advantage in enumerate(advantages))
    return Train(step=0, branch=0, groups=(), samples=samples, minibatches=())


def between(expected: Train, recorded: Train) -> Difference | None:
    """The difference between two commands."""

    class Core(Orchestrator):
        def handle(self, event: AnyEvent) -> list[AnyCommand]:
            return [expected]

    (decided,) = decide(Core(recording(WAIT).rules), [Turn(0, Woke(at=0.0), None, 16, [recorded], [40])])
    return decided.difference


def test_a_nan_is_the_same_as_a_nan() -> None:
    """A command with one could never be equal to itself."""
    assert between(train(float("nan")), train(float("nan"))) is None
    found = between(train(float("nan")), train(1.0))
    assert found is not None
    assert [(field.name, field.recorded) for field in found.fields] == [("samples[0].advantage", 1.0)]


def test_a_field_of_another_length_is_told_whole_and_the_largest_difference_first() -> None:
    found = between(train(1.0, 2.0), train(1.0))
    assert found is not None
    assert found.fields == (Field("samples", train(1.0, 2.0).samples, train(1.0).samples),)
    expected, recorded = train(0.0, 0.0, 0.0), train(0.1, -0.7, 0.2)
    found = between(expected, recorded)
    assert found is not None
    assert [field.recorded for field in found.fields] == [0.1, -0.7, 0.2]
    labels = list(_concerned(expected, recorded, found.fields))
    assert labels[:3] == ["sample 1.0", "sample 2.0", "sample 0.0"]


# --------------------------------------------------------------------------------------------- one field of one event

# event, which one, what is changed in it, where that shows (None: nowhere, since no decision hangs on it)
FLIPS: list[tuple[type[AnyEvent], dict[str, Any], dict[str, Any], Callable[[Recording, int], int | None]]] = [
    # where the batch is made, later than what was changed
    (Scored, {"sample": "0.0"}, {"reward": 0.0}, lambda run, _: run.trains(0)),
    (SampleDone, {"sample": "3.0"}, {"loss_tokens": 23}, lambda run, _: run.trains(0)),
    # a second reward is missing, so the group teaches nothing: it is filtered when its last check ends
    (Scored, {"sample": "0.1"}, {"reward": None}, lambda run, _: scored(run, "0.0")),
    # the pause before the restart begins later
    (Lost, {"peer": "trainer"}, {"at": 2.9}, lambda run, _: restarted(run)),
    # at once
    (GroupRead, {"group": 4}, {"group": 5}, lambda _, number: number),
    (Swapped, {"version": 1}, {"version": 2}, lambda _, number: number),
    (Published, {"version": 1}, {"location": "/dev/shm/another"}, lambda _, number: number),
    (SampleDone, {"sample": "3.0"}, {"sample": "4.0"}, lambda _, number: number),
    (SampleDone, {"sample": "3.0"}, {"reward": 1.0}, lambda _, number: number),
    (StepDone, {"step": 1}, {"step": 2}, lambda _, number: number),
    (Joined, {"peer": "trainer"}, {"version": 1}, lambda _, number: number),
    (RolledBack, {"why": "resumed"}, {"resumed": recording(DROP).rules}, lambda _, number: number),
    # nowhere
    (StepDone, {"step": 0}, {"metrics": {"loss": 7.0}}, lambda *_: None),
    (SampleDone, {"sample": "3.0"}, {"finish": "stop"}, lambda *_: None),
    (GroupRead, {"group": 4}, {"row": 9}, lambda *_: None),
    (CheckpointDone, {"version": 2}, {"nbytes": 9}, lambda *_: None),
    (Swapped, {"version": 1}, {"pause_s": 9.0}, lambda *_: None),
    (Scored, {"sample": "0.0"}, {"verdict": "right"}, lambda *_: None),
]


def scored(run: Recording, sample: str) -> int:
    return run.first(lambda turn: isinstance(turn.event, Scored) and turn.event.sample == sample)


def restarted(run: Recording) -> int:
    return run.first(lambda turn: any(isinstance(command, Restart) for command in turn.commands))


@pytest.mark.parametrize(
    ("kind", "which", "change", "shows"), FLIPS, ids=lambda it: it.__name__ if isinstance(it, type) else None
)
def test_one_flipped_field_is_found_at_the_event_where_it_shows(
    kind: type[AnyEvent], which: dict[str, Any], change: dict[str, Any], shows: Callable[[Recording, int], int | None]
) -> None:
    whole, number = flipped(WAIT, kind, which, change)
    found = difference(whole)
    wanted = shows(whole, number)
    assert (None if found is None else found.number) == wanted
    assert found is None or found.offset == whole.turns[found.number].offset


def test_a_difference_tells_which_field_and_the_story_of_the_sample() -> None:
    whole, _ = flipped(WAIT, Scored, {"sample": "0.0"}, {"reward": 0.0})
    found = difference(whole)
    assert found is not None
    turn = whole.turns[found.number]
    (place,) = [n for n, command in enumerate(turn.commands) if isinstance(command, Train)]
    assert (found.place, found.recorded, found.found_at) == (place, turn.commands[place], turn.offsets[place])
    assert isinstance(found.expected, Train)
    assert found.all_recorded == tuple(turn.commands)
    assert [field.name for field in found.fields] == ["samples[0].advantage", "samples[1].advantage"]
    assert [(field.expected, round(field.recorded, 2)) for field in found.fields] == [(0.0, 0.71), (0.0, -0.71)]  # type: ignore[call-overload]
    assert [story.partition("\n")[0] for story in found.stories] == ["sample 0.0", "sample 0.1", "trainer"]
    assert "scored" in found.stories[0]
    assert found.waiting.startswith("the trainer trains step 0, for 0.0 s")
    assert (found.impossible, found.last) == ("", False)


def test_an_event_that_cannot_have_happened_is_told_with_the_reason() -> None:
    whole, number = flipped(WAIT, SampleDone, {"sample": "3.0"}, {"sample": "40.0"})
    found = difference(whole)
    assert found is not None
    assert (found.number, found.expected, found.recorded, found.fields) == (number, None, None, ())
    assert "there never was one" in found.impossible
    assert found.all_recorded == tuple(whole.turns[number].commands)
    assert not found.last
    assert difference(Recording(whole.rules, whole.turns[:number])) is None


@pytest.mark.slow
@pytest.mark.parametrize("log", BOTH, ids=lambda log: log.name)
def test_any_flip_is_found_where_two_cores_part(log: Path) -> None:
    """Every field of every third event, against an oracle that knows nothing of logs: two cores, side by side."""
    whole, parted = recording(log), 0
    for number, turn in list(enumerate(whole.turns))[1::3]:
        for change in changes(turn.event):
            other = msgspec.structs.replace(turn.event, **change)
            events = [*(turn.event for turn in whole.turns[:number]), other]
            events += [turn.event for turn in whole.turns[number + 1 :]]
            wanted = parting(whole, events)
            turns = list(whole.turns)
            turns[number] = Turn(number, other, turn.payload, turn.offset, turn.commands, turn.offsets, [], turn.last)
            *_, last = decide(Orchestrator(whole.rules), turns)
            found = None if last.difference is None else last.difference.number
            assert found == wanted, (number, change)
            assert found is None or found >= number
            parted += found is not None
    assert parted > len(whole.turns) / 3


def changes(event: AnyEvent) -> Iterator[dict[str, Any]]:
    """Each field of it, once, to what a log can hold."""
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, bool | dict | msgspec.Struct) or value is None:
            continue
        change = {name: value + 1 if isinstance(value, int | float) else f"{value}0"}
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(event, **change)), type=type(event))
            yield change


def parting(whole: Recording, events: list[AnyEvent]) -> int | None:
    one, other = Orchestrator(whole.rules), Orchestrator(whole.rules)
    for number, (turn, event) in enumerate(zip(whole.turns, events, strict=True)):
        try:
            if one.handle(turn.event) != other.handle(event):
                return number
        except Exception:
            return number
    return None


# ------------------------------------------------------------------------------------------------- one command of a log


def test_commands_that_are_left_out_added_or_changed_are_found() -> None:
    whole = recording(WAIT)
    number = whole.first(lambda turn: len(turn.commands) == 2 and isinstance(turn.commands[0], StartSample))
    turn = whole.turns[number]
    first, second = turn.commands
    offsets = turn.offsets
    extra = ReadGroup(group=99, position=99)
    for commands, place, expected, recorded, at in (
        ([first], 1, second, None, turn.offset),
        ([second], 0, first, second, offsets[0]),
        ([], 0, first, None, turn.offset),
        ([first, second, extra], 2, None, extra, offsets[1] + 1),
        ([second, first], 0, first, second, offsets[0]),
        ([extra, second], 0, first, extra, offsets[0]),
    ):
        turn.commands, turn.offsets = list(commands), [*offsets, offsets[1] + 1]
        found = difference(whole)
        assert found is not None
        assert (found.number, found.place, found.expected, found.recorded) == (number, place, expected, recorded)
        assert found.found_at == at
        assert bool(found.fields) == (type(expected) is type(recorded))


def test_the_end_of_a_log_may_lack_commands_and_not_have_others() -> None:
    whole = recording(WAIT)
    number = whole.trains(0)
    end = whole.turns[number]
    end.last = True
    end.commands = [ReadGroup(group=99, position=99)]
    found = difference(Recording(whole.rules, whole.turns[: number + 1]))
    assert found is not None
    assert isinstance(found.expected, Train)
    end.commands = [*recording(WAIT).turns[number].commands, ReadGroup(group=99, position=99)]
    end.offsets = [7, 8]
    found = difference(Recording(whole.rules, whole.turns[: number + 1]))
    assert found is not None
    assert (found.place, found.expected, found.recorded, found.found_at) == (1, None, end.commands[1], 8)


# --------------------------------------------------------------------------------------------------- one rule of a core


def one_more_place(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity, lowest = admission.capacity, admission.lowest_floor
    monkeypatch.setattr(admission, "capacity", lambda version, taken, rules: capacity(version, taken - 1, rules))
    monkeypatch.setattr(admission, "lowest_floor", lambda taken, rules: lowest(taken - 1, rules))


def last_first(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Ledger.choose_batch

    def chosen(self: Ledger) -> list[Group]:
        return choose(self)[::-1]

    monkeypatch.setattr(Ledger, "choose_batch", chosen)


def larger_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    grpo = advantages.grpo
    monkeypatch.setattr(advantages, "grpo", lambda rewards, eps: grpo(rewards, eps + 1e-9))


def other_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    minibatch = batches.minibatch

    def divided(*args: Any) -> Minibatch:
        part = minibatch(*args)
        return Minibatch(part.divisor + 1, part.ranks)

    monkeypatch.setattr(batches, "minibatch", divided)


def longer_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_RESTART_S", 1.5)


def nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "late", lambda self: [])


BROKEN: list[tuple[Callable[[pytest.MonkeyPatch], None], Path, Callable[[Turn], object], tuple[str, ...]]] = [
    # η = 1, B = 2: four groups fit at first, and a fifth is asked for where the fourth is
    (one_more_place, DROP, lambda turn: any(isinstance(c, ReadGroup) and c.group == 3 for c in turn.commands), ()),
    (last_first, DROP, lambda turn: of(turn, Train), ("groups[0]", "groups[1]")),
    (larger_eps, WAIT, lambda turn: of(turn, Train), ("samples[0].advantage", "samples[1].advantage")),
    (other_divisor, WAIT, lambda turn: of(turn, Train), ("minibatches[0].divisor",)),
    (longer_pause, WAIT, lambda turn: of(turn, Restart), ()),
    (nothing_is_late, DROP, lambda turn: of(turn, Cancel), ()),
]


def of(turn: Turn, kind: type[AnyCommand]) -> bool:
    return any(isinstance(command, kind) for command in turn.commands)


@pytest.mark.parametrize(("broken", "log", "where", "fields"), BROKEN, ids=lambda it: getattr(it, "__name__", None))
def test_one_changed_rule_is_found_where_it_first_decides(
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[pytest.MonkeyPatch], None],
    log: Path,
    where: Callable[[Turn], object],
    fields: tuple[str, ...],
) -> None:
    whole = recording(log)
    broken(monkeypatch)
    found = difference(whole)
    assert found is not None
    assert found.number == whole.first(where)
    assert tuple(field.name for field in found.fields)[: len(fields)] == fields


# ------------------------------------------------------------------------------------------------- other areal-asyncs


def older(record: Any) -> Any:
    """As an older minor version would have written it: what has a default and holds it wasn't there."""
    body, payload = record
    kind = KINDS_OF[body["kind"]]
    defaults = dict(zip(kind.__struct_fields__[::-1], kind.__struct_defaults__[::-1], strict=False))
    return {key: value for key, value in body.items() if key not in defaults or value != defaults[key]}, payload


def newer(record: Any) -> Any:
    """As a newer minor version might write it: with more fields, of structs and of those that travel as arrays."""
    body, payload = record
    body = {**body, "a_field_to_come": {"x": [1, 2]}}
    if body["kind"] == "train":
        body["samples"] = [[*sample, "to come"] for sample in body["samples"]]
        body["minibatches"] = [[*part, None] for part in body["minibatches"]]
    return body, payload


KINDS_OF = {
    kind.__struct_config__.tag: kind
    for kind in (Rules, Note, *AnyEvent.__args__, *AnyCommand.__args__)  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("change", [older, newer])
@pytest.mark.parametrize("log", BOTH, ids=lambda log: log.name)
def test_logs_of_other_minor_versions_are_decided_again(
    tmp_path: Path, log: Path, change: Callable[[Any], Any]
) -> None:
    before = bodies(log)
    after = [change(record) for record in before]
    assert sum(len(record[0]) for record in after) != sum(len(record[0]) for record in before)
    told, whole = again(recording(write(tmp_path, after))), recording(log)
    assert [decided.commands for decided in told] == [turn.commands for turn in whole.turns]
    assert not any(decided.difference or decided.missing for decided in told)


def test_rules_that_this_core_cannot_go_by_are_said_in_one_line(tmp_path: Path) -> None:
    rules = msgspec.structs.replace(recording(WAIT).rules, batch_groups=3, minibatches=2)
    with pytest.raises(LogError, match=r"^[^\n]*decisions\.log: this areal-async can't go by the rules [^\n]*$"):
        begin(tmp_path, rules)


@pytest.mark.slow
def test_a_resume_refuses_where_replay_finds_the_difference(tmp_path: Path) -> None:
    """One mechanism leads a core through a log."""
    records = bodies(WAIT)
    place = next(n for n, (body, _) in enumerate(records) if body["kind"] == "scored" and body["sample"] == "0.0")
    records[place][0]["reward"] = 0.0
    log = write(tmp_path, records)
    found = difference(recording(log))
    assert found is not None
    with pytest.raises(LogError) as error:
        read(log, nothing_kept())
    words = str(error.value)
    assert f"decisions.log: at offset {found.found_at} the log has\n  {found.recorded}\nwhere this" in words
    assert f"gives\n  {found.expected}\nafter the event\n  {found.event}\n" in words
    records[place][0]["sample"] = "40.0"
    with pytest.raises(LogError, match=rf"the event at offset {found_at(log, place)} can't have happened: an event"):
        read(write(tmp_path, records), nothing_kept())


def nothing_kept() -> Samples:
    def none(*_: object) -> Any:
        raise AssertionError("arrays aren't read for this")

    return Samples(none, none)


def found_at(log: Path, place: int) -> int:
    """Offset of a record by its place; the flip in it doesn't move it."""
    return next(offset for number, (_, _, offset) in enumerate(read_records(log)) if number == place)


# ----------------------------------------------------------------------------------------------------------- who is who


def test_messages_name_what_they_are_about() -> None:
    core = Orchestrator(recording(WAIT).rules)
    unknown: set[str] = set()
    for turn, commands, _ in decide(core, recording(WAIT).turns):
        for message in (turn.event, *commands):
            for label in named(message):
                assert names(label, message)
                assert names(label.rpartition(" ")[2], message)
                if core.story(label).partition("\n")[0] != label:
                    unknown.add(label)
    # what is over has no story; peers are there for ever
    assert not {label for label in unknown if label.partition(" ")[0] not in ("group", "sample")}
    assert not names("7", StartSample(sample="7.0", attempt=0, position=7, server="0", floor=0))
    assert names("server 0", StartSample(sample="7.0", attempt=0, position=7, server="0", floor=0))


# ------------------------------------------------------------------------------------------------- runs of every kind


@pytest.mark.slow
@pytest.mark.parametrize("loop", list(LOOPS))
def test_runs_with_everything_that_can_happen_are_decided_again(tmp_path: Path, loop: str) -> None:
    """Under two seeds of Python's hashes, each in a process of its own."""
    logs = make(list(KINDS), tmp_path, loop)
    for name, log in logs.items():
        found = difference(recording(log))
        assert found is None, (name, found)
    told = [_replayed(list(logs.values()), seed) for seed in ("1", "2")]
    assert told[0] == told[1]
    assert all(line["differences"] == 0 and line["over"] == "the run is over: steps_done" for line in told[0])


def _replayed(logs: list[Path], seed: str) -> list[dict[str, Any]]:
    """What the command line says of each, but for how long it took, in one process with this PYTHONHASHSEED."""
    script = "import sys; from areal_async.cli import main; [main(['replay', log, '--json']) for log in sys.argv[1:]]"
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, logs)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(logs)
    return [{key: it for key, it in line.items() if not key.endswith(("_s", "faster"))} for line in lines]
