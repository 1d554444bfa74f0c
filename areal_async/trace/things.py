"""What an id on the command line names, and which records of a log are about it.

    12  "group 12"       the group, and its samples          server 0, server-0   a server, by its name
    12.3                 a sample                            rewards.0            a reward worker
    step 6, step-6       a training step                     trainer              the trainer

What always holds: a bare number is a group (servers have numbers for names, too: those are written with `server`).
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from areal_async.errors import ConfigError
from areal_async.messages import AnyRecord, Failed, Note, Rules, StepDone, Train
from areal_async.replay.naming import named

ThingKind: TypeAlias = Literal["group", "sample", "server", "worker", "step", "trainer"]

LONGEST: Final = 18  # digits of a number: no run has more of anything
_PREFIXED: Final = re.compile(r"(group|sample|server|step|worker|reward worker)[ :-]+(.+)", re.IGNORECASE)
_WORKER: Final = re.compile(r"rewards\.\d+")
_SAMPLE: Final = re.compile(r"\d+\.\d+")
_WORDS: Final = "such as 12 (a group), 12.3 (a sample), 'step 6', 'server 0', rewards.0, trainer"


@dataclass(frozen=True)
class Thing:
    """name: without the word in front. label: as people call it."""

    kind: ThingKind
    name: str

    @property
    def label(self) -> str:
        match self.kind:
            case "trainer":
                return "trainer"
            case "worker":
                return f"reward worker {self.name}"
            case kind:
                return f"{kind} {self.name}"

    def is_in(self, record: AnyRecord) -> bool:
        """Whether a record is about it; of a group also what is about its samples."""
        match record:
            case Rules():
                return False
            case Note():
                return self._is_noted(record)
            case _ if self.kind == "step":
                return self._is_step_of(record)
        label, members = self.label, f"sample {self.name}." if self.kind == "group" else "\n"
        return any(each == label or each.startswith(members) for each in named(record))

    def _is_step_of(self, record: AnyRecord) -> bool:
        match record:
            case Train() | StepDone():
                return record.step == int(self.name)
            case Failed(of="train"):
                return record.id == self.name
        return False

    def _is_noted(self, note: Note) -> bool:
        sample = str(note.data.get("sample", ""))
        match self.kind:
            case "sample":
                return sample == self.name
            case "group":
                return sample.startswith(f"{self.name}.")
            case "server":
                return self.name in (note.data.get("from"), note.data.get("to"))
        return False


def thing(text: str, command: str = "trace") -> Thing:
    """command: for the error. Errors: ConfigError: it can be no id."""
    text = text.strip()
    if not text:
        raise wrong(f"an id is empty; name one, {_WORDS}", command)
    if match := _PREFIXED.fullmatch(text):
        word, name = match[1].lower(), match[2].strip()
        kind: ThingKind = "worker" if "worker" in word else word  # type: ignore[assignment]
    elif text == "trainer":
        return Thing("trainer", "trainer")
    elif text.isdecimal():
        kind, name = "group", text
    elif _SAMPLE.fullmatch(text):
        kind, name = "sample", text
    elif _WORKER.fullmatch(text):
        kind, name = "worker", text
    else:
        kind, name = "server", text
    if kind in ("group", "step") and not name.isdecimal():
        raise wrong(f"{text!r} is no {kind}: its number is missing", command)
    if kind == "sample" and not _SAMPLE.fullmatch(name):
        raise wrong(f"{text!r} is no sample: name group and member, such as 12.3", command)
    if kind in ("group", "step", "sample") and max(map(len, name.split("."))) > LONGEST:
        raise wrong(f"{kind} {name[:LONGEST]}…: no run has as many", command)
    if kind == "sample":
        group, _, member = name.partition(".")
        return Thing("sample", f"{int(group)}.{int(member)}")
    return Thing(kind, str(int(name)) if kind in ("group", "step") else name)


def wrong(what: str, command: str = "trace") -> ConfigError:
    return ConfigError(f"command line: {command}: {what}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The names most like this one, for an error; "" if there are none at all."""
    names = sorted(known)
    return ", ".join(difflib.get_close_matches(name, names, cutoff=0.0) if len(names) > 8 else names)
