"""The warm process that checks are forked from: `python -m areal_async.rewards.forkserver FD SPEC_JSON`.

It has loaded the reward function and the tokenizer, has never opened a ZeroMQ context (whose threads and locks don't
survive a fork), and holds the deadline of every check. Descriptor FD is the socket to the worker (`channel`).

What always holds:
- a check is one forked child in a session of its own; its deadline counts from the fork;
- a check is answered once, after its child has ended; whatever the check started is killed then, too: each check is a
  sub-reaper, so orphans of a living one are its own, and a child of this process that is no living check was left
  behind by a dead one;
- nothing here waits for a check: output and results are read without blocking, and bounded;
- when the worker is gone, everything is killed; when this process is killed, the kernel kills the checks.
"""

import array
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from areal_async import process_tree
from areal_async.errors import RewardError
from areal_async.messages import RewardSpec, ScoreTask
from areal_async.rewards.channel import Done, Job, Message, Ready, Unpacker, pack
from areal_async.rewards.loading import load
from areal_async.rewards.verdicts import Check, Grader, Outcome, result_of

OUTPUT_LIMIT_BYTES: Final = 1 << 20  # a check that prints more is killed: reading for ever would delay the others
WHY_CHARACTERS: Final = 4000  # tail of a traceback or of the output; a result must fit into a pipe (64 KiB)
EXTRACTED_CHARACTERS: Final = 1000
READ_BYTES: Final = 1 << 16
LEFTOVER_S: Final = 0.005  # between looks at what a dead check left behind
END_LIMIT_S: Final = 5.0  # what SIGKILL doesn't end in this time hangs in the kernel
OOM_SCORE: Final = b"1000"  # if memory runs out, a check goes first, not a server or a trainer

Decode = Callable[[list[int]], str]


def main(arguments: list[str]) -> int:
    worker = socket.socket(fileno=int(arguments[0]))
    spec = msgspec.json.decode(arguments[1], type=RewardSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller, which decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    process_tree.become_subreaper()
    try:
        grader, decode = load(spec), load_decoder(spec.model_path) if spec.model_path else _nothing_to_decode
    except RewardError as error:
        worker.sendall(pack(Ready(str(error))))
        return 1
    worker.sendall(pack(Ready("")))
    gc.collect()
    gc.freeze()  # what is loaded stays in pages that the checks share
    ForkServer(worker, spec, grader, decode).serve()
    return 0


def load_decoder(model_path: str) -> Decode:
    """From token ids to text, special tokens left out; RewardError if the model has no usable tokenizer."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads don't survive a fork
    from tokenizers import Tokenizer

    path = Path(model_path, "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise RewardError(
            f"{path}: can't load the tokenizer ({error}); the model's folder needs a tokenizer.json, "
            "as `save_pretrained` of a fast tokenizer writes it"
        ) from None

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode


def _nothing_to_decode(token_ids: list[int]) -> str:
    raise RewardError(f"{len(token_ids)} tokens to be checked, and this worker was started without a tokenizer")


@dataclass
class _Running:
    """A check that was forked. ended_by: the verdict under which this process killed it."""

    job: Job
    pid: int
    pidfd: int
    result: int
    output: int
    began: float
    deadline: float
    tail: bytearray = field(default_factory=bytearray)
    printed: int = 0
    ended_by: Outcome | None = None


class ForkServer:
    """Runs the checks that come over the socket until the socket is closed."""

    def __init__(self, worker: socket.socket, spec: RewardSpec, grader: Grader, decode: Decode) -> None:
        self._worker = worker
        self._timeout_s = spec.timeout_s
        self._values = spec.values
        self._concurrent = spec.concurrent
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
            while self._waiting and len(self._running) < self._concurrent:
                self._start(self._waiting.popleft())
            for descriptor, _ in self._poll.poll(self._patience_ms()):
                if descriptor == self._worker.fileno():
                    if not self._exchange():
                        self._end_everything()
                        return
                elif running := self._by_descriptor.get(descriptor):
                    self._look(running, descriptor)
            self._end_late()
            if self._leftovers:
                self._end_leftovers()

    def _patience_ms(self) -> float | None:
        if self._leftovers:
            return LEFTOVER_S * 1000
        deadlines = [running.deadline for running in self._running.values() if running.ended_by is None]
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None

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
        result, result_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        output, output_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(output, False)
        inherited = [self._worker.fileno(), result, output]
        for other in self._running.values():
            inherited += [other.pidfd, other.result, other.output]
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _run(job, self._grader, self._decode, self._pid, inherited, result_end, output_end)
        os.close(result_end)
        os.close(output_end)
        running = _Running(job, pid, os.pidfd_open(pid), result, output, began, began + self._timeout_s)
        self._running[pid] = running
        for descriptor in (running.pidfd, output):
            self._by_descriptor[descriptor] = running
            self._poll.register(descriptor, select.POLLIN)

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
        if running.printed > OUTPUT_LIMIT_BYTES and running.ended_by is None:
            self._end(running, Outcome("crash", f"printed more than {OUTPUT_LIMIT_BYTES} bytes, and was killed"))
        return bool(printed)

    def _end_late(self) -> None:
        now = time.monotonic()
        for running in self._running.values():
            if running.ended_by is None and running.deadline <= now:
                self._end(running, Outcome("timeout", f"not done after {self._timeout_s:g} s, and was killed"))

    def _end(self, running: _Running, why: Outcome) -> None:
        running.ended_by = why
        process_tree.signal_all([*process_tree.descendants(running.pid), running.pid], signal.SIGKILL)

    def _finish(self, running: _Running) -> None:
        _, status = os.waitpid(running.pid, 0)
        if running.ended_by is None:
            self._read_output(running)
        found = running.ended_by or _outcome_of(running, os.waitstatus_to_exitcode(status))
        del self._running[running.pid]
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

    # --------------------------------------------------------------------------------------------- what checks started

    def _end_leftovers(self) -> None:
        """Kill children that are no living check. Their own children come to us then: again, until there is none."""
        strangers = set(process_tree.children(self._pid)) - self._running.keys() - self._kept
        for stranger in strangers:
            process_tree.signal_all([*process_tree.descendants(stranger), stranger], signal.SIGKILL)
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


# ------------------------------------------------------------------------------------------------- in the forked child


def _run(
    job: Job, grader: Grader, decode: Decode, parent: int, inherited: list[int], result: int, output: int
) -> NoReturn:
    try:
        process_tree.die_with_parent(parent)
        process_tree.become_subreaper()
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for descriptor in inherited:
            os.close(descriptor)
        os.dup2(output, 1)
        os.dup2(output, 2)
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(OOM_SCORE)
        found = _graded(job, grader, decode)
        os.write(result, msgspec.msgpack.encode(found))
    finally:
        os._exit(0)


def _graded(job: Job, grader: Grader, decode: Decode) -> Outcome:
    try:
        found = grader(_check_of(job.task, job.token_ids, decode))
    except BaseException:  # also SystemExit: a check that leaves has not given a reward
        return Outcome("crash", traceback.format_exc()[-WHY_CHARACTERS:])
    return msgspec.structs.replace(
        found, why=found.why[-WHY_CHARACTERS:], extracted=found.extracted[-EXTRACTED_CHARACTERS:]
    )


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
