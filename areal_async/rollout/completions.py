"""Answers that are there already, to be scored: JSON lines, read as they come (`areal-async score`).

What always holds: no more than one line and a chunk is in memory; lines keep their order and their numbers. A line that
can't be scored by any reward (no JSON object, no `completion`) is an error with file and line; what else is wrong with
one is said in its record, as a run would say of a data row.
"""

import difflib
from collections.abc import AsyncIterator
from typing import Final

import msgspec
import numpy as np

from areal_async.errors import DataError
from areal_async.messages import FinishReason, ScoreTask
from areal_async.rollout.data import answer_text, decoded, object_of, packed
from areal_async.rollout.types import Tokens
from areal_async.rollout.values import Json

LINE_BYTES: Final = 256 << 20  # the longest line; the tests of a problem can be tens of megabytes

OWN: Final = ("completion", "prompt", "finish", "answer")  # keys that are no columns
TESTS: Final = "tests"
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
ELSEWHERE: Final = ("response", "output", "generation", "text", "solution")  # what others call a completion
FINISHES: Final[dict[Json, FinishReason]] = {None: "stop", "stop": "stop", "length": "length"}
NO_TOKENS: Final[Tokens] = np.zeros(0, np.int32)


class Record(msgspec.Struct, frozen=True):
    """A line. id: as it was written, in JSON; the line's number (from 1) where none was. size: of the line, bytes.

    task: what a reward worker is asked. wrong: why nobody can be asked (`bad_data`); "" if the task can be given.
    tokens: of the response, int32 [n], where the task doesn't bring it as text (a recorded run's).
    """

    line: int
    id: msgspec.Raw
    size: int
    task: ScoreTask | None
    wrong: str = ""
    tokens: Tokens = NO_TOKENS


async def records(chunks: AsyncIterator[bytes], name: str) -> AsyncIterator[Record]:
    """The records of a stream; blank lines are passed over. name: of the file, for errors. Errors: DataError."""
    async for number, line in _lines(chunks, name):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
            _look_at_form(line, name)
        if line.strip():
            try:
                yield _record(number, line)
            except DataError as error:
                raise DataError(f"{name}:{number}: {error}") from error


async def _lines(chunks: AsyncIterator[bytes], name: str) -> AsyncIterator[tuple[int, bytes]]:
    """Lines with their numbers from 1, without their ends."""
    number, begun = 1, bytearray()
    async for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            yield number, bytes(begun) + piece
            number += 1
            begun.clear()
        begun += rest
        if len(begun) > LINE_BYTES:
            raise DataError(f"{name}:{number}: a line of more than {LINE_BYTES >> 20} MiB")
    if begun:
        yield number, bytes(begun)


def _look_at_form(line: bytes, name: str) -> None:
    if line.startswith(b"PAR1"):
        raise DataError(f"{name}: is a Parquet file; score reads JSON lines")
    if line.startswith(b"["):
        raise DataError(f"{name}:1: begins a JSON list; write one JSON object a line, without commas between")


def _record(number: int, line: bytes) -> Record:
    values = object_of(line)
    completion = _completion(values)
    id = values.get("id", msgspec.Raw(str(number).encode()))
    plain = {key: decoded(key, values[key]) for key in values}
    try:
        task = _task(number, completion, values, plain)
    except DataError as error:
        return Record(number, id, len(line), None, str(error))
    return Record(number, id, len(line), task)


def _completion(values: dict[str, msgspec.Raw]) -> str:
    if "completion" not in values:
        near = [name for name in ELSEWHERE if name in values] or difflib.get_close_matches("completion", values, 1)
        hint = f"; rename {near[0]!r} if that is it" if near else ""
        raise DataError(f"no 'completion'; the line has {', '.join(map(repr, values)) or 'nothing'}{hint}")
    completion = decoded("completion", values["completion"])
    if not isinstance(completion, str):
        raise DataError(f"'completion' must be text, not {bytes(values['completion']).decode():.60}")
    return completion


def _task(number: int, completion: str, values: dict[str, msgspec.Raw], plain: dict[str, Json]) -> ScoreTask:
    prompt, finish, answer = plain.get("prompt"), plain.get("finish"), plain.get("answer")
    if not isinstance(prompt, str | None):
        raise DataError("'prompt' must be text, as the model saw it")
    if not isinstance(finish, str | None) or finish not in FINISHES:
        raise DataError('\'finish\' must be "stop" or "length"')
    written = bytes(values["answer"]).decode().strip() if "answer" in values else ""
    return ScoreTask(
        sample=str(number),
        attempt=0,
        prompt=prompt or "",
        answer=answer_text(answer, "answer", written),
        finish=FINISHES[finish],
        columns={key: _column(key, plain[key], values[key]) for key in plain if key not in OWN},
        response=completion,
    )


def _column(key: str, value: Json, written: msgspec.Raw) -> msgspec.Raw:
    try:
        return packed(key, value)
    except DataError:
        if key != TESTS:
            raise
        # A number of more than 64 bits, as in the tests of a factorial: `code` reads text of JSON as what it says
        return packed(key, bytes(written).decode())
