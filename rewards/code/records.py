"""Tests of a data row, in whichever of the known forms it brings them (docs/rewards.md has the table of forms).

What always holds: what is left unclear is a `BadRecord` that says which column and what, never a test that is silently
dropped or that can't be passed; nothing of a row is executed (a pickle in it may hold a string, and nothing else).
"""

import ast
import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

from areal_async.rewards.code.outputs import Json, read_json
from areal_async.rewards.verdicts import Check

COLUMNS: Final = ("tests", "input_output", "test_cases", "ground_truth", "reward_model", "verification_info")
SPLIT: Final = ("public_test_cases", "private_test_cases")  # LiveCodeBench: both together are the tests
NESTED: Final = ("tests", "test_cases", "ground_truth", "input_output")
NAMES: Final = ("fn_name", "func_name", "function_name", "entry_point")
UNPACKED_BYTES: Final = 1 << 28  # LiveCodeBench's largest row has about 100 MB of tests


class BadRecord(Exception):
    """The row has no usable tests; says why."""


@dataclass(frozen=True)
class Program:
    """Run as a program: given on standard input, expected on standard output."""

    given: str
    expected: str


@dataclass(frozen=True)
class Call:
    """`function` is called. expected: any of these will do (see `_unwrapped`)."""

    function: str
    arguments: list[object]
    expected: tuple[Json, ...]


Test: TypeAlias = Program | Call


def read_tests(check: Check) -> list[Test]:
    """At least one test; BadRecord otherwise."""
    for column, value in _candidates(check):
        try:
            found = _tests(value, _function_of(check.columns))
        except BadRecord as error:
            raise BadRecord(f"column {column}: {error}") from None
        if not found:
            raise BadRecord(f"column {column}: it holds no test")
        return found
    raise BadRecord(
        f"the data row has no tests: none of {', '.join((*COLUMNS, *SPLIT))} and answer; "
        f"its columns: {', '.join(check.columns) or 'none'}"
    )


def _candidates(check: Check) -> Iterator[tuple[str, object]]:
    """(name, value) of what may be tests, the best first."""
    for column in COLUMNS:
        if value := check.columns.get(column):
            yield column, value
    if split := [test for column in SPLIT if (part := check.columns.get(column)) for test in _list(column, part)]:
        yield " and ".join(SPLIT), split
    if check.answer:
        yield "answer", check.answer


def _list(column: str, value: object) -> list[object]:
    found = _decoded(value)
    if not isinstance(found, list):
        raise BadRecord(f"column {column}: no list of tests, but {found!r:.100}")
    return found


def _function_of(columns: Mapping[str, object]) -> str:
    """A function's name that a row or a test gives beside its input and output; "" if none."""
    metadata = columns.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError):
            metadata = None
    for place in (columns, metadata):
        if isinstance(place, Mapping):
            for name in NAMES:
                if isinstance(found := place.get(name), str) and found:
                    return found.removeprefix("Solution.").removeprefix("Solution().")
    return ""


def _tests(value: object, function: str) -> list["Test"]:
    match _decoded(value):
        case dict() as found if {"inputs", "outputs"} <= found.keys():
            return _parallel(found["inputs"], found["outputs"], _function_of(found) or function)
        case dict() as found if {"input", "output"} <= found.keys():
            return _listed([found], function)
        case dict() as found:
            inner = next((name for name in NESTED if found.get(name)), None)
            if inner is None:
                raise BadRecord(f"neither inputs and outputs nor a list of tests, but {sorted(map(str, found))[:8]}")
            return _tests(found[inner], _function_of(found) or function)
        case list() as found:
            return _listed(found, function)
        case found:
            raise BadRecord(f"no tests, but {found!r:.100}")


def _decoded(value: object) -> object:
    """JSON as what it says, also where it was encoded twice, or packed as LiveCodeBench's private tests are."""
    for _ in range(3):
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        if not isinstance(text, str):
            break
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = _unpacked(text)
    return value


class _StringsOnly(pickle.Unpickler):
    """A pickle of a string names no class and no function; one that does could do anything."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, _: object) -> NoReturn:
        raise pickle.UnpicklingError("it names an object elsewhere")


def _unpacked(text: str) -> str:
    """base64 of zlib of a pickled string of JSON."""
    try:
        inflating = zlib.decompressobj()
        unpacked = inflating.decompress(base64.b64decode(text, validate=True), UNPACKED_BYTES)
        if not inflating.eof:
            raise BadRecord(f"packed tests of more than {UNPACKED_BYTES >> 20} MiB, or cut")
        found = _StringsOnly(io.BytesIO(unpacked)).load()
    except (binascii.Error, ValueError, zlib.error) as error:
        raise BadRecord(f"neither JSON nor packed JSON ({error}): {text!r:.100}") from None
    except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, OverflowError) as error:
        raise BadRecord(f"packed, but not as a string of JSON: {error}") from None
    if not isinstance(found, str):
        raise BadRecord(f"packed, but not as a string of JSON: {type(found).__name__}")
    return found


# --------------------------------------------------------------------------------------------------------- the forms


def _parallel(inputs: object, outputs: object, function: str) -> list[Test]:
    """APPS and TACO: {"inputs": [...], "outputs": [...], "fn_name": optional}."""
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise BadRecord("inputs and outputs are to be lists")
    if len(inputs) != len(outputs):
        raise BadRecord(f"{len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if not function:
        return [Program(_text(given), _text(expected)) for given, expected in pairs]
    return _unwrapped([_call(function, given, expected) for given, expected in pairs])


def _listed(tests: list[object], function: str) -> list[Test]:
    """LiveCodeBench, DeepCoder, PrimeIntellect: [{"input", "output", "testtype" or "type", name of a function}]."""
    programs: list[Test] = []
    calls: list[Call] = []
    for test in tests:
        if not isinstance(test, dict) or not {"input", "output"} <= test.keys():
            raise BadRecord(f"a test is to have input and output: {test!r:.100}")
        kind = test.get("testtype") or test.get("type") or ""
        name = _function_of(test) or function
        if kind in ("stdin", "stdin_stdout") or (kind == "" and not name):
            programs.append(Program(_text(test["input"]), _text(test["output"])))
        elif kind not in ("", "functional", "function_call"):
            raise BadRecord(f"{kind!r} is no known type of test (stdin, stdin_stdout, functional, function_call)")
        elif not name:
            raise BadRecord("a function is to be called, and neither the test nor the row says which")
        else:
            calls.append(_call(name, test["input"], test["output"]))
    return programs + _unwrapped(calls)


def _text(value: object) -> str:
    """As it goes through a pipe: a string, or a list of lines."""
    if not isinstance(value, list):
        return _line(value)
    lines = [_line(line) for line in value]
    return "".join(lines) if all(line.endswith("\n") for line in lines) else "\n".join(lines)


def _line(value: object) -> str:
    match value:
        case str():
            return value
        case bool() | None:
            pass
        case int() | float():
            return str(value)
        case list() if value and all(isinstance(item, str | int | float) for item in value):
            return _text(value)
    raise BadRecord(f"neither text nor a list of lines: {value!r:.100}")


def _call(function: str, given: object, expected: object) -> Call:
    """Arguments are a list, or text with one JSON value a line; then the result is text of JSON, too."""
    if isinstance(given, list):
        return Call(function, given, (_plain(expected),))
    if not isinstance(given, str):
        raise BadRecord(f"the arguments of {function} are to be a list, or lines of JSON: {given!r:.100}")
    arguments: list[object] = []
    for line in filter(str.strip, given.split("\n")):
        try:
            arguments.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise BadRecord(
                f"argument {len(arguments) + 1} of {function} is no JSON ({error}): {line!r:.100}"
            ) from None
    return Call(function, arguments, (_result(expected),))


def _result(expected: object) -> Json:
    """Text that isn't JSON: a literal of Python (True, 'a'), or else a string as it is."""
    if not isinstance(expected, str):
        return _plain(expected)
    try:
        return read_json(expected)
    except ValueError:
        pass
    try:
        return _plain(ast.literal_eval(expected.strip()))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return expected


def _plain(value: object) -> Json:
    try:
        return read_json(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRecord(f"a result that JSON can't carry ({error}): {value!r:.100}") from None


def _unwrapped(calls: Sequence[Call]) -> list[Test]:
    """APPS puts most results into a list of one. Where all of a row are such, what is in it will do, too."""
    inner = [each.expected[0] for each in calls]
    if not all(isinstance(value, list) and len(value) == 1 for value in inner):
        return list(calls)
    return [
        Call(call.function, call.arguments, (value, *value))
        for call, value in zip(calls, inner, strict=True)
        if isinstance(value, list)
    ]
