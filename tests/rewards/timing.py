"""How long something takes, of this thread's own time: other processes may be at work."""

import time
from collections.abc import Callable


def seconds_of(work: Callable[[], object], tries: int = 2) -> float:
    """The shortest: a garbage collection of the whole test run is no part of it."""
    found = []
    for _ in range(tries):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return min(found)
