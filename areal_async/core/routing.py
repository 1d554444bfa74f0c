"""Which server gets a request: the least loaded one that holds at least the floor.

What always holds: pure, and the same answer for the same servers in the same order. A group's samples go to one server
(they share the prompt's cache), so it is asked once a group, and again for a further attempt of a sample.
"""

from collections.abc import Iterable
from math import inf
from typing import Protocol, TypeVar

from areal_async.messages import Version


class Loaded(Protocol):
    """version: of the weights that the server answers with. load: samples that are placed on it."""

    @property
    def version(self) -> Version: ...

    @property
    def load(self) -> int: ...


AnyServer = TypeVar("AnyServer", bound=Loaded)


def least_loaded(servers: Iterable[AnyServer], floor: Version) -> AnyServer | None:
    """The server with the fewest samples among those with a version >= `floor`, the first one of equals; or None."""
    best: AnyServer | None = None
    least: float = inf
    for server in servers:
        if server.load < least and server.version >= floor:  # the load first: it rules out nearly all
            best, least = server, server.load
    return best
