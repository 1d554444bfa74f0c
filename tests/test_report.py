"""What a run prints: names as they are, also where they look like rich's markup."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from areal_async.controller.result import RunResult
from areal_async.report import _LiveTable, summary

ODD = Path("/runs/a[bold]b[/]/[/x]")


def printed(shown: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    shown(console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_folder_with_brackets_is_printed_as_it_is() -> None:
    result = RunResult(
        reason="stopped", steps=0, folder=ODD, model=ODD / "model", seconds=1.0, both_busy_share=0.0,
        trainer_idle_share=1.0, rollout_idle_share=1.0, rows=(), evaluations=(),
    )  # fmt: skip
    text = printed(lambda console: summary(result, console))
    assert f" {ODD} " in text
    assert f" {ODD}/model " in text
    run: Any = SimpleNamespace(folder=ODD, phase="starting", config=SimpleNamespace(train=SimpleNamespace(steps=3)))
    assert str(ODD) in printed(lambda console: console.print(_LiveTable(run).render()))
