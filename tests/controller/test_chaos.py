"""The chaos runner: what it draws, that it finds what is wrong and shrinks it, and runs that meet faults."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.testing import chaos
from areal_async.testing.faults import Fault
from areal_async.testing.shrink import shrink

SETS = st.sets(st.integers(0, 14), min_size=1, max_size=4)


@pytest.mark.slow
@given(st.integers(5, 15), st.lists(SETS, min_size=1, max_size=3))
def test_what_is_found_fails_and_nothing_can_be_left_out(size: int, bugs: list[set[int]]) -> None:
    """A planted bug shows when all of its elements are there; there may be several."""
    bugs = [{number % size for number in bug} for bug in bugs]
    tries = 0

    def fails(part: Sequence[int]) -> bool:
        nonlocal tries
        tries += 1
        return any(bug <= set(part) for bug in bugs)

    found = shrink(range(size), fails)
    assert found == sorted(found)
    assert set(found) in bugs
    assert not any(fails([other for other in found if other != left]) for left in found)
    assert tries <= size**2 + 3 * size + len(found)


def test_what_does_not_fail_is_refused() -> None:
    with pytest.raises(ValueError, match="these 3 don't fail"):
        shrink(range(3), lambda _: False)


def test_what_fails_without_anything_is_nothing() -> None:
    assert shrink(range(3), lambda _: True) == []


def test_a_failing_seed_is_told_with_the_shortest_schedule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake runner in which two faults together are a bug, in the order in which they are drawn."""
    schedule = chaos.draw(3, 8)
    bad = [schedule[2], schedule[5]]

    def play(part: Sequence[Fault], parent: Path) -> chaos.Played:
        return chaos.Played(len(part), ("sample 3.1 was lost",) if set(bad) <= set(part) else (), parent)

    monkeypatch.setattr(chaos, "play", play)
    report = chaos.chaos(3, faults=8, folder=tmp_path, shortest=True)
    assert report.wrong == ("sample 3.1 was lost",)
    assert report.shortest == tuple(bad)
    told = str(report).splitlines()[-1]
    assert chaos.read(told.partition("--schedule '")[2].rstrip("'")) == bad


def test_a_seed_always_draws_the_same_and_seeds_differ() -> None:
    drawn = [chaos.draw(seed, 4) for seed in range(50)]
    assert drawn == [chaos.draw(seed, 4) for seed in range(50)]
    assert len({chaos.written(schedule) for schedule in drawn}) == 50
    assert {fault.whom for schedule in drawn for fault in schedule} == {
        "server 0", "server 1", "rewards 0", "trainer", "controller",
    }  # fmt: skip
    assert {fault.do for schedule in drawn for fault in schedule} == {"kill", "freeze", "500", "break", "stall"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 10, 11])  # with faults of each process, and none that takes long to notice
def test_faults_of_a_seed(tmp_path: Path, seed: int) -> None:
    report = chaos.chaos(seed, faults=3, folder=tmp_path)
    assert not report.wrong, report
    assert report.came
