"""The columns of a sample's row in the data: its right answer, for code its tests.

What always holds: only the row that is asked for becomes values; a file that isn't there any more or has changed its
format is a line that says so, and no error; rows that a library makes are those of `made_rows`.
"""

from pathlib import Path
from typing import Final

import msgspec
import yaml

from areal_async.errors import DataError
from areal_async.rollout import parquet, reasoning_gym
from areal_async.rollout.data import decoded, object_of
from areal_async.rollout.values import Json
from areal_async.runfiles import CONFIG
from areal_async.view.made_rows import MadeRows

COMPARED: Final = 30  # characters of a prompt: that it is the same one
MOST_CHARACTERS: Final = 20_000  # of a column: more is no use on a page


def columns_of(
    run_folder: Path, row: int | None, prompt: str | None, missing: list[str], made: MadeRows
) -> dict[str, str]:
    """Columns of row number `row` of the run's data as text, its prompt left out; what isn't text as JSON. Where they
    can't be had, {}, and a line more in `missing` says why. prompt: of the sample, None where it isn't known: a row
    that has another one is shown with a warning."""
    if row is None:
        return {}
    try:
        paths, prompt_key = _data_of(run_folder)
        values = _values(paths, row, made)
    except DataError as error:
        missing.append(f"no columns of the data's row {row}: {error}")
        return {}
    own = values.pop(prompt_key, None)
    if prompt is not None and isinstance(own, str) and _end(own) not in _end(prompt, len(prompt)):
        what = "its package" if any(map(reasoning_gym.is_source, paths)) else "its file"
        missing.append(f"row {row} of the data has another prompt by now: {what} was changed, or prompts are rewritten")
    return {key: _cut(_text(value)) for key, value in values.items()}


def _data_of(run_folder: Path) -> tuple[list[str], str]:
    """Only these keys are read: the configuration may be of another version."""
    path = run_folder / CONFIG
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))["data"]
        named, prompt_key = data["train"], data.get("prompt_key", "prompt")
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError, RecursionError):
        raise DataError(f"{path} names no data.train") from None
    return [str(each) for each in (named if isinstance(named, list) else [named])], str(prompt_key)


def _values(paths: list[str], row: int, made: MadeRows) -> dict[str, Json]:
    """The columns of a row; rows are numbered through the files, one after another."""
    first = 0
    for path in paths:
        if reasoning_gym.is_source(path):
            count = reasoning_gym.parsed(path).size
            if row < first + count:
                return made.row(path, row - first)
        elif parquet.is_parquet(path):
            count = parquet.count(path)
            if row < first + count:
                return parquet.row(path, row - first)
        else:
            line, count = _line(path, row - first)
            if line is not None:
                return {key: decoded(key, raw) for key, raw in object_of(line).items()}
        first += count
    raise DataError(f"{', '.join(paths)}: {first} rows are there; the files have changed")


def _line(path: str, row: int) -> tuple[bytes | None, int]:
    """A row of a JSONL file; or None, and how many rows it has."""
    count = 0
    try:
        with Path(path).open("rb") as file:
            for line in file:
                if not line.strip():
                    continue
                if count == row:
                    return line.removeprefix(b"\xef\xbb\xbf"), count
                count += 1
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from None
    return None, count


def _end(prompt: str, most: int = COMPARED) -> str:
    """What templates, cuts and tokenizers leave of a prompt: its last characters, without spaces and upper case."""
    return "".join(prompt.casefold().split())[-most:]


def _text(value: Json) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}… ({len(text) - MOST_CHARACTERS:,} more characters)"
