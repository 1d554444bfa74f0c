"""Data policies in whole runs with scripted peers: what is left out is said and noted, shares are drawn as asked."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_async.config import Config
from areal_async.controller import Controller
from areal_async.errors import ConfigError
from areal_async.log.reader import read_records
from areal_async.messages import GroupRead, Note
from areal_async.testing.recipes import scripted

Make = Callable[..., Config]


@pytest.mark.slow
async def test_long_prompts_are_left_out_said_and_noted(
    make_config: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1" * n, "answer": "1"}) + "\n" for n in (3, 40, 5, 41, 7)))
    option = f"data.train={path}"
    with pytest.raises(ConfigError, match=r"2 of 5 prompts have more than 10 tokens, first .*some\.jsonl:2 \(40\)"):
        async with Controller(make_config(option, "data.max_prompt_tokens=10")):
            pytest.fail("it has begun")
    config = make_config(option, "data.max_prompt_tokens=10", "data.long_prompts=skip", "train.steps=2")
    with caplog.at_level(logging.INFO, "areal_async"):
        async with Controller(config, recipes=scripted()) as run:
            result = await run.run()
    assert "2 of 5 prompts are longer than 10 tokens and left out (data.long_prompts: skip)" in caplog.messages
    records = [record.message for record in read_records(result.folder / "log")]
    (note,) = [record for record in records if isinstance(record, Note) and record.what == "long_prompts"]
    assert note.data == {"left_out": 2, "max_prompt_tokens": 10}
    read = [record for record in records if isinstance(record, GroupRead)]
    assert {record.row for record in read} == {0, 2, 4}
    assert {record.prompt_tokens for record in read} == {3, 5, 7}


@pytest.mark.slow
async def test_files_are_drawn_by_their_shares(make_config: Make, tmp_path: Path) -> None:
    for name, count in (("a", 40), ("b", 3)):
        rows = [json.dumps({"prompt": f"{n}+", "answer": "1"}) + "\n" for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    config = make_config(f"data.train=[{tmp_path}/a.jsonl, {tmp_path}/b.jsonl]", "data.weights=[1, 3]", "train.steps=3")
    async with Controller(config, recipes=scripted()) as run:
        result = await run.run()
    records = [record.message for record in read_records(result.folder / "log")]
    read = [record.row for record in records if isinstance(record, GroupRead)]
    assert len(read) >= 12
    assert abs(sum(row >= 40 for row in read) - 0.75 * len(read)) <= 2
    assert len({row for row in read if row < 40}) == sum(row < 40 for row in read)  # none of them is asked again yet
