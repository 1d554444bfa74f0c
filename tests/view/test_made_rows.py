"""Rows of `reasoning_gym:` data, made again for a sample that somebody looks at."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

from areal_async.errors import DataError
from areal_async.rollout import reasoning_gym
from areal_async.view import api, made_rows, samples
from areal_async.view.data_row import columns_of
from areal_async.view.made_rows import MadeRows

from ..waiting import until
from .asking import asking

ROWS = [
    {"prompt": [], "question": f"q{number}", "answer": str(number), "metadata": {"n": number}} for number in range(3)
]
SOURCE = "reasoning_gym:chain_sum?size=3&seed=7"


def program(path: Path, source: str) -> tuple[str, ...]:
    """A child that stands for the package. It notes that it was run."""
    book = path / "book"
    (path / "child.py").write_text(
        f"import os, sys, time\nopen({str(book)!r}, 'a').write(f'{{os.getpid()}}\\n')\n{source}"
    )
    return (sys.executable, "-S", str(path / "child.py"))


def gives(path: Path) -> tuple[str, ...]:
    return program(path, f"sys.stdout.buffer.write({msgspec.msgpack.encode(ROWS)!r})")


def started(path: Path) -> list[int]:
    book = path / "book"
    return [int(line) for line in book.read_text().split()] if book.exists() else []


def config_of(run: Path, *sources: str) -> None:
    (run / "config.yaml").write_text(json.dumps({"data": {"train": list(sources)}}))


async def test_a_source_is_made_once(tmp_path: Path) -> None:
    made = MadeRows(gives(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "n": 1}\n')
    config_of(tmp_path, str(tmp_path / "a.jsonl"), SOURCE)
    missing: list[str] = []
    assert not await made.make_wanted()
    assert columns_of(tmp_path, 0, None, missing, made) == {"n": "1"}
    assert not await made.make_wanted(), "nothing of it was asked for"
    assert columns_of(tmp_path, 2, None, missing, made) == {}
    assert missing == [f"no columns of the data's row 2: {SOURCE}: its rows are not made again yet"]
    missing.clear()
    with pytest.raises(DataError, match="not made again yet"):
        made.row(SOURCE, 0)
    assert await asyncio.gather(made.make_wanted(), made.make_wanted())
    assert columns_of(tmp_path, 2, "<|user|> Q1 <|assistant|>", missing, made) == {"answer": "1", "metadata": '{"n":1}'}
    assert missing == []
    assert columns_of(tmp_path, 3, "another", missing, made) == {"answer": "2", "metadata": '{"n":2}'}
    assert missing == ["row 3 of the data has another prompt by now: its package was changed, or prompts are rewritten"]
    assert not await made.make_wanted()
    assert len(started(tmp_path)) == 1
    columns_of(tmp_path, 4, None, missing, made)
    assert "4 rows are there; the files have changed" in missing[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("print('not installed', file=sys.stderr); sys.exit(1)", "can't be made again: not installed"),
        ("sys.exit(3)", "can't be made again: the process ended with 3"),
        ("sys.stdout.write('x')", "can't be made again: Expected `array`"),
        ("time.sleep(60)", "could not be made again within 0.2 s"),
        ("[sys.stdout.write('x' * 1000) for _ in iter(int, 1)]", "are more than 1 MB, too many"),
        (f"os.write(1, {msgspec.msgpack.encode(ROWS[:1])!r})", "makes 1 rows by now"),
    ],
)
async def test_why_there_are_none_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    monkeypatch.setattr(made_rows, "MOST_BYTES", 1 << 20)
    deadline_s = 0.2 if "sleep" in source else 30.0  # it may not have begun by then
    made = MadeRows(program(tmp_path, source), deadline_s)
    for told in ("not made again yet", why, why):
        with pytest.raises(DataError, match=told):
            made.row(SOURCE, 1)
        await made.make_wanted()
    children = started(tmp_path)
    assert len(children) == 1 or "sleep" in source
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.slow
async def test_who_leaves_takes_the_child_with_him(tmp_path: Path) -> None:
    made = MadeRows(program(tmp_path, "time.sleep(60)"))
    with pytest.raises(DataError):
        made.row(SOURCE, 0)
    making = asyncio.create_task(made.make_wanted())
    await until(lambda: started(tmp_path))
    making.cancel()
    await asyncio.wait({making})
    with pytest.raises(ProcessLookupError):
        os.kill(started(tmp_path)[0], 0)


@pytest.mark.slow
async def test_a_sample_has_them(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_of(runs / "first", "reasoning_gym:chain_sum?size=1000&seed=7")
    rows = [{"question": "q", "answer": "5"}] * 1000
    command = program(tmp_path, f"sys.stdout.buffer.write({msgspec.msgpack.encode(rows)!r})")
    monkeypatch.setattr(samples, "MadeRows", lambda: MadeRows(command))
    async with asking(runs) as asked:
        await asked.read("first")
        page = msgspec.json.decode(await (await asked.get("/api/runs/first/samples")).read(), type=api.SamplePage)
        for row in page.rows[:2]:
            answer = await asked.get(f"/api/runs/first/samples/{row.id}")
            full = msgspec.json.decode(await answer.read(), type=api.SampleFull)
            assert full.columns == {"answer": "5"}
    assert len(started(tmp_path)) == 1


@pytest.mark.slow
async def test_they_are_those_of_the_training(tmp_path: Path) -> None:
    made, source = MadeRows(), "reasoning_gym:chain_sum?size=20&seed=7&min_terms=2"
    with pytest.raises(DataError):
        made.row(source, 0)
    begun = time.monotonic()
    assert await made.make_wanted()
    assert time.monotonic() - begun < made_rows.DEADLINE_S
    for number, row in enumerate(reasoning_gym.rows(source)):
        own = {key: value for key, value in row.items() if key != "question"}
        assert made.row(source, number) == own
