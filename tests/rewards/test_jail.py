"""Ways out of the jail, each tried from inside: to the network, to other processes, to the run's secret, to its files.

A new way that somebody thinks of belongs here. Nothing is skipped where bubblewrap is missing: it has to be there.
"""

import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from areal_async.errors import RewardError
from areal_async.messages import RewardOptions
from areal_async.messages.rewards import Limits
from areal_async.rewards import jail

pytestmark = pytest.mark.slow
LIMIT_S = 120.0
OPTIONS = RewardOptions(limits=Limits(file_mib=4))
PROJECT = Path(__file__).parents[2]
Jailed = Callable[..., str]

PRELUDE = """
import ctypes, errno, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def refused(what, *arguments):
    '''Print the error that a call fails with; "got through" if it doesn't.'''
    try:
        print("got through", what(*arguments))
    except OSError as error:
        print(errno.errorcode[error.errno])
def libc_call(name, *arguments):
    found = getattr(libc, name)(*arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), name)
    return found
"""


@pytest.fixture
def jailed(monkeypatch: pytest.MonkeyPatch) -> Jailed:
    """Runs Python code in the jail, gives what it printed."""
    monkeypatch.setenv("AREAL_ASYNC_SECRET", "open sesame")

    def run(code: str, *arguments: str, before: Callable[[], None] | None = None) -> str:
        ended = subprocess.run(
            jail.command([jail.interpreter(), "-I", "-c", PRELUDE + code, *arguments], OPTIONS),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            preexec_fn=before,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    return run


@pytest.fixture
def bystander() -> Iterator[int]:
    """A process outside, which must live on."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        assert process.poll() is None
        process.kill()


def test_honest_code_finds_what_it_needs(jailed: Jailed) -> None:
    code = """
sys.path += sys.argv[1:]
import numpy, json, multiprocessing, sqlite3, ssl, threading
threading.Thread(target=print, args=("a thread",)).start()
multiprocessing.Lock()
open("notes", "w").write("in the working folder")
print(os.getcwd(), open("/tmp/notes").read(), numpy.arange(3).sum())
"""
    assert jailed(code, *jail.packages(OPTIONS)) == "a thread\n/tmp in the working folder 3"


@pytest.mark.parametrize("family", ["tcp", "abstract"])
def test_no_network(jailed: Jailed, family: str) -> None:
    with socket.socket(socket.AF_INET if family == "tcp" else socket.AF_UNIX) as server:
        server.bind(("127.0.0.1", 0) if family == "tcp" else f"\0areal-async-test-{os.getpid()}")
        server.listen()
        server.setblocking(False)
        address = repr(server.getsockname())
        kind = "AF_INET" if family == "tcp" else "AF_UNIX"
        said = jailed(f"refused(socket.socket(socket.{kind}).connect, {address})")
        assert said == "ECONNREFUSED"
        with pytest.raises(BlockingIOError):
            server.accept()
    assert jailed("refused(socket.create_connection, ('192.0.2.1', 80), 3)") == "ENETUNREACH"
    assert jailed("print([name for _, name in socket.if_nameindex()])") == "['lo']"


def test_no_other_process(jailed: Jailed, bystander: int) -> None:
    pids = jailed("print(*sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))")
    assert pids == "1"
    assert jailed(f"refused(os.kill, {bystander}, 9)") == "ESRCH"
    assert jailed(f"refused(libc_call, 'ptrace', 16, {bystander}, 0, 0)") in ("ESRCH", "EPERM")
    assert jailed(f"refused(os.pidfd_open, {bystander})") == "ESRCH"
    assert jailed("refused(os.kill, -1, 9)") == "ESRCH"  # all that there is: nothing else


def test_neither_secret_nor_environment(jailed: Jailed) -> None:
    assert jailed("print(sorted(os.environ))") == str(sorted([*jail.ENVIRONMENT, "PWD"]))
    everywhere = """
for process in filter(str.isdigit, os.listdir("/proc")):
    for file in ("environ", "cmdline", "mem"):
        try:
            if b"sesame" in open(f"/proc/{process}/{file}", "rb").read(1 << 20): print("got through", process, file)
        except OSError:
            pass
"""
    said = jailed(everywhere.replace("sesame", "s\\x65same"))  # so that it doesn't find itself
    assert said == ""


def test_no_file_of_the_host(jailed: Jailed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 1")
    for path in ("/etc/shadow", "/etc/passwd", "/proc/1/root/etc/shadow", "/proc/2/root/etc/passwd"):
        assert jailed(f"refused(open, {path!r})") == "ENOENT"
    for folder in (
        run,
        PROJECT / "areal_async",
        PROJECT / "configs",
        PROJECT / ".git",
        Path.home() / ".cache",
        "/sys",
        "/run",
        "/var",
    ):
        assert jailed(f"refused(os.listdir, {str(folder)!r})") in ("ENOENT", "EACCES"), folder
    assert jailed("print(os.path.exists('/proc/1/root/var'), os.path.exists('/proc/1/cwd/../var'))") == "False False"


def test_nothing_can_be_written_but_the_small_folders(jailed: Jailed) -> None:
    code = """
for folder, folders, files in os.walk("/"):
    if folder.count("/") > 3 or folder.startswith("/proc/"): folders.clear()
    try:
        os.close(os.open(os.path.join(folder, "planted"), os.O_CREAT | os.O_WRONLY)); print(folder)
    except OSError: pass
"""
    assert sorted(jailed(code).split()) == ["/dev/shm", "/tmp"]
    programs = f"refused(open, {jail.interpreter()!r}, 'r+b')"
    assert jailed(programs) in ("EROFS", "ETXTBSY")


def test_no_setting_of_the_kernel(jailed: Jailed) -> None:
    """Root's own files in /proc can be written by whoever has root's number, whatever a namespace calls it."""
    code = """
for folder, folders, files in os.walk("/proc"):
    if folder == "/proc": folders[:] = [name for name in folders if not name.isdigit() and "self" not in name]
    for file in files:
        try:
            os.close(os.open(os.path.join(folder, file), os.O_WRONLY | os.O_NONBLOCK)); print(folder, file)
        except OSError: pass
"""
    assert jailed(code) == ""


@pytest.mark.parametrize(
    ("call", "errors"),
    [
        ("'unshare', 0x10000000", "ENOSPC"),  # a user namespace
        ("'unshare', 0x00020000", "EPERM"),  # a mount namespace
        ("'unshare', 0x20000000", "EPERM"),  # a pid namespace
        ("'mount', b'x', b'/tmp', b'tmpfs', 0, None", "EPERM"),
        ("'mount', None, b'/', None, 32, None", "EPERM"),  # remount to be written
        ("'umount2', b'/proc', 2", "EPERM"),
        ("'chroot', b'/tmp'", "EPERM"),
        ("'setuid', 0", "EINVAL"),
        ("'sethostname', b'x', 1", "EPERM"),
        ("'mknod', b'/tmp/disk', 0o60600, 0x800", "EPERM"),
        ("'setns', os.open('/proc/1/ns/net', 0), 0", "EPERM"),
        ("'reboot', 0", "EPERM"),
        ("'nice', -5", "EPERM"),
    ],
)
def test_no_way_through_a_system_call(jailed: Jailed, call: str, errors: str) -> None:
    assert jailed(f"refused(libc_call, {call})") == errors


def test_no_privilege(jailed: Jailed) -> None:
    status = dict(re.findall(r"^(\w+):\t(\w+)$", jailed("print(open('/proc/self/status').read())"), re.MULTILINE))
    assert (status["NoNewPrivs"], {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")}) == (
        "1",
        {0},
    )
    code = """
import glob, subprocess, stat
for path in glob.glob("/usr/bin/*"):
    if os.path.exists(path) and os.stat(path).st_mode & stat.S_ISUID:
        attempts = {"su": ["-c", "id -u"], "sudo": ["-n", "id"], "mount": ["-t", "tmpfs", "x", "/tmp"]}
        if arguments := attempts.get(os.path.basename(path)):
            ended = subprocess.run([path, *arguments], stdin=subprocess.DEVNULL, capture_output=True)
            if ended.returncode == 0: print("got through", path)
"""
    assert jailed(code) == ""


def test_limits_can_not_be_raised(jailed: Jailed) -> None:
    def before() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    code = "import resource\ntry: resource.setrlimit(resource.RLIMIT_NOFILE, (65, 65)); print('got through')\n"
    assert (
        jailed(code + "except ValueError as error: print(error)", before=before) == "not allowed to raise maximum limit"
    )


def test_no_device(jailed: Jailed) -> None:
    expected = {
        "core",
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
    }
    assert set(jailed("print(*os.listdir('/dev'))").split()) <= expected
    assert jailed("refused(open, '/dev/tty')") == "ENXIO"  # no terminal to type into


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_the_small_folders_are_small_and_go(jailed: Jailed, folder: str) -> None:
    code = f"""
written = 0
try:
    for number in range(64):
        with open("{folder}/%d" % number, "wb", buffering=0) as file: written += file.write(bytes(1 << 20))
except OSError as error: print(errno.errorcode[error.errno], written >> 20)
"""
    assert jailed(code) == "ENOSPC 4"
    assert jailed(f"print(os.listdir('{folder}'))") == "[]"


def test_shared_memory_of_old_stays_inside(jailed: Jailed) -> None:
    key = 0x5EED0000 + os.getpid()
    assert jailed(f"print(libc_call('shmget', {key}, 4096, 0o1666) >= 0)") == "True"
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()  # of all that run on this machine
    assert str(key) not in [line.split()[0] for line in lines]


def test_what_it_started_ends_with_it(jailed: Jailed) -> None:
    """Also what has a session of its own, is deaf, and holds the pipe: `jailed` waits for the pipe's end."""
    begin = time.monotonic()
    code = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(15, signal.SIG_IGN)
        import time; time.sleep(3600)
    os._exit(0)
os.wait(); print("done", flush=True); os._exit(0)
"""
    assert jailed(code) == "done"
    assert time.monotonic() - begin < LIMIT_S / 2


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    argv = jail.command([jail.interpreter(), "-I", "-c", "import time; print(1, flush=True); time.sleep(60)"], OPTIONS)
    reading, writing = os.pipe()
    starter = os.fork()
    if starter == 0:
        os.dup2(writing, 1)
        subprocess.Popen(argv)
        signal.pause()
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.readline() == b"1\n"
        os.kill(starter, signal.SIGKILL)
        os.waitpid(starter, 0)
        assert pipe.read() == b""  # the last one that could write is gone


def test_what_is_on_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    jail.require(OPTIONS)
    assert {layer.name: layer.on for layer in jail.layers(OPTIONS)} | {"cgroup": True} == {
        "own session": True,
        "rlimits": True,
        "cgroup": True,
        "bubblewrap": True,
    }
    without = msgspec.structs.replace(OPTIONS, sandbox="rlimits")
    assert jail.command(["true"], without) == ["true"]
    jail.require(without)
    assert not {layer.name: layer.on for layer in jail.layers(without)}["bubblewrap"]
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RewardError, match=r"there is no `bwrap`; install it: .*bubblewrap"):
        jail.require(OPTIONS)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("bwrap: No permissions to create a new namespace, likely because the kernel does not allow", "--privileged"),
        ("bwrap: Creating new namespace failed: Operation not permitted", "--privileged"),
        ("bwrap: Unknown option --disable-userns", "0.8.0"),
        ("bwrap: Can't mkdir", "bwrap --unshare-all"),
    ],
)
def test_where_it_does_not_work_it_is_said_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, advice: str
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RewardError) as caught:
        jail.require(OPTIONS)
    assert said in str(caught.value)
    assert advice in str(caught.value)
    assert "reward.sandbox=rlimits" in str(caught.value)
