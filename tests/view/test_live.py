"""A run that is read while it goes on, is killed and resumed: at its end the tables say what `trace` tells of it."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from areal_async.log.follow import QUIET_S
from areal_async.runfiles import read_checks
from areal_async.testing.crash import Life, Point
from areal_async.testing.lives import live, wait_for_the_end_of_all
from areal_async.testing.small_run import write_small_run
from areal_async.trace.samples import find_decoder
from areal_async.view import tables
from areal_async.view.api import SampleQuery
from areal_async.view.index import Index
from areal_async.view.samples import MOST_ROWS, Samples

from .test_index import check

SLICE_S = 0.01


@pytest.mark.slow
@pytest.mark.parametrize("point", [Point("record", 60), Point("event", 25), Point("sent", 4)], ids=lambda p: p.place)
def test_read_while_it_goes_on(tmp_path: Path, point: Point) -> None:
    """Killed in the middle of a record, between an event and its commands, in a step."""
    folder = tmp_path / "r"
    config, run = write_small_run(folder), folder / "run"
    decode, _ = find_decoder(run)  # its configuration isn't there yet
    assert decode is None

    def lived(at: Point | None, *, resume: bool) -> int | None:
        end = live(
            Life(
                config=str(config), run_dir=str(run), resume=resume, point=at,
                books=str(folder / "books"), server_book=str(folder / "server-book"),
            )
        )  # fmt: skip
        assert wait_for_the_end_of_all(end.mark)[1] == []
        return end.code

    with (
        closing(tables.open_database(tmp_path / "x.sqlite")) as database,
        closing(Index(run / "log", database, None)) as index,
        ThreadPoolExecutor(1) as beside,
    ):
        samples = Samples(run, run / "log", index, None, "not yet")
        totals = []
        for code, at in ((-9, point), (0, None)):
            life = beside.submit(lived, at, resume=code == 0)
            while not life.done():
                index.read_some(SLICE_S)
                totals.append(samples.page(SampleQuery(limit=MOST_ROWS)).total)
                time.sleep(SLICE_S)
            assert life.result() == code
            time.sleep(QUIET_S)  # now the newest turn is taken for whole, though commands of it may be missing
            while index.read_some(SLICE_S):
                pass
            if code == 0 or not index.reading().problem:
                check(run / "log", index, samples)
            else:
                assert "torn end: the last" in index.reading().problem
        assert len(set(totals)) > 3  # it was seen growing
        assert (index.reading().problem, index.reading().done) == ("", True)
        assert "rolled_back" in [each.what for each in index.troubles(100)]
        checks = {each.sample for each in read_checks(run)[0]}
        shown = search_all(samples)
        assert {name for name in shown if samples.full(name).checks} == checks & shown  # type: ignore[union-attr]


def search_all(samples: Samples) -> set[str]:
    return {row.id for row in samples.page(SampleQuery(limit=MOST_ROWS)).rows}
