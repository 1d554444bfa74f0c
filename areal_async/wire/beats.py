"""Heartbeats: how often, and when silence is a death.

What always holds: silence is counted in the listener's own beats, not in clock time. A listener that itself stood still
(a stopped process, a blocked loop) counts nothing meanwhile, so it doesn't take its own sleep for another's death.
"""

from typing import Final

BEAT_S: Final[float] = 2.0  # often enough to notice a death soon, rare enough to cost nothing
LOST_AFTER_S: Final[float] = 15.0  # several beats: a machine that swaps, or a garbage collection, isn't a death


class Silence:
    """How long nothing has been heard of a peer."""

    def __init__(self) -> None:
        self._beats = 0

    def heard(self) -> None:
        self._beats = 0

    def beat(self) -> bool:
        """Call once for every own beat; True when the peer has been silent for too long."""
        self._beats += 1
        return self._beats * BEAT_S > LOST_AFTER_S

    @property
    def seconds(self) -> float:
        return self._beats * BEAT_S
