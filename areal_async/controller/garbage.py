"""Python's garbage collector, kept from stopping the loop.

A full collection looks at every object that lives: about a hundred for each sample in flight, 0.6 s with 8,192 of them
(tools/bench/controller.py), and Python makes one each time their number has grown by a quarter. It stops the loop, and
found nothing to free: what a sample needs ends with it, without cycles.

What always holds: young objects are looked at as before; cycles that grew old are still found, though later.
"""

import gc
from typing import Final

RARELY: Final = 1000  # collections of the middle generation between full ones; Python's own number is 10


def collect_rarely() -> None:
    """For this whole process, so for programs that have nothing but a run in them."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, RARELY)
