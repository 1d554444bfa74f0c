"""What comes of code in an answer, through the whole sandbox: every verdict, and what it says."""

import marshal
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import psutil
import pytest

from areal_async.messages import CodeOptions, Limits, RewardSpec, ScoreResult, ScoreTask
from areal_async.rewards import code, jail
from areal_async.rewards.code.jailed import Jailed, Launcher, Unavailable
from areal_async.rewards.sandbox import Sandbox
from areal_async.rewards.verdicts import Check

from ..waiting import LEFT_S, SLACK_S, wait_until

pytestmark = pytest.mark.slow
# more than a busy machine needs, less than what sleeps in the background
SPEC = RewardSpec(function="code", timeout_s=100.0, code=CodeOptions(test_timeout_s=25.0))
HASTY = msgspec.structs.replace(SPEC, code=CodeOptions(test_timeout_s=1.0))
SHARE = msgspec.structs.replace(SPEC, code=CodeOptions(test_timeout_s=3.0, credit="share"))
GOOGOL = "1" + "0" * 10_000
DOUBLE = {"inputs": ["3\n", "4"], "outputs": ["6\n", "8"]}
SILENT = {"inputs": [""], "outputs": [""]}
FIVE = {"inputs": [""], "outputs": ["5"]}
FIVES = {"inputs": [""] * 2, "outputs": ["5"] * 2}
SUM = {"inputs": ["3\n1 2\n3"], "outputs": ["6"]}
CALL = {"inputs": ["[1,2]\n3"], "outputs": ["[1,2,3]"], "fn_name": "f"}
ONE = {"inputs": [[]], "outputs": [1], "fn_name": "f"}

CHECK = Check(prompt="", response="```python\nprint(5)\n```", answer=None, finish="stop", columns={"tests": FIVE})
Judge = Callable[..., ScoreResult]


def calls(output: object, *arguments: object) -> dict[str, object]:
    """A second test keeps a result in a list from being read as APPS's wrapping."""
    return {"inputs": [[*arguments], [*arguments]], "outputs": [output, output], "fn_name": "f"}


def task_of(response: str, **columns: object) -> ScoreTask:
    return ScoreTask(
        sample="0.0",
        attempt=0,
        prompt="",
        answer=None,
        finish="stop",
        response=response,
        columns={name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in columns.items()},
    )


def judge_in(sandbox: Sandbox) -> Judge:
    def judge(program: str, tests: object = None) -> ScoreResult:
        sandbox.submit(1, task_of(f"```python\n{program}\n```", tests=tests), b"")
        found = sandbox.next_result()
        assert found is not None
        return found[1]

    return judge


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(SPEC) as found:
        yield found


@pytest.fixture
def judge(sandbox: Sandbox) -> Judge:
    return judge_in(sandbox)


@pytest.fixture(scope="module")
def sharing() -> Iterator[Judge]:
    with Sandbox(SHARE) as found:
        yield judge_in(found)


@pytest.fixture(scope="module")
def hasty() -> Iterator[Judge]:
    with Sandbox(HASTY) as found:
        yield judge_in(found)


LOOP = (
    "import sys\nt = []\ntry:\n    while True: t += input().split()\nexcept EOFError: pass\nprint(sum(map(int, t[1:])))"
)
RIGHT = [
    pytest.param(LOOP, SUM, id="C10-input-until-EOFError"),
    pytest.param("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split()[1:])))", SUM, id="C10-buffer"),
    pytest.param("import sys\nsys.stdin.readline()\nprint(sum(map(int, sys.stdin.read().split())))", SUM,
                 id="C10-readline"),
    pytest.param("import sys\nprint('a')\nsys.stdout.flush()\nsys.stdout.buffer.write(b'b\\n')\nprint('c')",
                 {"inputs": [""], "outputs": ["a\nb\nc"]}, id="C10-print-and-buffer"),
    pytest.param("print(sum(map(int, open(0).read().split()[1:])))", SUM, id="open-0"),
    pytest.param("print(sum(map(int, open('/dev/stdin').read().split()[1:])))", SUM, id="dev-stdin"),
    pytest.param("import os\nos.write(1, b'5')", FIVE, id="os.write"),
    pytest.param("import sys\nprint(5)\nsys.exit(0)", FIVE, id="C12-exit-0"),
    pytest.param("print(5)\nexit()", FIVE, id="exit"),
    pytest.param("print(5, flush=True)\nraise SystemExit", FIVE, id="SystemExit"),
    pytest.param("pass", SILENT, id="nothing-to-print"),
    pytest.param("print(10 ** 10000)", {"inputs": [""], "outputs": [GOOGOL]}, id="C14-all-digits"),
    pytest.param("print('→√')", {"inputs": [""], "outputs": ["→√"]}, id="C17"),
    pytest.param("import atexit\natexit.register(print, 5)", FIVE, id="atexit"),
    pytest.param("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print(5))).start()", FIVE,
                 id="threads-are-waited-for"),
    pytest.param("out = open(1, 'w')\nout.write('5')", FIVE, id="a-file-that-is-not-closed"),
    pytest.param("import sys, io\nprint(5)\nsys.stdout = io.StringIO()\nprint(6)", FIVE, id="stdout-replaced"),
    pytest.param("class A:\n    def __del__(self): print(5)\na = A()\na.a = a", FIVE, id="a-cycle-with-__del__"),
    pytest.param("import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(n): return n and 1 + f(n - 1)\n"
                 "print(f(50000) // 10000)",
                 FIVE, id="deep-recursion"),
    pytest.param("import multiprocessing as m\ndef f(x): return x + 1\nif __name__ == '__main__':\n"
                 "    with m.Pool(2) as p: print(sum(p.map(f, [1, 2])))", FIVE, id="multiprocessing"),
    pytest.param("from concurrent.futures import ThreadPoolExecutor as T\nprint(sum(T(2).map(int, '23')))", FIVE,
                 id="C05-two-threads"),
    pytest.param("from dataclasses import dataclass\nimport pickle\n@dataclass\nclass A: x: int\n"
                 "print(pickle.loads(pickle.dumps(A(5))).x)", FIVE, id="classes-of-__main__"),
    pytest.param("import numpy\nprint(numpy.arange(5).size)", FIVE, id="numpy"),
    pytest.param("import warnings\nif 5 is 5: print(5)", FIVE, id="a-warning-of-the-compiler"),
    pytest.param("print(5)", {"inputs": ["x" * 3_000_000], "outputs": ["5"]}, id="input-that-is-not-read"),
    pytest.param("s = input()\nprint(s)", {"inputs": ["x" * 3_000_000], "outputs": ["x" * 3_000_000]},
                 id="more-output-than-the-limit-if-it-is-right"),
    pytest.param("import sys\nfor line in sys.stdin: print(line, end='')",
                 {"inputs": ["0123456789\n" * 50_000], "outputs": ["0123456789\n" * 50_000]}, id="both-ways-at-once"),
    pytest.param("import fcntl, os\nfcntl.fcntl(1, 1031, 1 << 20)\nos.write(1, b'x' * 1_000_000)\nos._exit(0)",
                 {"inputs": [""], "outputs": ["x" * 1_000_000]}, id="much-output-at-its-end"),
    pytest.param("import subprocess\nsubprocess.Popen(['sleep', '30'])\nprint(5)", FIVES,
                 id="C03-sleep-in-the-background"),
    pytest.param("open('a', 'x').write('1')\nprint(5)", FIVES, id="own-files"),
    pytest.param("def f(a, b): return a + [b]", CALL, id="C15-lines-are-arguments"),
    pytest.param("class Solution:\n    def f(self, a: List[int], b: Optional[int]) -> List[int]: return a + [b]", CALL,
                 id="C15-Solution"),
    pytest.param("def f(): return [(1, 2)]", calls([[1, 2]]), id="C15-tuples"),
    pytest.param("def f(): return [0.1000000001, 0.2]", calls([0.1, 0.2]), id="C14-call"),
    pytest.param("def f(): return {1: (2, {'a': None})}", calls({"1": [2, {"a": None}]}), id="keys-are-text-in-JSON"),
    pytest.param("def f(): return 10 ** 10000", {"inputs": [""], "outputs": [GOOGOL], "fn_name": "f"},
                 id="long-integer"),
    pytest.param("import numpy\ndef f(): return [numpy.int64(1), numpy.arange(2), numpy.float64(2)]",
                 calls([1, [0, 1], 2.0]), id="results-of-numpy"),
    pytest.param("def f(n):\n    h = [n]; heappush(h, 1); return Counter(h), math.inf, gcd(4, 6), bisect.bisect(h, 1), "
                 "next(count(5))", calls([{"1": 1, "7": 1}, float("inf"), 2, 1, 5], 7), id="names-without-imports"),
    pytest.param("def f(n): return n and 1 + f(n - 1)", calls(20_000, 20_000), id="deep-recursion-of-a-function"),
    pytest.param("n = 7\ndef f(): return n\nif __name__ == '__main__':\n    print(f(int(input())))", calls(7),
                 id="main-part"),
    pytest.param("def f(): return 1\nprint(f(), input())", ONE, id="reads-an-input-that-is-not-there"),
    pytest.param("def f():\n    print('hello')\n    return 1", ONE, id="prints-besides"),
    pytest.param("f = lambda: 1", ONE, id="lambda"),
    pytest.param("import functools\n@functools.cache\ndef f(): return 1", ONE, id="decorated"),
    pytest.param("def f(): return 1", {"inputs": [[], []], "outputs": [[1], [1]], "fn_name": "f"}, id="APPS-wrapping"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "tests"), RIGHT)
def test_right(judge: Judge, program: str, tests: object) -> None:
    found = judge(program, tests)
    assert (found.verdict, found.reward) == ("right", 1.0), found.why
    assert found.extracted == program[:1000]


NOT_RIGHT = [
    pytest.param("import os\nos._exit(0)\nprint(5)", FIVE, "wrong", "expected 1 lines, got 0", id="C12-_exit"),
    pytest.param("def f(): 1 / 0", {**ONE, "outputs": [""]}, "wrong", "ZeroDivisionError", id="C12-raises"),
    pytest.param("print(5)\nraise ValueError('what')", FIVE, "wrong", "ValueError: what", id="C12-right-then-raises"),
    pytest.param("print(5)\nexit(3)", FIVE, "wrong", "exit code 3", id="exit-code"),
    pytest.param("print(5)\nexit('sorry')", FIVE, "wrong", "sorry", id="exit-with-words"),
    pytest.param("import os, atexit\nprint(5)\natexit.register(os._exit, 4)", FIVE, "wrong", "exit code 4",
                 id="atexit"),
    pytest.param("import sys, os\nprint(5)\nos.close(1)", FIVE, "wrong", "exit code 120", id="closed-stdout"),
    pytest.param("print(6)", FIVE, "wrong", "test 1 of 1: line 1: expected '5', got '6'", id="wrong"),
    pytest.param("print(6)", DOUBLE, "wrong", "test 2 of 2: line 1: expected '8', got '6'; input: '4'", id="second"),
    pytest.param("print(b'5')", FIVE, "wrong", "expected '5'", id="bytes"),
    pytest.param("import sys\nsys.stdout.buffer.write(b'\\xff5')", FIVE, "wrong", "�5", id="C17-no-UTF-8"),
    pytest.param("print(", FIVE, "wrong", "SyntaxError", id="no-Python"),
    pytest.param("x = " + "(" * 500 + ")" * 500, FIVE, "wrong", "too many nested", id="no-parser-likes-it"),
    pytest.param("def f(): return True", ONE, "wrong", "expected '1', got 'true'", id="C15-True"),
    pytest.param("def f(): return {1}", ONE, "wrong", "the function returned set, which can't be compared", id="set"),
    pytest.param("def f(): return 1\nf = 5", ONE, "wrong", "not callable", id="no-function-any-more"),
    pytest.param("def g(): return 1", ONE, "wrong", "there is no function 'f'", id="no-such-function"),
    pytest.param("def f(a): return 1", ONE, "wrong", "missing 1 required positional argument", id="arguments"),
    pytest.param("import os\ndef f(): os._exit(0)", ONE, "wrong", "f gave no result", id="no-record"),
    pytest.param("def f():\n    a = []\n    a.append(a)\n    return a", ONE, "wrong", "Circular", id="circular"),
    pytest.param("List = 5\nprint(Optional)", FIVE, "wrong", "NameError", id="a-program-imports-what-it-uses"),
    pytest.param("input()\ninput()", {"inputs": ["1"], "outputs": ["1"]}, "wrong", "EOFError", id="reads-too-much"),
    pytest.param("while True: print('line')", FIVE, "crash", "output limit: printed more than 1024 KiB", id="C07"),
    pytest.param("import sys\nwhile True: sys.stderr.write('line')", FIVE, "crash", "output limit", id="C07-stderr"),
    pytest.param("def f(): return 'x' * 2_000_000", ONE, "crash", "output limit", id="C07-result"),
    pytest.param("x = bytearray(16 << 30)", FIVE, "crash", "MemoryError", id="C06"),
    pytest.param("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", FIVE, "crash", "signal 11", id="segfault"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "tests", "verdict", "why"), NOT_RIGHT)
def test_not_right(judge: Judge, program: str, tests: object, verdict: str, why: str) -> None:
    found = judge(program, tests)
    assert (found.verdict, found.reward) == (verdict, 0.0), found.why
    assert why in found.why
    assert len(found.why) < 4000
    assert found.seconds < SPEC.code.test_timeout_s, "it was not waited for"


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("while True: pass", id="C01"),
        pytest.param("import subprocess\nsubprocess.Popen(['sleep', '30'])\nwhile True: pass", id="C03"),
        pytest.param(
            "import time, threading\nprint(5)\nthreading.Thread(target=time.sleep, args=(60,)).start()", id="thread"
        ),
    ],
)
def test_not_in_time(hasty: Judge, program: str) -> None:
    found = hasty(program, FIVE)
    assert (found.verdict, found.reward) == ("timeout", 0.0)
    assert found.why == "test 1 of 1: not done after 1 s; input: ''"
    assert 1.0 <= found.seconds < 1.0 + SLACK_S


def test_more_processes_than_allowed() -> None:
    few = msgspec.structs.replace(SPEC, limits=Limits(processes=8))
    program = "import os, time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(30)\ntime.sleep(30)"
    with Sandbox(few) as sandbox:
        found = judge_in(sandbox)(program, FIVE)
    assert (found.verdict, found.reward) == ("crash", 0.0), found.why


def test_no_code_and_no_tests(sandbox: Sandbox) -> None:
    for task, verdict, reward, why in (
        (task_of("The answer is 5.", tests=FIVE), "no_answer", 0.0, "no Python code in the response"),
        (task_of("```python\nprint(5)\n```"), "bad_data", None, "the data row has no tests"),
        (task_of("The answer is 5.", tests={"inputs": [1], "outputs": []}), "bad_data", None, "1 inputs and 0 outputs"),
    ):
        sandbox.submit(1, task, b"")
        found = sandbox.next_result()
        assert found is not None
        assert (found[1].verdict, found[1].reward) == (verdict, reward)
        assert why in found[1].why


# Of each four: right; wrong; not in time, with a process that stays behind; right again, in a new interpreter
SOME = """
import subprocess, time
n = int(input())
if n == 2: subprocess.Popen(["sleep", "30"], start_new_session=True); time.sleep(30)
print(n if n != 1 else 7)
"""


def test_a_share_of_the_tests(sharing: Judge) -> None:
    found = sharing(SOME, {"inputs": ["0", "1", "2", "3"], "outputs": ["0", "1", "2", "3"]})
    assert (found.verdict, found.reward) == ("given", 0.5), found.why
    assert found.why.startswith("tests passed: 2 of 4; test 2: line 1: expected '1', got '7'")
    assert sharing("print(5)", FIVE).reward == 1.0
    assert sharing("print(6)", FIVE).reward == 0.0


def test_a_share_of_what_is_done_when_the_time_of_the_check_is_up() -> None:
    tests = {"inputs": ["0", *["2"] * 8], "outputs": ["0", *["2"] * 8]}
    grade = code.grader(msgspec.structs.replace(SHARE, timeout_s=5.0))
    found = grade(msgspec.structs.replace(CHECK, response=SOME, columns={"tests": tests}))
    assert (found.verdict, found.reward) == ("given", pytest.approx(1 / 9)), found.why


def test_true_is_1_where_that_is_wished() -> None:
    with Sandbox(msgspec.structs.replace(SPEC, code=CodeOptions(bool_is_int=True))) as sandbox:
        assert judge_in(sandbox)("def f(): return True", ONE).verdict == "right"


def test_C17_the_locale_of_the_worker_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONUTF8", "0")
    with Sandbox(SPEC) as sandbox:
        assert judge_in(sandbox)("print('→√', input())", {"inputs": ["é"], "outputs": ["→√ é"]}).verdict == "right"


OWN_SLEEP = f"1{os.getpid()}.5"  # seconds that nobody else on this machine sleeps for


def sleeping() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", OWN_SLEEP]]


def test_knowingly_without_a_jail() -> None:
    """Nothing is left of a test here either: no process, and no file, since its folder is none."""
    with Sandbox(msgspec.structs.replace(SPEC, sandbox="rlimits")) as sandbox:
        judge = judge_in(sandbox)
        assert judge("print(int(input()) * 2)", DOUBLE).verdict == "right"
        assert judge("def f(a, b): return a + [b]", CALL).verdict == "right"
        assert judge("print(6)", FIVE).verdict == "wrong"
        assert "FileNotFoundError" in judge("open('a', 'w')", FIVE).why
        daemon = f"import subprocess\nsubprocess.Popen(['sleep', '{OWN_SLEEP}'], start_new_session=True)\nprint(5)"
        assert judge(daemon, FIVES).verdict == "right"
        assert judge("import os\nos.kill(os.getppid(), 9)", FIVE).verdict == "crash"
        wait_until(lambda: not sleeping(), LEFT_S)


def test_the_same_order_of_sets_each_time(judge: Judge) -> None:
    program = "print(*{'a', 'b', 'c', 'd', 'e', 'f'})"
    orders = {judge(program, FIVE).why for _ in range(4)}
    assert len(orders) == 1


def test_C19_nothing_is_left_behind(sandbox: Sandbox, judge: Judge) -> None:
    """Also of checks whose interpreter was replaced, or that were killed in the middle."""
    own = psutil.Process(sandbox.pid)
    judge("print(5)", FIVE)
    files = own.num_fds()
    for _ in range(4):
        judge("print(5)", FIVE)
        judge(SOME, {"inputs": ["0", "1"], "outputs": ["0", "1"]})
        judge("import os\nos.kill(os.getppid(), 9)", FIVE)
        judge(f"import subprocess\nsubprocess.Popen(['sleep', '{OWN_SLEEP}'], start_new_session=True)\nprint(5)", FIVE)
    wait_until(lambda: not own.children(recursive=True), LEFT_S)
    assert own.num_fds() == files
    assert not sleeping()


# ------------------------------------------------------------------------------- the jail can't be had: nobody's fault


def test_C20_the_jail_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher.of(SPEC)
    monkeypatch.setattr(Launcher, "of", lambda _: replace(launcher, argv=["/nonexistent/bwrap"]))
    found = code.grader(SPEC)(CHECK)
    assert (found.verdict, found.extracted) == ("infrastructure", "print(5)")
    assert "/nonexistent/bwrap can't be started: [Errno 2]" in found.why


def test_C20_the_interpreter_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher.of(SPEC)
    monkeypatch.setattr(Launcher, "of", lambda _: replace(launcher, argv=jail.command(["/nonexistent"], SPEC)))
    found = code.grader(SPEC)(CHECK)
    assert found.verdict == "infrastructure"
    assert "/nonexistent" in found.why


def test_C20_no_process_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    grade = code.grader(SPEC)
    assert grade(CHECK).verdict == "right"

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert grade(CHECK).verdict == "infrastructure"


def run_in(launcher: Launcher) -> None:
    jailed = Jailed(launcher, "print(5)")
    try:
        jailed.run(b"", "", [], 1000, time.monotonic() + 30)
    finally:
        jailed.end()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os, sys, time; os.write(int(sys.argv[1]), b'ready\\n'); os.read(int(sys.argv[1]), 9999); "
         "os.write(int(sys.argv[1]), b'fork 11\\n'); time.sleep(60)", "Resource temporarily unavailable"),
        ("import os; os.write(2, b'no room')", "no room"),
        ("import os; os._exit(5)", "it said nothing"),
    ],
)  # fmt: skip
def test_C20_the_interpreter_can_not_do_its_part(program: str, why: str) -> None:
    launcher = replace(Launcher.of(SPEC), program=marshal.dumps(compile(program, "runner.py", "exec")))
    with pytest.raises(Unavailable, match=why):
        run_in(launcher)
