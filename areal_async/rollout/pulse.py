"""Whether a server that is there also works: a process can live, and say that it is well, while no token comes of it.

What always holds: a server is called stuck only if not one token of all its requests has arrived for `stall_timeout_s`,
and it had some all the time (a request that only waits for its turn sends nothing, but those before it do); sick only
if many requests in a row, over a while and with no token between them, were answered with an error of its own. Time is
counted in looks: whoever stood still himself counts nothing meanwhile. Pure: no sockets, no clock.
"""

from typing import Final

LOOK_S: Final = 2.0  # between two looks; at most a quarter of the deadline
SICK_REQUESTS: Final = 8  # errors in a row: one burst may meet a full queue
SICK_S: Final = 10.0  # and over so long: what ends sooner by itself is a hiccup


class Errors:
    """Errors of a server's own that its requests ended with (500, 503, a connection that breaks before the first
    token) since one was answered. last: the words of the last one. total: all that were ever counted."""

    __slots__ = ("in_a_row", "last", "total")

    def __init__(self) -> None:
        self.in_a_row = 0
        self.total = 0
        self.last = ""

    def failed(self, why: str) -> None:
        self.in_a_row += 1
        self.total += 1
        self.last = why

    def mended(self) -> None:
        self.in_a_row = 0


class Pulse:
    """What looks at one server found so far. look_s: between two of them. silent_s: for how long it has requests and
    no token of them came."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self.look_s = min(LOOK_S, stall_timeout_s / 4)
        self.silent_s = 0.0
        self._tokens = 0  # that have arrived
        self._seen: tuple[int, int] | None = None  # requests that have ended, and tokens, at the last look
        self._row_begun_s: float | None = None  # since the look that saw the first error of the row
        self._row_s = 0.0  # between those that saw the first and the last
        self._errors_seen = 0

    def look(self, running: int, ended: int, tokens: int, errors: Errors) -> str:
        """Why the server is to be given up, or "". running: requests that are there now. ended: those of which there
        was an end, whichever. tokens: that have arrived, of all requests ever."""
        if tokens != self._tokens:
            self._tokens = tokens
            errors.mended()
        return self._sick(errors) or self._stuck(running, (ended, tokens))

    def rest(self) -> None:
        """It has other work, which has a deadline of its own: silence from here on counts anew."""
        self.silent_s = 0.0

    def _stuck(self, running: int, seen: tuple[int, int]) -> str:
        if not running or seen != self._seen:
            self.silent_s, self._seen = 0.0, seen
            return ""
        self.silent_s += self.look_s
        if self.silent_s < self._stall_timeout_s:
            return ""
        return (
            f"it is stuck: it lives, but no token of its {running} requests has arrived for {self.silent_s:g} s "
            f"(server.stall_timeout_s = {self._stall_timeout_s:g})"
        )

    def _sick(self, errors: Errors) -> str:
        if not errors.in_a_row:
            self._row_begun_s, self._row_s = None, 0.0
        else:
            self._row_begun_s = 0.0 if self._row_begun_s is None else self._row_begun_s + self.look_s
            if errors.total != self._errors_seen:
                self._row_s = self._row_begun_s
        self._errors_seen = errors.total
        if errors.in_a_row < SICK_REQUESTS or self._row_s < SICK_S:
            return ""
        return (
            f"it is sick: {errors.in_a_row} requests in a row failed over {self._row_s:g} s, the last one with: "
            f"{errors.last}"
        )
