"""Problems to train on: JSONL and Parquet files, each row checked.

What always holds: each row has a number of its own, whatever columns it has, so two rows with the same `id` are never
taken for one another. Columns beside prompt and answer come through as they are written: nothing is filled in, dropped
or made of one shape (what a Parquet table filled in with null is left out again: `parquet`). Every error names file and
line (of a Parquet file: the row). The order in which rows are asked is made in `order`.
"""

import bisect
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from areal_async.errors import DataError
from areal_async.rollout import parquet, reasoning_gym
from areal_async.rollout.values import Json

Message: TypeAlias = dict[str, Json]
PromptValue: TypeAlias = str | tuple[Message, ...]

ERRORS_SHOWN: Final = 10  # of one file; more would bury the first


class Row(msgspec.Struct, frozen=True):
    """One problem.

    line: in the file, from 1; of a Parquet file the row. prompt: text, or chat messages. answer: the right one as text;
    a number is the text that was written (`0.10` stays "0.10"). columns: all other columns, each a value in msgpack
    (what the wire speaks: `msgspec.msgpack.decode(raw)` gives it back).
    """

    line: int
    prompt: PromptValue
    answer: str | None
    columns: dict[str, msgspec.Raw]


class Dataset:
    """The rows of one file or several, file after file; a row's number is its index in `rows`."""

    def __init__(self, paths: Sequence[str], files: Sequence[range], rows: Sequence[Row]) -> None:
        """files: numbers of the rows of each path, one range after another."""
        self.paths: Final = tuple(paths)
        self.files: Final = tuple(files)
        self.rows: Final = rows

    @classmethod
    def load(cls, path: str, prompt_key: str, answer_key: str) -> "Dataset":
        """Read one file. Errors: as `load_all`."""
        return cls.load_all((path,), prompt_key, answer_key)

    @classmethod
    def load_all(cls, paths: Sequence[str], prompt_key: str, answer_key: str) -> "Dataset":
        """Read JSONL files (blank lines are skipped) and Parquet files, told apart by how they begin; a path that is
        `reasoning_gym:…` has its problems made.

        Errors: DataError, a line `file:line: what` for each wrong line (the first ten of a file); or `file: what`.
        """
        rows: list[Row] = []
        files: list[range] = []
        wrong: list[str] = []
        for path in paths:
            first = len(rows)
            try:
                rows += _file(path, prompt_key, answer_key)
            except DataError as error:
                wrong.append(str(error))
            files.append(range(first, len(rows)))
        if wrong:
            raise DataError("\n".join(wrong))
        return cls(paths, files, rows)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int) -> str:
        """`data/train.jsonl:17`."""
        file = bisect.bisect_right(self.files, row, key=lambda rows: rows.start) - 1
        return f"{self.paths[file]}:{self.rows[row].line}"


def _file(path: str, prompt_key: str, answer_key: str) -> list[Row]:
    if reasoning_gym.is_source(path):
        made = reasoning_gym.rows(path)
        return [_of_values(number, values, "prompt", "answer") for number, values in enumerate(made, 1)]
    rows: list[Row] = []
    wrong: list[str] = []
    in_parquet = parquet.is_parquet(path)
    for number, row in (_parquet if in_parquet else _jsonl)(path, prompt_key, answer_key):
        if isinstance(row, DataError):
            wrong.append(f"{path}:{number}: {row}")
        else:
            rows.append(row)
    if wrong:
        more, kind = len(wrong) - ERRORS_SHOWN, "rows" if in_parquet else "lines"
        raise DataError("\n".join(wrong[:ERRORS_SHOWN] + [f"{path}: and {more} more such {kind}"] * (more > 0)))
    if not rows:
        raise DataError(f"{path}: holds no rows" + ("" if in_parquet else "; a JSONL file has one JSON object a line"))
    return rows


# ------------------------------------------------------------------------------------------------------ reading lines


def _jsonl(path: str, prompt_key: str, answer_key: str) -> Iterator[tuple[int, Row | DataError]]:
    """Rows, and what is wrong with the others, with their line numbers from 1."""
    for number, line in _lines(path):
        try:
            yield number, _of_line(number, line, prompt_key, answer_key)
        except DataError as error:
            yield number, error


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """The lines that aren't blank, with their numbers from 1."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error
    if data[:1] == b"[":
        raise DataError(
            f"{path}:1: begins a JSON list; a JSONL file has one JSON object a line, without commas between"
        )
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield number, line


_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY: Final = msgspec.json.Decoder()


def object_of(line: bytes) -> dict[str, msgspec.Raw]:
    """The columns of a line, each as it was written. Errors: DataError."""
    try:
        line.decode()  # the decoder passes over bytes that aren't text inside values it doesn't look at
        return _OBJECT.decode(line)
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text (byte {error.start + 1})") from error
    except msgspec.ValidationError as error:
        raise DataError("not a JSON object; a row is {…} with a key for each column") from error
    except msgspec.DecodeError as error:
        raise DataError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise DataError("nested too deeply") from error


def _of_line(number: int, line: bytes, prompt_key: str, answer_key: str) -> Row:
    values = object_of(line)
    if prompt_key not in values:
        raise DataError(_no_column(prompt_key, "data.prompt_key", values))
    prompt = _prompt(decoded(prompt_key, values.pop(prompt_key)), prompt_key)
    answer = None
    if answer_key in values:
        raw = values.pop(answer_key)
        answer = answer_text(decoded(answer_key, raw), answer_key, written=bytes(raw).decode().strip())
    return Row(number, prompt, answer, {key: packed(key, decoded(key, raw)) for key, raw in values.items()})


def decoded(key: str, raw: msgspec.Raw) -> Json:
    try:
        value: Json = _ANY.decode(raw)
    except msgspec.DecodeError as error:
        raise DataError(f"column {key!r}: not JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"column {key!r}: nested too deeply") from error
    return value


# ------------------------------------------------------------------------------------------------------- Parquet rows


def _parquet(path: str, prompt_key: str, answer_key: str) -> Iterator[tuple[int, Row | DataError]]:
    """The same of a Parquet file, rows counted from 1."""
    for number, values in parquet.rows(path):
        try:
            yield number, _of_values(number, values, prompt_key, answer_key)
        except DataError as error:
            yield number, error


def _of_values(number: int, values: dict[str, Json], prompt_key: str, answer_key: str) -> Row:
    if prompt_key not in values:
        raise DataError(_no_column(prompt_key, "data.prompt_key", values))
    prompt = _prompt(values.pop(prompt_key), prompt_key)
    answer = values.pop(answer_key, None)
    return Row(
        number,
        prompt,
        answer_text(answer, answer_key, written=str(answer)),
        {key: packed(key, value) for key, value in values.items()},
    )


# ------------------------------------------------------------------------------------------------------- what a row is


def _no_column(key: str, option: str, values: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(key, list(values), 1) or [
        name for name in ("question", "messages", "problem", "input") if name in values
    ]
    known = f"set {option} if it is {close[0]!r}" if close else f"it has {', '.join(values) or 'none'}"
    return f"no column {key!r}; {known}"


def packed(key: str, value: Json) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.msgpack.encode(value))
    except OverflowError as error:
        raise DataError(f"column {key!r}: a whole number of more than 64 bits; write it as text, in quotes") from error
    except TypeError as error:  # of Parquet's types those that msgpack has no form for
        raise DataError(f"column {key!r}: {error}; write it as text") from error


def answer_text(value: Json, key: str, written: str) -> str | None:
    match value:
        case None | str():
            return value
        case bool() | list() | dict():
            raise DataError(
                f"column {key!r} must be text or a number; what has more to it goes into another column: "
                "reward functions get them all"
            )
        case _:
            return written


def _prompt(value: Json, key: str) -> PromptValue:
    if isinstance(value, str):
        if not value:
            raise DataError(f"column {key!r} is empty")
        return value
    if not isinstance(value, list):
        raise DataError(f"column {key!r} must be text or a list of messages")
    if not value:
        raise DataError(f"column {key!r} is a list without messages")
    messages = tuple(_message(message, f"{key}[{i}]") for i, message in enumerate(value))
    if messages[-1]["role"] == "assistant":
        raise DataError(f"the last message of {key!r} is the assistant's: nothing is left to be answered")
    return messages


def _message(value: Json, key: str) -> Message:
    """Keys that are null are left out: tables fill them in, and chat templates ask whether a key is there."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f'{key} must be a message such as {{"role": "user", "content": "…"}}')
    content = value.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise DataError(f"{key} has content that isn't text; only text is supported")
    elif not isinstance(content, str):
        raise DataError(f"{key} has no content that is text")
    return {name: part for name, part in value.items() if part is not None}
