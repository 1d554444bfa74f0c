"""Weights & Biases, offline, with the real package: what it writes is read back and compared with the run's files."""

import asyncio
import importlib
import json
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from areal_async import config_check, process_tree, wandb_process
from areal_async.config import Config
from areal_async.controller import Controller, RunResult
from areal_async.controller import wandb as telling
from areal_async.errors import ArealError
from areal_async.launch.child import Child, ChildSpec
from areal_async.rollout.session import Session
from areal_async.rollout.workflow import Prompt, Sample, SingleTurn
from areal_async.testing.recipes import scripted
from areal_async.wandb_process import Order, Teller, evaluation_values, read_told, row_values

from ..waiting import PATIENCE_S, Straggler, until

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record

Make = Callable[..., Config]
Values = dict[str, object]
BLOCK_BYTES = 32768
HEADER_BYTES = 7  # of the file, and of each piece of a record
ADDED = ("_step", "_runtime", "_timestamp")  # by W&B


def records(file: Path) -> "Iterator[Record]":
    """Of a .wandb file: LevelDB's log format (the package has its reader in Go alone)."""
    from wandb.proto.wandb_internal_pb2 import Record  # here: it takes half a second

    data = file.read_bytes()
    assert data.startswith(b":W&B")
    at, whole = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < HEADER_BYTES:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + HEADER_BYTES : at + HEADER_BYTES + length]
        at += HEADER_BYTES + length
        whole = part if kind in (1, 2) else whole + part  # whole or first; middle or last
        if at > len(data):
            return  # killed while it was written
        if kind in (1, 4):
            yield Record.FromString(whole)


def of_kind(folder: Path, kind: str) -> "Iterator[Record]":
    """Of all files in a run folder, the oldest first."""
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        yield from (record for record in records(file) if record.WhichOneof("record_type") == kind)


def history(folder: Path) -> list[Values]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in of_kind(folder, "history")
    ]


def lines(path: Path) -> list[Values]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.is_file() else []


def expected(folder: Path) -> list[Values]:
    """What the run's files say, in the order in which it happened."""
    found = [(row["time_s"], row_values(row)) for row in lines(folder / "metrics.jsonl")]
    found += [(row["time_s"], evaluation_values(row)) for row in lines(folder / "eval" / "results.jsonl")]
    return [values for _, values in sorted(found, key=lambda entry: entry[0])]


def without(entry: Values) -> Values:
    return {name: value for name, value in entry.items() if name not in ADDED}


def left_behind(folder: Path) -> list[int]:
    """Processes that were started for this run: W&B's own have its id, or its process, in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in command:
                found.append(int(entry.name))
    return [*found, *(pid for each in found for pid in process_tree.descendants(each))]


# -------------------------------------------------------------------------------------------------------------- names


def test_names_are_those_of_the_file() -> None:
    row = {
        "step": 3, "loss": -0.5, "lost_by_length": [0.0, 0.25], "verdicts": {"right": 2}, "waited_for": "",
        "skipped": "x", "eval_version": 2, "eval_score": 1.0, "eval_pass_at": {"1": 1.0}, "grad_norm": None,
        "ledger": {},
    }  # fmt: skip
    assert row_values(row) == {
        "step": 3, "loss": -0.5, "lost_by_length/1": 0.0, "lost_by_length/2": 0.25, "verdicts/right": 2,
        "waited_for": "", "skipped": "x",
    }  # fmt: skip
    result = {"version": 4, "score": 0.5, "pass_at": {"1": 0.25, "2": 0.5}, "time_s": 9.0, "server": "0"}
    assert evaluation_values(result) == {
        "eval_version": 4, "eval_score": 0.5, "eval_pass_at/1": 0.25, "eval_pass_at/2": 0.5,
    }  # fmt: skip


def test_a_folder_named_wandb_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own runs leave one where somebody worked."""
    (tmp_path / "wandb_of_nobody").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert not config_check._is_package("wandb_of_nobody")
    assert not config_check._is_package("wandb_that_is_not_there")
    assert config_check._is_package("wandb")


def test_what_is_written_while_it_is_read_keeps_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row, an evaluation and another row come after the rows were read and before the evaluations are."""
    told: list[Values] = []

    class Run:
        dir, url = str(tmp_path / "wandb" / "files"), None

        def define_metric(self, name: str, step_metric: str | None) -> None: ...

        def log(self, values: Values, step: int, commit: bool) -> None:
            told.append(values)

    def add(name: str, line: Values) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def evaluation(version: int, at: float) -> Values:
        return {"version": version, "score": 0.0, "pass_at": {}, "time_s": at}

    real = wandb_process._lines

    def lines(path: Path, position: int) -> Iterator[tuple[float, Values, int]]:
        if path.name == "results.jsonl" and not position:
            add("metrics.jsonl", {"step": 1, "time_s": 2.0})
            add("eval/results.jsonl", evaluation(7, 3.0))
            add("metrics.jsonl", {"step": 2, "time_s": 4.0})
        return real(path, position)

    monkeypatch.setattr(wandb_process, "_begin", lambda *_: Run())
    monkeypatch.setattr(wandb_process, "_lines", lines)
    add("metrics.jsonl", {"step": 0, "time_s": 1.0})
    teller = Teller(Order(folder=str(tmp_path), mode="offline", project="p", entity=None, name="n"))
    teller.hand_over()
    assert [values.get("step", values.get("eval_version")) for values in told] == [0, 1, 7]
    teller.hand_over()
    assert [values["step"] for values in told[3:]] == [2]


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package takes seconds to load, and on a busy machine many."""
    monkeypatch.setattr(telling, "FINISH_S", PATIENCE_S)
    monkeypatch.setattr(telling, "LEAVE_S", PATIENCE_S)


class Held:
    """Answers come once W&B's process has begun: it would hear nothing of the end of a run that ended before."""

    def __init__(self, config: Config) -> None:
        self._runs = Path(config.runs_dir)
        self._before = self._begun()

    def _begun(self) -> int:
        return len(list(self._runs.glob("*/wandb/offline-run-*")))

    async def run(self, session: Session, prompt: Prompt) -> Sample:
        while self._begun() == self._before:  # noqa: ASYNC110 (a folder)
            await asyncio.sleep(0.05)
        return await SingleTurn().run(session, prompt)


async def run_offline(make_config: Make) -> RunResult:
    config = make_config(
        "train.steps=4", "eval.every_steps=2", "eval.samples=2", "eval.limit=8", "metrics.wandb=offline",
        "metrics.wandb_project=numbers", "checkpoint.every_steps=1",
    )  # fmt: skip
    async with Controller(config, workflow=Held(config), recipes=scripted(step_s=0.02)) as run:
        return await run.run()


@pytest.mark.slow
async def test_everything_that_the_files_say(make_config: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "areal_async")
    result = await run_offline(make_config)
    folder = result.folder
    found = history(folder)
    assert [without(entry) for entry in found] == expected(folder)
    assert [entry["_step"] for entry in found] == list(range(len(found)))
    assert len(found) == 4 + 2
    axes = {record.metric.name: record.metric.step_metric for record in of_kind(folder, "metric")}
    assert axes["reward_mean"] == axes["ledger/trained"] == axes["waited_for"] == "step"
    assert axes["eval_score"] == axes["eval_pass_at/2"] == "eval_version"
    assert set(axes) == {name for entry in found for name in without(entry)}
    (began,) = (record.run for record in of_kind(folder, "run"))
    assert (began.project, began.display_name) == ("numbers", folder.name)
    updates = [update for record in of_kind(folder, "config") for update in record.config.update]
    config = {update.key or update.nested_key[0]: json.loads(update.value_json) for update in updates}
    assert (config["train"]["steps"], config["metrics"]["wandb"]) == (4, "offline")
    told = read_told(folder)
    assert told is not None
    assert (told.id, told.entries, told.url) == (began.run_id, 6, "")
    said = [message for message in caplog.messages if "W&B" in message]
    assert said == [f"W&B has 6 entries: {told.place}; `wandb sync {told.place}` sends them"]
    assert not left_behind(folder)


@pytest.mark.slow
async def test_a_resumed_run_goes_on_under_its_id(make_config: Make) -> None:
    """Nothing is told twice where the first one ended well."""
    config = make_config("train.steps=6", "metrics.wandb=offline", "checkpoint.every_steps=1")
    async with Controller(config, workflow=Held(config), recipes=scripted(step_s=0.05)) as run:
        async for row in run.steps():
            if row.step == 1:
                run.stop()
        folder = run.result().folder
    before = len(history(folder))
    assert 2 <= before < 6
    recipes = scripted(step_s=0.02)
    async with Controller(config, workflow=Held(config), recipes=recipes, run_dir=folder, resume=True) as run:
        await run.run()
    found = history(folder)
    assert [without(entry) for entry in found] == expected(folder)
    assert [entry["_step"] for entry in found] == list(range(len(found)))
    assert len(found) > before
    assert len({record.run.run_id for record in of_kind(folder, "run")}) == 1
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2


@pytest.mark.slow
async def test_what_was_killed_is_told_again(make_config: Make) -> None:
    """A process that was killed may have lost the end of what it was told; its resume tells it anew, with the same
    numbers."""
    result = await run_offline(make_config)
    folder = result.folder
    told = read_told(folder)
    assert told is not None
    at_the_start = msgspec.structs.replace(told, rows=0, evaluations=0, entries=0)
    (folder / "wandb" / "areal-async.json").write_bytes(msgspec.json.encode(at_the_start))
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    while len(history(folder)) == 6:
        os.truncate(file, file.stat().st_size - 500)
    assert 0 < len(history(folder)) < 6
    order = Order(folder=str(folder), mode="offline", project="numbers", entity=None, name="x")
    argv = [sys.executable, "-m", "areal_async.wandb_process", msgspec.json.encode(order).decode()]
    async with await Child.start(ChildSpec(name="again", argv=argv, stderr_path=folder / "again.log")) as child:
        await until(lambda: len(list(folder.glob("wandb/offline-run-*"))) == 2)  # from then on it hears of its end
        assert await child.stop(PATIENCE_S) == 0
    numbers = {entry["_step"]: without(entry) for entry in history(folder)}
    assert [numbers[number] for number in range(6)] == expected(folder)


# ------------------------------------------------------------------------------------------------- it fails, or hangs


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refused", "silent", "killed"])
async def test_a_run_goes_on_whatever_becomes_of_it(
    how: str, make_config: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(telling, "FINISH_S", 0.5 if how == "silent" else PATIENCE_S)
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody's netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    mode = "offline" if how == "killed" else "online"
    silent = socket.create_server(("127.0.0.1", 0))  # takes a question, and never answers
    if how == "silent":
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    config, workflow = make_config("train.steps=4", f"metrics.wandb={mode}"), Straggler()
    async with Controller(config, workflow=workflow, recipes=scripted(step_s=0.05)) as run:
        async for row in run.steps():
            if row.step == 1:  # further ones wait for the straggler
                if how == "killed":
                    process_tree.signal_all(left_behind(run.folder), signal.SIGKILL)
                if how != "silent":
                    await until(lambda: any("W&B" in record.getMessage() for record in caplog.records))
                workflow.go.set()
        result = run.result()
    silent.close()
    assert (result.reason, len(result.rows)) == ("steps_done", 4)
    (said,) = [record for record in caplog.records if "W&B" in record.message]
    assert said.levelname == "WARNING"
    assert f"({result.folder}/stderr/wandb.log has what it said)" in said.message
    assert ("has not taken everything in 0.5 s" if how == "silent" else "is told nothing more") in said.message
    assert how != "refused" or "No API key configured" in said.message
    assert not left_behind(result.folder)


@pytest.mark.slow
async def test_a_run_that_fails_leaves_no_process(make_config: Make, tmp_path: Path) -> None:
    config = make_config("metrics.wandb=offline")

    class Stop(ArealError):
        pass

    with pytest.raises(Stop):  # noqa: PT012
        async with Controller(config, workflow=Held(config), recipes=scripted(step_s=0.2)) as run:
            async for row in run.steps():
                if row.step == 1:
                    raise Stop
    assert [entry["step"] for entry in history(run.folder)][:2] == [0, 1]
    assert not left_behind(run.folder)
