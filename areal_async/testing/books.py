"""What became of a run that was killed and went on, by the books of its peers and by its log.

What always holds: the trainer's book says what was trained, the servers' what was generated, both written by processes
that the controller can't speak for; the log is read from the disk, by itself. Each function gives what is wrong, in
words; nothing if all is well.
"""

import itertools
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_async.audit.auditor import audit
from areal_async.controller.checkpoints import MARKER
from areal_async.log.reader import read_records
from areal_async.messages import (
    AnyRecord,
    Finish,
    Published,
    ReadGroup,
    SampleDone,
    SampleId,
    Scored,
    StartSample,
    Train,
    group_of,
)
from areal_async.replay.replayed import replay
from areal_async.rollout.order import order
from areal_async.testing.small_run import ROWS, row_of
from areal_async.testing.vllm_server import Entry

Read = TypeVar("Read", bound=msgspec.Struct)


class Line(msgspec.Struct, frozen=True):
    """A line of the trainer's book (`testing.trainer`): one step of one rank."""

    step: int
    branch: int
    rank: int
    groups: tuple[int, ...]
    samples: tuple[SampleId, ...]
    advantages: tuple[float, ...]
    lengths: tuple[int, ...]
    checksum: int
    state: int


@dataclass(frozen=True)
class Wanted:
    """What the run should have done. eta: the bound on ages. faultless: no server or check failed, so nothing was
    asked twice and no sample is missing."""

    steps: int
    batch_groups: int
    group_size: int
    ranks: int
    eta: int
    seed: int
    keep: int = 2
    faultless: bool = True


@dataclass(frozen=True)
class Moment:
    """The books when a controller had died. graded: samples whose reward stood in the log. asked: bytes of the servers'
    book. at_the_end: the run was over, and its last processes may have gone before it."""

    graded: frozenset[SampleId]
    asked: int
    at_the_end: bool = False


def moment(run_dir: Path, server_book: Path) -> Moment:
    """To be taken when the controller is dead."""
    records = list(_records(run_dir))
    graded = frozenset(record.sample for record in records if isinstance(record, Scored))
    asked = server_book.stat().st_size if server_book.exists() else 0
    return Moment(graded, asked, any(isinstance(record, Finish) for record in records))


def has_begun(run_dir: Path) -> bool:
    """Whether a controller has written a record there."""
    return next(_records(run_dir), None) is not None


def read_trainer(book: Path) -> list[Line]:
    return _lines(book.read_bytes() if book.exists() else b"", Line)


def read_servers(book: Path, since: int = 0) -> list[Entry]:
    """What was asked of them for samples, without probes and aborts; since: bytes to leave out."""
    data = book.read_bytes()[since:] if book.exists() else b""
    return [entry for entry in _lines(data, Entry) if not entry.aborted and entry.request_id[:1].isdecimal()]


def surviving(lines: Iterable[Line]) -> list[Line]:
    """A branch takes the place of all older ones from its first step on."""
    kept: list[Line] = []
    for _, branch in itertools.groupby(sorted(lines, key=lambda line: line.branch), key=lambda line: line.branch):
        of_branch = sorted(branch, key=lambda line: (line.step, line.rank))
        kept = [line for line in kept if line.step < of_branch[0].step] + of_branch
    return kept


# ---------------------------------------------------------------------------------------------------- the peers' books


def trained_once(lines: list[Line], wanted: Wanted) -> Iterator[str]:
    """Every step once, by every rank, each sample in one step; nothing is missing."""
    history = surviving(lines)
    parts = [(line.step, line.rank) for line in history]
    complete = [(step, rank) for step in range(wanted.steps) for rank in range(wanted.ranks)]
    if parts != complete:
        yield f"the surviving history has (step, rank) {parts}, not {complete}"
    where: dict[SampleId, int] = {}
    for line in history:
        for sample in line.samples:
            if sample in where:
                yield f"sample {sample} was trained by steps {where[sample]} and {line.step}"
            where[sample] = line.step
    groups = [group for line in history if line.rank == 0 for group in line.groups]
    if len(set(groups)) != wanted.steps * wanted.batch_groups:
        yield f"{len(set(groups))} groups were trained, not {wanted.steps * wanted.batch_groups}"
    if wanted.faultless and len(where) != wanted.steps * wanted.batch_groups * wanted.group_size:
        yield f"{len(where)} samples were trained, not {wanted.steps * wanted.batch_groups * wanted.group_size}"
    seen: set[tuple[int, int, int]] = set()
    for line in lines:
        if (line.step, line.branch, line.rank) in seen:
            yield f"rank {line.rank} was given step {line.step} twice on branch {line.branch}"
        seen.add((line.step, line.branch, line.rank))


def same_batches_again(lines: list[Line]) -> Iterator[str]:
    """A step that was trained again had the same batch, bit for bit."""
    first: dict[tuple[int, int], Line] = {}
    for line in sorted(lines, key=lambda line: line.branch):
        before = first.setdefault((line.step, line.rank), line)
        if msgspec.structs.replace(line, branch=before.branch) != before:
            yield (
                f"step {line.step} of rank {line.rank} was trained on branch {before.branch} with {before.samples}"
                f" (state {before.state}, checksum {before.checksum}), and on branch {line.branch} with {line.samples}"
                f" (state {line.state}, checksum {line.checksum})"
            )


def states_follow(lines: list[Line]) -> Iterator[str]:
    """The weights are those of the surviving steps, one after another: each branch began with the right checkpoint."""
    state = 0
    for step, parts in itertools.groupby(surviving(lines), key=lambda line: line.step):
        ranks = list(parts)
        trained = sorted(pair for line in ranks for pair in zip(line.samples, line.advantages, strict=True))
        state = zlib.crc32(msgspec.json.encode((step, trained)), state)
        if any(line.state != state for line in ranks):
            yield f"after step {step} the trainer's weights are not those of the surviving steps before"
            return


def order_of_data(lines: list[Line], entries: list[Entry], wanted: Wanted) -> Iterator[str]:
    """Which prompts were trained when, from what the servers were asked: the order of the data, each prompt once, and
    with η = 0 exactly the batches of a run that nobody interrupted."""
    position = {row: place for place, row in enumerate(order(ROWS, wanted.seed, 0))}
    rows: defaultdict[int, set[int | None]] = defaultdict(set)
    for entry in entries:
        rows[group_of(sample_asked(entry))].add(row_of(entry.prompt))
    asked: dict[int, int] = {}
    for group, found in rows.items():
        row = next(iter(found))
        if len(found) != 1 or row is None:
            yield f"group {group} was asked with the prompts of rows {found}"
            return
        asked[group] = position[row]
    trained: list[int] = []
    for line in surviving(lines):
        if line.rank == 0:
            batch = [asked[group] for group in line.groups if group in asked]
            plain = list(range(line.step * wanted.batch_groups, (line.step + 1) * wanted.batch_groups))
            if wanted.eta == 0 and wanted.faultless and sorted(batch) != plain:
                yield f"step {line.step} trained positions {batch} of the data, a run without a stop {plain}"
            trained += batch
    if len(trained) != len(set(trained)):
        yield f"a prompt was trained twice: positions {sorted(trained)}"
    skipped = set(range(max(asked.values(), default=-1) + 1)) - set(asked.values())
    if skipped and wanted.faultless:
        yield f"the prompts at positions {sorted(skipped)} were never asked, later ones were"


def not_generated_again(server_book: Path, moments: Iterable[Moment]) -> Iterator[str]:
    """No request for a sample that had its reward when a controller died, nor for its prompt in another group's name
    (a small run asks each row once)."""
    row_asked = {group_of(sample_asked(entry)): row_of(entry.prompt) for entry in read_servers(server_book)}
    for number, then in enumerate(moments):
        later = {sample_asked(entry) for entry in read_servers(server_book, then.asked)}
        graded = {group_of(sample) for sample in then.graded}
        rows = {row_asked[group] for group in graded if group in row_asked}
        renamed = {other for other in later if group_of(other) not in graded and row_asked[group_of(other)] in rows}
        if again := (later & then.graded) | renamed:
            yield f"graded when controller {number} died, and generated again: {', '.join(sorted(again))}"


def asked_once(entries: list[Entry]) -> Iterator[str]:
    """Each attempt of a sample was asked once."""
    seen: set[str] = set()
    for entry in entries:
        if entry.request_id in seen:
            yield f"request {entry.request_id} was made twice"
        seen.add(entry.request_id)


def ages_by_servers(lines: list[Line], entries: list[Entry], wanted: Wanted) -> Iterator[str]:
    """No sample was begun under weights that are older than η at its step. Its last request counts: the one that was
    trained."""
    label = {sample_asked(entry): entry.label for entry in entries}
    for line in surviving(lines):
        for sample in line.samples:
            if label.get(sample, "").isdecimal() and line.step - int(label[sample]) > wanted.eta:
                yield f"step {line.step} trained sample {sample} of version {label[sample]}: older than {wanted.eta}"


def sample_asked(entry: Entry) -> SampleId:
    """Whose request it is: their ids are sample-attempt-turn, and more."""
    return entry.request_id.partition("-")[0]


# ------------------------------------------------------------------------------------------------------------- the log


def nothing_lost(run_dir: Path, lines: list[Line], wanted: Wanted) -> Iterator[str]:
    """Every group that had to be trained by the last step, for its age, was."""
    trained = {group for line in surviving(lines) for group in line.groups}
    newest: dict[int, int] = {}  # of each position, the last group that has its prompt
    floors: dict[int, int] = {}
    for record in _records(run_dir):
        if isinstance(record, ReadGroup):
            newest[record.position] = record.group
        elif isinstance(record, StartSample):
            floors[group_of(record.sample)] = record.floor
    for position, group in newest.items():
        if group not in trained and group in floors and floors[group] + wanted.eta < wanted.steps:
            yield f"group {group} (position {position}, floor {floors[group]}) was never trained"


def graded_once(run_dir: Path) -> Iterator[str]:
    """By the log: whoever has its reward is not started again, nor is its prompt asked for by another group."""
    graded: set[SampleId] = set()
    groups: dict[int, int] = {}  # of each position, the last group that asked for it
    for record in _records(run_dir):
        if isinstance(record, Scored) and record.reward is not None:
            graded.add(record.sample)
        elif isinstance(record, StartSample) and record.sample in graded:
            yield f"sample {record.sample} has its reward, and was started again"
        elif isinstance(record, ReadGroup):
            before = groups.get(record.position)
            if lost := sorted(sample for sample in graded if group_of(sample) == before):
                yield f"group {record.group} asks again for position {record.position}: {lost} have their reward"
            groups[record.position] = record.group


def audited(run_dir: Path) -> Iterator[str]:
    """What `areal-async audit --payloads` finds in the log."""
    report = audit(run_dir / "log", payloads=True)
    if not report.proven:
        yield from (f"audit: {finding}" for finding in report.findings[:5])
        yield from (f"audit: {words}" for words in (report.torn, report.corrupt) if words)


def decided_again(run_dir: Path) -> Iterator[str]:
    """What `areal-async replay` finds in the log."""
    found = replay(run_dir / "log").difference
    if found is not None:
        yield f"replay: event {found.number} ({found.event}): {found.impossible or found.fields or found.recorded}"


def ages_by_log(run_dir: Path, wanted: Wanted) -> Iterator[str]:
    """No trained token is older than η."""
    done: dict[SampleId, SampleDone] = {}
    for record in _records(run_dir):
        if isinstance(record, SampleDone):
            done[record.sample] = record
        elif isinstance(record, Train):
            for entry in record.samples:
                if record.step - done[entry.sample].oldest > wanted.eta:
                    yield f"step {record.step} was given {entry.sample}, oldest version {done[entry.sample].oldest}"


def metrics_complete(run_dir: Path, wanted: Wanted) -> Iterator[str]:
    """A line a step; those of a newer branch stand for the older ones; the balance is right in each."""
    kept: list[int] = []
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        kept = [step for step in kept if step < line["step"]] + [line["step"]]
        ledger = line["ledger"]
        for kind in ("", "samples_"):
            states = ("trained", "filtered", "stale", "failed", "cancelled", "outstanding", "training")
            if ledger[f"{kind}admitted"] != sum(ledger[kind + state] for state in states):
                yield f"step {line['step']}: the ledger doesn't balance: {ledger}"
    if kept != list(range(wanted.steps)):
        yield f"metrics.jsonl has the steps {kept}"


def folder_tidy(run_dir: Path, wanted: Wanted) -> Iterator[str]:
    """The model is the last version's; only whole checkpoints are left, as many as are kept."""
    model = run_dir / "model" / "version"
    if not model.exists() or model.read_text() != str(wanted.steps):
        yield f"{model} doesn't say {wanted.steps}"
    folders = sorted((run_dir / "checkpoints").glob("*")) + sorted((run_dir / "checkpoints").glob(".*"))
    if broken := [folder.name for folder in folders if not (folder / MARKER).exists()]:
        yield f"checkpoints without a marker are left: {broken}"
    if len(folders) > wanted.keep:
        yield f"{len(folders)} checkpoints are left, not {wanted.keep}"


def sockets_left(folder: Path) -> list[Path]:
    """Of children. A controller that is killed before it has started any leaves its folder with its own socket, dead;
    children take the folder away with them, if they live longer than the controller (`Moment.at_the_end`)."""
    return [path for path in folder.glob("*/*") if path.name != "wire.sock"]


def published(run_dir: Path) -> list[Path]:
    """Files of weights that the run has had."""
    return [Path(record.location) for record in _records(run_dir) if isinstance(record, Published)]


def _records(run_dir: Path) -> Iterator[AnyRecord]:
    if (run_dir / "log" / "decisions.log").exists():
        for record in read_records(run_dir / "log", on_torn=lambda _: None):
            yield record.message


def _lines(data: bytes, kind: type[Read]) -> list[Read]:
    """A last line that its writer was killed in is left out."""
    return [msgspec.json.decode(line, type=kind) for line in data.split(b"\n")[:-1]]
