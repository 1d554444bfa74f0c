"""What a run was made with: versions, host, processor and GPUs, as its own folder tells them.

What always holds: only what the run itself wrote down is told, with where it stands; a run of an older areal-async,
which wrote down less, has less.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from areal_async.controller import status
from areal_async.errors import ConfigError, LogError
from areal_async.log.turns import read_turns
from areal_async.messages import Note

NAMES: Final = {
    "python": "Python",
    "areal_async": "areal-async",
    "vllm": "vLLM",
    "torch": "torch",
    "deepspeed": "DeepSpeed",
    "transformers": "transformers",
    "plotly": "plotly",
    "host": "host",
    "system": "system",
    "cpu": "processor",
    "gpu": "GPUs",
}  # of `environment.environment`, for people, in their order
_BANNER: Final = re.compile(rb"version (\d[0-9A-Za-z.+]{0,30})")  # of a vLLM server, on its first lines
_BANNER_BYTES: Final = 1 << 14


class Made(msgspec.Struct, frozen=True):
    """at: since when, in words. facts: [name, what it is]."""

    at: str
    facts: list[tuple[str, str]]


def in_words(facts: Mapping[str, object]) -> list[tuple[str, str]]:
    """Those of `NAMES`, in its order."""
    return [(words, str(facts[name])) for name, words in NAMES.items() if name in facts]


def made_with(folder: Path, log_folder: Path) -> list[Made]:
    """From the run's beginning on, and after each resume that changed something."""
    made: list[Made] = []
    for note in _notes(log_folder):
        facts = in_words({**note.data})
        if note.what == "run":
            made.append(Made("at its beginning", facts))
        elif not made or facts != made[-1].facts:
            made.append(Made(f"resumed at {note.at:.0f} s of its clock", facts))
    further = list(_elsewhere(folder, {name for each in made for name, _ in each.facts}))
    return [*made, *([Made("from other files of its folder", further)] if further else [])]


def _notes(log_folder: Path) -> Iterator[Note]:
    """Those that tell it, as far as the log can be read."""
    try:
        recorded = read_turns(log_folder, on_torn=lambda _: None)
        if recorded is None:
            return
        for note in recorded.notes:
            if note.what in ("run", "resumed"):
                yield note
        for turn in recorded.turns:
            for note in turn.notes:
                if note.what == "resumed":
                    yield note
    except LogError:
        return  # the page tells what is wrong with it


def _elsewhere(folder: Path, known: set[str]) -> Iterator[tuple[str, str]]:
    if NAMES["vllm"] not in known:
        for path in sorted(folder.glob("stderr/server-*.log")):
            try:
                with path.open("rb") as file:
                    found = _BANNER.search(file.read(_BANNER_BYTES))
            except OSError:
                continue
            if found is not None:
                yield NAMES["vllm"], f"{found[1].decode()} (stderr/{path.name})"
                break
    if NAMES["host"] not in known:
        try:
            told = status.read(folder)
        except ConfigError:
            return
        if told is not None:
            yield NAMES["host"], f"{told.host} (status.json)"
