"""Whole runs with scripted servers and trainers: real processes, wire, log and rewards."""

import json
from collections.abc import Callable
from pathlib import Path

from areal_async.config import Config
from areal_async.controller import Controller
from areal_async.testing.recipes import scripted

Make = Callable[..., Config]


async def test_a_run_ends_with_all_steps_and_a_model(make_config: Make, tmp_path: Path) -> None:
    books = tmp_path / "books.jsonl"
    async with Controller(make_config(), recipes=scripted(books=books)) as run:
        result = await run.run()
    assert (result.reason, result.steps) == ("steps_done", 4)
    assert result.model is not None
    assert (result.model / "version").read_text() == "4"
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
