"""A log record by record: number of the event, run clock, kind, what it is about, its telling fields.

What always holds: records come in the order of the log; a command has the number and the time of the event that it
answers; nothing is kept in memory, so a log may be of any length, or still be growing.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, get_args

import msgspec

from areal_async.log.format import PayloadRef, Torn
from areal_async.log.turns import read_turns
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    AnyRecord,
    Cancel,
    Checkpoint,
    CheckpointDone,
    Command,
    DataEnded,
    Evaluate,
    EvaluationDone,
    Event,
    Fail,
    Failed,
    Finish,
    Forget,
    GroupRead,
    Joined,
    Lost,
    Note,
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
)
from areal_async.trace.things import Thing, nearest, wrong
from areal_async.trace.words import count, first_line, number, samples, spans, versions

NOTES: Final = (
    *("run", "long_prompts", "resumed", "model_saved"),
    *("continued", "moved", "repeated", "completed"),
)  # kinds of notes that areal-async writes
KINDS: Final[dict[str, str]] = {
    kind.__struct_config__.tag: kind.__name__ for kind in (Rules, Note, *get_args(AnyEvent), *get_args(AnyCommand))
}  # name in the log -> name of the struct


class Item(NamedTuple):
    """event: number of the event that it is, or follows; -1 before the first. at: run clock. offset: in
    `decisions.log`; None of notes."""

    event: int
    at: float
    record: AnyRecord
    offset: int | None = None
    payload: PayloadRef | None = None

    @property
    def kind(self) -> str:
        return str(self.record.__struct_config__.tag)


class Filter(NamedTuple):
    """kinds: names of kinds, or of notes ((): all). things: of which a record has to be about one ((): all). begin,
    end: run clock, both included."""

    kinds: tuple[str, ...] = ()
    things: tuple[Thing, ...] = ()
    begin: float = float("-inf")
    end: float = float("inf")

    def wants(self, item: Item) -> bool:
        if not self.begin <= item.at <= self.end:
            return False
        if self.kinds and item.kind not in self.kinds:
            note = item.record
            if not isinstance(note, Note) or note.what not in self.kinds:
                return False
        return not self.things or any(thing.is_in(item.record) for thing in self.things)


def kind_named(text: str) -> str:
    """What `--kind` names: `sample_done`, `SampleDone`, `note`, or a kind of note. Errors: ConfigError."""
    names = {**{tag: tag for tag in KINDS}, **{name.lower(): tag for tag, name in KINDS.items()}}
    names |= {what: what for what in NOTES}
    found = names.get(text.lower())
    if found is None:
        raise wrong(f"--kind {text}: no such kind of record; the nearest are {nearest(text, {*KINDS, *NOTES})}")
    return found


def read_items(folder: Path, on_torn: Callable[[Torn], None]) -> Iterator[Item]:
    """Everything in a log folder, in order. Raises LogError."""
    recorded = read_turns(folder, on_torn)
    if recorded is None:
        return
    yield Item(-1, 0.0, recorded.rules)
    for note in recorded.notes:
        yield Item(-1, note.at, note)
    for turn in recorded.turns:
        yield Item(turn.number, turn.event.at, turn.event, turn.offset, turn.payload)
        for command, offset in zip(turn.commands, turn.offsets, strict=True):
            yield Item(turn.number, turn.event.at, command, offset)
        for note in turn.notes:
            yield Item(turn.number, note.at, note)


def line(item: Item) -> str:
    """For people."""
    record = item.record
    about, told = told_of(record)
    if isinstance(record, Command):
        kind = f"  > {item.kind}"
    else:
        kind = f"note {record.what}" if isinstance(record, Note) else item.kind
    event = "" if item.event < 0 or isinstance(record, Note) else str(item.event)
    return f"{event:>7}  {item.at:>10.3f} s  {kind:<17} {about:<10} {told}".rstrip()


class _Shown(msgspec.Struct):
    event: int | None
    at: float
    kind: str
    of: str
    offset: int | None
    payload: PayloadRef | None
    record: AnyRecord


def json_line(item: Item) -> bytes:
    """For programs: the whole record, and where it stands."""
    record = item.record
    of = "command" if isinstance(record, Command) else "event" if isinstance(record, Event) else item.kind
    event = None if item.event < 0 else item.event
    return msgspec.json.encode(_Shown(event, item.at, item.kind, of, item.offset, item.payload, record))


def told_of(record: AnyRecord) -> tuple[str, str]:
    """What a record is about, and its telling fields."""
    match record:
        case Event():
            return _told_event(record)
        case Command():
            return _told_command(record)
        case Note(data=data):
            rest = {key: value for key, value in data.items() if key != "sample" and value is not None}
            words = (f"{key} {first_line(str(value), 80)}" for key, value in rest.items())
            return str(data.get("sample", "")), ", ".join(words)
        case Rules():
            return "", (
                f"{record.steps} steps of {record.batch_groups} groups x {record.group_size} samples, max_staleness"
                f" {record.max_staleness}, when_older {record.when_older}, seed {record.seed}"
            )
    raise AssertionError(f"unknown record {record}")


def _told_event(event: AnyEvent) -> tuple[str, str]:
    match event:
        case Joined():
            return event.id, f"{event.peer}" + (f", version {event.version}" if event.peer == "trainer" else "")
        case Lost():
            return event.id, f"{event.peer}: {first_line(event.why)}"
        case GroupRead():
            return str(event.group), f"row {event.row}, prompt of {count(event.prompt_tokens, 'token')}"
        case DataEnded():
            return str(event.group), ""
        case SampleDone():
            reward = "" if event.reward is None else f", reward {number(event.reward)}"
            text = f"{count(event.length, 'token')} of {versions(event.oldest, event.newest)}, {event.finish}{reward}"
            return event.sample, text + _attempt(event.attempt)
        case Scored():
            return event.sample, f"{event.verdict}, reward {number(event.reward)}" + _attempt(event.attempt)
        case Failed():
            return event.id, f"{event.of}: {first_line(event.why)}" + _attempt(event.attempt)
        case StepDone():
            skipped = f", update left out: {first_line(event.skipped)}" if event.skipped else ""
            named = [name for name in ("loss", "grad_norm", "entropy", "train_s") if name in event.metrics]
            told = "".join(f", {name} {number(event.metrics[name])}" for name in named)
            return f"step {event.step}", f"branch {event.branch}{told}{skipped}"
        case Published():
            return f"v{event.version}", f"branch {event.branch}, {event.nbytes} bytes in {event.location}"
        case Swapped():
            return event.server, f"version {event.version}, branch {event.branch}, pause {event.pause_s:.3f} s"
        case EvaluationDone():
            text = (
                f"version {event.version}: score {number(event.score)} of {event.n} problems in {event.seconds:.1f} s"
            )
            return event.server, text
        case CheckpointDone():
            return f"v{event.version}", f"branch {event.branch}, {event.nbytes} bytes in {event.seconds:.3f} s"
        case RolledBack():
            return f"v{event.to}", ("resumed: " if event.resumed is not None else "") + first_line(event.why)
    return "", ""  # Woke, StopRequested


def _told_command(command: AnyCommand) -> tuple[str, str]:
    match command:
        case ReadGroup():
            return str(command.group), f"position {command.position}"
        case StartSample():
            return command.sample, f"server {command.server}, floor {command.floor}" + _attempt(command.attempt)
        case Score() | Cancel():
            return command.sample, _attempt(command.attempt).removeprefix(", ")
        case Train():
            micro = sum(len(rank) for part in command.minibatches for rank in part.ranks[:1])
            return f"step {command.step}", (
                f"branch {command.branch}, {len(command.samples)} samples of groups {spans(command.groups)};"
                f" {len(command.minibatches)} minibatches, {micro} micro-batches a rank"
            )
        case Publish():
            free = f", free {spans(command.free)}" if command.free else ""
            return f"v{command.version}", f"branch {command.branch}{free}"
        case Swap():
            return command.server, f"version {command.version}, branch {command.branch}, from {command.location}"
        case Restart():
            version = f" with version {command.version}" if command.peer == "trainer" else ""
            return command.id, f"{command.peer}{version}: {first_line(command.why)}"
        case Evaluate():
            return command.server, f"version {command.version}"
        case Checkpoint():
            return f"v{command.version}", f"branch {command.branch}, beside it {spans(command.keep) or 'none'}"
        case Forget() | Release():
            return "", samples(command.samples)
        case Finish():
            return "", command.reason
        case Fail():
            return "", first_line(command.why)
    raise AssertionError(f"unknown command {command}")


def _attempt(number: int) -> str:
    return f", attempt {number}" if number else ""
