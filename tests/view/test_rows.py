"""`metrics.jsonl` of a run that may still write it."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.view import rows
from areal_async.view.rows import Rows

from .folders import row, write_rows

GOOD = [json.dumps(row(step)).encode() + b"\n" for step in range(12)]
BROKEN = [b"{\n", b"\n", b"[1]\n", b'{"step": "x"}\n', b"\xff\xfe\n", b'{"step": 1} {"step": 2}\n']


def read(found: Rows) -> None:
    while found.read_some(0.0):
        pass


def lines(found: Rows) -> list[bytes]:
    """All that are there, as somebody gets them who asks again and again."""
    got: list[bytes] = []
    while True:
        some, following = found.since(len(got))
        assert following == len(got) + len(some)
        if not some:
            return got
        got += [bytes(each) + b"\n" for each in some]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    written=st.lists(st.sampled_from(GOOD + BROKEN), max_size=12),
    cuts=st.lists(st.integers(0, 4000), max_size=5),
    piece=st.sampled_from([7, 300, 1 << 18]),
    at_once=st.sampled_from([1, 700, 1 << 22]),
)
def test_all_good_lines_come_in_order_however_the_file_grows(
    tmp_path_factory: pytest.TempPathFactory, written: list[bytes], cuts: list[int], piece: int, at_once: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    data = b"".join(written)
    found = Rows(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows, "PIECE_BYTES", piece)
        patched.setattr(rows, "AT_ONCE_BYTES", at_once)
        for end in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
            (folder / "metrics.jsonl").write_bytes(data[:end])
            read(found)
            whole = data[:end].splitlines(keepends=True)
            assert lines(found) == [line for line in whole if line in GOOD]
    broken = sum(line in BROKEN for line in written)
    assert sum(int(told.split()[1]) if "more lines" in told else 1 for told in found.problems) == broken
    good = [line for line in written if line in GOOD]
    assert (found.last is None) == (not good)
    assert found.last is None or found.last.step == json.loads(good[-1])["step"]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD[0] + b"{]\n" + GOOD[1])
    found = Rows(tmp_path)
    read(found)
    assert len(found) == 2
    (told,) = found.problems
    assert told.startswith(f"{path}:2: is no row of this release, and is left out: ")


def test_a_file_that_has_become_shorter_is_read_anew(tmp_path: Path) -> None:
    found = Rows(tmp_path)
    write_rows(tmp_path, *(row(step) for step in range(5)))
    read(found)
    write_rows(tmp_path, row(7))
    read(found)
    assert len(found) == 1
    some, following = found.since(5)
    assert (json.loads(bytes(some[0]))["step"], following) == (7, 1)
    (tmp_path / "metrics.jsonl").unlink()
    read(found)
    assert (len(found), found.since(1)) == (0, ([], 0))


def test_evaluations_are_found(tmp_path: Path) -> None:
    write_rows(tmp_path, row(0), row(1, eval_version=1, eval_score=0.5, eval_pass_at={"4": 0.75}))
    found = Rows(tmp_path)
    read(found)
    (point,) = found.evaluations
    assert (point.version, point.time_s, point.score, point.pass_at) == (1, 10.0, 0.5, {4: 0.75})
