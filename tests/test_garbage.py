"""Full garbage collections are rare in a run; young garbage goes as before, and old cycles are found in the end."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from areal_async.controller.garbage import RARELY, collect_rarely


@pytest.fixture(autouse=True)
def same_thresholds_after() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Thing:
    """Something that can be in a cycle and be watched."""


@pytest.mark.slow
def test_full_collections_are_rare_and_young_cycles_go() -> None:
    young, middle, _ = gc.get_threshold()
    collect_rarely()
    assert gc.get_threshold() == (young, middle, RARELY)
    gc.collect()
    full_before = gc.get_stats()[2]["collections"]
    thing = Thing()
    thing.itself = thing  # type: ignore[attr-defined]
    gone = weakref.ref(thing)
    del thing
    kept = [[number] for number in range(20 * young * middle)]  # with Python's own thresholds: a full one
    assert gone() is None
    assert gc.get_stats()[2]["collections"] == full_before
    assert kept
