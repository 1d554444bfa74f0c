"""`areal-async score`: records in, a line each out, whatever the checks do."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async import process_tree
from areal_async.cli import main
from areal_async.controller import scoring
from areal_async.controller.crew import Crew
from areal_async.controller.scoring import Scored, _Window
from areal_async.errors import DataError
from areal_async.messages import ScoreResult, ScoreTask
from areal_async.rollout import completions
from areal_async.rollout.completions import Record, records

from .waiting import SLACK_S

PROGRAM = [sys.executable, "-m", "areal_async", "score"]

REWARDS = """
import os, time

print("a module that prints")

def reward(response, answer=None, level=1, **columns):
    if response == "sleep":
        time.sleep(600)
    if response == "raise":
        raise ValueError("no such thing")
    if response == "exit":
        os._exit(3)
    if response == "nan":
        return float("nan")
    if response == "number":
        return level / 4
    return response == answer

def tidy(response):
    return 0.5
"""


# ------------------------------------------------------------------------------------------------------ reading records


async def pieces(data: bytes, sizes: Iterator[int]) -> AsyncIterator[bytes]:
    while data:
        size = next(sizes)
        yield data[:size]
        data = data[size:]


def read(data: bytes, sizes: Sequence[int] = (1 << 20,)) -> list[Record]:
    async def all_of() -> list[Record]:
        return [record async for record in records(pieces(data, iter((*sizes, len(data)))), "f.jsonl")]

    return asyncio.run(all_of())


LINES = (
    '\ufeff{"completion": "a", "answer": "x"}\n\n{"completion": "é \\n z", "id": {"a": 1.50}, "answer": 1.50}\r\n'
    '  \n{"answer": null, "completion": "", "level": 3, "id": "p", "prompt": "q", "finish": "length"}'
).encode()


@settings(max_examples=50, derandomize=True, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), max_size=30))
def test_records_do_not_depend_on_how_the_stream_is_cut(sizes: list[int]) -> None:
    found = read(LINES, sizes)
    assert [(record.line, bytes(record.id)) for record in found] == [(1, b"1"), (3, b'{"a": 1.50}'), (5, b'"p"')]
    tasks = [record.task for record in found]
    assert [task.response for task in tasks if task] == ["a", "é \n z", ""]
    assert [task.answer for task in tasks if task] == ["x", "1.50", None]
    assert tasks[2] is not None
    assert (tasks[2].prompt, tasks[2].finish) == ("q", "length")
    columns = {key: msgspec.msgpack.decode(raw) for key, raw in tasks[2].columns.items()}
    assert columns == {"level": 3, "id": "p"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nothing", "f.jsonl:2: not JSON: JSON is malformed: invalid character (byte 4)"),
        (b"[1]", "f.jsonl:2: not a JSON object; a row is {…} with a key for each column"),
        (b'{"completion": "x"', "f.jsonl:2: not JSON: Input data was truncated"),
        (b'{"completion": "\xff"}', "f.jsonl:2: not UTF-8 text (byte 17)"),
        (b'{"completion": "x", "level": 1e999}', "f.jsonl:2: column 'level': not JSON: Number out of range"),
        (b'{"completion": "x", "level": ' + b"[" * 5000 + b"]" * 5000 + b"}", "f.jsonl:2: nested too deeply"),
        (b'{"completion": 7}', "f.jsonl:2: 'completion' must be text, not 7"),
        (b'{"completion": null}', "f.jsonl:2: 'completion' must be text, not null"),
        (b"{}", "f.jsonl:2: no 'completion'; the line has nothing"),
        (b'{"response": "x", "n": 1}', "f.jsonl:2: no 'completion'; the line has 'response', 'n'; rename 'response' if that is it"),  # noqa: E501
        (b'{"completions": "x"}', "f.jsonl:2: no 'completion'; the line has 'completions'; rename 'completions' if that is it"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_line_that_no_reward_can_score(line: bytes, message: str) -> None:
    with pytest.raises(DataError) as raised:
        read(b'{"completion": "x"}\n' + line + b"\n")
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"completion": "x"}]', "f.jsonl:1: begins a JSON list; write one JSON object a line, without commas between"),  # noqa: E501
        (b"PAR1\x00\x00", "f.jsonl: is a Parquet file; score reads JSON lines"),
    ],
)  # fmt: skip
def test_a_file_of_another_form(data: bytes, message: str) -> None:
    with pytest.raises(DataError) as raised:
        read(data)
    assert str(raised.value) == message


def test_a_line_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "LINE_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"f\.jsonl:1: a line of more than 1 MiB"):
        read(b"x" * (3 << 20), [1 << 18] * 100)


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        ('"answer": true', "column 'answer' must be text or a number; what has more to it goes into another column: reward functions get them all"),  # noqa: E501
        ('"level": 123456789012345678901234567890', "column 'level': a whole number of more than 64 bits; write it as text, in quotes"),  # noqa: E501
        ('"prompt": ["x"]', "'prompt' must be text, as the model saw it"),
        ('"finish": "eos"', "'finish' must be \"stop\" or \"length\""),
        ('"finish": {}', "'finish' must be \"stop\" or \"length\""),
    ],
)  # fmt: skip
def test_a_row_that_can_not_be_checked_is_a_record(columns: str, wrong: str) -> None:
    (record,) = read(f'{{"id": 7, "completion": "x", {columns}}}'.encode())
    assert (bytes(record.id), record.task, record.wrong) == (b"7", None, wrong)


# -------------------------------------------------------------------------------------------------- order, and its limit  # noqa: E501


class ScriptedPool:
    """Checks that end when they are told to. most: of them at a time."""

    def __init__(self) -> None:
        self.asked: dict[str, asyncio.Future[None]] = {}
        self.most = 0

    async def check(self, task: ScoreTask, tokens: np.ndarray) -> ScoreResult:
        assert not len(tokens)
        self.asked[task.sample] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, sum(not end.done() for end in self.asked.values()))
        await self.asked[task.sample]
        return ScoreResult(sample=task.sample, attempt=0, verdict="right", reward=1.0, extracted="x" * 40)


async def stream(lines: int, broken: bool, size: int) -> AsyncIterator[Record]:
    """Every seventh record can't be checked."""
    for line in range(1, lines + 1):
        task = ScoreTask(sample=str(line), attempt=0, prompt="", answer="", finish="stop", columns={}, response="")
        yield Record(line, msgspec.Raw(b"1"), size, task if line % 7 else None, "" if line % 7 else "wrong")
    if broken:
        raise DataError("line 99")


@settings(max_examples=60, derandomize=True, deadline=None)
@given(lines=st.integers(0, 25), broken=st.booleans(), size=st.sampled_from([1, 300]), data=st.data())
def test_lines_are_written_in_order_whatever_ends_first(
    lines: int, broken: bool, size: int, data: st.DataObject
) -> None:
    """And what is held is bounded; those before a broken line are written; each as soon as it may be."""
    pool, written = ScriptedPool(), list[int]()

    async def write(batch: Sequence[Scored]) -> None:
        written.extend(scored.record.line for scored in batch)

    async def end_one_after_another() -> None:
        while True:
            for _ in range(40):  # all that can happen happens
                await asyncio.sleep(0)
            ended = {int(line) for line, end in pool.asked.items() if end.done()} | set(range(7, lines + 1, 7))
            read_until = max(map(int, pool.asked), default=0)
            may = next(line for line in range(1, lines + 2) if line not in ended) - 1
            assert written == list(range(1, len(written) + 1))
            assert len(written) >= min(may, read_until)
            if running := [line for line, end in pool.asked.items() if not end.done()]:
                pool.asked[data.draw(st.sampled_from(running))].set_result(None)

    async def score() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            ending = group.create_task(end_one_after_another())
            await _Window(pool, Crew(group)).score(stream(lines, broken, size), write)  # type: ignore[arg-type]
            ending.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "WINDOW", 6)
        patch.setattr(scoring, "WINDOW_BYTES", 900)
        patch.setattr(scoring, "BATCH", 2)
        told = []
        try:
            asyncio.run(score())
        except* DataError as errors:
            told = [str(error) for error in errors.exceptions]
    assert told == (["line 99"] if broken else [])
    assert written == list(range(1, lines + 1))
    assert pool.most <= (6 if size == 1 else 3)


# ------------------------------------------------------------------------------------------------------ the command line  # noqa: E501


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a module of rewards, a file of records, and a temporary folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "one.jsonl").write_text('{"completion": "> 4", "answer": "4"}\n')
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward", "exakt", "one.jsonl"], "command line: reward.function: 'exakt' is no reward; write one of exact, numeric, regex, choice, math, code, reasoning_gym, http, or `module:function`, one of your own; did you mean 'exact'?"),  # noqa: E501
        (["--reward", "exact", "two.jsonl"], "command line: two.jsonl: can't be read: No such file or directory"),
        (["--reward", "exact", "."], "command line: .: is a folder; name a file of JSON lines, or - for standard input"),  # noqa: E501
        (["--reward", "exact", "exact_after=x"], "command line: score: no file; name one, or - for standard input"),
        (["--reward", "exact", "one.jsonl", "two.jsonl"], "command line: score: one file at a time, not one.jsonl, two.jsonl"),  # noqa: E501
        (["--reward", "exact", "one.jsonl", "exact_aftr=x"], "command line: reward.exact_aftr: no such key; did you mean reward.exact_after?"),  # noqa: E501
        (["--reward", "exact", "one.jsonl", "reward.limits.memory=1"], "command line: reward.limits.memory: no such key; did you mean reward.limits.memory_mib?"),  # noqa: E501
        (["--reward", "exact", "one.jsonl", "learning_rate=1"], "command line: reward.learning_rate: no such key; the keys here are "),  # noqa: E501
        (["--reward", "exact", "one.jsonl", "limits.memory_mib=x"], "command line: reward.limits.memory_mib: must be a whole number ≥ 1, not the text 'x'"),  # noqa: E501
        (["--reward", "exact", "one.jsonl", "--timeout", "0"], "command line: reward.timeout_s: must be a number > 0, not the number 0"),  # noqa: E501
        (["--reward", "exact", "one.jsonl", "--workers", "two"], "command line: reward.workers: must be a whole number ≥ 1, not the text 'two'"),  # noqa: E501
        (["--reward", "exact", "one.jsonl", "--timeout", "2", "timeout_s=3"], "command line: reward.timeout_s: given twice; keep one of them"),  # noqa: E501
        (["--reward", "exact", "one.jsonl", "scale=10"], "command line: reward.scale: is about training; here a reward is what the check gave; leave it out"),  # noqa: E501
        (["--reward", "exact", "one.jsonl", "math.last_number=true"], "command line: reward.math.last_number: is only read by `math`, and reward.function is exact; leave it out"),  # noqa: E501
        (["--reward", "my_rewards:nothing", "one.jsonl"], "has no 'nothing'"),
        (["--reward", "my_reward:tidy", "one.jsonl"], "there is no module 'my_reward'"),
        (["--reward", "0.5*exact + my_rewards:nothing", "one.jsonl"], "has no 'nothing'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["score", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len([line for line in shown.err.strip().split("\n") if line != "a module that prints"]) == 1
    assert shown.out == ""
    assert not list((folder / "tmp").iterdir())


@pytest.mark.parametrize("arguments", [["one.jsonl", "--frob"], ["one.jsonl", "--timeout"], []])
def test_bad_usage(folder: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["score", "--reward", "exact", *arguments])
    assert end.value.code == 2


def test_help_shows_records_results_and_calls(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["score", "--help"])
    shown = capsys.readouterr().out
    examples = [line.strip() for line in shown.split("\n") if line.strip().startswith("{")]
    assert len(examples) == 4
    for line in examples[:3]:
        (record,) = read(line.encode())
        assert record.task is not None
    assert "areal-async score --reward math" in shown


# ------------------------------------------------------------------------------------------------------- real processes


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=270)


def lines_of(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def left_in(folder: Path) -> list[str]:
    """Temporary files, and processes that were started with that temporary folder."""
    deadline = time.monotonic() + 20
    while True:
        pids = [pid for pid in process_tree.marked("TMPDIR", str(folder / "tmp")) if pid != os.getpid()]
        left = [str(path) for path in (folder / "tmp").iterdir()] + [f"process {pid}" for pid in pids]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


@pytest.mark.slow
def test_all_verdicts_in_order(folder: Path) -> None:
    rows: list[dict[str, object]] = [
        {"id": "a", "completion": "4", "answer": "4"},
        {"completion": "5", "answer": 4},
        {"id": 7.5, "completion": "sleep"},
        {"id": None, "completion": "raise"},
        {"id": ["x"], "completion": "exit"},
        {"completion": "nan"},
        {"completion": "number", "level": 3},
        {"completion": "number", "answer": False},
    ]
    write_rows(folder / "rows.jsonl", rows)
    done = run("--reward", "my_rewards:reward", "rows.jsonl", "--timeout", "3", "values.timeout=-1")
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stdout)
    assert [line["id"] for line in lines] == ["a", 2, 7.5, None, ["x"], 6, 7, 8]
    assert [line["verdict"] for line in lines] == [
        "right", "wrong", "timeout", "crash", "crash", "bad_data", "given", "bad_data"
    ]  # fmt: skip
    assert [line["reward"] for line in lines] == [1, 0, -1, 0, 0, None, 0.75, None]
    assert all(set(line) == {"id", "verdict", "reward", "extracted", "reason", "seconds"} for line in lines)
    assert "no such thing" in str(lines[3]["reason"])
    assert 3 <= float(str(lines[2]["seconds"])) < 3 + SLACK_S
    assert "8 record(s): right 1, wrong 1, bad_data 2, timeout 1, crash 2, given 1" in done.stderr
    assert "mean reward: 0.1250 over the 6 that have one" in done.stderr
    assert "(line 3, timeout)" in done.stderr
    assert left_in(folder) == []


@pytest.mark.slow
def test_a_sum_and_a_file_that_ends_badly(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"completion": "> 4", "answer": "4"}\n\n{"text": "x"}\n{"completion": "x"}\n')
    done = run("--reward", "exact + 0.5*my_rewards:tidy", "rows.jsonl", "exact_after=>", "--workers", "1")
    assert done.returncode == 2
    assert [(line["verdict"], line["reward"], line["extracted"]) for line in lines_of(done.stdout)] == [
        ("given", 1.25, "4")
    ]
    assert "rows.jsonl:3: no 'completion'; the line has 'text'; rename 'text' if that is it" in done.stderr
    assert left_in(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_results_come_while_records_still_do(folder: Path, number: signal.Signals) -> None:
    """And whatever ends it then, lines are whole, and nothing is left."""
    command = [*PROGRAM, "--reward", "my_rewards:reward", "-", "--workers", "1", "--timeout", "600"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        for row in range(3):
            process.stdin.write(json.dumps({"completion": str(row), "answer": "1"}).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["verdict"] == ("right" if row == 1 else "wrong")
        process.stdin.write(b'{"completion": "sleep"}\n{"completion": "1"}\n')
        process.stdin.flush()
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(60) == (130 if number != signal.SIGKILL else -signal.SIGKILL)
        assert process.stdout.read() == b""
        said = process.stderr.read().decode()
        assert number == signal.SIGKILL or said.endswith("areal-async: interrupted; all processes were ended\n")
    assert left_in(folder) == []


@pytest.mark.slow
def test_a_reader_that_has_enough(folder: Path) -> None:
    write_rows(folder / "many.jsonl", [{"completion": "x" * 3000, "answer": "y"}] * 100 + [{"completion": "sleep"}])
    command = " ".join([*PROGRAM, "--reward", "my_rewards:reward", "many.jsonl", "--workers", "1"])
    shell = ["bash", "-c", f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, timeout=270)
    assert done.returncode == 0
    assert len(lines_of(done.stdout)) == 1
    assert done.stderr == "a module that prints\n"
    assert left_in(folder) == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(folder: Path) -> None:
    """200 MB of records; those behind one that sleeps are read on until the window is full."""
    row = json.dumps({"completion": "x" * 1_000_000, "answer": "y"}).encode() + b"\n"
    command = [*PROGRAM, "--reward", "my_rewards:reward", "-", "--timeout", "5", "--workers", "2"]
    with (
        open(folder / "out.jsonl", "wb") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdin
        assert process.stderr
        process.stdin.write(b'{"completion": "sleep"}\n')
        for _ in range(200):
            process.stdin.write(row)
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.stdin.close()
        assert process.wait(270) == 0
        assert b"wrong 200, timeout 1" in process.stderr.read()
    peak_mib = next(int(entry.split()[1]) for entry in status.split("\n") if entry.startswith("VmHWM")) / 1024
    assert peak_mib < 250


@pytest.mark.slow
def test_mathematics_with_what_can_not_be_computed(folder: Path) -> None:
    rows: list[dict[str, object]] = [
        {"completion": "so \\boxed{\\frac{1}{2}}", "answer": "0.5"},
        {"completion": "\\boxed{9^{9^{9^{9^9}}}}", "answer": "1"},
        {"completion": "\\boxed{1000000!}", "answer": "(10^6)!+1"},
        {"completion": "\\boxed{" * 2000, "answer": "1"},
        {"completion": "I can't say", "answer": "1"},
        {"completion": "\\boxed{1}", "answer": "as above"},
        {"completion": "x = 5", "answer": 5},
    ]
    write_rows(folder / "rows.jsonl", rows * 4)
    done = run("--reward", "math", "rows.jsonl", "--timeout", "5", "--workers", "2", "math.last_number=true")
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stdout)
    assert [line["id"] for line in lines] == list(range(1, 29))
    expected = ["right", "wrong", "wrong", "no_answer", "no_answer", "bad_data", "right"]
    verdicts = [str(line["verdict"]) for line in lines]
    assert [verdicts[row].replace("timeout", "wrong") for row in range(28)] == expected * 4
    assert all(float(str(line["seconds"])) < 5 + SLACK_S for line in lines)
    assert [line["extracted"] for line in lines[:2]] == ["\\frac{1}{2}", "9^{9^{9^{9^9}}}"]
    assert left_in(folder) == []


@pytest.mark.slow
def test_code_that_does_what_it_may_not(folder: Path) -> None:
    doubled = {"inputs": ["4\n", "5\n"], "outputs": ["8\n", "10\n"]}
    called = {"fn_name": "f", "inputs": [[4], [10**30]], "outputs": [8, 2 * 10**30]}
    fences = "Here it is:\n```python\n{}\n```\n"
    daemon = "import os, signal, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(99)\nprint(int(input()) * 2)"
    rows: list[dict[str, object]] = [
        {"id": "ok", "completion": fences.format("print(int(input()) * 2)"), "tests": doubled},
        {"id": "half", "completion": fences.format("print(8)"), "tests": doubled},
        {"id": "call", "completion": fences.format("def f(x): return 2 * x"), "tests": called},
        {"id": "spin", "completion": fences.format("while True: pass"), "tests": doubled},
        {"id": "prints", "completion": fences.format("while True: print('x' * 9999)"), "tests": doubled},
        {"id": "daemon", "completion": fences.format(daemon), "tests": doubled},
        {"id": "none", "completion": "I don't know.", "tests": doubled},
        {"id": "bad", "completion": fences.format("print(1)"), "tests": {"inputs": ["1"], "outputs": []}},
        {"id": "bare", "completion": fences.format("print(1)")},
    ]
    write_rows(folder / "rows.jsonl", rows)
    done = run("--reward", "code", "rows.jsonl", "--timeout", "60", "--workers", "2", "code.test_timeout_s=5")
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stdout)
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    assert [line["reward"] for line in lines] == [1, 0, 1, 0, 0, 1, 0, None, None]
    assert [line["verdict"] for line in lines] == [
        "right", "wrong", "right", "timeout", "crash", "right", "no_answer", "bad_data", "bad_data"
    ]  # fmt: skip
    assert all(float(str(line["seconds"])) < 5 + SLACK_S for line in lines)
    assert "model-written code runs in: own session, rlimits" in done.stderr
    assert left_in(folder) == []


@pytest.mark.slow
def test_workers_that_do_not_start(folder: Path) -> None:
    module = folder / "mine.py"
    module.write_text("import os\nassert 'AREAL_ASYNC_GUARD' not in os.environ\n\n\ndef f(response):\n    return 1\n")
    done = run("--reward", "mine:f", "one.jsonl", "--workers", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("areal-async: it ended while it started: rewards.0 ")
    assert "AssertionError" in done.stderr
    assert left_in(folder) == []
