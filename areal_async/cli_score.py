"""`areal-async score`: try a reward on answers that are there already, without a model.

What always holds: results go to standard output, a JSON line each, in the order of the records and never broken off
inside a line; everything else goes to standard error. What is wrong with the command line or the reward is said before
anything is started. Checks are made by the workers of a run, started in the same way (`controller.scoring`).
"""

import argparse
import asyncio
import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TextIO, TypeVar, cast, get_args

import msgspec

from areal_async.errors import ArealError, ConfigError, DataError
from areal_async.messages import RewardOptions, RewardSpec, Verdict

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from areal_async.config import RewardConfig
    from areal_async.controller.scoring import Scored

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

CHUNK_BYTES: Final = 1 << 18
WRITTEN_WITHIN_S: Final = 2.0  # what a reader may take, after Ctrl-C, for the lines that are being written
DIGITS: Final = 6  # of `seconds`

EXAMPLES: Final = """records, a JSON object a line:
  {"completion": "so it is \\\\boxed{7}", "answer": "7"}
  {"id": "p1", "completion": "print(int(input()) * 2)", "tests": {"inputs": ["4\\n"], "outputs": ["8\\n"]}}
  {"completion": "def f(x): return 2 * x", "tests": {"fn_name": "f", "inputs": [[4]], "outputs": [8]}}

results, a JSON object a line:
  {"id":1,"verdict":"right","reward":1.0,"extracted":"7","reason":"…","seconds":0.0021}

examples:
  areal-async score --reward math answers.jsonl > scored.jsonl
  areal-async score --reward code answers.jsonl --timeout 5 --workers 2 code.credit=share
  areal-async score --reward my_rewards:tidy answers.jsonl
  areal-async score --reward '0.9*math + 0.1*my_rewards:tidy' answers.jsonl math.last_number=true
  generate | areal-async score --reward exact - exact_after='>' | head
"""


class Line(msgspec.Struct, frozen=True):
    """What is written for a record. reward: null where the verdict gives none. seconds: of the check."""

    id: msgspec.Raw
    verdict: Verdict
    reward: float | None
    extracted: str
    reason: str
    seconds: float


def add_score(commands: "Commands") -> None:
    about = "Score answers that are there already by a reward, without a model."
    parser = commands.add_parser(
        "score",
        help=about,
        description=about,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--reward", required=True, metavar="NAME", help="as reward.function: a name, module:function, or a weighted sum"
    )
    parser.add_argument("--timeout", metavar="S", help="deadline of a check, seconds (reward.timeout_s; default 10)")
    parser.add_argument("--workers", metavar="N", help="worker processes (reward.workers; default: one for each core)")
    parser.add_argument("file", metavar="FILE.jsonl", help="records; - for standard input")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="options of the section `reward` (docs/configuration.md)"
    )
    parser.set_defaults(do=score)


def score(arguments: argparse.Namespace) -> int:
    """`areal-async score`."""
    import uvloop

    name, overrides = _file([arguments.file, *arguments.overrides])
    with _input(name) as source:
        config, spec = _reward(arguments, overrides)
        try:
            uvloop.run(_Scoring(config, spec, name, source).run())
        except BrokenPipeError:  # `| head` has what it wants
            return 0
    return 0


def _file(words: Sequence[str]) -> tuple[str, list[str]]:
    """Of what was given without `--`: the file, and the options. Errors: ConfigError."""
    files = [word for word in words if "=" not in word or os.path.exists(word)]
    if len(files) != 1:
        what = f"one file at a time, not {', '.join(files)}" if files else "no file; name one, or - for standard input"
        raise ConfigError(f"command line: score: {what}")
    return files[0], [word for word in words if word != files[0]]


def _reward(arguments: argparse.Namespace, options: Sequence[str]) -> tuple["RewardConfig", RewardSpec]:
    """The reward's options, and what its workers are told. Errors: ConfigError."""
    from areal_async import config_rewards
    from areal_async.config_file import reward_of_command_line
    from areal_async.rewards.loading import verify

    overrides = [f"reward.function={arguments.reward}"]
    if arguments.timeout is not None:
        overrides.append(f"reward.timeout_s={arguments.timeout}")
    workers = len(os.sched_getaffinity(0)) if arguments.workers is None else arguments.workers
    given = [text if text.startswith("reward.") else f"reward.{text}" for text in options]
    if arguments.workers is not None or not any(text.startswith("reward.workers=") for text in given):
        overrides.append(f"reward.workers={workers}")
    config, sources = reward_of_command_line([*overrides, *given])
    found = [*config_rewards.findings(config), *config_rewards.of_training(config), *config_rewards.machine(config)]
    if found:
        raise ConfigError("\n".join(f"{sources.where(key)}: {key}: {what}" for key, what in found))
    values = {name: getattr(config, name) for name in RewardOptions.__struct_fields__}
    spec = RewardSpec(**values, import_paths=(os.getcwd(),))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's module prints is no result
            verify(spec)
    except ArealError as error:
        raise ConfigError(f"command line: --reward: {error}") from error
    for line in config_rewards.protection(config):
        print(line, file=sys.stderr)
    return config, spec


@contextlib.contextmanager
def _input(name: str) -> Iterator[int]:
    """A descriptor of the file. Errors: ConfigError."""
    if name == "-":
        yield _standard(sys.stdin, "input").fileno()
        return
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"command line: {name}: can't be read: {error.strerror}") from error
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise ConfigError(f"command line: {name}: is a folder; name a file of JSON lines, or - for standard input")
        yield descriptor
    finally:
        os.close(descriptor)


def _standard(stream: TextIO | None, name: str) -> TextIO:
    if stream is None:
        raise ConfigError(f"command line: standard {name} is closed")
    return stream


class _Scoring:
    """One call of the command. source: descriptor of the records; name: its file, for messages."""

    def __init__(self, config: "RewardConfig", spec: RewardSpec, name: str, source: int) -> None:
        self._config = config
        self._spec = spec
        self._name = "standard input" if name == "-" else name
        self._source = source
        self._output = _standard(sys.stdout, "output").fileno()
        self._tally = _Tally()

    async def run(self) -> None:
        from areal_async.controller.scoring import score
        from areal_async.rollout.completions import records

        with ended_by_signals(), _progress(self._source, self._output) as (bar, task):

            async def write(batch: Sequence["Scored"]) -> None:
                await _write(self._output, b"".join(map(_line, batch)))
                self._tally.add(batch)
                bar.update(task, completed=self._tally.bytes, records=self._tally.records)

            chunks = _chunks(self._source, self._name)
            await score(self._config, self._spec, records(chunks, self._name), write, started=self._tally.begin)
        print(self._tally.summary(self._name, self._config.workers), file=sys.stderr)


def _line(scored: "Scored") -> bytes:
    result = scored.result
    line = Line(
        scored.record.id,
        result.verdict,
        result.reward,
        result.extracted,
        result.why,
        round(result.seconds, DIGITS),
    )
    return msgspec.json.encode(line) + b"\n"


class _Tally:
    """What has been written."""

    def __init__(self) -> None:
        self.records = 0
        self.bytes = 0
        self._created = self._begun = time.monotonic()
        self._verdicts: Counter[Verdict] = Counter()
        self._rewards = 0.0
        self._rewarded = 0
        self._slowest = (-1.0, "")

    def begin(self) -> None:
        """The workers are there."""
        self._begun = time.monotonic()

    def add(self, batch: Sequence["Scored"]) -> None:
        for record, result in batch:
            self.records += 1
            self.bytes += record.size
            self._verdicts[result.verdict] += 1
            if result.reward is not None:
                self._rewarded += 1
                self._rewards += result.reward
            if result.seconds > self._slowest[0]:
                self._slowest = (result.seconds, f"line {record.line}, {result.verdict}")

    def summary(self, name: str, workers: int) -> str:
        now = time.monotonic()
        checks_s = self.records / max(now - self._begun, 1e-9)
        counts = [f"{verdict} {self._verdicts[verdict]:,}" for verdict in get_args(Verdict) if self._verdicts[verdict]]
        mean = f"{self._rewards / self._rewarded:.4f}" if self._rewarded else "none"
        lines = [
            f"{name}: {self.records:,} record(s): {', '.join(counts) or 'nothing to score'}",
            f"mean reward: {mean} over the {self._rewarded:,} that have one",
            f"time: {now - self._created:.1f} s, of which {self._begun - self._created:.1f} s to start {workers} "
            f"worker(s); then {checks_s:,.0f} checks/s",
        ]
        if self.records:
            lines.append(f"slowest check: {self._slowest[0]:.3f} s ({self._slowest[1]})")
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- files and terminals


async def _chunks(source: int, name: str) -> AsyncIterator[bytes]:
    """What is read, as it comes. Errors: DataError."""
    try:
        while chunk := await _in_thread(lambda: os.read(source, CHUNK_BYTES)):
            yield chunk
    except OSError as error:
        raise DataError(f"{name}: can't be read: {error.strerror}") from error


async def _write(output: int, data: bytes) -> None:
    """Write all of it, also if this is cancelled meanwhile: no line is broken off.

    Errors: BrokenPipeError; ArealError.
    """
    writing = asyncio.ensure_future(_in_thread(lambda: _write_all(output, data)))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing], timeout=WRITTEN_WITHIN_S)
        raise
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ArealError(f"standard output can't be written: {error.strerror}") from error


def _write_all(output: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(output, left) :]


Value = TypeVar("Value")


async def _in_thread(call: Callable[[], Value]) -> Value:
    """A call that may wait for ever for somebody else's pipe. Its thread holds up neither the loop nor the end of the
    program (those of asyncio's own executor would be waited for)."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Value] = loop.create_future()

    def finish(value: Value | None, error: OSError | None) -> None:
        if done.done():
            return  # cancelled
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("Value", value))

    def work() -> None:
        value, error = None, None
        try:
            value = call()
        except OSError as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, value, error)

    threading.Thread(target=work, daemon=True, name="score: files").start()
    return await done


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Cancel the task that runs this, which ends workers and removes files; no second signal is needed."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    # nohup means what it says
    numbers = [signal.SIGINT, signal.SIGTERM, *[signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)]
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _progress(source: int, output: int) -> Iterator[tuple["Progress", "TaskID"]]:
    """A bar on standard error if that is a terminal; not where results go to a terminal, too: they show it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    status = os.fstat(source)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.fields[records]:,} records"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    hidden = not console.is_terminal or os.isatty(output)
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        total = status.st_size if stat.S_ISREG(status.st_mode) else None
        yield bar, bar.add_task("", total=total, records=0)
