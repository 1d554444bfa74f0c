"""How many checks ended, and how: what the log says now, also between two steps."""

import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path

import msgspec

from areal_async.log.format import DECISIONS_NAME
from areal_async.log.reader import read_records
from areal_async.messages import Scored, StepDone
from areal_async.view import api, tables
from areal_async.view.index import Index

from .asking import asking
from .folders import RECORDED


def test_they_move_between_steps(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    records, data = list(read_records(RECORDED)), (RECORDED / DECISIONS_NAME).read_bytes()
    ends = [*(record.offset for record in records[1:]), len(data)]
    counts: list[int] = []
    with (
        closing(tables.open_database(tmp_path / "x.sqlite")) as database,
        closing(Index(tmp_path / "log", database, None)) as index,
        (tmp_path / "log" / DECISIONS_NAME).open("wb", buffering=0) as file,
    ):
        for record, end in zip(records, ends, strict=True):
            file.write(data[file.tell() : end])
            if not isinstance(record.message, Scored | StepDone):
                continue
            while index.read_some(1.0):
                pass
            ended = [each.message for each in records if each.offset <= record.offset]
            whole = Counter(each.verdict for each in ended[:-1] if isinstance(each, Scored))  # the newest may grow yet
            assert index.verdicts == whole
            if isinstance(record.message, StepDone):
                counts.append(0)
            elif counts:
                counts[-1] += 1
        assert max(counts) > 5, "checks ended between two steps"


async def test_without_a_log_nobody_knows(runs: Path) -> None:
    shutil.rmtree(runs / "first" / "log")
    async with asking(runs) as asked:
        await asked.read("first")
        answer = await asked.get("/api/runs/first/peers")
        assert msgspec.json.decode(await answer.read(), type=api.Peers).verdicts is None
