"""The finished samples of a run, each as one record: texts, tokens, versions, log-probabilities, verdict, fate.

What always holds: a record says nothing that isn't in the log; which step trained a sample is that of the history that
survives. Records come when their group's life is over for good (released, or over without training), and at the log's
end for all that live on, so memory follows what training may go back to, and not the length of the run. Arrays are read
when their record is made; those that have left the disk are null, and `missing` says why.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, cast, get_args

import msgspec
import numpy as np
import yaml

from areal_async.errors import ConfigError, LogError
from areal_async.log import format as fmt
from areal_async.log import payloads
from areal_async.log.format import PayloadRef, Torn
from areal_async.log.turns import Turn, read_turns, taken
from areal_async.messages import FinishReason, GroupId, Release, SampleId, Verdict, Version
from areal_async.runfiles import CONFIG
from areal_async.trace.life import GroupLife, Outcome, SampleLife
from areal_async.trace.lives import Lives
from areal_async.trace.things import Thing, nearest, wrong
from areal_async.wire.arrays import Array

Decode: TypeAlias = Callable[[list[int]], str]

MODEL_NAME: Final = "model"  # folder of a run's last weights; it has the tokenizer, too
LOST: Final = "missing: the file of its arrays isn't here, and they were never released; `areal-async audit` names it"


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Run clock in seconds. asked: when its group was. started: its last attempt. answered: its last token had come.
    scored: its reward was known. ready: all of its group's were. handed, trained: its step began, was done."""

    asked: float
    started: float
    answered: float
    scored: float | None
    ready: float | None
    handed: float | None
    trained: float | None


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished answer.

    row: of its prompt in the data, from 0. position: in the run's data order. outcome: what became of it; step, branch:
    that trained it (null unless `trained`). lag: step - its oldest token's version. floor: of its group. server: where
    it was placed. prompt, response: texts, special tokens written out; null without a tokenizer. loss_mask, logprobs,
    versions: of `response_ids`, one each. missing: why the arrays are null, or "".
    """

    id: SampleId
    group: GroupId
    member: int
    attempt: int
    row: int | None
    position: int
    outcome: Outcome
    step: int | None
    branch: int | None
    advantage: float | None
    lag: int | None
    verdict: Verdict | None
    reward: float | None
    finish: FinishReason
    prompt_tokens: int
    response_tokens: int
    oldest: Version
    newest: Version
    floor: Version | None
    server: str
    times: Times
    prompt: str | None
    response: str | None
    prompt_ids: list[int] | None
    response_ids: list[int] | None
    loss_mask: list[int] | None
    logprobs: list[float] | None
    versions: list[int] | None
    missing: str


class Wanted(NamedTuple):
    """Which samples: () and None are all. step: that trained them."""

    things: tuple[Thing, ...] = ()
    step: int | None = None
    verdicts: tuple[Verdict, ...] = ()

    def has(self, group: GroupLife, sample: SampleLife) -> bool:
        if self.step is not None and (group.step != self.step or group.outcome(sample) != "trained"):
            return False
        if self.verdicts and sample.verdict not in self.verdicts:
            return False
        return not self.things or any(_is_of(thing, group, sample) for thing in self.things)


def verdict_named(text: str) -> Verdict:
    """Errors: ConfigError: there is no such verdict."""
    for verdict in get_args(Verdict):
        if verdict == text:
            return cast(Verdict, verdict)
    raise wrong(f"--verdict {text}: there is no such verdict; they are {nearest(text, get_args(Verdict))}")


def _is_of(thing: Thing, group: GroupLife, sample: SampleLife) -> bool:
    match thing.kind:
        case "group":
            return thing.name == str(group.id)
        case "sample":
            return thing.name == sample.id
        case "server":
            return thing.name == sample.server
        case "step":
            return thing.name == str(group.step) and group.outcome(sample) == "trained"
    return False


def read_samples(
    folder: Path,
    wanted: Wanted,
    decode: Decode | None,
    on_torn: Callable[[Torn], None],
    on_read: Callable[[int], None],
) -> Iterator[SampleRecord]:
    """Those of the log folder that are wanted, as their groups are over. on_read: is told how far the decision log was
    read, in bytes. Raises LogError."""
    recorded = read_turns(folder, on_torn)
    if recorded is None:
        return
    lives, released = Lives(recorded.rules), set[SampleId]()
    with Assembler(folder, decode) as assembler:
        for turn, finished in taken(folder, recorded.turns, lambda turn: list(_finished(lives, turn))):
            for command in turn.commands:
                if isinstance(command, Release):
                    released.update(command.samples)
            for group, sample in finished:
                released.discard(sample.id)
                if wanted.has(group, sample):
                    yield assembler.record(group, sample)
            if not turn.number % 256:
                on_read(turn.offset)
        for group in lives.rest():
            for sample in group.samples:
                if sample.done is not None and wanted.has(group, sample):
                    record = assembler.record(group, sample)
                    if record.missing and sample.id not in released:
                        record = msgspec.structs.replace(record, missing=LOST)
                    yield record


def _finished(lives: Lives, turn: Turn) -> Iterator[tuple[GroupLife, SampleLife]]:
    for group in lives.take(turn):
        for sample in group.samples:
            if sample.done is not None:
                yield group, sample


class Assembler:
    """Makes records; one payload segment is open at a time. Use it as a context manager."""

    def __init__(self, folder: Path, decode: Decode | None) -> None:
        self._folder = folder
        self._decode = decode
        self._segment = -1
        self._fd = -1

    def __enter__(self) -> "Assembler":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def record(self, group: GroupLife, sample: SampleLife) -> SampleRecord:
        """Of a sample whose answer has come (`sample.done`). Raises LogError: its arrays are damaged."""
        done = sample.done
        assert done is not None, "only an answer that has come has a record"
        arrays, missing = self.arrays(sample)
        ids, mask, logprobs, versions = arrays if arrays is not None else (None, None, None, None)
        count, outcome = done.prompt_tokens, group.outcome(sample)
        prompt = None if ids is None else ids[:count].tolist()
        response = None if ids is None else ids[count:].tolist()
        trained = outcome == "trained"
        return SampleRecord(
            id=sample.id,
            group=group.id,
            member=int(sample.id.partition(".")[2]),
            attempt=done.attempt,
            row=group.row,
            position=group.position,
            outcome=outcome,
            step=group.step if trained else None,
            branch=group.branch if trained else None,
            advantage=sample.advantage,
            lag=group.step - done.oldest if trained and group.step is not None else None,
            verdict=sample.verdict,
            reward=sample.reward,
            finish=done.finish,
            prompt_tokens=count,
            response_tokens=done.length,
            oldest=done.oldest,
            newest=done.newest,
            floor=group.floor,
            server=sample.server,
            times=Times(
                asked=group.asked_at,
                started=sample.started_at,
                answered=done.at,
                scored=sample.scored_at,
                ready=group.ready_at,
                handed=group.handed_at,
                trained=group.trained_at,
            ),
            prompt=self._text(prompt),
            response=self._text(response),
            prompt_ids=prompt,
            response_ids=response,
            loss_mask=None if mask is None else mask[count:].tolist(),
            logprobs=None if logprobs is None else _shortest(logprobs[count:]),
            versions=None if versions is None else versions[count:].tolist(),
            missing=missing,
        )

    def _text(self, token_ids: list[int] | None) -> str | None:
        return None if token_ids is None or self._decode is None else self._decode(token_ids)

    def arrays(self, sample: SampleLife) -> tuple[list[Array] | None, str]:
        """Token ids, loss mask, log-probabilities, versions of prompt and answer; or why there are none. Raises
        LogError: they are damaged."""
        ref, done = sample.payload, sample.done
        if ref is None or done is None:
            return None, "the log refers to no arrays of it"
        path = fmt.payload_path(self._folder, ref.segment)
        if not self._open(ref.segment, path):
            return None, f"released: {path.name} was deleted when nobody could ask for its samples again"
        found = self._read(path, ref)
        if (found.sample, found.attempt) != (sample.id, done.attempt):
            raise LogError(
                f"{path}: at offset {ref.offset} lies sample {found.sample}, attempt {found.attempt}, where the log has"
                f" sample {sample.id}, attempt {done.attempt}; `areal-async audit` says more"
            )
        lengths = [len(array) for array in found.arrays]
        if lengths != [done.prompt_tokens + done.length] * 4:
            raise LogError(
                f"{path}: at offset {ref.offset} sample {sample.id} has arrays of {lengths}, where the log says"
                f" {done.prompt_tokens} + {done.length} tokens; `areal-async audit --payloads` says more"
            )
        return found.arrays, ""

    def _read(self, path: Path, ref: PayloadRef) -> payloads.Payload:
        return payloads.decode(path, ref, payloads.read_at(self._fd, path, ref))

    def _open(self, segment: int, path: Path) -> bool:
        """Whether there is such a file; it is open then."""
        if segment == self._segment:
            return self._fd >= 0
        self._close()
        self._segment = segment
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise LogError(f"{path}: payload segment {segment} can't be read: {error.strerror}") from None
        return True

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _shortest(values: Array) -> list[float]:
    """As float64 that a float32 reader rounds to the very same value, with as few digits as that takes."""
    whole: list[float] = np.char.mod("%.9g", values).astype(np.float64).tolist()
    return whole


# ------------------------------------------------------------------------------------------------------- the tokenizer


def find_decoder(folder: Path) -> tuple[Decode | None, str]:
    """Token ids to text, by the tokenizer of the run's model; None, and why, where it isn't to be had."""
    root = folder.parent if folder.name == "log" else folder
    tried = []
    for model in (_model_path(root), root / MODEL_NAME):
        if model is None:
            tried.append(f"{root / CONFIG} names no model.path")
        elif not (model / "tokenizer.json").is_file():
            tried.append(f"{model} holds no tokenizer.json")
        else:
            return _decoder(model)
    return None, "; ".join(tried)


def _decoder(model: Path) -> tuple[Decode | None, str]:
    from areal_async.rollout.text import Text

    try:
        return Text(str(model)).decode_all, ""
    except ConfigError as error:
        return None, str(error)


def _model_path(root: Path) -> Path | None:
    """Only this key is read: the configuration may be of another version."""
    try:
        settings = yaml.safe_load((root / CONFIG).read_text(encoding="utf-8"))
        return Path(settings["model"]["path"])
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):
        return None
