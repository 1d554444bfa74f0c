"""What holds for every test (it leaves no task, process, open file or file in /dev/shm), and what several use."""

import asyncio
import contextlib
import functools
import gc
import inspect
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from areal_async.config import Config
from areal_async.config_file import load_config
from areal_async.testing.small_run import write_model

# The same examples each time, and no deadline: what fails must fail alike on a fast, a slow and a busy machine.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

uvloop.new_event_loop().close()  # libuv opens a pipe for signals once a process, and keeps it

ROOT = Path(__file__).resolve().parent.parent
SETTLE_S = 20.0  # how long a child or a socket that a test has just ended may take to go


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is tested under both event loops is tested fast under uvloop, the command line's; asyncio's own is slow."""
    for item in items:
        if "[asyncio" in item.name:
            item.add_marker(pytest.mark.slow)
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = leaving_no_task(item.obj)


def leaving_no_task(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The test, and after it no task of its own is left; those of fixtures may be there (aiohttp's, a connection)."""

    @functools.wraps(test)
    async def checked(*args: object, **kwargs: object) -> None:
        before = asyncio.all_tasks()
        await test(*args, **kwargs)
        deadline = time.monotonic() + SETTLE_S
        while left := [task for task in asyncio.all_tasks() - before if "RequestHandler.start" not in repr(task)]:
            assert time.monotonic() < deadline, f"the test has left behind: {left}"
            await asyncio.sleep(0.01)

    return checked


@pytest.fixture(scope="session")
def oracles() -> Path:
    """Folder of the reference numbers. Without it these tests are left out; never in CI, where it must be there."""
    folder = Path(os.environ.get("ORACLES_DIR", ROOT.parent / "shared" / "oracles"))
    if not folder.is_dir() and not os.environ.get("CI"):
        pytest.skip(f"no reference numbers at {folder}; name their folder in ORACLES_DIR")
    return folder


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    before = _held()
    yield
    deadline = time.monotonic() + SETTLE_S
    while left := _left(before):
        if time.monotonic() > deadline:
            pytest.fail(f"the test has left behind: {'; '.join(left)}")
        gc.collect()
        time.sleep(0.05)


def _held() -> dict[str, set[str]]:
    return {"process": _children(), "file": _files(), "shared memory": set(os.listdir("/dev/shm"))}


def _left(before: dict[str, set[str]]) -> list[str]:
    return [f"{kind} {name}" for kind, names in _held().items() for name in sorted(names - before[kind])]


def _children() -> set[str]:
    """This process's children, but for zombies. From /proc itself: looking through all processes takes far longer."""
    found = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        pids = ""
        with contextlib.suppress(OSError):  # a thread that has just ended
            pids = listed.read_text()
        for pid in pids.split():
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.add(f"{pid} {command[:120]}")
    return found


def _files() -> set[str]:
    """Open files, pipes and sockets; event loops' own ones (anonymous inodes, which libraries keep) are left out."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if not target.startswith(("/dev/", "anon_inode:", "/proc/")):
            found.add(f"{fd} -> {target}")
    return found


# a model folder without weights (the scripted peers need none), a little data, and a configuration on them

ROWS = 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """128 character tokens; "z" ends an answer."""
    folder = tmp_path / "model"
    write_model(folder)
    return folder


@pytest.fixture
def make_config(tmp_path: Path, model: Path) -> Callable[..., Config]:
    """A run of 4 steps of 4 prompts × 2 samples, some options changed: make_config("train.steps=2")."""

    def make(*overrides: str) -> Config:
        data = tmp_path / "train.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(ROWS)))
        path = tmp_path / "config.yaml"
        path.write_text(
            f"name: scripted\nruns_dir: {tmp_path / 'runs'}\n"
            f"model: {{path: {model}, dtype: float32}}\n"
            f"data: {{train: {data}, eval: {data}, chat_template: plain}}\n"
            "rollout: {group_size: 2, max_new_tokens: 64, max_staleness: 2, max_concurrent: 64}\n"
            "train: {steps: 4, batch_groups: 4, minibatches: 2, max_tokens_per_microbatch: 512}\n"
        )
        return load_config(path, overrides)

    return make
