"""What a check may use, how many run at a time, and the watch that finds those which use too much.

Some limits the kernel holds for each process (`set_limits`, in the forked child). What counts for a check with all it
started, its processes and its memory, is looked at from outside (`Watch`): RLIMIT_NPROC counts all processes of a user,
so that checks would starve each other, and doesn't hold for root at all; RLIMIT_AS holds for one process, not for many.

What always holds: nothing here waits; a look at a check with any number of processes reads at most one more than it
may have.
"""

import contextlib
import os
import resource
from typing import Final

from areal_async import process_tree
from areal_async.messages import Limits, RewardOptions

SLOW_S: Final = 0.5
"""A check that is older gives its place to one that waits, so that hanging ones hold up nobody until their deadline."""
SLOW_PLACES: Final = 4
"""For each quick place so many slow ones; when they are taken, a slow check keeps its quick place."""

CHECK_NICE: Final = 5  # servers and trainers first: a run waits for them, hardly ever for a check
SLOW_NICE: Final = 10  # a third of the share of a quick one; much less, and it would miss its deadline under load

LOOK_S: Final = (
    0.025  # between looks at a check, the first at that age: a bomb makes some 10 processes in a millisecond
)
EXACT_S: Final = 0.25  # between exact looks at memory, which cost milliseconds for a large check
SPARE_BYTES: Final = 64 << 20  # a check that ran out of memory may still say so

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
MIB: Final = 1 << 20
MEMFD: Final = "/memfd:"


def places(options: RewardOptions) -> int:
    """Checks that one worker may have running at the same time, slow ones included."""
    return options.concurrent * (1 + SLOW_PLACES)
