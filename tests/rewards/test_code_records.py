"""Tests of a data row, in all known forms; what is unclear is said, never dropped."""

import base64
import json
import os
import pickle
import zlib

import pytest

from areal_async.rewards.code.records import BadRecord, Call, Program, Test, read_tests
from areal_async.rewards.verdicts import Check


def read(answer: str | None = None, **columns: object) -> list[Test]:
    return read_tests(Check(prompt="", response="", answer=answer, finish="stop", columns=columns))


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


APPS = {"inputs": ["1 2\n", "3"], "outputs": ["3\n", "4"]}
PROGRAMS = [Program("1 2\n", "3\n"), Program("3", "4")]
LIVE = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "3", "output": "4", "testtype": "stdin"},
]
DEEP = [{"input": test.given, "output": test.expected, "type": "stdin_stdout", "fn_name": None} for test in PROGRAMS]
LIVE_CALLS = [{"input": '[1, 2]\n"a"', "output": "[3]", "testtype": "functional"}, {"input": "[]", "output": "[]"}]
METADATA = json.dumps({"func_name": "f"})
CALLS = [Call("f", [[1, 2], "a"], (["3"],)), Call("f", [[]], ([],))]


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"tests": APPS}, id="APPS"),
        pytest.param({"tests": json.dumps(APPS)}, id="APPS-as-JSON"),
        pytest.param({"tests": json.dumps(json.dumps(APPS))}, id="APPS-as-JSON-twice"),
        pytest.param({"tests": {**APPS, "fn_name": None}}, id="APPS-without-a-name"),
        pytest.param({"input_output": json.dumps(APPS)}, id="APPS-input_output"),
        pytest.param({"answer": json.dumps(APPS)}, id="answer"),
        pytest.param({"tests": "", "input_output": APPS, "answer": "42"}, id="the-first-that-is-there"),
        pytest.param(
            {"tests": {"inputs": [["1 2", ""], ["3"]], "outputs": [["3\n"], [4]]}}, id="APPS-as-lists-of-lines"
        ),
        pytest.param({"reward_model": {"ground_truth": json.dumps(APPS), "style": "rule"}}, id="verl"),
        pytest.param({"ground_truth": json.dumps(LIVE)}, id="ground_truth"),
        pytest.param(
            {"public_test_cases": json.dumps(LIVE[:1]), "private_test_cases": packed(json.dumps(LIVE[1:]))},
            id="LiveCodeBench",
        ),
        pytest.param({"public_test_cases": json.dumps(LIVE)}, id="LiveCodeBench-public-only"),
        pytest.param({"tests": DEEP}, id="DeepCoder"),
        pytest.param({"tests": {"test_cases": LIVE}}, id="a-level-down"),
        pytest.param({"verification_info": json.dumps({"language": "python", "test_cases": LIVE})}, id="SYNTHETIC-1"),
        pytest.param({"tests": LIVE, "metadata": METADATA}, id="type-says-stdin"),
    ],
)
def test_programs(columns: dict[str, object]) -> None:
    assert [(test.given.strip(), test.expected.strip()) for test in read(**columns) if isinstance(test, Program)] == [
        (test.given.strip(), test.expected.strip()) for test in PROGRAMS
    ]


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"tests": LIVE_CALLS, "metadata": METADATA}, id="LiveCodeBench"),
        pytest.param({"tests": [{**test, "metadata": {"func_name": "f"}} for test in LIVE_CALLS]}, id="DeepCoder"),
        pytest.param({"tests": LIVE_CALLS, "fn_name": "f"}, id="name-in-the-row"),
        pytest.param(
            {"tests": {"inputs": ['[1, 2]\n"a"\n', "[]"], "outputs": ["[3]", "[]"], "fn_name": "f"}}, id="APPS-lines"
        ),
        pytest.param(
            {"tests": {"inputs": [[[1, 2], "a"], [[]]], "outputs": [[3], []], "fn_name": "Solution.f"}}, id="APPS"
        ),
        pytest.param(
            {"tests": [{"type": "function_call", "fn_name": "f", "input": [[1, 2], "a"], "output": [3]},
                       {"type": "function_call", "fn_name": "f", "input": [[]], "output": []}]}, id="PrimeIntellect"
        ),
    ],
)  # fmt: skip
def test_calls(columns: dict[str, object]) -> None:
    assert read(**columns) == CALLS


def test_a_result_in_a_list_of_one_may_be_meant_without_it() -> None:
    tests = {"inputs": [[1], [2]], "outputs": [[3], [[4]]], "fn_name": "f"}
    assert [test.expected for test in read(tests=tests) if isinstance(test, Call)] == [(["3"], "3"), ([["4"]], ["4"])]
    tests = {"inputs": [[1], [2]], "outputs": [[3], 4], "fn_name": "f"}
    assert [test.expected for test in read(tests=tests) if isinstance(test, Call)] == [(["3"],), ("4",)]


@pytest.mark.parametrize(
    ("output", "expected"),
    [("3", "3"), ("3.0", 3.0), ('"a"', "a"), ("True", True), ("'a'", "a"), ("a b", "a b"), ("(1, None)", ["1", None])],
)
def test_results_in_text(output: str, expected: object) -> None:
    (test,) = read(tests={"inputs": ["1"], "outputs": [output], "fn_name": "f"})
    assert isinstance(test, Call)
    assert test.expected == (expected,)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("exit 1",))


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({}, "the data row has no tests"),
        ({"level": 3}, "its columns: level"),
        ({"tests": []}, "the data row has no tests"),
        ({"tests": {"inputs": [], "outputs": []}}, "it holds no test"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"tests": {"inputs": "1", "outputs": "2"}}, "to be lists"),
        ({"tests": {"input": "1"}}, "neither inputs and outputs nor a list of tests"),
        ({"tests": ["assert f(1) == 2"]}, "a test is to have input and output"),
        ({"tests": "assert f(1) == 2"}, "neither JSON nor packed JSON"),
        ({"answer": "42"}, "column answer: no tests, but 42"),
        (
            {"tests": [{"input": "1", "output": "2", "testtype": "functional"}]},
            "neither the test nor the row says which",
        ),
        ({"tests": [{"input": "1", "output": "2", "type": "interactive"}]}, "'interactive' is no known type"),
        ({"tests": {"inputs": ["[1"], "outputs": ["2"], "fn_name": "f"}}, "argument 1 of f is no JSON"),
        ({"tests": {"inputs": [{"a": 1}], "outputs": ["2"], "fn_name": "f"}}, "to be a list, or lines of JSON"),
        ({"tests": {"inputs": [None], "outputs": ["2"]}}, "neither text nor a list of lines: None"),
        ({"tests": packed(Evil())}, "it names posix.system"),
        ({"tests": packed([1])}, "packed, but not as a string of JSON: list"),
        ({"tests": packed("[]")[:-8]}, "packed tests of more than 256 MiB, or cut"),
        ({"tests": base64.b64encode(zlib.compress(b"garbage")).decode()}, "packed, but not"),
    ],
)
def test_what_is_unclear_is_said(columns: dict[str, object], why: str) -> None:
    with pytest.raises(BadRecord) as error:
        read(**columns)
    assert why in str(error.value)
