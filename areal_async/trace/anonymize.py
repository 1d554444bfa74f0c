"""A copy of a run's log for a bug report: what was decided stays, what was said goes.

    token ids        the token's place among all ids up to the highest of the log, ordered by a keyed hash of each
    texts            errors, tracebacks, stderr, reasons, paths: "removed " and twelve digits of a keyed hash
    names            servers, workers: kept where areal-async gave them (numbers, "rewards.0"), else numbered
    notes            numbers stay; words stay where areal-async itself writes them, from a short list
    everything else  ids, versions, times, lengths, rewards, log-probabilities, advantages, splits: as they were

What always holds: the key is made here, used for this one copy, and kept nowhere, so nobody can try out guesses; equal
tokens and texts stay equal in it, different ones different. Each array keeps its place, type and length. The copy gives
the core the same decisions: where a recorded command is what the core gives, the copy has what the core gives after the
events of the copy (words in it come from words of events); where it isn't, the difference stays. It is whole, or it
isn't there at all.
"""

import hashlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.core.orchestrator import Orchestrator
from areal_async.environment import PACKAGES
from areal_async.errors import IllegalTransition, LogError
from areal_async.log import format as fmt
from areal_async.log import payloads
from areal_async.log.format import Entry, PayloadRef, Torn
from areal_async.log.reader import index_segment
from areal_async.log.turns import Turn, read_turns
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    AnyRecord,
    Cancel,
    Evaluate,
    EvaluationDone,
    Fail,
    Failed,
    Forget,
    Joined,
    Lost,
    Note,
    Published,
    Release,
    Restart,
    RolledBack,
    Rules,
    SampleId,
    Score,
    StartSample,
    StepDone,
    Swap,
    Swapped,
    Train,
)
from areal_async.trace.things import wrong
from areal_async.wire.arrays import Array

KEY_BYTES: Final = 32
HASH_BYTES: Final = 6  # of a text: so that no two of a log are the same by chance
LOG_NAME: Final = "log"
RESUMED: Final = "resumed"  # why of a `RolledBack` that a new controller tells

_SAMPLE: Final = re.compile(r"\d{1,18}\.\d{1,9}")
_NUMBER: Final = re.compile(r"\d{1,18}")
_METRIC: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
_VERSION: Final = re.compile(r"\d[0-9a-z.+]{0,15}")
_OPTION: Final = re.compile(r"data\.[a-z_]{1,30}")
# what notes may say in words, by key; all other words are removed
_WORDS: Final[dict[str, re.Pattern[str]]] = {
    "python": _VERSION,
    "areal_async": _VERSION,
    **dict.fromkeys(PACKAGES, _VERSION),
    "model.dtype": re.compile("bfloat16|float32"),
    "data.chat_template": re.compile("auto|plain"),
    "data.long_prompts": re.compile("error|drop|cut"),
    "reason": re.compile("steps_done|data_ended|stopped"),
    "sample": _SAMPLE,
}
_MACHINE: Final = ("host", "system", "cpu", "gpu")  # of these only the keys stay
_NOTES: Final[dict[str, frozenset[str]]] = {
    "run": frozenset(
        (
            *_WORDS,
            *_MACHINE,
            "name",
            "config",
            "model.path",
            "data.train",
            "the longest prompt in tokens",
            "prompts left out",
        )
    ),
    "long_prompts": frozenset(("left_out", "max_prompt_tokens")),
    "resumed": frozenset(("python", "areal_async", "config", *PACKAGES, *_MACHINE)),
    "model_saved": frozenset(("reason",)),
    **dict.fromkeys(
        ("continued", "moved", "repeated", "completed"),
        frozenset(("sample", "attempt", "turn", "request", "from", "to", "tokens", "inferred", "why")),
    ),
}  # keys that areal-async writes; `data.…` besides

Struct = TypeVar("Struct", bound=msgspec.Struct)


class Copied(NamedTuple):
    """differs_at: number of the first event whose commands the core of today wouldn't give; None: all are as it gives
    them. events, records: of the decision log; samples: whose arrays were copied. highest: token id. nbytes: in all."""

    events: int
    records: int
    samples: int
    highest: int
    nbytes: int
    differs_at: int | None


def anonymize(folder: Path, out: Path, on_torn: Callable[[Torn], None], on_read: Callable[[float], None]) -> Copied:
    """Make the new run folder `out` of the log in `folder`. on_read: is told which share of the work is done.

    Raises LogError: the log is damaged; ConfigError: there is something at `out`.
    """
    if out.exists() or out.is_symlink():
        raise wrong(f"--anonymize {out}: there is something already; name a folder that doesn't exist")
    partial = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    try:
        (partial / LOG_NAME).mkdir(parents=True)
        copied = _copy(folder, partial / LOG_NAME, on_torn, on_read)
        partial.rename(out)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        raise LogError(f"{out}: can't be made: {where}{error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return copied


def _copy(folder: Path, out: Path, on_torn: Callable[[Torn], None], on_read: Callable[[float], None]) -> Copied:
    segments = fmt.payload_segments(folder)
    whole = 2 * len(segments) + 1  # a segment is read twice
    key = secrets.token_bytes(KEY_BYTES)
    highest = -1
    for done, number in enumerate(segments):
        for ref in _records(folder, number, on_torn):
            highest = max(highest, _highest(payloads.read(folder, ref), fmt.payload_path(folder, number)))
        on_read((done + 1) / whole)
    tokens = permutation(key, highest + 1)
    samples = nbytes = 0
    for done, number in enumerate(segments):
        with fmt.payload_path(out, number).open("xb") as file:
            samples += _copy_segment(folder, number, file, tokens)
            nbytes += file.tell()
        on_read((len(segments) + done + 1) / whole)
    with (out / fmt.DECISIONS_NAME).open("xb") as file:
        events, records, differs_at = _copy_decisions(folder, file, key, on_torn)
        nbytes += file.tell()
    on_read(1.0)
    return Copied(events, records, samples, highest, nbytes, differs_at)


# ------------------------------------------------------------------------------------------------------------- payloads


def permutation(key: bytes, count: int) -> npt.NDArray[np.int32]:
    """Which id each of the token ids 0 … count - 1 becomes: its rank in the order of their keyed hashes."""
    hashes = [hashlib.blake2b(token.to_bytes(8, "little"), digest_size=16, key=key).digest() for token in range(count)]
    ranks = np.empty(count, np.int32)
    ranks[sorted(range(count), key=hashes.__getitem__)] = np.arange(count, dtype=np.int32)
    return ranks


def _records(folder: Path, number: int, on_torn: Callable[[Torn], None]) -> Iterator[PayloadRef]:
    for item in index_segment(folder, number):
        if isinstance(item, Torn):
            on_torn(item)
        else:
            yield item[1]


def _highest(payload: payloads.Payload, path: Path) -> int:
    lengths = {len(array) for array in payload.arrays}
    shapes = {array.ndim for array in payload.arrays}
    if len(payload.arrays) != 4 or len(lengths) > 1 or shapes != {1} or payload.arrays[0].dtype.kind not in "iu":
        raise LogError(
            f"{path}: sample {payload.sample} has other arrays than this version knows: they can't be copied"
        )
    if not _SAMPLE.fullmatch(payload.sample):
        raise LogError(f"{path}: {payload.sample!r} is no sample's name; it can't be copied")
    token_ids = payload.arrays[0]
    if not len(token_ids):
        return -1
    if int(token_ids.min()) < 0:
        raise LogError(f"{path}: sample {payload.sample} has a negative token id; it can't be copied")
    return int(token_ids.max())


def _copy_segment(folder: Path, number: int, file: BinaryIO, tokens: npt.NDArray[np.int32]) -> int:
    """The same records in the same places, other tokens. How many they are."""
    file.write(fmt.file_header("payloads"))
    count = 0
    for ref in _records(folder, number, lambda _: None):
        found = payloads.read(folder, ref)
        token_ids = found.arrays[0]
        changed: list[Array] = [tokens[token_ids].astype(token_ids.dtype), *found.arrays[1:]]
        for part in payloads.encode(found.sample, found.attempt, changed):
            file.write(part)
        if file.tell() != ref.offset + ref.nbytes:
            raise LogError(
                f"{fmt.payload_path(folder, number)}: the record at offset {ref.offset} was written by another version"
                " of areal-async in another form; it can't be copied"
            )
        count += 1
    return count


# ------------------------------------------------------------------------------------------------------------ decisions


def _copy_decisions(
    folder: Path, file: BinaryIO, key: bytes, on_torn: Callable[[Torn], None]
) -> tuple[int, int, int | None]:
    """Events, records, and the first event after which the log isn't what the core of today decides."""
    file.write(fmt.file_header("decisions"))
    encoder = msgspec.msgpack.Encoder()
    events = records = 0

    def write(record: AnyRecord, payload: PayloadRef | None = None) -> None:
        nonlocal records
        body = encoder.encode(Entry(record, payload))
        file.write(fmt.record_head([body]))
        file.write(body)
        records += 1

    recorded = read_turns(folder, on_torn)
    if recorded is None:
        return 0, 0, None
    words, deciding = Words(key), Deciding(recorded.rules)
    write(recorded.rules)
    for note in recorded.notes:
        write(words.note(note))
    for turn in recorded.turns:
        event = words.event(turn.event)
        write(event, turn.payload)
        for command in deciding.commands(turn, event, words):
            write(command)
        for note in turn.notes:
            write(words.note(note))
        events += 1
    return events, records, deciding.differs_at


class Deciding:
    """Two cores: one hears what was recorded, the other what stands in the copy. A recorded command that the first one
    gives, too, is the second one's in the copy."""

    def __init__(self, rules: Rules) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._cores: tuple[Orchestrator, Orchestrator] | None = None
        self.differs_at: int | None = None
        try:
            self._cores = Orchestrator(rules), Orchestrator(rules)
        except ValueError:  # rules that this version can't go by
            self.differs_at = 0

    def commands(self, turn: Turn, event: AnyEvent, words: "Words") -> Iterator[AnyCommand]:
        """Of the copy, as many as were recorded. event: of the copy."""
        given, copied = self._handle(turn, event)
        for place, command in enumerate(turn.commands):
            if place < len(copied) and place < len(given) and self._same(given[place], command):
                yield copied[place]
            else:
                self._note_difference(turn.number)
                yield words.command(command)
        if len(given) > len(turn.commands) and not turn.last:
            self._note_difference(turn.number)

    def _handle(self, turn: Turn, event: AnyEvent) -> tuple[Sequence[AnyCommand], Sequence[AnyCommand]]:
        if self._cores is None:
            return (), ()
        ours, theirs = self._cores
        try:
            return ours.handle(turn.event), theirs.handle(event)
        except (IllegalTransition, ValueError):  # the log tells what can't have happened, by the rules of today
            self._cores = None
            self._note_difference(turn.number)
            return (), ()

    def _same(self, given: AnyCommand, recorded: AnyCommand) -> bool:
        """NaN is the same as NaN."""
        return given == recorded or self._encoder.encode(given) == self._encoder.encode(recorded)

    def _note_difference(self, event: int) -> None:
        if self.differs_at is None:
            self.differs_at = event


class Words:
    """Texts and names, made unreadable by one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._names: dict[str, str] = {}

    def text(self, text: str) -> str:
        """ "" stays "": the core asks whether there is any."""
        if not text:
            return ""
        digest = hashlib.blake2b(
            text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, key=self._key
        ).hexdigest()
        return f"removed {digest}"

    def name(self, name: str) -> str:
        """Of a server, a worker, the trainer."""
        if name == "trainer" or _NUMBER.fullmatch(name) or re.fullmatch(r"rewards\.\d{1,9}", name):
            return name
        return self._names.setdefault(name, f"peer-{len(self._names)}")

    def sample(self, name: SampleId) -> SampleId:
        return name if _SAMPLE.fullmatch(name) else self.text(name)

    def event(self, event: AnyEvent) -> AnyEvent:
        match event:
            case Joined():
                return _with(event, id=self.name(event.id))
            case Lost():
                return _with(event, id=self.name(event.id), why=self.text(event.why))
            case Failed():
                return _with(event, id=self._failed(event), why=self.text(event.why))
            case StepDone():
                metrics = {self._metric(name): value for name, value in event.metrics.items()}
                return _with(event, metrics=metrics, skipped=self.text(event.skipped))
            case Published():
                return _with(event, location=self.text(event.location))
            case Swapped() | EvaluationDone():
                return _with(event, server=self.name(event.server))
            case RolledBack():
                constant = event.resumed is not None and event.why == RESUMED
                return event if constant else _with(event, why=self.text(event.why))
        if hasattr(event, "sample"):  # SampleDone, Scored
            return _with(event, sample=self.sample(event.sample))
        return event

    def command(self, command: AnyCommand) -> AnyCommand:
        """One that the core of today wouldn't give."""
        match command:
            case Restart():
                return _with(command, id=self.name(command.id), why=self.text(command.why))
            case StartSample():
                return _with(command, sample=self.sample(command.sample), server=self.name(command.server))
            case Swap():
                return _with(command, server=self.name(command.server), location=self.text(command.location))
            case Evaluate():
                return _with(command, server=self.name(command.server))
            case Fail():
                return _with(command, why=self.text(command.why))
            case Score() | Cancel():
                return _with(command, sample=self.sample(command.sample))
            case Forget() | Release():
                return _with(command, samples=tuple(map(self.sample, command.samples)))
            case Train():
                return _with(command, samples=tuple(_with(e, sample=self.sample(e.sample)) for e in command.samples))
        return command

    def note(self, note: Note) -> Note:
        """What areal-async itself says, and numbers."""
        keys = _NOTES.get(note.what)
        if keys is None:
            return Note(at=note.at, what=self.text(note.what), data={})
        kept = {key: value for key, value in note.data.items() if key in keys or _is_option(note, key)}
        return Note(at=note.at, what=note.what, data={key: self._word(key, value) for key, value in kept.items()})

    def _word(self, key: str, value: "Fact") -> "Fact":
        match value:
            case str() if key in ("from", "to"):
                return self.name(value)
            case str():
                allowed = _WORDS.get(key)
                return value if allowed is not None and allowed.fullmatch(value) else self.text(value)
            case tuple():
                return tuple(self.text(each) if isinstance(each, str) else each for each in value)
        return value

    def _failed(self, event: Failed) -> str:
        if event.of in ("swap", "server"):
            return self.name(event.id)
        return event.id if _NUMBER.fullmatch(event.id) else self.sample(event.id)

    def _metric(self, name: str) -> str:
        return name if _METRIC.fullmatch(name) else self.text(name)


Fact = str | int | float | bool | tuple[int | str, ...] | None


def _is_option(note: Note, key: str) -> bool:
    return note.what == "run" and _OPTION.fullmatch(key) is not None


def _with(struct: Struct, **changes: object) -> Struct:
    return msgspec.structs.replace(struct, **changes)
