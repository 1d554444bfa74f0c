"""Controllers that are killed and resumed: by the books of their peers nothing is lost or trained twice."""

import zlib
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from areal_async.log import format as fmt
from areal_async.log.format import Entry
from areal_async.messages import Woke
from areal_async.testing import books
from areal_async.testing.books import Line, Wanted
from areal_async.testing.crash import PLACES, Trap, record_borders
from areal_async.testing.kill_points import KillPoints
from areal_async.testing.small_run import prompt_of
from areal_async.testing.vllm_server import Entry as Asked

WANTED = Wanted(steps=2, batch_groups=1, group_size=1, ranks=1, eta=1, seed=0)


def line(step: int, group: int, branch: int = 0, state: int = 0) -> Line:
    return Line(
        step=step, branch=branch, rank=0, groups=(group,), samples=(f"{group}.0",), advantages=(0.0,), lengths=(3,),
        checksum=group, state=state,
    )  # fmt: skip


def test_a_newer_branch_takes_the_place_of_older_steps() -> None:
    lines = [line(0, 0), line(1, 1), line(1, 1, branch=1), line(2, 2, branch=1), line(2, 2, branch=2)]
    assert [(kept.step, kept.branch) for kept in books.surviving(lines)] == [(0, 0), (1, 1), (2, 2)]
    assert list(books.trained_once([line(0, 0), line(1, 1), line(1, 1, branch=1)], WANTED)) == []


LIES = {
    "a sample in two steps": ([line(0, 0), line(1, 0)], "sample 0.0 was trained by steps 0 and 1"),
    "a step is missing": ([line(0, 0)], "surviving history has"),
    "a step twice on one branch": ([line(0, 0), line(1, 1), line(1, 1)], "rank 0 was given step 1 twice on branch 0"),
    "a step too many": ([line(0, 0), line(1, 1), line(2, 2)], "surviving history has"),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_trainers_book_shows(lie: str) -> None:
    lines, words = LIES[lie]
    assert any(words in wrong for wrong in books.trained_once(lines, WANTED))


def test_another_batch_the_second_time_shows() -> None:
    other = msgspec.structs.replace(line(1, 1, branch=1), checksum=99)
    assert list(books.same_batches_again([line(0, 0), line(1, 1), line(1, 1, branch=1)])) == []
    assert "step 1 of rank 0 was trained" in next(books.same_batches_again([line(0, 0), line(1, 1), other]))


def test_a_branch_that_began_with_other_weights_shows() -> None:
    first = zlib.crc32(msgspec.json.encode((0, [("0.0", 0.0)])))
    second = zlib.crc32(msgspec.json.encode((1, [("1.0", 0.0)])), first)
    good = [line(0, 0, state=first), line(1, 1, state=second)]
    assert list(books.states_follow(good)) == []
    assert list(books.states_follow([*good, line(1, 1, branch=1, state=second)])) == []
    assert "after step 1" in next(books.states_follow([*good, line(1, 1, branch=1, state=first)]))


def test_a_graded_sample_that_is_asked_again_shows(tmp_path: Path) -> None:
    """Under its own name, or its prompt in another group's."""
    book = tmp_path / "servers.jsonl"
    prompts = [[ord(char) - 33 for char in prompt_of(row)] for row in (4, 5)]
    asked = [("0.0-0-0", 0), ("1.0-0-0", 1), ("1.0-1-0", 1), ("0.1-0-0", 0), ("0.0-1-0", 0), ("2.0-0-0", 0)]
    data = [
        msgspec.json.encode(Asked("server-0", "0", request, prompts[which], 4, 0)) + b"\n" for request, which in asked
    ]
    then = books.Moment(frozenset({"0.0"}), len(data[0]) + len(data[1]))
    words = "graded when controller 0 died, and generated again: "
    for lines, again in ((data[:4], ""), (data[:5], "0.0"), ([*data[:4], data[5]], "2.0")):
        book.write_bytes(b"".join(lines))
        assert list(books.not_generated_again(book, [then])) == ([words + again] if again else [])


def test_a_torn_write_can_end_at_the_end_of_any_record_but_the_last() -> None:
    data, ends = bytearray(fmt.file_header("decisions")), []
    for number in range(3):
        body = msgspec.msgpack.encode(Entry(Woke(at=float(number)), None))
        data += fmt.record_head([body]) + body
        ends.append(len(data))
    assert record_borders(data) == ends[:-1]
    assert record_borders(data[fmt.HEADER_BYTES :]) == [end - fmt.HEADER_BYTES for end in ends[:-1]]


def test_points_are_spread_over_all_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(KillPoints, "passes", lambda *_, **__: dict.fromkeys(PLACES, 10))
    points = [KillPoints(7, tmp_path).point(number) for number in range(20 * len(PLACES))]
    assert points == [KillPoints(7, tmp_path).point(number) for number in range(20 * len(PLACES))]
    assert Counter(point.place for point in points) == dict.fromkeys(PLACES, 20)
    assert {point.first.number for point in points} == set(range(1, 11))


def test_a_trap_comes_once(tmp_path: Path) -> None:
    trap = Trap(None)
    assert not any(trap.comes("record") for _ in range(5))
    assert trap.counts == {"record": 5}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, len(PLACES), 3))
def test_nothing_is_lost_or_trained_twice(number: int, points: KillPoints) -> None:
    """A few of many: `tools/chaos.py kills`."""
    outcome = points.try_point(points.point(number))
    assert not outcome.wrong, f"{outcome.point}\n" + "\n".join(outcome.wrong)
    assert outcome.deaths


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> KillPoints:
    return KillPoints(0, tmp_path_factory.mktemp("k"))
