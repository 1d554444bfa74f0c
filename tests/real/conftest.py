"""Runs on real vLLM and DeepSpeed with the quickstart's model: how to start them and what to look at."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from areal_async.config import Config
from areal_async.config_file import load_config

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PATIENCE_S = 600.0  # for what never comes; vLLM and DeepSpeed start in 20 s alone, and in minutes beside other work

SMALL = ("train.batch_groups=8", "train.minibatches=2", "rollout.group_size=4", "rollout.max_concurrent=64")


def small(*overrides: str) -> list[str]:
    """Small batches, and these overrides, which come before them."""
    given = {override.partition("=")[0] for override in overrides}
    return [*(option for option in SMALL if option.partition("=")[0] not in given), *overrides]


def _hears_ctrl_c() -> None:
    """Tests that were started in the background of a shell (`pytest &`) inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Program:
    """`areal-async` (or another script) in a process of its own, with what it has started."""

    def __init__(self, argv: list[str], cwd: Path) -> None:
        self.output = cwd / "output.txt"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                argv, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True, preexec_fn=_hears_ctrl_c
            )
        self.family: set[psutil.Process] = set()

    def look(self) -> set[psutil.Process]:
        """Note everything that descends from it now; guards put children into sessions of their own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self.family

    def wait_for(self, there: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = self.process.poll() is not None  # asked first: what it did at last counts, too
            if there():
                return
            assert not has_ended, f"it ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"not there after {timeout_s:g} s:\n{self.text()}"
            self.look()
            time.sleep(0.05)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def arguments(self) -> list[str]:
        """Of all of the family's command lines."""
        found: list[str] = []
        for process in self.look():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.cmdline()
        return found

    def alive(self) -> list[str]:
        found = []
        for process in self.family:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            except psutil.NoSuchProcess:
                continue
        return found

    def gone_after_s(self, timeout_s: float) -> float:
        """Seconds until nothing of the family is alive."""
        begun = time.monotonic()
        while left := self.alive():
            assert time.monotonic() - begun < timeout_s, f"still there after {timeout_s:g} s: {left}"
            time.sleep(0.1)
        return time.monotonic() - begun

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.gone_after_s(15.0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """start("run", "train.steps=3"): the command line on the quickstart's configuration, small batches."""
    programs = []

    def begin(command: str, *overrides: str) -> Program:
        argv = [sys.executable, "-m", "areal_async", command, str(QUICKSTART), f"runs_dir={tmp_path}/runs"]
        programs.append(Program([*argv, *small(*overrides)], tmp_path))
        return programs[-1]

    yield begin
    for program in programs:
        program.end()


@pytest.fixture
def quickstart(tmp_path: Path) -> Callable[..., Config]:
    """The quickstart's configuration with small batches and some options changed."""
    return lambda *overrides: load_config(QUICKSTART, [f"runs_dir={tmp_path}/runs", *small(*overrides)])


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make smollm2` makes: once for all tests, and what lies in configs/ if somebody has made it."""
    folder = ROOT / "configs" / "smollm2"
    if not all((folder / name).exists() for name in ("model/model.safetensors", "code-eval.jsonl")):
        folder = tmp_path_factory.mktemp("smollm2")
        subprocess.run([sys.executable, str(ROOT / "tools" / "make_smollm2.py"), "--out", str(folder)], check=True)
    return folder


def is_server(process: psutil.Process) -> bool:
    """Whether it is vLLM's server itself, not who starts it."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return (
        "vllm.entrypoints.openai.api_server" in command
        and "taskset" not in command[0]
        and "guard.py" not in str(command)
    )


def is_rank(process: psutil.Process) -> bool:
    """Whether it is a rank of the trainer, not who starts it."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return command[-6:-4] == ["-m", "areal_async.engines.deepspeed.rank"] and "torch.distributed.run" not in command


def metrics(tmp_path: Path) -> Path:
    """`metrics.jsonl` of the only run under this folder (may not be there yet)."""
    found = list((tmp_path / "runs").glob("*/metrics.jsonl"))
    return found[0] if found else tmp_path / "none"


def lines(path: Path) -> int:
    """Whole ones; somebody may be writing it."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
