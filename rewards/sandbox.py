"""The reward worker's side of its sandbox: starts the process that checks are forked from, and keeps it there.

What always holds: each submitted check gets exactly one result, also if the sandbox process itself is killed (then
`infrastructure`, and a new process takes over at once). `submit` and `next_result` may be called from two threads.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from typing import Final, Self

import msgspec

from areal_async import process_tree
from areal_async.errors import RewardError
from areal_async.messages import RewardSpec, ScoreResult, ScoreTask
from areal_async.rewards import cgroups
from areal_async.rewards.channel import Done, Job, Message, Ready, Unpacker, pack
from areal_async.rewards.verdicts import Outcome, result_of

START_DEADLINE_S: Final = 300.0  # the user's module may import torch from a slow disk
END_LIMIT_S: Final = 10.0
READ_BYTES: Final = 1 << 16
SECRET: Final = "AREAL_ASYNC_SECRET"  # of the run, in the worker's environment
MARKER: Final = "AREAL_ASYNC_SANDBOX"  # in the environment of all checks, to find what a killed sandbox left


class Sandbox:
    """Checks in killable processes; a context manager. Entering it raises RewardError if the reward can't be loaded."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()  # over socket and outstanding, when the process is replaced
        self._outstanding: dict[int, ScoreTask] = {}
        self._results: deque[tuple[int, ScoreResult]] = deque()
        self._closing = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process that checks are forked from."""
        return self._process.pid

    def submit(self, number: int, task: ScoreTask, token_ids: bytes) -> None:
        """Have an answer checked. number: comes back with the result. token_ids: int32 in native order."""
        with self._lock, contextlib.suppress(OSError):  # OSError: it is gone, which `next_result` deals with
            self._outstanding[number] = task
            self._socket.sendall(pack(Job(number, task, token_ids)))

    def next_result(self) -> tuple[int, ScoreResult] | None:
        """Wait for the next result, in the order of finishing; None once the sandbox is closed.

        RewardError if the process had to be replaced and its successor can't load the reward any more.
        """
        while not self._results:
            message = self._receive()
            if isinstance(message, Done):
                with self._lock:
                    if self._outstanding.pop(message.number, None) is not None:
                        return message.number, message.result
            elif self._closing:
                return None
            else:
                self._replace()
        return self._results.popleft()

    def close(self) -> None:
        """End all checks and the process."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)
        if self._process.returncode != 0:  # it hangs, or it was killed and could end nothing
            self._kill()
        self._socket.close()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._unpacker = Unpacker()
        self._received: deque[Message] = deque()
        self._marker = uuid.uuid4().hex
        environment = {**os.environ, MARKER: self._marker}
        for secret in (SECRET, self._spec.http.token_env or SECRET):
            environment.pop(secret, None)  # what is checked has no business with it
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-u", "-m", "areal_async.rewards.forkserver",  # -u: what a crash printed isn't lost
                    str(theirs.fileno()), msgspec.json.encode(self._spec).decode(),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )  # fmt: skip
        self._socket.settimeout(START_DEADLINE_S)
        try:
            ready = self._receive()
        except TimeoutError:
            ready = Ready(f"importing it has not ended after {START_DEADLINE_S:.0f} s")
        self._socket.settimeout(None)
        if not isinstance(ready, Ready) or ready.why:
            self._kill()
            self._socket.close()
            why = ready.why if isinstance(ready, Ready) else f"its process ended with {self._process.returncode}"
            raise RewardError(why)

    def _receive(self) -> Message | None:
        """The next message; None when the process is gone."""
        while not self._received:
            try:
                received = self._socket.recv(READ_BYTES)
            except ConnectionError:
                return None
            if not received:
                return None
            self._received.extend(self._unpacker.feed(received))
        return self._received.popleft()

    def _replace(self) -> None:
        """The process is gone, by no doing of ours: answer for its checks, and start another."""
        with self._lock:
            self._kill()
            self._socket.close()
            lost = Outcome("infrastructure", f"the sandbox process ended with {self._process.returncode}")
            self._results.extend(
                (number, result_of(task, lost, self._spec.values)) for number, task in self._outstanding.items()
            )
            self._outstanding.clear()
            self._start()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        limit = time.monotonic() + END_LIMIT_S
        # The kernel has killed the checks, not what they started
        while (left := process_tree.marked(MARKER, self._marker)) and time.monotonic() < limit:
            process_tree.signal_all(left, signal.SIGKILL)
        cgroups.remove_of(self._process.pid)
