"""What a controller has to know to go on with a run that has ended: all of it is in the run's folder.

There is no second record of the core's state: a fresh core is led through the log, event by event, and must give the
commands that stand there. Then it is told `RolledBack(resumed=…)`, which is the only thing that is special about a
resume.

What always holds: nothing is changed in the folder before everything has been found right; a refusal says in one line
what is wrong and what to do; after the resume the log reads as if one controller had written it (the commands that the
end has cut off are written first).
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from areal_async.config import Config
from areal_async.controller import checkpoints
from areal_async.controller.checkpoints import CheckpointState
from areal_async.controller.samples import Samples
from areal_async.core import resuming as rules_of_resuming
from areal_async.core.orchestrator import Orchestrator
from areal_async.environment import environment
from areal_async.errors import ConfigError, LogError
from areal_async.log import format as fmt
from areal_async.log.turns import read_turns
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    CheckpointDone,
    Finish,
    Note,
    RolledBack,
    Rules,
    Score,
    Version,
)
from areal_async.replay.deciding import Difference, begin, decide
from areal_async.rollout.training_data import TrainingData

logger = logging.getLogger("areal_async")

Fact: TypeAlias = str | int | float | bool | None

RUN: Final = "run"  # the note that a run begins with
RESUMED: Final = "resumed"  # the note that each resume begins with
SAVED: Final = "model_saved"  # the note that it ends with
_WHOLE_BYTES: Final = 64 << 20  # of a file: larger ones are compared by their size and both ends
_END_BYTES: Final = 1 << 20
_MODEL_FILES: Final = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
    "tokenizer.model", "*.safetensors", "*.bin",
)  # fmt: skip


# ----------------------------------------------------------------------------------------- what a run is known again by


def about(config: Config, number: int, data: TrainingData) -> Note:
    """The note that a run begins with. number: of the configuration (`runfiles`)."""
    facts = _identity(config, data)
    return Note(at=0.0, what=RUN, data={"name": config.name, "config": number, **environment(), **facts})


def resumed_with(number: int, at: float) -> Note:
    """The note that a resume begins with. number: of the configuration from here on. at: run clock."""
    return Note(at=at, what=RESUMED, data={"config": number, **environment()})


def _identity(config: Config, data: TrainingData) -> dict[str, Fact]:
    """What may not be another at a resume, beside the rules. Files count by what is in them, so they may be moved."""
    options = {name: getattr(config.data, name) for name in config.data.__struct_fields__ if name not in _FILES}
    return {
        "model.path": digest_of_model(Path(config.model.path)),
        "model.dtype": config.model.dtype,
        "data.train": digest_of_data(data),
        **{f"data.{name}": str(value) if isinstance(value, tuple) else value for name, value in options.items()},
        "the longest prompt in tokens": data.limit,
        "prompts left out": data.left_out,
    }


_DIGESTS: Final = ("model.path", "data.train")
_FILES: Final = ("train", "eval")  # named by their path; of `train` the content counts, `eval` may change


def digest_of_data(data: TrainingData) -> str:
    """Of all rows, in their order: prompts, answers and columns, whatever file they came from."""
    digest = hashlib.blake2b(digest_size=16)
    encoder = msgspec.msgpack.Encoder()
    digest.update(encoder.encode([len(rows) for rows in data.dataset.files]))
    for row in data.dataset.rows:
        digest.update(encoder.encode((row.prompt, row.answer, row.columns)))
    return f"{len(data.dataset)} rows {digest.hexdigest()}"


def digest_of_model(folder: Path) -> str:
    """Of the files in a model's folder that say what it computes and how text becomes tokens, by their contents."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(size if size <= _WHOLE_BYTES else _END_BYTES))
            if size > _WHOLE_BYTES:
                file.seek(size - _END_BYTES)
                digest.update(file.read())
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------------- the log read


@dataclass
class Past:
    """What the log of a run says. rules: the newest. missing: commands of the last event that the end has cut off.
    ended: the run clock at its end. checkpoints: that the surviving history has made, with their branch."""

    core: Orchestrator
    rules: Rules
    about: dict[str, Fact] = field(default_factory=dict)
    missing: tuple[AnyCommand, ...] = ()
    ended: float = 0.0
    events: int = 0
    checkpoints: dict[Version, int] = field(default_factory=dict)
    finish: Finish | None = None
    saved: bool = False


def read(folder: Path, samples: Samples) -> Past | None:
    """Lead a core, and `samples`, through the log in `folder`; None: nothing is in it. Errors: LogError: corrupt, or
    not what this core would have decided."""
    recorded = read_turns(folder, on_torn=lambda _: None)  # whoever opened the log has cut the end, and said so
    if recorded is None:
        return None
    past = Past(begin(folder, recorded.rules), recorded.rules)
    for note in recorded.notes:
        _read_note(past, note)
    for decided in decide(past.core, recorded.turns):
        turn, commands, difference = decided
        if difference is not None:
            raise _refused(folder / fmt.DECISIONS_NAME, difference)
        samples.seen(turn.event, commands)
        _follow(past, turn.event, commands)
        for note in turn.notes:
            _read_note(past, note)
        past.missing = decided.missing
    return past


def _follow(past: Past, event: AnyEvent, commands: Sequence[AnyCommand]) -> None:
    past.events += 1
    past.ended = max(past.ended, event.at)
    match event:
        case CheckpointDone():
            past.checkpoints[event.version] = event.branch
        case RolledBack():
            past.checkpoints = {version: b for version, b in past.checkpoints.items() if version <= event.to}
            past.finish, past.saved = None, False
            past.rules = event.resumed or past.rules
    for command in commands:
        if isinstance(command, Finish):
            past.finish = command


def _read_note(past: Past, note: Note) -> None:
    past.ended = max(past.ended, note.at)
    if note.what == RUN:
        past.about = {key: value for key, value in note.data.items() if not isinstance(value, tuple)}
    elif note.what == SAVED:
        past.saved = True


def _refused(path: Path, found: Difference) -> LogError:
    """The first place where the log isn't what this core would have decided."""
    if found.impossible:
        return LogError(f"{path}: the event at offset {found.offset} can't have happened: {found.impossible}")
    recorded, expected = found.recorded or "no further command", found.expected or "no further command"
    return LogError(
        f"{path}: at offset {found.found_at} the log has\n  {recorded}\nwhere this areal-async gives\n  {expected}\n"
        f"after the event\n  {found.event}\nThe run was made by another version of areal-async, or the log was "
        f"changed; it can't be resumed (areal-async replay tells more). {found.waiting}"
    )


# ------------------------------------------------------------------------------------------------------- where to go on


class Resumed(NamedTuple):
    """core: as it was at the end. version: that training goes back to. ended: run clock at the end. missing: commands
    that the end has cut off. has_about: whether the log has the note that a run begins with. in_words: the run and the
    checkpoint."""

    core: Orchestrator
    version: Version
    ended: float
    missing: tuple[AnyCommand, ...]
    has_about: bool
    in_words: str


def resume(root: Path, samples: Samples, config: Config, data: TrainingData) -> Resumed | None:
    """Find out how to go on with the run in the folder `root`; None: it ended before anything was recorded, and may
    begin. Errors: LogError, ConfigError: why that can't be."""
    past = read(root / "log", samples)
    if past is None:
        return None
    finish = past.finish
    if finish is not None and finish.reason != "stopped" and past.saved:
        ended = {"steps_done": "all steps are done", "data_ended": "the data ended"}[finish.reason]
        raise ConfigError(f"{root}: {ended}: nothing to resume; the model is in {root / 'model'}")
    wrong = [*rules_of_resuming.refusals(past.rules, config.rules), *_other_things(past, config, data)]
    if wrong:
        raise ConfigError("\n".join(f"{root}: {why}" for why in wrong))
    version, state = _newest(past, root / "checkpoints")
    words = _in_words(past, root, version, state)
    return Resumed(past.core, version, past.ended, past.missing, bool(past.about), words)


def _other_things(past: Past, config: Config, data: TrainingData) -> Iterator[str]:
    for key, now in _identity(config, data).items():
        before = past.about.get(key)
        if past.about and before != now:
            change = "other files" if key in _DIGESTS else f"{before} before, {now} now"
            yield f"{key}: {change}: the run's tokens and the order of its data can't be others; start a new run"


def _newest(past: Past, folder: Path) -> tuple[Version, CheckpointState | None]:
    """Where training can go back to: the newest checkpoint that the log knows and that is whole on the disk, or the
    run's first weights."""
    told = []
    for version in past.core.returns:
        if version not in past.checkpoints:
            return version, None
        state = checkpoints.read_state(checkpoints.folder_of(folder, version))
        if state is not None and (state.version, state.branch) == (version, past.checkpoints[version]):
            return version, state
        told.append(f"step-{version}")
    if told:
        why = f"of its checkpoints ({', '.join(told)}) none is whole in {folder}"
    else:
        why = "it has made no checkpoint (checkpoint.every_steps, checkpoint.every_minutes)"
    raise ConfigError(f"{folder.parent}: can't be resumed: {why}, and what its first steps were trained on is gone")


def _in_words(past: Past, root: Path, version: Version, state: CheckpointState | None) -> str:
    place = f"version {version}"
    if state is not None:
        old_s = time.time() - datetime.fromisoformat(state.written).timestamp()
        place += f" (step-{version}, {_old(old_s)} old)"
    return f"resuming {root}: {past.events:,} events, {place}"


def kept_in_words(core: Orchestrator, version: Version, commands: Sequence[AnyCommand]) -> str:
    """What of the run goes on. core, commands: after the resume was told to it."""
    view = core.view()
    finished = view.balance["samples_outstanding"] - view.held
    checked = sum(isinstance(command, Score) for command in commands)
    return (
        f"{core.step - version} step(s) are trained again; of the samples after them {finished} finished ones are kept "
        f"({checked} are checked again), {view.held} start again"
    )


def _old(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
