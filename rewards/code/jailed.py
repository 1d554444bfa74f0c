"""The trusted end of a jailed interpreter (`runner.py`): starts it, gives it tests, reads what they print.

What always holds:
- nothing here waits longer than the deadline that it was given, or keeps more output than the limit and a little;
- an interpreter that can't start, or can't fork, is `Unavailable`: not the tested code's fault;
- an interpreter in which a test has left anything (a process, a file, a signal to the interpreter itself) is not used
  for another one: it is ended, whole, and the next test gets a new one.
"""

import contextlib
import marshal
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

from areal_async import process_tree
from areal_async.messages import RewardOptions
from areal_async.rewards import jail

BOOT: Final = "import marshal,os;exec(marshal.loads(os.read(0,1<<20)),{'__name__':'runner'})"
FLAGS: Final = ("-s", "-S", "-P", "-X", "utf8")  # not -I, which would ignore PYTHONHASHSEED: sets in the same order
WRITABLE: Final = ("/tmp", "/dev/shm")  # in the jail; what a test leaves there, the next one must not find
START_SHARE: Final = 0.5  # of the check's time; it takes 15 ms. What takes longer is nobody's fault, so it is said
END_LIMIT_S: Final = 5.0  # what SIGKILL doesn't end in this time hangs in the kernel
END_LOOK_S: Final = 0.001
READ_BYTES: Final = 1 << 16
TAIL_BYTES: Final = 4000  # of what is printed to stderr
LENGTH_BYTES: Final = 4

Ended: TypeAlias = Literal["exit", "timeout", "output", "lost"]
"""How a test ended: by itself; killed at its deadline or its output limit; or its interpreter was gone, or talked
nonsense, which is the tested code's doing."""


class Unavailable(Exception):
    """The check can't be made: no jail, no interpreter, no process to be had."""


@dataclass
class Ran:
    """What a test did. exit_code: negative for a signal. record: what came on the descriptor for results.

    began: its process was there. Before that no tested code runs, so what the interpreter says then can be believed.
    """

    ended: Ended = "lost"
    exit_code: int = -1
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    record: bytearray = field(default_factory=bytearray)
    printed: int = 0
    began: bool = False


@dataclass(frozen=True)
class Launcher:
    """What is the same for every check of a worker: computed once, before anything is forked."""

    argv: list[str]
    program: bytes
    packages: list[str]
    watched: tuple[str, ...]
    folderless: bool
    start_s: float

    @classmethod
    def of(cls, options: RewardOptions) -> Self:
        source = Path(__file__).with_name("runner.py").read_bytes()  # bytes: the locale must not matter
        held = options.sandbox == "bubblewrap"
        program, *arguments = jail.command([jail.interpreter(), *FLAGS, "-c", BOOT], options)
        return cls(
            [shutil.which(program) or program, *arguments],  # found by this process's PATH, not by the jail's
            marshal.dumps(compile(source, "runner.py", "exec", dont_inherit=True)),
            jail.packages(options),
            WRITABLE if held else (),
            not held,
            options.timeout_s * START_SHARE,
        )


class Jailed:
    """One interpreter with a program to be tested. Ended by `end`, or by the check's own end."""

    def __init__(self, launcher: Launcher, code: str) -> None:
        self._before = set(process_tree.descendants(os.getpid()))
        self._received = bytearray()
        self.spoiled = False
        self._control, theirs = socket.socketpair()
        boot, boot_end = os.pipe()
        os.write(boot_end, launcher.program)  # much less than a pipe holds
        os.close(boot_end)
        said, said_end = os.pipe()
        folder = tempfile.mkdtemp() if launcher.folderless else None
        try:
            self._process = subprocess.Popen(
                [*launcher.argv, str(theirs.fileno())],
                stdin=boot,
                stdout=said_end,
                stderr=said_end,
                pass_fds=[theirs.fileno()],
                env=jail.ENVIRONMENT,
                cwd=folder,
            )
        except OSError as error:
            os.close(said)
            self._control.close()
            raise Unavailable(f"{launcher.argv[0]} can't be started: {error}") from None
        finally:
            theirs.close()
            os.close(boot)
            os.close(said_end)
            if folder is not None:
                os.rmdir(folder)  # it is in a folder that nobody has to remove if this check is killed
        try:
            self._await_ready(said, launcher.start_s)
            message = marshal.dumps((code, launcher.packages, launcher.watched))
            self._control.sendall(len(message).to_bytes(LENGTH_BYTES, "little") + message)
            self._own = set(process_tree.descendants(os.getpid()))
        except OSError as error:
            self.end()
            raise Unavailable(f"the jailed interpreter ended at once: {error}") from None
        finally:
            os.close(said)

    def _await_ready(self, said: int, start_s: float) -> None:
        self._control.settimeout(start_s)
        try:
            line = self._control.recv(len(b"ready\n"), socket.MSG_WAITALL)
        except TimeoutError:
            line = b""
        if line != b"ready\n":
            self._process.kill()  # or what it says would have no end
            self.end()
            os.set_blocking(said, False)
            with contextlib.suppress(BlockingIOError):
                line = os.read(said, TAIL_BYTES)
            why = line.decode(errors="replace").strip() or "it said nothing"
            raise Unavailable(f"the jailed interpreter did not start ({self._process.returncode}): {why}")

    def run(self, given: bytes, function: str, arguments: list[object], limit_bytes: int, deadline: float) -> Ran:
        """One test. given: its standard input. function: to be called with `arguments`; "": run as a program.

        limit_bytes: of all that it prints. deadline: of time.monotonic().
        """
        ran = Ran()
        pipes = _Pipes()
        try:
            self._send(marshal.dumps((function, arguments)), pipes.theirs, deadline)
            pipes.close(*pipes.theirs)
            self._exchange(ran, pipes, memoryview(given), limit_bytes, deadline)
        except TimeoutError:
            ran.ended = "timeout"
        except OSError:
            ran.ended = "lost"
        finally:
            pipes.close(*pipes.open)
        self.spoiled |= ran.ended != "exit" or set(process_tree.descendants(os.getpid())) != self._own
        return ran

    def _send(self, body: bytes, descriptors: list[int], deadline: float) -> None:
        self._control.settimeout(max(deadline - time.monotonic(), 0.001))
        socket.send_fds(self._control, [len(body).to_bytes(LENGTH_BYTES, "little")], descriptors)
        self._control.sendall(body)

    def _exchange(self, ran: Ran, pipes: "_Pipes", given: memoryview, limit_bytes: int, deadline: float) -> None:
        """Feed and read, all at once, until the test has ended, in whatever way."""
        control = self._control.fileno()
        kept = {pipes.stdout: ran.stdout, pipes.stderr: ran.stderr, pipes.result: ran.record}
        poll = select.poll()
        for descriptor in (control, *kept):
            poll.register(descriptor, select.POLLIN)
        if given:
            poll.register(pipes.feed, select.POLLOUT)
        else:
            pipes.close(pipes.feed)
        while True:
            patience_s = deadline - time.monotonic()
            if patience_s <= 0:
                raise TimeoutError
            over = False
            for descriptor, _ in poll.poll(patience_s * 1000 + 1):
                if descriptor == control:
                    over = self._take_report(ran)
                elif descriptor == pipes.feed:
                    given = given[_written(descriptor, given) :]
                    if not given:
                        poll.unregister(descriptor)
                        pipes.close(descriptor)
                elif not _read(descriptor, kept[descriptor], ran):
                    poll.unregister(descriptor)
            if over:  # what it has printed before its end is in the pipes; what it left behind may hold them open
                for descriptor, into in kept.items():
                    while ran.printed <= limit_bytes and _read(descriptor, into, ran):
                        pass
            del ran.stderr[:-TAIL_BYTES]
            if ran.printed > limit_bytes:
                ran.ended = "output"
            if over or ran.printed > limit_bytes:
                return

    def _take_report(self, ran: Ran) -> bool:
        """Whether the interpreter has said how the test ended."""
        received = self._control.recv(READ_BYTES)
        if not received or len(self._received) > TAIL_BYTES:
            raise ConnectionError("the interpreter is gone, or talks nonsense")
        self._received += received
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            match line.split():
                case [b"run"] if not ran.began:
                    ran.began = True
                case [b"fork", number] if not ran.began and number.isdigit():
                    raise Unavailable(f"a process for the test can't be had: {os.strerror(int(number[:8]))}")
                case [b"exit", code, left] if ran.began and code.removeprefix(b"-").isdigit():
                    ran.ended, ran.exit_code = "exit", int(code[:8])
                    self.spoiled |= left != b"0" or bool(self._received)
                    return True
                case _:
                    raise ConnectionError("the interpreter talks nonsense")
        return False

    def end(self) -> None:
        """Kill the interpreter and all that is in its jail, and wait until it is gone."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        limit = time.monotonic() + END_LIMIT_S
        while time.monotonic() < limit:
            left = set(process_tree.descendants(os.getpid())) - self._before
            if not left:
                return
            process_tree.signal_all(left, signal.SIGKILL)
            for child in left.intersection(process_tree.children(os.getpid())):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)
            time.sleep(END_LOOK_S)


class _Pipes:
    """Four pipes: ours are `feed`, `stdout`, `stderr` and `result`, without blocking; `theirs` go into the jail."""

    def __init__(self) -> None:
        stdin, self.feed = os.pipe()
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        self.result, result = os.pipe()
        self.theirs = [stdin, stdout, stderr, result]
        ours = [self.feed, self.stdout, self.stderr, self.result]
        for descriptor in ours:
            os.set_blocking(descriptor, False)
        self.open = {*self.theirs, *ours}

    def close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            self.open.discard(descriptor)
            os.close(descriptor)


def _written(descriptor: int, data: memoryview) -> int:
    """How much of it could be written; all of it, if nobody reads any more."""
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)


def _read(descriptor: int, into: bytearray, ran: Ran) -> bool:
    """Take what is there; False when there is nothing, or will be nothing any more."""
    try:
        received = os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return False
    into += received
    ran.printed += len(received)
    return bool(received)
