"""The reward `code`: Python code from the response, run against the data row's tests in a jail.

Its parts: `records` (the row's tests), `markdown` (the code in the response), `jailed` and `runner` (both ends of the
jailed interpreter), `outputs` (the comparison). This one puts them together and finds the verdict.

What always holds: expected outputs stay on this side of the jail; `right` needs for every test an exit code of 0 and
the expected output or result; what isn't the tested code's fault is `infrastructure` or `bad_data`, never a number.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from areal_async.messages import RewardSpec, Verdict
from areal_async.rewards import jail
from areal_async.rewards.code.jailed import Jailed, Launcher, Ran, Unavailable
from areal_async.rewards.code.markdown import code_of
from areal_async.rewards.code.outputs import head, printed_difference, read_json, result_difference
from areal_async.rewards.code.records import BadRecord, Call, Program, Test, read_tests
from areal_async.rewards.verdicts import Check, Grader, Outcome, given

EXTRACTED_CHARACTERS: Final = 1000
TRACEBACK_CHARACTERS: Final = 1500
SPARE_SHARE: Final = 0.1  # of the check's time, in which `credit: share` says what was passed so far
OVER_LIMIT: Final = ("MemoryError", "can't start new thread", "Resource temporarily unavailable")


@dataclass(frozen=True)
class _Found:
    """Of one test. why: "" where it is passed."""

    verdict: Verdict
    why: str = ""


def grader(spec: RewardSpec) -> Grader:
    """RewardError where this machine has no such jail as `spec.sandbox` asks for."""
    jail.require(spec)
    launcher = Launcher.of(spec)

    def grade(check: Check) -> Outcome:
        deadline = time.monotonic() + spec.timeout_s * (1 - SPARE_SHARE)
        sys.set_int_max_str_digits(0)  # of this check's process: integers of data rows have any length
        try:
            tests = read_tests(check)
        except BadRecord as error:
            return Outcome("bad_data", str(error))
        function = next((test.function for test in tests if isinstance(test, Call)), "")
        code = code_of(check.response, check.prompt, function)
        if code is None:
            return Outcome("no_answer", "no Python code in the response")
        tried = _Tried(spec, launcher, code, deadline)
        try:
            found = _all_of(tests, tried.test) if spec.code.credit == "all" else _share_of(tests, tried.test, deadline)
        except Unavailable as error:
            found = Outcome("infrastructure", str(error))
        finally:
            tried.end()
        return Outcome(found.verdict, found.why, code[:EXTRACTED_CHARACTERS], found.reward)

    return grade


def _all_of(tests: list[Test], run: Callable[[Test], _Found]) -> Outcome:
    """Right if every test is passed; the first that isn't gives the verdict."""
    for number, test in enumerate(tests, 1):
        found = run(test)
        if found.verdict != "right":
            return Outcome(found.verdict, f"test {number} of {len(tests)}: {found.why}")
    return Outcome("right", f"tests passed: {len(tests)}")


def _share_of(tests: list[Test], run: Callable[[Test], _Found], deadline: float) -> Outcome:
    """The share of tests that are passed; what isn't done at the deadline isn't."""
    passed, failed = 0, ""
    for number, test in enumerate(tests, 1):
        if time.monotonic() >= deadline:
            failed = failed or f"test {number}: the time of the check was up"
            break
        found = run(test)
        passed += found.verdict == "right"
        failed = failed or (f"test {number}: {found.why}" if found.why else "")
    return given(passed / len(tests), f"tests passed: {passed} of {len(tests)}" + (f"; {failed}" if failed else ""))


class _Tried:
    """The code, and the jailed interpreter that its tests run in, while it can be used."""

    def __init__(self, spec: RewardSpec, launcher: Launcher, code: str, deadline: float) -> None:
        self._spec = spec
        self._launcher = launcher
        self._code = code
        self._deadline = deadline if spec.code.credit == "share" else float("inf")  # else the check is killed: timeout
        self._jailed: Jailed | None = None

    def end(self) -> None:
        if self._jailed is not None:
            self._jailed.end()
            self._jailed = None

    def test(self, test: Test) -> _Found:
        if self._jailed is None:
            self._jailed = Jailed(self._launcher, self._code)
        deadline = min(time.monotonic() + self._spec.code.test_timeout_s, self._deadline)
        limit_bytes = self._spec.limits.output_kib << 10
        match test:
            case Program(text, expected):
                limit_bytes += len(expected) * 4  # what is right may be longer than the limit
                ran = self._jailed.run(text.encode(errors="surrogatepass"), "", [], limit_bytes, deadline)
            case Call(function, arguments, _):
                ran = self._jailed.run(b"", function, arguments, limit_bytes, deadline)
        if self._jailed.spoiled:
            self.end()
        return self._judged(test, ran)

    def _judged(self, test: Test, ran: Ran) -> _Found:
        match ran.ended:
            case "timeout":
                return _Found("timeout", f"not done after {self._spec.code.test_timeout_s:g} s; {_given(test)}")
            case "output":
                return _Found("crash", f"output limit: printed more than {self._spec.limits.output_kib} KiB")
            case "lost":
                return _Found("crash", "it ended the interpreter that runs it")
        trace = ran.stderr.decode(errors="replace").strip()[-TRACEBACK_CHARACTERS:]
        if ran.exit_code < 0:
            return _Found("crash", f"killed by signal {-ran.exit_code}; {trace or _given(test)}")
        if ran.exit_code > 0:
            last = trace.rpartition("\n")[2]
            verdict: Verdict = "crash" if any(limit in last for limit in OVER_LIMIT) else "wrong"
            return _Found(verdict, f"exit code {ran.exit_code}; {trace or _given(test)}")
        difference = self._difference(test, ran)
        return _Found("wrong", f"{difference}; {_given(test)}") if difference else _Found("right")

    def _difference(self, test: Test, ran: Ran) -> str:
        if isinstance(test, Program):
            return printed_difference(test.expected, ran.stdout.decode(errors="replace"))
        if not ran.record:
            return f"{test.function} gave no result"
        try:
            got = read_json(ran.record.decode(errors="replace"))
        except ValueError as error:
            return f"the result can't be read: {error}"
        found = [result_difference(each, got, bool_is_int=self._spec.code.bool_is_int) for each in test.expected]
        return "" if "" in found else found[0]


def _given(test: Test) -> str:
    if isinstance(test, Program):
        return f"input: {head(test.given)}"
    return f"arguments: {head(repr(test.arguments))}"
