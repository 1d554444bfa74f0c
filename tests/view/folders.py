"""Run folders to look at, made by hand: a recorded log with the files that a run has beside it."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Final

import msgspec

from areal_async.controller.status import Status
from areal_async.core.view import PeerView, ServerView
from areal_async.log.writer import RunLog
from areal_async.messages import Rules

LOGS: Final = Path(__file__).resolve().parent.parent / "logs"
RECORDED: Final = LOGS / "wait-gone-back-resumed"
STEPS: Final = 3

STATUS: Final = Status(
    time=0.0, pid=1, host=os.uname().nodename, name="first", at=100.0, ended="", phase="saves the model",
    waits=("step 2 waits for group 0",), last_event=97.0, loop_lag_s=0.004, steps=9, version=STEPS, branch=1,
    in_flight=5, ready=1, outstanding=2, balance={"admitted": 6, "trained": 4, "outstanding": 2},
    peers=(PeerView("trainer", "idle", 90.0),), servers=(ServerView("0", "serving", 2, 3),),
)  # fmt: skip


def row(step: int, **changes: object) -> dict[str, object]:
    """A line of `metrics.jsonl`, as far as somebody here reads it."""
    return {
        "step": step, "version": step + 1, "branch": 1, "time_s": 10.0 * step, "reward_mean": step / 8,
        "verdicts": {"right": 3, "wrong": 1}, "ledger": {"admitted": step}, "eval_version": None, "eval_score": None,
        "eval_pass_at": {}, "waited_for": "größer", **changes,
    }  # fmt: skip


def write_rows(folder: Path, *rows: dict[str, object]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def write_status(folder: Path, **changes: object) -> None:
    changes = {"time": time.time(), "ended": "steps_done", **changes}
    (folder / "status.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(STATUS, **changes)))


def write_run(folder: Path, log: Path = RECORDED) -> Path:
    """A run that has ended."""
    shutil.copytree(log, folder / "log")
    (folder / "config.yaml").write_text("name: first\ntrain: {steps: 9}\n")
    write_rows(folder, *(row(step) for step in range(STEPS)))
    write_status(folder)
    return folder


class Living:
    """A run of this process: it holds the log's lock. Leave it as a context manager."""

    def __init__(self, folder: Path, rules: Rules) -> None:
        self._log = RunLog(folder / "log", 1 << 20)
        self._log.append(rules)
        self._log.flush()

    def __enter__(self) -> "Living":
        return self

    def __exit__(self, *error: object) -> None:
        self._log.close()
