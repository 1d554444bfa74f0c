"""Whatever a check does, it ends at its deadline with all it started, and the others don't notice."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import psutil
import pytest

from areal_async import process_tree
from areal_async.errors import RewardError
from areal_async.messages import RewardSpec, ScoreResult, ScoreTask
from areal_async.rewards import cgroups, limits
from areal_async.rewards.sandbox import Sandbox

from ..waiting import LEFT_S, SLACK_S, wait_until

SpecOf = Callable[..., RewardSpec]
TaskOf = Callable[..., ScoreTask]
Encode = Callable[[str], bytes]
TRIES = 10  # of what is to end in time; the fastest counts, since the machine may be busy


@pytest.fixture
def result_of(spec_of: SpecOf, task_of: TaskOf, encode: Encode) -> Callable[..., ScoreResult]:
    """Outcome of one check; afterwards the same sandbox still works, and has no process but its own."""

    def check(function: str, timeout_s: float = 10.0, **columns: object) -> ScoreResult:
        with Sandbox(spec_of(function, timeout_s=timeout_s)) as sandbox:
            sandbox.submit(7, task_of(**columns), encode("42"))
            found = sandbox.next_result()
            assert found is not None
            assert found[0] == 7
            wait_until(lambda: not psutil.Process(sandbox.pid).children(recursive=True), LEFT_S)
            return found[1]

    return check


@pytest.mark.parametrize(
    ("function", "verdict", "reward", "why"),
    [
        ("length", "given", 0.2, ""),
        ("right", "right", 1.0, "returned True"),
        ("raises", "crash", 0.0, "ValueError: no such thing as 42"),
        ("exits", "crash", 0.0, "SystemExit: 3"),
        ("leaves", "crash", 0.0, "exit code 7 before it gave a reward; its output ends:\nlast words"),
        ("segfaults", "crash", 0.0, "signal 11 (Segmentation fault)"),
        ("nan", "bad_data", None, "nan is no reward"),
        ("prints", "crash", 0.0, "printed more than 1024 KiB"),
        ("chatty", "given", 0.5, ""),
        ("needs", "bad_data", None, "needs level"),
        ("secret", "wrong", 0.0, "returned False"),
        ("exact", "right", 1.0, "expected '42'"),
    ],
)
def test_outcomes(
    result_of: Callable[..., ScoreResult],
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    verdict: str,
    reward: float | None,
    why: str,
) -> None:
    monkeypatch.setenv("AREAL_ASYNC_SECRET", "s")
    found = result_of(function)
    assert (found.verdict, found.reward) == (verdict, reward)
    assert why in found.why
    assert len(found.why) < 5000


def test_columns_and_async_functions(result_of: Callable[..., ScoreResult]) -> None:
    found = result_of("later", level=2.5)
    assert (found.verdict, found.reward) == ("given", 2.5)


@pytest.mark.parametrize("function", ["sleeps", pytest.param("spins", marks=pytest.mark.slow)])
def test_the_deadline(result_of: Callable[..., ScoreResult], function: str) -> None:
    for _ in range(TRIES):
        found = result_of(function, timeout_s=0.3)
        assert (found.verdict, found.reward) == ("timeout", 0.0)
        assert 0.3 <= found.seconds < 0.3 + SLACK_S
        if found.seconds < 0.6:
            return
    pytest.fail(f"it ended {found.seconds - 0.3:.2f} s too late, and never in time")


@pytest.mark.parametrize(
    ("function", "timeout_s", "verdict"),
    [
        pytest.param("hangs", 3.0, "timeout", marks=pytest.mark.slow),
        ("returns", 60.0, "given"),
        ("dies", 60.0, "crash"),
    ],
)
def test_all_that_a_check_started_ends_with_it(
    result_of: Callable[..., ScoreResult], tmp_path: Path, function: str, timeout_s: float, verdict: str
) -> None:
    found = result_of(f"{function}_with_a_tree", timeout_s=timeout_s, folder=str(tmp_path))
    assert found.verdict == verdict
    assert len(pids_in(tmp_path)) == 3
    wait_until(lambda: not alive(pids_in(tmp_path)), LEFT_S)


@pytest.mark.slow
def test_a_slow_check_delays_nobody_else(spec_of: SpecOf, task_of: TaskOf, encode: Encode) -> None:
    """Also where more of them hang than there are places, and came first."""
    with Sandbox(spec_of("mixed", timeout_s=60.0, concurrent=2)) as sandbox:
        for number in range(6):
            sandbox.submit(number, task_of(), encode("slow"))
        for number in range(6, 36):
            sandbox.submit(number, task_of(), encode("fast"))
        quick = set()
        for _ in range(30):  # all of them before any of the slow ones ends
            number, result = sandbox.next_result() or pytest.fail("closed")
            assert (number >= 6, result.verdict) == (True, "given")
            quick.add(number)
        assert len(quick) == 30
    with Sandbox(spec_of("mixed", timeout_s=1.0, concurrent=2)) as sandbox:
        for number in range(6):
            sandbox.submit(number, task_of(), encode("slow"))
        slow = [sandbox.next_result() for _ in range(6)]
        assert sorted((found[0], found[1].verdict) for found in slow if found) == [(n, "timeout") for n in range(6)]


@pytest.mark.slow
def test_there_is_an_end_to_slow_places(spec_of: SpecOf, task_of: TaskOf, encode: Encode) -> None:
    spec = spec_of("mixed", timeout_s=600.0, concurrent=1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with Sandbox(spec) as sandbox:
        for number in range(8):
            sandbox.submit(number, task_of(), encode("slow"))

        def running() -> list[int]:
            return process_tree.children(sandbox.pid)

        def lowest() -> int:
            return max(os.getpriority(os.PRIO_PROCESS, pid) for pid in running())

        wait_until(lambda: len(running()) == limits.places(spec), 60)
        wait_until(lambda: lowest() == min(own + limits.SLOW_NICE, limits.LOWEST_NICE), 60)
        begin = time.monotonic()
        while time.monotonic() - begin < 2 * limits.SLOW_S:
            assert len(running()) == limits.places(spec)
            time.sleep(0.05)


def test_the_end_of_a_check_leaves_the_daemons_of_the_others(
    spec_of: SpecOf, task_of: TaskOf, encode: Encode, tmp_path: Path
) -> None:
    with Sandbox(spec_of("needs_its_daemon", timeout_s=600)) as sandbox:
        task = task_of(folder=str(tmp_path))
        sandbox.submit(1, task, encode("slow"))
        wait_until((tmp_path / "ready").exists, 60)
        sandbox.submit(2, task, encode("quick"))
        assert sandbox.next_result() is not None
        (tmp_path / "quick is over").touch()
        found = sandbox.next_result()
        assert found is not None
        assert (found[0], found[1].verdict) == (1, "right"), found[1].why


@pytest.mark.slow
def test_the_deadline_counts_from_the_start_of_the_check(spec_of: SpecOf, task_of: TaskOf, encode: Encode) -> None:
    timeout_s = 3 * limits.SLOW_S
    with Sandbox(spec_of("mixed", timeout_s=timeout_s, concurrent=1)) as sandbox:
        begin = time.monotonic()
        for number, text in enumerate(["slow"] * 4 + ["fast"]):  # the last one waits until all others are slow
            sandbox.submit(number, task_of(), encode(text))
        verdicts = {}
        for _ in range(5):
            number, result = sandbox.next_result() or pytest.fail("closed")
            verdicts[number] = result.verdict
            if number == 4:
                assert time.monotonic() - begin - result.seconds > timeout_s
        assert verdicts == {0: "timeout", 1: "timeout", 2: "timeout", 3: "timeout", 4: "given"}


def test_a_killed_sandbox_is_replaced(spec_of: SpecOf, task_of: TaskOf, encode: Encode, tmp_path: Path) -> None:
    with Sandbox(spec_of("hangs_with_a_tree", timeout_s=600)) as sandbox:
        sandbox.submit(1, task_of(folder=str(tmp_path)), encode("x"))
        wait_until(lambda: len(pids_in(tmp_path)) == 3, 60)
        first = sandbox.pid
        os.kill(first, signal.SIGKILL)
        found = sandbox.next_result()
        assert found is not None
        assert (found[0], found[1].verdict, found[1].reward) == (1, "infrastructure", None)
        assert alive(pids_in(tmp_path)) == []
        assert sandbox.pid != first


def test_a_sandbox_that_was_killed_leaves_nothing_when_it_is_closed(
    spec_of: SpecOf, task_of: TaskOf, encode: Encode, tmp_path: Path
) -> None:
    sandbox = Sandbox(spec_of("hangs_with_a_tree", timeout_s=600))
    with sandbox:
        sandbox.submit(1, task_of(folder=str(tmp_path)), encode("x"))
        wait_until(lambda: len(pids_in(tmp_path)) == 3, 60)
        os.kill(sandbox.pid, signal.SIGKILL)
    assert alive(pids_in(tmp_path)) == []
    folder = cgroups.parent()
    assert folder is None or list(folder.glob(f"{cgroups.NAME}.*.{sandbox.pid}.*")) == []


@pytest.mark.slow
def test_a_check_that_kills_the_sandbox_only_fails_itself(spec_of: SpecOf, task_of: TaskOf, encode: Encode) -> None:
    with Sandbox(spec_of("kills_its_parent")) as sandbox:
        for number in range(2):
            sandbox.submit(number, task_of(), encode("x"))
            found = sandbox.next_result()
            assert found is not None
            assert (found[0], found[1].verdict) == (number, "infrastructure")


@pytest.mark.slow
def test_no_descriptor_is_left_open(spec_of: SpecOf, task_of: TaskOf, encode: Encode) -> None:
    with Sandbox(spec_of("mixed", timeout_s=0.1)) as sandbox:
        counts = []
        for _ in range(2):
            for number in range(12):
                sandbox.submit(number, task_of(), encode("slow" if number % 4 == 0 else "fast"))
            for _ in range(12):
                sandbox.next_result()
            counts.append(len(os.listdir(f"/proc/{sandbox.pid}/fd")))
        assert counts[0] == counts[1]


@pytest.mark.slow
def test_long_answers_pass(spec_of: SpecOf, task_of: TaskOf, encode: Encode) -> None:
    with Sandbox(spec_of("length", concurrent=2)) as sandbox:
        for number in range(8):
            sandbox.submit(number, task_of(), encode("7" * 200_000))
        assert [found[1].reward for found in (sandbox.next_result() for _ in range(8)) if found] == [20_000.0] * 8


def test_errors_of_loading_come_before_any_check(spec_of: SpecOf, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="has no 'no_such_function'"), Sandbox(spec_of("no_such_function")):
        pass
    no_tokenizer = msgspec.structs.replace(spec_of("length"), model_path=str(tmp_path))
    with pytest.raises(RewardError, match=r"tokenizer.json: can't load the tokenizer"), Sandbox(no_tokenizer):
        pass


HOLDER = """
import sys, time, msgspec
from areal_async.messages import RewardSpec, ScoreTask
from areal_async.rewards.sandbox import Sandbox
with Sandbox(msgspec.json.decode(sys.argv[1], type=RewardSpec)) as sandbox:
    sandbox.submit(1, msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=ScoreTask), b"")
    print(sandbox.pid, flush=True)
    time.sleep(600)
"""


def test_when_the_worker_is_killed_nothing_is_left(spec_of: SpecOf, task_of: TaskOf, tmp_path: Path) -> None:
    spec = msgspec.json.encode(spec_of("hangs_with_a_tree", timeout_s=600)).decode()
    task = msgspec.msgpack.encode(task_of(folder=str(tmp_path))).hex()
    with subprocess.Popen([sys.executable, "-c", HOLDER, spec, task], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        forkserver = int(worker.stdout.readline())
        wait_until(lambda: len(pids_in(tmp_path)) == 3, 60)
        pids = [*pids_in(tmp_path), forkserver, *psutil_tree(forkserver)]
        worker.kill()
        wait_until(lambda: not alive(pids), 60)


def psutil_tree(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def pids_in(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir(folder)]


def alive(pids: Iterable[int]) -> list[int]:
    """Those that still run; a zombie, whose parent has only not asked yet, doesn't."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found
