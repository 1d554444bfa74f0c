"""The staleness rule by itself: the two forms of Eq. 3 agree, and the batch test counts as it says."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from areal_async.core.admission import blockers, capacity, deadline, lowest_floor, overdue
from areal_async.core.routing import least_loaded

from .world import make_rules


@dataclass
class Placed:
    id: int
    deadline: int


@dataclass
class Server:
    name: str
    version: int
    load: int


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 300), st.integers(-3, 60))
def test_the_lowest_floor_is_where_capacity_begins(batch: int, eta: int, taken: int, version: int) -> None:
    rules = make_rules(batch_groups=batch, max_staleness=eta)
    assert (capacity(version, taken, rules) >= 1) == (version >= lowest_floor(taken, rules))


def test_p02_the_formula() -> None:
    rules = make_rules(batch_groups=8, max_staleness=1)
    assert capacity(100, 100 * 8, rules) == 16
    assert capacity(0, 0, rules) == 16
    assert capacity(0, 16, rules) == 0
    assert deadline(3, rules) == 4


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=20),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_the_batch_test_is_what_it_says(groups: list[tuple[int, bool]], batch: int, step: int) -> None:
    placed = [Placed(number, step + ahead) for number, (ahead, _) in enumerate(groups)]
    chosen = {number for number, (_, taken) in enumerate(groups) if taken}
    behind = [group for group in placed if group.id not in chosen]
    passes = all(sum(group.deadline <= step + k for group in behind) <= k * batch for k in range(8))
    blocking = blockers(placed, chosen, step=step, rules=make_rules(batch_groups=batch))
    assert (not blocking) == passes
    assert all(group in behind for group in blocking)
    assert blockers(placed, chosen, step=step, rules=make_rules(batch_groups=batch, when_older="mask")) == []


def test_a_group_past_its_deadline_blocks_everything() -> None:
    assert overdue({2: 1, 9: 3}, {9: 2}, step=4, batch_groups=2) == 2


def test_routing_takes_the_least_loaded_one_that_is_new_enough() -> None:
    servers = [Server("a", 4, 0), Server("b", 5, 3), Server("c", 6, 2), Server("d", 5, 2)]
    assert least_loaded(servers, 5) == servers[2]
    assert least_loaded(servers, 4) == servers[0]
    assert least_loaded(servers, 7) is None
