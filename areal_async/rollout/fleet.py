"""The servers that answer, as requests see them: what weights each has at least, and how much it has to do.

What always holds: a server is in here from its handshake until it is lost; `version` is never newer than the weights
that it really has, so tokens whose version was never told can be given it; whoever waits for a server is woken by every
change.
"""

import asyncio
from collections import Counter

from areal_async.core.routing import least_loaded
from areal_async.messages import Version
from areal_async.rollout.vllm_http import VllmClient


class Live:
    """One server between its handshake and its loss.

    version: of its last swap that was told, -1 before the first. load: requests that run there. gone: set when it is
    lost. suspected: set when a request failed there, for whoever watches its health.
    """

    __slots__ = ("client", "gone", "load", "suspected", "version")

    def __init__(self, client: VllmClient, version: Version = -1) -> None:
        self.client = client
        self.version = version
        self.load = 0
        self.gone = asyncio.Event()
        self.suspected = asyncio.Event()

    @property
    def name(self) -> str:
        return self.client.name


class Fleet:
    """The live servers, by name."""

    def __init__(self) -> None:
        self._live: dict[str, Live] = {}
        self._changed = asyncio.Event()
        self._waiting: Counter[Version] = Counter()

    @classmethod
    def only(cls, client: VllmClient, version: Version = 0) -> "Fleet":
        """One server that is looked after elsewhere, with these weights."""
        fleet = cls()
        fleet.join(client).version = version
        return fleet

    def join(self, client: VllmClient) -> Live:
        """A server that passed its handshake; nothing is asked of it before its first swap."""
        live = self._live[client.name] = Live(client)
        return live

    def loading(self, live: Live, version: Version) -> None:
        """It begins to load these weights: from now on it may have either; after a rollback the new ones are older."""
        if live.version >= 0:
            live.version = min(live.version, version)

    def swapped(self, live: Live, version: Version) -> None:
        live.version = version
        self._tell()

    def lose(self, live: Live, why: str) -> bool:
        """It answers nothing more; its requests break off now. False if that was known."""
        if live.gone.is_set():
            return False
        live.gone.set()
        if self._live.get(live.name) is live:
            del self._live[live.name]
        live.client.hang_up(why)
        self._tell()
        return True

    def find(self, preferred: str, floor: Version, avoid: Live | None = None) -> Live | None:
        """The server `preferred` if it has at least version `floor`, else the least loaded one that has; `avoid` only
        if there is no other."""
        others = [live for live in self._live.values() if live is not avoid]
        best = next((live for live in others if live.name == preferred and live.version >= floor), None)
        return best or least_loaded(others, floor) or least_loaded(self._live.values(), floor)

    async def server(self, preferred: str, floor: Version, avoid: Live | None = None) -> Live:
        """As `find`; waits until there is one. It has no deadline of its own: a sample's rollout has."""
        while (found := self.find(preferred, floor, avoid)) is None:
            self._waiting[floor] += 1
            try:
                await self._changed.wait()
            finally:
                self._waiting[floor] -= 1
        return found

    def waits(self) -> str:
        """Who waits for a server, for people; empty if nobody does."""
        waiting = +self._waiting
        if not waiting:
            return ""
        names = ", ".join(f"server {live.name} (version {live.version})" for live in self._live.values()) or "none"
        return (
            f"{waiting.total()} requests wait for a server with version {min(waiting)} or newer; those that answer: "
            f"{names}"
        )

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
