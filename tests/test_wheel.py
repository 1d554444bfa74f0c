"""The package as a stranger gets it: a wheel, installed into an empty environment without torch or vLLM."""

import re
import resource
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 60.0  # of what takes a second on a free machine
TRIES = 3  # of a timed command; the fastest counts


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = folder / "source"  # a copy: setuptools leaves what it built beside the sources, and takes it up again
    skipped = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=skipped)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    (wheel,) = folder.glob("*.whl")
    python = folder / "env" / "bin" / "python"
    subprocess.run([str(python), *pip[1:], "install", str(wheel)], check=True)
    return python.parent


def fastest_s(command: list[str], cwd: Path) -> float:
    """Seconds of a core: whatever else the machine does, it is the command's own work."""
    times = []
    for _ in range(TRIES):
        before = used_s()
        subprocess.run(command, check=True, cwd=cwd, capture_output=True, timeout=LIMIT_S)
        times.append(used_s() - before)
    return min(times)


def used_s() -> float:
    """By all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_check_works_in_an_empty_environment(environment: Path, tmp_path: Path) -> None:
    command = [str(environment / "areal-async"), "check", str(ROOT / "configs" / "quickstart.yaml")]
    took_s = fastest_s(command, tmp_path)
    print(f"areal-async check: {took_s:.2f} s")
    assert took_s < 1.0


@pytest.mark.slow
def test_the_import_is_quick_and_brings_no_torch(environment: Path, tmp_path: Path) -> None:
    python = str(environment / "python")
    empty_s = fastest_s([python, "-c", "pass"], tmp_path)
    took_s = fastest_s([python, "-c", "import areal_async"], tmp_path) - empty_s
    print(f"import areal_async: {took_s:.3f} s")
    assert took_s < 0.3
    names = subprocess.run([python, "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout
    assert "torch" not in names


@pytest.mark.slow
def test_other_processes_code_is_in_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = "import areal_async.engines.vllm, areal_async.rewards.worker, areal_async.testing.trainer"
    subprocess.run([str(environment / "python"), "-c", code], check=True, cwd=tmp_path)


@pytest.mark.slow
def test_the_view_has_its_page_and_what_draws(environment: Path, tmp_path: Path) -> None:
    """Also where no browser is: the files come from the wheel, and the drawing script from the package plotly."""
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests" / "logs" / "wait-gone-back-resumed", run / "log")
    command = [str(environment / "areal-async"), "view", str(run), "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        said = ""
        while not (address := re.search(r"http://[^\s/]+/", said)):
            said += (line := viewer.stdout.readline())
            assert line, f"it ended and has only said: {said}"
        got = {name: _get(address.group() + name) for name in ("", "static/app.js", "static/plotly.min.js")}
        viewer.send_signal(signal.SIGINT)
        assert viewer.wait(timeout=LIMIT_S) == 0
    assert b"<!doctype html>" in got[""].lower()
    assert b"import" in got["static/app.js"]
    assert b"plotly.js v" in got["static/plotly.min.js"][:200]


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
        return bytes(answer.read())
