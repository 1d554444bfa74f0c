"""Ways to get a reward without the right answer, each tried from inside: none ends as right.

What they all run into: the expected output isn't in the jail, so whatever they overwrite, forge or kill there, what
they would have to print isn't known.
"""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from areal_async.messages import CodeOptions, RewardSpec, ScoreResult, ScoreTask
from areal_async.rewards.sandbox import Sandbox

pytestmark = pytest.mark.slow
SECRET = "EXPECTED-6f1ed002ab5595859014ebf0951522d9"  # the honest way to it is closed on purpose
LOOK = r"""
import glob, os, re, sys
def look(data):
    if found := re.search(rb"EXPECTED-[0-9a-f]{32}", data): os.write(1, found[0]); os._exit(0)
def slurp(path):
    try:
        with open(path, "rb", buffering=0) as file: return file.read(1 << 20) or b""
    except OSError: return b""
"""
Cheat = Callable[..., ScoreResult]


@pytest.fixture(scope="module")
def cheat() -> Iterator[Cheat]:
    with Sandbox(RewardSpec(function="code")) as sandbox:
        yield cheat_in(sandbox)


@pytest.fixture(scope="module")
def patient() -> Iterator[Cheat]:
    """For what must come to its end, also on a busy machine."""
    with Sandbox(RewardSpec(function="code", timeout_s=100.0, code=CodeOptions(test_timeout_s=50.0))) as sandbox:
        yield cheat_in(sandbox)


def cheat_in(sandbox: Sandbox) -> Cheat:
    def judge(program: str, inputs: list[object], outputs: list[object], function: str = "") -> ScoreResult:
        tests = {"inputs": inputs, "outputs": outputs, **({"fn_name": function} if function else {})}
        task = ScoreTask(
            sample="0.0",
            attempt=0,
            prompt="",
            answer=None,
            finish="stop",
            response=f"```python\n{program}\n```",
            columns={"tests": msgspec.Raw(msgspec.msgpack.encode(tests))},
        )
        sandbox.submit(1, task, b"")
        found = sandbox.next_result()
        assert found is not None
        return found[1]

    return judge


def assert_wrong(found: ScoreResult) -> None:
    assert found.verdict in ("wrong", "crash", "timeout"), found
    assert found.reward == 0.0


MEMORY = """
for pid in {os.getpid(), os.getppid(), 1}:
    for line in slurp(f"/proc/{pid}/maps").splitlines():
        begin, end = (int(n, 16) for n in line.split()[0].split(b"-"))
        try:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
                file.seek(begin)
                look(file.read(min(end - begin, 1 << 24)) or b"")
        except (OSError, ValueError, OverflowError): pass
"""
OBJECTS = """
import gc
for thing in gc.get_objects(): look(repr(thing)[:10000].encode())
"""
FRAMES = """
frame = sys._getframe()
while frame:
    look(repr(frame.f_locals)[:100000].encode())
    frame = frame.f_back
"""
DESCRIPTORS = """
for path in glob.glob("/proc/*/fd/*"):
    try: look(os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 20))
    except OSError: pass
"""
ARGUMENTS = """
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"): look(slurp(path))
"""
FILES = """
for root in ("/tmp", "/dev/shm", "/var", "/run", "/home", "/root", "/work"):
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(("site-packages", "python3"))]
        for name in names: look(slurp(os.path.join(folder, name)))
"""
SEARCHES = [
    pytest.param("text = input()", MEMORY, id="memory"),
    pytest.param("text = [input()]", OBJECTS, id="objects"),
    pytest.param("text = input()", FRAMES, id="frames"),
    pytest.param("r, w = os.pipe(); os.write(w, input().encode())", DESCRIPTORS, id="descriptors"),
    pytest.param("import subprocess\nsubprocess.Popen(['sleep', '300'], env={'a': input()})", ARGUMENTS,
                 id="environments"),
    pytest.param("open('x', 'w').write(input())", FILES, id="files"),
]  # fmt: skip


@pytest.mark.parametrize(("put", "search"), SEARCHES)
def test_the_expected_output_is_nowhere(patient: Cheat, put: str, search: str, tmp_path: Path) -> None:
    """And the same search finds it where it is there, since it was in the input."""
    (tmp_path / "answers.json").write_text(SECRET)
    program = f"{LOOK}\n{put}\n{search}\nprint('not found')"
    assert "got 'not found'" in patient(program, [f"{SECRET[:-1]}?\n"], [SECRET]).why
    assert patient(program, [f"{SECRET}\n"], [SECRET]).verdict == "right"


FORGERIES = [
    pytest.param("import os\nfor fd in range(64):\n    try: os.write(fd, b'1')\n    except OSError: pass\n"
                 "os._exit(0)", id="a-record-on-every-descriptor"),
    pytest.param("import os\ndef f():\n    for fd in range(3, 64):\n        try: os.write(fd, b'\"x\"')\n"
                 "        except OSError: pass\n    return 7", id="two-records"),
    pytest.param("import json, os, sys\njson.dumps = lambda *a, **k: '77'\nsys.exit = os._exit = lambda *a: None\n"
                 "def f(): return 7", id="json-and-exit"),
    pytest.param("import _json, builtins\n_json.make_encoder = lambda *a: lambda *b: ('77',)\n"
                 "builtins.isinstance = lambda *a: True\ndef f(): return 8", id="builtins"),
    pytest.param("import os\nold = os.write\nos.write = lambda fd, data: old(fd, b'77')\n"
                 "def f(): return 8", id="os.write"),
    pytest.param("class Any:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
                 "def f(): return Any()", id="equal-to-everything"),
    pytest.param("class Int(int):\n    def __repr__(self): return '77'\n    __str__ = __repr__\n"
                 "    def __eq__(self, other): return True\ndef f(): return Int(8)", id="an-int-of-its-own"),
    pytest.param("class Text(str):\n    def __eq__(self, other): return True\ndef f(): return Text('x')", id="a-str"),
    pytest.param("def f(): return float('nan')", id="NaN"),
    pytest.param("import os\ndef f():\n    for fd in range(3, 64):\n        try: os.write(fd, b'[' * 50000)\n"
                 "        except OSError: pass\n    return 7", id="nested-too-deep"),
    *(pytest.param("import ctypes, os\nlibc = ctypes.CDLL(None)\npidfd = libc.syscall(434, 1, 0)\n"
                   "for fd in range(64):\n    got = libc.syscall(438, pidfd, fd, 0)\n"
                   f"    if got >= 0:\n        try: os.write(got, {report!r})\n        except OSError: pass\n"
                   "def f(): raise ValueError\nraise ValueError", id=f"says-{report!r}-in-the-name-of-the-runner")
      for report in (b"exit 0 0\n", b"fork 11\n", b"run\nexit 0 0\n", b"\n", b"exit --1 0\n", b"x" * 50_000)),
]  # fmt: skip


@pytest.mark.parametrize("program", FORGERIES)
def test_a_forged_result_is_no_right_one(cheat: Cheat, program: str) -> None:
    assert_wrong(cheat(program, [[], []], [77, 77], "f"))
    assert_wrong(cheat(program, ["", ""], ["77", "77"]))


EXITS = [
    pytest.param("import os\nos._exit(0)", id="_exit"),
    pytest.param("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nraise ValueError", id="kills-the-runner"),
    pytest.param("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nraise ValueError", id="stops-the-runner"),
    pytest.param("import os, signal\nos.kill(-1, signal.SIGKILL)", id="kills-everything"),
    pytest.param("import os\nif os.fork(): os._exit(0)\nos.setsid()\nraise ValueError", id="leaves-a-child-to-fail"),
    pytest.param("import sys\nprint(77)\nsys.stdout.flush()\nraise ValueError", id="raises-after-the-right-output"),
    pytest.param("import os\nos.execv('/bin/true', ['true'])", id="becomes-another-program"),
]


@pytest.mark.parametrize("program", EXITS)
def test_an_early_end_is_no_right_answer(cheat: Cheat, program: str) -> None:
    assert_wrong(cheat(program, ["", ""], ["77", "77"]))


LEFT = [
    pytest.param("import os\ntry: print(open('seen').read())\nexcept OSError: open('seen', 'w').write('77'); print(76)",
                 id="a-file"),
    pytest.param("import os\nprint(77 if os.path.exists('/dev/shm/a') else 76)\nopen('/dev/shm/a', 'w')",
                 id="shared-memory"),
    pytest.param("import os, time\nothers = sum(name.isdigit() for name in os.listdir('/proc')) - 2\n"
                 "print(77 if others else 76, flush=True)\nif os.fork() == 0:\n    os.setsid()\n"
                 "    if os.fork() == 0: time.sleep(300)\n    os._exit(0)", id="a-daemon"),
    pytest.param("import socket, os\ns = socket.socket(socket.AF_UNIX)\ntry: s.bind('\\0here'); print(76, flush=True)\n"
                 "except OSError: print(77)\nif os.fork() == 0:\n    import time; time.sleep(300)", id="a-socket"),
]  # fmt: skip


@pytest.mark.parametrize("program", LEFT)
def test_a_test_finds_nothing_of_the_one_before(patient: Cheat, program: str) -> None:
    """The first test is passed by what it prints; the second would only be by what the first has left."""
    assert patient(program, ["", ""], ["76", "76"]).verdict == "right"
    found = patient(program, ["", ""], ["76", "77"])
    assert (found.verdict, found.why[:11]) == ("wrong", "test 2 of 2"), found.why


def test_no_network(patient: Cheat) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = (
            "import socket\n"
            f"try: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1); print(77)\n"
            "except OSError: print('refused')"
        )
        assert "got 'refused'" in patient(program, [""], ["77"]).why


@pytest.mark.parametrize("path", [__file__, "/etc/passwd", "/root", "/proc/1/root/etc/passwd", "/var/log"])
def test_no_files_of_the_machine(patient: Cheat, path: str) -> None:
    program = f"import os\ntry: os.stat({path!r}); print(77)\nexcept OSError: print('nothing')"
    assert path == "/root" or "got 'nothing'" in patient(program, [""], ["77"]).why
    names = f"import os\ntry: print(*os.listdir({os.path.dirname(path)!r}))\nexcept OSError: print('nothing')"
    assert "test_code" not in patient(names, [""], ["77"]).why
