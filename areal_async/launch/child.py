"""A child process of the controller, under its guard (`launch.guard`), watched by the running event loop.

What always holds: a `Child` that exists was really started; when `wait` returns, the child and everything that it
started are gone; if the controller ends in any way, also by SIGKILL, they are gone within 8 s. No thread, no signal
handler and no child watcher is installed: two descriptors (the guard's socket, its pidfd) are readers of the loop, so
this works under uvloop, asyncio's own loops and inside somebody else's program.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from areal_async import process_tree
from areal_async.errors import LaunchError

GUARD: Final = Path(__file__).with_name("guard.py")
START_DEADLINE_S: Final = 30.0  # the guard needs 20 ms; more only where the machine swaps
STOP_GRACE_S: Final = 5.0  # what vLLM needs to end its engine core by itself
SWEEP_S: Final = 0.05  # between looks for what a killed guard left behind
TAIL_BYTES: Final = 1 << 16  # how far `tail` looks back; a progress bar is one very long line
MARKER: Final = "AREAL_ASYNC_GUARD"  # in the environment of the whole tree, to find it without its guard


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What to start.

    name: for messages. argv: program (looked for on PATH) and arguments. env: added to the controller's environment.
    stderr_path: file that stdout and stderr are appended to; its folder must exist. shm_prefix: after the child's end
    `/dev/shm/<shm_prefix>*` is removed (see `guard`); one with a folder (/mnt/weights/areal-1a2b) means files in that
    folder. cwd: working folder; None for the controller's.
    scratch: a folder of files (sockets) that is removed with them if the controller dies before the child.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    stderr_path: Path
    shm_prefix: str | None = None
    scratch: Path | None = None
    cwd: Path | None = None


class Child:
    """A running child; made by `start` only. `async with await Child.start(spec) as child:` stops it at the end."""

    def __init__(self, spec: ChildSpec, guard: int, control: socket.socket, marker: str, output_from: int) -> None:
        self.spec = spec
        self.pid = 0  # of the child itself, not of its guard; known once `start` returns
        self._guard = guard
        self._control = control
        self._marker = marker
        self._output_from = output_from
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[str] = self._loop.create_future()  # "" or why it could not be started
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._reported: int | None = None
        self._received = b""
        self._pidfd = os.pidfd_open(guard)
        self._loop.add_reader(control.fileno(), self._on_control)
        self._loop.add_reader(self._pidfd, self._on_guard_end)

    @classmethod
    async def start(cls, spec: ChildSpec) -> Self:
        """Start the child; LaunchError at once, with the reason, if it can't be executed."""
        marker = uuid.uuid4().hex
        try:
            output = os.open(spec.stderr_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(f"{spec.name}: can't write its output to {spec.stderr_path}: {error.strerror}") from error
        ours, theirs = socket.socketpair()
        try:
            guard = _spawn_guard(spec, marker, theirs.fileno(), output)
            child = cls(spec, guard, ours, marker, os.fstat(output).st_size)
        except OSError as error:
            ours.close()
            raise LaunchError(f"{spec.name}: can't start its guard process: {error}") from error
        finally:
            theirs.close()
            os.close(output)
        await child._wait_for_start()
        return child

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal's number; None while something of the child is alive."""
        return self._exit.result() if self._exit.done() else None

    @property
    def is_running(self) -> bool:
        """Whether the child itself runs; what it had started may outlive it, and `wait` takes that much longer."""
        if self._exit.done():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    async def wait(self) -> int:
        """Wait until the child and all it started are gone; its exit code, negative for a signal's number."""
        return await asyncio.shield(self._exit)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """SIGTERM to the child; after `grace_s` seconds SIGKILL to all that is left. As `wait`, else.

        May be called again with another grace, which then counts from there; 0 kills at once.
        """
        self._request_stop(grace_s)
        return await self.wait()

    def tail(self, lines: int = 20) -> str:
        """The last lines that this child wrote to stdout and stderr, without those of an earlier one in the file."""
        try:
            with self.spec.stderr_path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._output_from, end - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"({self.spec.stderr_path}: {error.strerror})"
        return "\n".join(text.rstrip("\n").split("\n")[-lines:])

    def why(self) -> str:
        """How it ended and what it said last, for an error message."""
        end = "is alive" if self.returncode is None else _describe(self.returncode)
        return f"{self.spec.name} (pid {self.pid}) {end}; the last lines of {self.spec.stderr_path}:\n{self.tail()}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _wait_for_start(self) -> None:
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                reason = await asyncio.shield(self._started)
        except TimeoutError:
            await self._abandon()
            raise LaunchError(
                f"{self.spec.name}: its guard process has not answered for {START_DEADLINE_S:.0f} s; "
                "is the machine out of memory?"
            ) from None
        except asyncio.CancelledError:
            await self._abandon()
            raise
        if reason:
            await self.wait()
            raise LaunchError(f"{self.spec.name}: can't start {' '.join(self.spec.argv)!r}: {reason}")

    async def _abandon(self) -> None:
        """End a start that nobody waits for any more."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._guard, signal.SIGKILL)
        await self.wait()

    def _request_stop(self, grace_s: float) -> None:
        with contextlib.suppress(OSError):  # the guard has ended: nothing to stop
            self._control.send(f"stop {grace_s:.3f}\n".encode())

    def _on_control(self) -> None:
        try:
            received = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        if not received:
            self._loop.remove_reader(self._control.fileno())
            return
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "exited":
                self._reported = int(rest)
                continue
            if word == "started":
                self.pid = int(rest)
            else:
                self._reported = 127  # there never was a child
            if not self._started.done():
                self._started.set_result("" if word == "started" else rest)

    def _on_guard_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._on_control()  # what it said last
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        with contextlib.suppress(ChildProcessError):  # somebody else's waitpid(-1) in this program was faster
            os.waitpid(self._guard, 0)
        if not self._started.done():
            self._started.set_result(f"its guard process ended; {self.tail()}")
        self._finish()

    def _finish(self) -> None:
        """The guard is gone. If it was killed it could not end the tree, so that is done here."""
        left = [] if self._reported is not None else process_tree.marked(MARKER, self._marker)
        if left:
            process_tree.signal_all(left, signal.SIGKILL)
            self._loop.call_later(SWEEP_S, self._finish)
        elif not self._exit.done():
            self._exit.set_result(-signal.SIGKILL if self._reported is None else self._reported)


def _spawn_guard(spec: ChildSpec, marker: str, control: int, output: int) -> int:
    """Pid of the guard. posix_spawn, since a fork would copy the page tables of a large controller."""
    arguments = [str(os.getpid()), spec.shm_prefix or "", str(spec.cwd or ""), str(spec.scratch or ""), *spec.argv]
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", str(GUARD), *arguments],
        {**os.environ, **spec.env, MARKER: marker},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
            (os.POSIX_SPAWN_DUP2, control, 3),
        ],
        setsid=True,
        setsigmask=[],
    )


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
