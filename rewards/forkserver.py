"""The warm process that checks are forked from: `python -m areal_async.rewards.forkserver FD SPEC_JSON`.

It has loaded the reward function and the tokenizer, has never opened a ZeroMQ context (whose threads and locks don't
survive a fork), and holds the deadline of every check. Descriptor FD is the socket to the worker (`channel`).

What always holds:
- a check is one forked child in a session of its own; its deadline counts from the fork;
- a check is answered once, after its child has ended; whatever the check started is killed then, too: each check is a
  sub-reaper, so orphans of a living one are its own, and a child of this process that is no living check was left
  behind by a dead one;
- a check over one of its limits is killed like a late one; what was forked to be a check and couldn't be made one is
  `infrastructure`;
- nothing here waits for a check: output and results are read without blocking, and bounded; one that is slow gives its
  place to the next;
- when the worker is gone, everything is killed; when this process is killed, the kernel kills the checks.
"""

import array
import contextlib
import errno
import gc
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NoReturn

import msgspec

from areal_async import process_tree
from areal_async.errors import RewardError
from areal_async.messages import RewardSpec, ScoreTask, Verdict
from areal_async.rewards import limits
from areal_async.rewards.cgroups import Cgroups
from areal_async.rewards.channel import Done, Job, Message, Ready, Unpacker, pack
from areal_async.rewards.decoding import Decode, load_decoder
from areal_async.rewards.loading import load
from areal_async.rewards.verdicts import Check, Grader, Outcome, result_of

WHY_CHARACTERS: Final = 4000  # tail of a traceback or of the output; a result must fit into a pipe (64 KiB)
EXTRACTED_CHARACTERS: Final = 1000
READ_BYTES: Final = 1 << 16
LEFTOVER_S: Final = 0.005  # between looks at what a dead check left behind
END_LIMIT_S: Final = 5.0  # what SIGKILL doesn't end in this time hangs in the kernel
OOM_SCORE: Final = b"1000"  # if memory runs out, a check goes first, not a server or a trainer


def main(arguments: list[str]) -> int:
    worker = socket.socket(fileno=int(arguments[0]))
    spec = msgspec.json.decode(arguments[1], type=RewardSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller, which decides
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # three for each check that runs
    process_tree.become_subreaper()
    try:
        grader, decode = load(spec), load_decoder(spec.model_path)
    except RewardError as error:
        worker.sendall(pack(Ready(str(error))))
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of the worker is the end of this, with its groups removed
    groups = Cgroups(limits.places(spec), spec.limits.processes)
    worker.sendall(pack(Ready("")))
    gc.collect()
    gc.freeze()  # what is loaded stays in pages that the checks share
    try:
        ForkServer(worker, spec, grader, decode, groups).serve()
    finally:
        groups.close()
    return 0


@dataclass
class _Running:
    """A check that was forked. place: number of its group. ended_by: the verdict under which this process killed it."""

    job: Job
    place: int
    pid: int
    pidfd: int
    result: int
    output: int
    began: float
    deadline: float
    watch: limits.Watch
    look_at: float
    slow: bool = False
    tail: bytearray = field(default_factory=bytearray)
    printed: int = 0
    ended_by: Outcome | None = None


class ForkServer:
    """Runs the checks that come over the socket until the socket is closed."""

    def __init__(
        self, worker: socket.socket, spec: RewardSpec, grader: Grader, decode: Decode, groups: Cgroups
    ) -> None:
        self._worker = worker
        self._timeout_s = spec.timeout_s
        self._limits = spec.limits
        self._inherited = limits.Inherited()
        self._address_bytes = limits.mapped_bytes()
        self._most_processes = limits.most_processes(spec)
        self._values = spec.values
        self._quick_places = spec.concurrent
        self._slow_places = limits.places(spec) - spec.concurrent
        self._groups = groups
        self._free = deque(range(limits.places(spec)))  # the one that was left longest ago is taken next
        self._grader = grader
        self._decode = decode
        self._pid = os.getpid()
        self._kept = set(process_tree.children(self._pid))  # what the user's module started when it was imported
        self._unpacker = Unpacker()
        self._outgoing = bytearray()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, _Running] = {}  # by pid
        self._by_descriptor: dict[int, _Running] = {}
        self._leftovers = False
        self._poll = select.poll()
        self._poll.register(worker, select.POLLIN)
        worker.setblocking(False)

    def serve(self) -> None:
        while True:
            while self._waiting and len(self._running) - self._slow() < self._quick_places:
                self._start(self._waiting.popleft())
            for descriptor, _ in self._poll.poll(self._patience_ms()):
                if descriptor == self._worker.fileno():
                    if not self._exchange():
                        self._end_everything()
                        return
                elif running := self._by_descriptor.get(descriptor):
                    self._look(running, descriptor)
            self._mind_the_running()
            if self._leftovers:
                self._end_leftovers()

    def _slow(self) -> int:
        return sum(running.slow for running in self._running.values())

    def _patience_ms(self) -> float | None:
        if self._leftovers:
            return LEFTOVER_S * 1000
        times = [min(running.deadline, running.look_at) for running in self._running.values()]
        return max(0.0, min(times) - time.monotonic()) * 1000 + 1 if times else None

    # ------------------------------------------------------------------------------------------- the worker's socket

    def _exchange(self) -> bool:
        """Take and give what is there; False when the worker is gone."""
        try:
            received = self._worker.recv(READ_BYTES)
        except BlockingIOError:
            received = None
        except ConnectionError:
            return False
        if received == b"":
            return False
        for message in self._unpacker.feed(received or b""):
            assert isinstance(message, Job)
            self._waiting.append(message)
        return self._flush()

    def _say(self, message: Message) -> None:
        self._outgoing += pack(message)
        self._flush()

    def _flush(self) -> bool:
        try:
            if self._outgoing:
                del self._outgoing[: self._worker.send(self._outgoing)]
        except BlockingIOError:
            pass
        except ConnectionError:
            return False
        self._poll.modify(self._worker, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        return True

    # --------------------------------------------------------------------------------------------------- one check

    def _start(self, job: Job) -> None:
        began = time.monotonic()
        try:
            running = self._forked(job, began)
        except OSError as error:  # no process, no descriptor, no memory: nothing that the answer could help
            lost = Outcome("infrastructure", f"a process for the check could not be made: {error}")
            self._say(Done(job.number, result_of(job.task, lost, self._values, time.monotonic() - began)))
            return
        self._running[running.pid] = running
        for descriptor in (running.pidfd, running.output):
            self._by_descriptor[descriptor] = running
            self._poll.register(descriptor, select.POLLIN)

    def _forked(self, job: Job, began: float) -> _Running:
        """OSError if it can't be; then nothing of it is left."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            result, result_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            ours.callback(os.close, result)
            theirs.callback(os.close, result_end)
            output, output_end = os.pipe2(os.O_CLOEXEC)
            ours.callback(os.close, output)
            theirs.callback(os.close, output_end)
            os.set_blocking(output, False)
            inherited = [self._worker.fileno(), result, output]
            for other in self._running.values():
                inherited += [other.pidfd, other.result, other.output]
            place = self._free[0]
            pid = os.fork()
            if pid == 0:
                self._be_check(job, place, inherited, result_end, output_end)
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
            ours.pop_all()
        self._free.popleft()
        watch = limits.Watch(pid, self._limits, began, self._inherited)
        return _Running(
            job, place, pid, pidfd, result, output, began, began + self._timeout_s, watch, began + limits.LOOK_S
        )

    def _look(self, running: _Running, descriptor: int) -> None:
        if descriptor == running.pidfd:
            self._finish(running)
        elif not self._read_output(running):
            self._poll.unregister(descriptor)  # closed by the check; its end is still to come

    def _read_output(self, running: _Running) -> bool:
        """Keep the tail of what the check has printed; False when it can print no more."""
        try:
            printed = os.read(running.output, READ_BYTES)
        except BlockingIOError:
            return True
        running.printed += len(printed)
        running.tail = (running.tail + printed)[-WHY_CHARACTERS:]
        if running.printed > self._limits.output_kib << 10 and running.ended_by is None:
            self._end(running, "crash", f"printed more than {self._limits.output_kib} KiB (reward.limits.output_kib)")
        return bool(printed)

    def _mind_the_running(self) -> None:
        """End those that are late or over a limit; let those that are slow wait for nobody."""
        now = time.monotonic()
        for running in self._running.values():
            if running.deadline <= now and running.ended_by is None:
                self._end(running, "timeout", f"not done after {self._timeout_s:g} s")
            elif running.look_at <= now:
                self._mind(running, now)

    def _mind(self, running: _Running, now: float) -> None:
        running.look_at = now + limits.LOOK_S
        if running.ended_by is not None:
            process_tree.kill_tree(running.pid)  # again: SIGKILL is certain, but not what was alive to be sent it
        elif over := running.watch.look(now):
            self._end(running, "crash", over)
        elif not running.slow and now - running.began > limits.SLOW_S and self._slow() < self._slow_places:
            running.slow = True
            limits.lower(running.pid)

    def _end(self, running: _Running, verdict: Verdict, why: str) -> None:
        running.ended_by = Outcome(verdict, f"{why}, and was killed")
        running.deadline = math.inf
        running.look_at = time.monotonic() + limits.LOOK_S
        process_tree.kill_tree(running.pid)

    def _finish(self, running: _Running) -> None:
        _, status = os.waitpid(running.pid, 0)
        if running.ended_by is None:
            self._read_output(running)
        found = running.ended_by or _outcome_of(running, os.waitstatus_to_exitcode(status))
        del self._running[running.pid]
        self._free.append(running.place)
        for descriptor in (running.pidfd, running.output):
            del self._by_descriptor[descriptor]
            self._poll_forget(descriptor)
            os.close(descriptor)
        os.close(running.result)
        result = result_of(running.job.task, found, self._values, time.monotonic() - running.began)
        self._end_leftovers()
        self._say(Done(running.job.number, result))

    def _poll_forget(self, descriptor: int) -> None:
        try:
            self._poll.unregister(descriptor)
        except KeyError:
            return  # it was closed by the check before

    # ------------------------------------------------------------------------------------------- in the forked child

    def _be_check(self, job: Job, place: int, inherited: list[int], result: int, output: int) -> NoReturn:
        try:
            process_tree.die_with_parent(self._pid)
            self._groups.enter(place)
            process_tree.become_subreaper()
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            for descriptor in inherited:
                os.close(descriptor)
            os.dup2(output, 1)
            os.dup2(output, 2)
            with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
                file.write(OOM_SCORE)
            limits.lower_own()
            limits.set_limits(self._limits, self._address_bytes, self._most_processes)
            check = os.getpid()
            found = self._graded(job)
            if os.getpid() == check:  # a process that the function forked may come back from it, too
                os.write(result, msgspec.msgpack.encode(found))
        finally:
            os._exit(0)

    def _graded(self, job: Job) -> Outcome:
        try:
            found = self._grader(_check_of(job.task, job.token_ids, self._decode))
        except BaseException as error:  # also SystemExit: a check that leaves has not given a reward
            limits.spare_memory()
            why = traceback.format_exc()
            if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
                why += limits.out_of_memory(self._limits.memory_mib)
            return Outcome("crash", _end_of(why, WHY_CHARACTERS))
        return msgspec.structs.replace(
            found, why=_end_of(found.why, WHY_CHARACTERS), extracted=_end_of(found.extracted, EXTRACTED_CHARACTERS)
        )

    # --------------------------------------------------------------------------------------------- what checks started

    def _end_leftovers(self) -> None:
        """Kill children that are no living check. Their own children come to us then: again, until there is none."""
        strangers = set(process_tree.children(self._pid)) - self._running.keys() - self._kept
        for stranger in strangers:
            process_tree.kill_tree(stranger)
            os.waitpid(stranger, os.WNOHANG)
        self._leftovers = bool(strangers)

    def _end_everything(self) -> None:
        limit = time.monotonic() + END_LIMIT_S
        while time.monotonic() < limit:
            process_tree.signal_all(process_tree.descendants(self._pid), signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(LEFTOVER_S)


def _end_of(text: str, most: int) -> str:
    """Half of a surrogate pair, which a function may put into a message, can't be sent."""
    return text.encode(errors="backslashreplace").decode()[-most:]


def _outcome_of(running: _Running, exit_code: int) -> Outcome:
    """What the check said before it ended; or that it ended without a word."""
    try:
        return msgspec.msgpack.decode(os.read(running.result, READ_BYTES), type=Outcome)
    except (msgspec.DecodeError, BlockingIOError):
        pass
    if exit_code < 0:
        end = f"was killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    else:
        end = f"ended the process with exit code {exit_code}"
    tail = running.tail.decode(errors="replace")
    return Outcome("crash", f"{end} before it gave a reward" + (f"; its output ends:\n{tail}" if tail else ""))


def _check_of(task: ScoreTask, token_ids: bytes, decode: Decode) -> Check:
    return Check(
        prompt=task.prompt,
        response=decode(array.array("i", token_ids).tolist()) if task.response is None else task.response,
        answer=task.answer,
        finish=task.finish,
        columns={name: msgspec.msgpack.decode(value) for name, value in task.columns.items()},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
