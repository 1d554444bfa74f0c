"""Problems to train on: JSONL files, and the order in which a run goes through them.

What always holds: each line is one row with a number of its own, whatever columns it has, so two rows with the same
`id` are never taken for one another. Columns beside prompt and answer come through as they are written: nothing is
filled in, dropped or made of one shape. Every error names file and line. The order is a pure function of the number
of rows, the seed and the epoch.
"""

import difflib
import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from areal_async.errors import DataError

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Message: TypeAlias = dict[str, Json]
PromptValue: TypeAlias = str | tuple[Message, ...]

ERRORS_SHOWN: Final = 10  # of one file; more would bury the first
EPOCHS_KEPT: Final = 2  # a retry reaches back over an epoch's border, seldom further


class Row(msgspec.Struct, frozen=True):
    """One problem.

    line: in the file, from 1. prompt: text, or chat messages. answer: the right one as text; a number is the text that
    was written (`0.10` stays "0.10"). columns: all other columns, each a value in msgpack (what the wire speaks:
    `msgspec.msgpack.decode(raw)` gives it back).
    """

    line: int
    prompt: PromptValue
    answer: str | None
    columns: dict[str, msgspec.Raw]


class Dataset:
    """The rows of a file, in its order; a row's number is its index in `rows`."""

    def __init__(self, path: str, rows: Sequence[Row]) -> None:
        self.path: Final = path
        self.rows: Final = rows

    @classmethod
    def load(cls, path: str, prompt_key: str, answer_key: str) -> "Dataset":
        """Read a JSONL file; blank lines are skipped.

        Errors: DataError, a line `file:line: what` for each wrong line (the first ten); or `file: what`.
        """
        rows: list[Row] = []
        wrong: list[str] = []
        for number, line in _lines(path):
            try:
                rows.append(_row(number, line, prompt_key, answer_key))
            except DataError as error:
                wrong.append(f"{path}:{number}: {error}")
        if wrong:
            more = len(wrong) - ERRORS_SHOWN
            raise DataError("\n".join(wrong[:ERRORS_SHOWN] + ([f"{path}: and {more} more such lines"] * (more > 0))))
        if not rows:
            raise DataError(f"{path}: holds no rows; a JSONL file has one JSON object a line")
        return cls(path, rows)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int) -> str:
        """`data/train.jsonl:17`."""
        return f"{self.path}:{self.rows[row].line}"


def order(n: int, seed: int, epoch: int) -> Sequence[int]:
    """A shuffled range(n): the order of the rows in this epoch (from 0).

    Fisher and Yates's shuffle over the numbers of a Mersenne Twister (MT19937) that is seeded by SHA-256 of
    "seed/epoch". Of Python's generator only `random()` is used: it is the one method that the library promises to keep
    the same for a given seed; `random.shuffle` has changed between versions.
    """
    seeded = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    draw = random.Random(int.from_bytes(seeded, "big")).random
    rows = list(range(n))
    for last in range(n - 1, 0, -1):
        other = int(draw() * (last + 1))
        rows[last], rows[other] = rows[other], rows[last]
    return rows


class Positions:
    """Which row stands at a position of the run, epochs one after another. A function of its arguments alone."""

    def __init__(self, n: int, seed: int, shuffle: bool, epochs: int | None) -> None:
        """n: rows, at least 1. shuffle: a new order for each epoch. epochs: None for as many as are asked for."""
        self._n = n
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._orders: dict[int, Sequence[int]] = {}

    def row(self, position: int) -> int | None:
        """Number of the row; None past the last epoch."""
        epoch, index = divmod(position, self._n)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        return self._order(epoch)[index] if self._shuffle else index

    def _order(self, epoch: int) -> Sequence[int]:
        if epoch not in self._orders:
            while len(self._orders) >= EPOCHS_KEPT:
                del self._orders[min(self._orders)]
            self._orders[epoch] = order(self._n, self._seed, epoch)
        return self._orders[epoch]


# ------------------------------------------------------------------------------------------------------ reading lines


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


def _row(number: int, line: bytes, prompt_key: str, answer_key: str) -> Row:
    try:
        line.decode()  # the decoder passes over bytes that aren't text inside values it doesn't look at
        values = _OBJECT.decode(line)
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text (byte {error.start + 1})") from error
    except msgspec.ValidationError as error:
        raise DataError("not a JSON object; a row is {…} with a key for each column") from error
    except msgspec.DecodeError as error:
        raise DataError(f"not JSON: {error}") from error
    if prompt_key not in values:
        raise DataError(_no_column(prompt_key, "data.prompt_key", values))
    prompt = _prompt(_decoded(prompt_key, values.pop(prompt_key)), prompt_key)
    answer = _answer(values.pop(answer_key), answer_key) if answer_key in values else None
    return Row(number, prompt, answer, {key: _msgpack(key, raw) for key, raw in values.items()})


def _no_column(key: str, option: str, values: dict[str, msgspec.Raw]) -> str:
    close = difflib.get_close_matches(key, list(values), 1) or [
        name for name in ("question", "messages", "problem", "input") if name in values
    ]
    known = f"set {option} if it is {close[0]!r}" if close else f"it has {', '.join(values) or 'none'}"
    return f"no column {key!r}; {known}"


def _decoded(key: str, raw: msgspec.Raw) -> Json:
    try:
        value: Json = _ANY.decode(raw)
    except msgspec.DecodeError as error:
        raise DataError(f"column {key!r}: not JSON: {error}") from error
    return value


def _msgpack(key: str, raw: msgspec.Raw) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.msgpack.encode(_decoded(key, raw)))
    except OverflowError as error:
        raise DataError(f"column {key!r}: a whole number of more than 64 bits; write it as text, in quotes") from error


def _answer(raw: msgspec.Raw, key: str) -> str | None:
    value = _decoded(key, raw)
    match value:
        case None | str():
            return value
        case bool() | list() | dict():
            raise DataError(
                f"column {key!r} must be text or a number; what has more to it goes into another column: "
                "reward functions get them all"
            )
        case _:
            return bytes(raw).decode().strip()


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
