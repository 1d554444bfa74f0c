"""Checks that use up a machine: each ends by its limit with its verdict, leaves nothing, and hurts nobody beside it."""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from areal_async.messages import RewardSpec, ScoreResult, ScoreTask
from areal_async.messages.rewards import Limits
from areal_async.rewards import cgroups, limits
from areal_async.rewards.sandbox import Sandbox

pytestmark = pytest.mark.slow

FUNCTIONS = '''
import ctypes, mmap, os, re, signal, subprocess, sys, time
from areal_async.messages import RewardOptions
from areal_async.rewards import jail
libc = ctypes.CDLL(None)
MIB = 1 << 20

def reward(response): return globals()[response]()
def easy(): return 1.0

def tower(): return 9 ** 9 ** 9
def factorial():
    import math
    return math.factorial(10_000_000)
def pattern(): return bool(re.fullmatch("(a+)+", "a" * 60 + "b"))
def deaf():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
    while True: time.sleep(1)

def large(): return len(bytearray(16 << 30))
def mapped():
    held = []
    while True:
        held.append(mmap.mmap(-1, 4 * MIB))
        held[-1].write(bytes(4 * MIB))
def shared():
    """Little for each process, much for all."""
    for _ in range(6):
        if os.fork() == 0: break
    held = b"x" * (15 * MIB)
    time.sleep(60)
def files():
    """Memory that no process has mapped."""
    held = [os.memfd_create("x") for _ in range(30)]
    for number in held: os.write(number, bytes(3 * MIB))
    time.sleep(60)

def again(fork):
    """A bomb that doesn't mind being refused."""
    while True:
        try: fork()
        except OSError: pass
def forks(): again(os.fork)
def forks_fast(): again(libc.fork)
def forks_in_sessions(): again(lambda: os.fork() or os.setsid())
def forks_in_a_shell(): again(lambda: subprocess.run(["sh", "-c", "b() { b | b & }; b"], stderr=subprocess.DEVNULL))
def forks_in_the_jail():
    bomb = """import os
while True:
    try: os.fork() or os.setsid()
    except OSError: pass
"""
    subprocess.run(jail.command([jail.interpreter(), "-I", "-S", "-c", bomb], RewardOptions()))
def threads():
    import threading
    while True: threading.Thread(target=time.sleep, args=(60,)).start()

def prints():
    while True: print("x" * 10_000)
def opens():
    held = []
    while True: held.append(open("/dev/null"))
def writes():
    with open(os.environ["TMPDIR"] + "/large", "wb") as file:
        while True: file.write(bytes(MIB))
def daemon():
    """A grandchild with a session of its own holds the pipes, and goes on."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        os._exit(0)
    os.wait()
    return 1.0
def comes_back_twice():
    os.fork()
    return 1.0
'''

TIMEOUT_S = 1.0
PATIENT_S = 30.0  # the timeout of what isn't to end by it, also on a busy machine
TRIES = 5  # of what is to end in time; the fastest counts
LIMITS = Limits(memory_mib=64, processes=16, open_files=64, file_mib=4, output_kib=100)
EXPECTED = {
    "tower": ("timeout", "not done after 1 s"),
    "factorial": ("timeout", "not done after 1 s"),
    "pattern": ("timeout", "not done after 1 s"),
    "deaf": ("timeout", "not done after 1 s"),
    "large": ("crash", "used more than 64 MiB (reward.limits.memory_mib)"),
    "mapped": ("crash", "used more than 64 MiB (reward.limits.memory_mib)"),
    "shared": ("crash", "used more than 64 MiB (reward.limits.memory_mib), and was killed"),
    "files": ("crash", "used more than 64 MiB (reward.limits.memory_mib), and was killed"),
    "forks": ("crash", "had more than 16 processes and threads"),
    "forks_fast": ("crash", "had more than 16 processes and threads"),
    "forks_in_sessions": ("crash", "had more than 16 processes and threads"),
    "forks_in_a_shell": ("crash", "had more than 16 processes and threads"),
    "forks_in_the_jail": ("crash", "had more than 16 processes and threads"),
    "threads": ("crash", ""),
    "prints": ("crash", "printed more than 100 KiB (reward.limits.output_kib)"),
    "opens": ("crash", "Too many open files"),
    "writes": ("crash", "File too large"),
    "daemon": ("given", ""),
    "comes_back_twice": ("given", ""),
}


needs_groups = pytest.mark.skipif(cgroups.parent() is None, reason="this machine lets us make no control groups")
HOLDS_ONLY_IN_A_GROUP = {"forks_in_sessions"} if cgroups.parent() is None and os.geteuid() == 0 else set()
"""Outside of the jail, nothing else bounds for certain what root's bombs do that make new sessions all the time."""


@pytest.fixture
def spec_of_abuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RewardSpec]:
    (tmp_path / "abuse.py").write_text(FUNCTIONS)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def make(**options: object) -> RewardSpec:
        chosen = {"timeout_s": TIMEOUT_S, "limits": LIMITS, "concurrent": 2, **options}
        return RewardSpec(function="abuse:reward", import_paths=(str(tmp_path),), **chosen)  # type: ignore[arg-type]

    return make


def task(response: str) -> ScoreTask:
    return ScoreTask(sample="0.0", attempt=0, prompt="", answer="", finish="stop", columns={}, response=response)


def results(sandbox: Sandbox, wanted: list[str]) -> Iterator[tuple[str, ScoreResult]]:
    for number, response in enumerate(wanted):
        sandbox.submit(number, task(response), b"")
    for _ in wanted:
        found = sandbox.next_result()
        assert found is not None
        yield wanted[found[0]], found[1]


def state_of(pid: int) -> dict[str, int]:
    return {
        "processes": len(psutil.Process(pid).children(recursive=True)),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "shared memory": len(os.listdir("/dev/shm")),
    }


def groups(pid: int) -> list[Path]:
    folder = cgroups.parent()
    return list(folder.glob(f"{cgroups.NAME}.*.{pid}.*")) if folder else []


def settled(condition: Callable[[], bool], deadline_s: float = 20.0) -> bool:
    limit = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("abuse", sorted(EXPECTED.keys() - HOLDS_ONLY_IN_A_GROUP))
def test_it_ends_by_its_limit_and_leaves_nothing(spec_of_abuse: Callable[..., RewardSpec], abuse: str) -> None:
    verdict, why = EXPECTED[abuse]
    times = []
    with Sandbox(spec_of_abuse(timeout_s=TIMEOUT_S if verdict == "timeout" else PATIENT_S)) as sandbox:
        list(results(sandbox, ["easy"]))
        before = state_of(sandbox.pid)
        for _ in range(TRIES):
            ((_, found),) = results(sandbox, [abuse])
            assert (found.verdict, why in found.why) == (verdict, True), found
            assert settled(lambda: state_of(sandbox.pid) == before), (before, state_of(sandbox.pid))
            times.append(found.seconds)
            if found.seconds < TIMEOUT_S + 1:
                return
    pytest.fail(f"it never ended in time, but after {times} s")


def test_two_hundred_of_them_beside_easy_ones(spec_of_abuse: Callable[..., RewardSpec]) -> None:
    kinds = sorted(EXPECTED.keys() - HOLDS_ONLY_IN_A_GROUP) * 12
    mixed = [name for abuse in kinds[:200] for name in (abuse, "easy", "easy")]
    with Sandbox(spec_of_abuse(timeout_s=3.0, concurrent=4)) as sandbox:
        for _ in results(sandbox, ["easy"] * 20):
            pass
        before, memory = state_of(sandbox.pid), psutil.Process(sandbox.pid).memory_info().rss
        slowest = 0.0
        for response, found in results(sandbox, mixed):
            expected = "given" if response == "easy" else EXPECTED[response][0]
            assert found.verdict == expected, (response, found)
            assert found.seconds < 4, (response, found)
            if response == "easy":
                slowest = max(slowest, found.seconds)
        assert slowest < 1
        assert settled(lambda: state_of(sandbox.pid) == before), (before, state_of(sandbox.pid))
        assert psutil.Process(sandbox.pid).memory_info().rss - memory < 4 << 20
    assert groups(sandbox.pid) == []


@needs_groups
def test_groups_of_a_killed_sandbox_are_removed(spec_of_abuse: Callable[..., RewardSpec]) -> None:
    with Sandbox(spec_of_abuse()) as sandbox:
        first = sandbox.pid
        assert len(groups(first)) == limits.places(spec_of_abuse())
        sandbox.submit(0, task("deaf"), b"")
        os.kill(first, signal.SIGKILL)
        found = sandbox.next_result()
        assert found is not None
        assert found[1].verdict == "infrastructure"
        assert sandbox.pid != first
        assert groups(first) == []


@needs_groups
def test_if_the_worker_was_killed_too_the_next_one_removes_them(spec_of_abuse: Callable[..., RewardSpec]) -> None:
    folder = cgroups.parent()
    assert folder is not None
    with subprocess.Popen(["true"]) as gone:
        pass
    left = folder / f"{cgroups.NAME}.{os.stat('/proc/self/ns/pid').st_ino}.{gone.pid}.0"
    left.mkdir()
    with Sandbox(spec_of_abuse()):
        assert not left.exists()


def test_no_descriptor_is_infrastructure(spec_of_abuse: Callable[..., RewardSpec]) -> None:
    with Sandbox(spec_of_abuse()) as sandbox:
        list(results(sandbox, ["easy"]))  # it has started: what it opens for that is closed again
        _, hard = resource.prlimit(sandbox.pid, resource.RLIMIT_NOFILE)
        before = state_of(sandbox.pid)
        for most in range(4, 8):  # each step of making one fails in its turn
            resource.prlimit(sandbox.pid, resource.RLIMIT_NOFILE, (most, hard))
            ((_, found),) = results(sandbox, ["easy"])
            assert found.verdict == "infrastructure", (most, found)
            assert "could not be made: [Errno 24]" in found.why
        resource.prlimit(sandbox.pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert [found.verdict for _, found in results(sandbox, ["easy"] * 5)] == ["given"] * 5
        assert settled(lambda: state_of(sandbox.pid) == before)


def test_a_bomb_of_another_user_is_bounded_by_rlimits() -> None:
    """Root is not held by RLIMIT_NPROC, everybody else is: also a bomb that outruns the watch."""
    spec = RewardSpec(limits=LIMITS, concurrent=1)
    most = limits.most_processes(spec)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            limits.set_limits(LIMITS, limits.mapped_bytes(), most)
            if os.geteuid() == 0:
                os.setuid(61_234)  # nobody's
            started = []
            with contextlib.suppress(BlockingIOError):
                while len(started) <= most:
                    started.append(os.fork())
                    if started[-1] == 0:
                        signal.pause()
            os.write(writing, str(len(started)).encode())
            for pid in started:
                os.kill(pid, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert 0 < int(os.read(reading, 100)) < most
    os.close(reading)
    os.close(writing)
