"""Children end as they should, with all they started, whatever happens to whom."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from areal_async.errors import LaunchError
from areal_async.launch.child import GUARD, START_DEADLINE_S, Child, ChildSpec

from ..waiting import until, wait_until

# A tree of four: itself, one in a session of its own, one that ignores SIGTERM in yet another, and a double fork.
# Each writes its pid to the folder argv[1] when it is ready; argv[2] is a name for a file in /dev/shm.
TREE = """
import os, signal, sys, time
folder, shm = sys.argv[1:]
def settle(name):
    with open(os.path.join(folder, name + ".tmp"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(folder, name + ".tmp"), os.path.join(folder, name + ".pid"))
    while True:
        time.sleep(60)
open("/dev/shm/" + shm + "-v1.safetensors", "w").close()
if os.fork() == 0:
    os.setsid()
    settle("session")
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settle("stubborn")
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        settle("daemon")
    os._exit(0)
os.wait()
print("the tree stands", flush=True)
settle("root")
"""
TREE_NAMES = ("session", "stubborn", "daemon", "root")
CONTROLLER = """
import asyncio, os, sys, time
from pathlib import Path
from areal_async.launch.child import Child, ChildSpec
folder, shm, fork = sys.argv[1:]
async def main():
    await Child.start(ChildSpec(name="tree", argv=[sys.executable, "-c", os.environ["TREE"], folder, shm],
                                stderr_path=Path(folder, "out"), shm_prefix=shm))
    if fork == "fork" and os.fork() == 0:  # holds copies of all descriptors
        Path(folder, "forked").touch()
        time.sleep(60)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def shm() -> Iterator[str]:
    name = f"areal-test-{uuid.uuid4().hex[:8]}"
    yield name
    for path in Path("/dev/shm").glob(f"*{name}*"):
        path.unlink()


def spec(folder: Path, source: str, *arguments: str, shm_prefix: str | None = None) -> ChildSpec:
    return ChildSpec(
        name="child", argv=python(source, *arguments), stderr_path=folder / "out", shm_prefix=shm_prefix, cwd=folder
    )


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11),
        ("import os, signal; os.kill(0, signal.SIGUSR1)", -10),
    ],
)
async def test_exit_code_or_signal_is_passed_on(tmp_path: Path, source: str, code: int) -> None:
    child = await Child.start(spec(tmp_path, source))
    assert await child.wait() == code
    assert child.returncode == code
    assert not alive([child.pid])


async def test_output_is_kept_and_only_its_own_is_in_the_tail(tmp_path: Path) -> None:
    first = await Child.start(spec(tmp_path, "print('of the first')"))
    await first.wait()
    source = "import sys; [print(i, flush=True) for i in range(100)]; print('bad', file=sys.stderr); sys.exit(4)"
    second = await Child.start(spec(tmp_path, source))
    await second.wait()
    assert second.tail(3) == "98\n99\nbad"
    assert "of the first" in (tmp_path / "out").read_text()
    assert "of the first" not in second.tail(1000)
    assert "exit code 4" in second.why()
    assert second.why().endswith("bad")


async def test_a_tail_of_one_endless_line_is_bounded(tmp_path: Path) -> None:
    child = await Child.start(spec(tmp_path, "print('x' * 10_000_000)"))
    await child.wait()
    assert len(child.tail()) <= 1 << 16


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["no-such-program"], "No such file or directory: no-such-program"),
        (["/etc/passwd"], "Permission denied: /etc/passwd"),
    ],
)
async def test_a_program_that_can_not_be_executed_is_an_error_at_once(
    tmp_path: Path, argv: list[str], reason: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=reason):
        await Child.start(ChildSpec(name="child", argv=argv, stderr_path=tmp_path / "out"))
    assert time.monotonic() - begin < START_DEADLINE_S / 2


async def test_missing_folders_are_errors_at_once(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="No such file or directory: /no/such/folder"):
        await Child.start(
            ChildSpec(name="child", argv=["true"], stderr_path=tmp_path / "out", cwd=Path("/no/such/folder"))
        )
    with pytest.raises(LaunchError, match="can't write its output to /no/such/out"):
        await Child.start(ChildSpec(name="child", argv=["true"], stderr_path=Path("/no/such/out")))


async def test_environment_is_added_to_ours(tmp_path: Path) -> None:
    child = await Child.start(
        ChildSpec(
            name="child",
            argv=python("import os; print(os.environ['MINE'], bool(os.environ['PATH']))"),
            env={"MINE": "yes"},
            stderr_path=tmp_path / "out",
        )
    )
    await child.wait()
    assert child.tail() == "yes True"


async def test_nothing_of_ours_is_inherited(tmp_path: Path) -> None:
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    child = await Child.start(spec(tmp_path, "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"))
    await child.wait()
    os.close(leak)
    assert child.tail() == "[0, 1, 2]"


@pytest.mark.slow
async def test_stop_ends_the_tree_and_removes_its_shared_memory(tmp_path: Path, shm: str) -> None:
    neighbour = f"{shm}0-v1.safetensors"  # of a run whose name begins like ours
    touch_shared(neighbour)
    child = await Child.start(spec(tmp_path, TREE, str(tmp_path), shm, shm_prefix=shm))
    pids = await asyncio.to_thread(tree_pids, tmp_path)
    assert alive(pids) == pids
    assert await child.stop(5.0) == -15  # the root doesn't ignore SIGTERM, so this takes no 5 s
    assert alive(pids) == []
    assert shared_files(shm) == [neighbour]


async def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    source = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = await Child.start(spec(tmp_path, source))
    await asyncio.to_thread(wait_until, lambda: child.tail() == "up", 60)
    begin = time.monotonic()
    assert await child.stop(0.3) == -9
    assert 0.3 <= time.monotonic() - begin < 20  # it would have slept on


async def test_a_second_stop_shortens_the_first(tmp_path: Path) -> None:
    source = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = await Child.start(spec(tmp_path, source))
    await asyncio.to_thread(wait_until, lambda: child.tail() == "up", 60)
    patient = asyncio.create_task(child.stop(60))
    await asyncio.sleep(0.05)
    assert await child.stop(0) == -9
    assert await patient == -9
    assert await child.stop(1) == -9  # of what has ended


async def test_the_context_stops_the_child_also_when_cancelled(tmp_path: Path) -> None:
    async def use() -> None:
        async with await Child.start(spec(tmp_path, "import time; time.sleep(600)")) as child:
            pids.append(child.pid)
            await asyncio.sleep(60)

    pids: list[int] = []
    task = asyncio.create_task(use())
    await asyncio.to_thread(wait_until, lambda: bool(pids), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive(pids) == []


@pytest.mark.slow
async def test_a_child_that_dies_takes_its_tree_with_it(tmp_path: Path, shm: str) -> None:
    child = await Child.start(spec(tmp_path, TREE, str(tmp_path), shm, shm_prefix=shm))
    pids = await asyncio.to_thread(tree_pids, tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -9
    assert alive(pids) == []
    assert shared_files(shm) == []


async def test_a_prefix_with_a_folder_means_files_in_that_folder(tmp_path: Path) -> None:
    """What the trainer publishes to a disk; /dev/shm isn't touched by such a prefix."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("areal-ab-v3.safetensors", "areal-ab-v4.partial", "areal-abc-v1.safetensors", "other"):
        (folder / name).touch()
    (folder / "areal-ab.partial").mkdir()
    (folder / "areal-ab.partial" / ".tmpX1").touch()
    source = "import time; print('up', flush=True); time.sleep(60)"
    child = await Child.start(spec(tmp_path, source, shm_prefix=str(folder / "areal-ab")))
    await asyncio.to_thread(wait_until, lambda: child.tail() == "up", 60)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -9
    assert sorted(os.listdir(folder)) == ["areal-abc-v1.safetensors", "other"]


async def test_shared_memory_that_the_tree_forgot_is_removed(tmp_path: Path) -> None:
    source = """
import mmap, os, sys, time
name = "psm_" + sys.argv[1]
with open("/dev/shm/" + name, "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
print(name, flush=True)
time.sleep(60)
"""
    child = await Child.start(spec(tmp_path, source, uuid.uuid4().hex[:8]))
    await asyncio.to_thread(wait_until, lambda: child.tail() != "", 60)
    assert child.tail() in shared_files("psm_")
    await child.stop(0)
    assert shared_files(child.tail()) == []


async def test_a_semaphore_that_the_tree_forgot_is_removed(tmp_path: Path) -> None:
    """As multiprocessing makes them, but without its tracker: mapped under a name that is gone, left under another."""
    source = """
import sys, time, _multiprocessing
kept = _multiprocessing.SemLock(1, 1, 1, "/mp-" + sys.argv[1], False)
print("sem.mp-" + sys.argv[1], flush=True)
time.sleep(60)
"""
    child = await Child.start(spec(tmp_path, source, uuid.uuid4().hex[:8]))
    await asyncio.to_thread(wait_until, lambda: child.tail() != "", 60)
    assert child.tail() in shared_files("sem.")
    await child.stop(0)
    assert shared_files(child.tail()) == []


async def test_a_killed_guard_is_replaced_by_a_sweep(tmp_path: Path, shm: str) -> None:
    child = await Child.start(spec(tmp_path, TREE, str(tmp_path), shm))
    pids = await asyncio.to_thread(tree_pids, tmp_path)
    os.kill(child._guard, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert await child.wait() == -9
    assert alive(pids) == []


@pytest.mark.slow
async def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = open_descriptors()
    for _ in range(20):
        child = await Child.start(spec(tmp_path, "pass"))
        await child.wait()
        with pytest.raises(LaunchError):
            await Child.start(ChildSpec(name="child", argv=["no-such-program"], stderr_path=tmp_path / "out"))
    await until(lambda: open_descriptors() == before)  # the guards of those that could not start end by themselves


async def test_many_at_once(tmp_path: Path) -> None:
    children = await asyncio.gather(*(Child.start(spec(tmp_path, f"raise SystemExit({i})")) for i in range(8)))
    assert await asyncio.gather(*(child.wait() for child in children)) == list(range(8))


@pytest.mark.slow
@pytest.mark.parametrize("fork", ["no fork", "fork"])
def test_when_the_controller_is_killed_nothing_is_left(tmp_path: Path, shm: str, fork: str) -> None:
    controller = subprocess.Popen(python(CONTROLLER, str(tmp_path), shm, fork), env={**os.environ, "TREE": TREE})
    pids = tree_pids(tmp_path)
    assert Path(f"/dev/shm/{shm}-v1.safetensors").exists()
    if fork == "fork":
        wait_until((tmp_path / "forked").exists, 60)
    forked = children_of(controller.pid)
    controller.kill()
    controller.wait()
    took_s = wait_until(lambda: not alive(pids) and not shared_files(shm), 10.0)
    assert took_s < 8
    for pid in alive(forked):
        os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_guard_loads_only_the_standard_library() -> None:
    source = f"""
import runpy, sys
sys.path.append({str(GUARD.parents[2])!r})
runpy.run_path({str(GUARD)!r}, run_name="guard")
loaded = {{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)
print(sorted(loaded), "asyncio" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-I", "-S", "-c", source], capture_output=True, text=True, check=True)
    assert found.stdout == "['__main__', 'areal_async'] False\n"


def python(source: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", source, *arguments]


def tree_pids(folder: Path, deadline_s: float = 60.0) -> list[int]:
    """Pids of a `TREE`, once all of it stands."""
    wait_until(lambda: all((folder / f"{name}.pid").exists() for name in TREE_NAMES), deadline_s)
    return [int((folder / f"{name}.pid").read_text()) for name in TREE_NAMES]


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


def shared_files(part: str) -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if part in name)


def touch_shared(name: str) -> None:
    Path("/dev/shm", name).touch()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
