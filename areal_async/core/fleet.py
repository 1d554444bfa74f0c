"""The rollout servers: which weights they hold, what is placed on them, and their swaps.

What always holds: a server is only ever told to load the newest version that is completely published on the present
branch, at most `wave` servers load at a time, and nothing is placed on a server that holds weights of an older branch
(its next swap would take it below the floors of what it runs).
"""

from areal_async.core.lifecycle import SERVER, Thing
from areal_async.errors import IllegalTransition
from areal_async.messages import Joined, Published, Rules, Swap, Swapped, Version


class Server(Thing):
    """version, branch: of the weights that it answers with, -1 before the first. load: samples placed on it.

    loading: the version that its swap in progress brings.
    """

    __slots__ = ("branch", "id", "load", "loading", "version")
    lifecycle = SERVER

    def __init__(self, name: str, at: float) -> None:
        super().__init__(f"server {name}", at)
        self.id = name
        self.version: Version = -1
        self.branch = -1
        self.load = 0
        self.loading: tuple[int, Version] | None = None  # branch, version


class Fleet:
    """newest: the version that servers follow, None while none is published on the present branch.

    open: servers on which groups may be placed. newest_open: the highest version among them, None if there is none.
    """

    def __init__(self, rules: Rules) -> None:
        self._wave = rules.wave
        self._branch = 0
        self._published: dict[Version, str] = {}  # version -> location, of all that still takes up memory
        self._loading = 0
        self.servers: dict[str, Server] = {}
        self.newest: Version | None = None
        self.open: list[Server] = []
        self.newest_open: Version | None = None

    def join(self, event: Joined) -> None:
        if event.id in self.servers:
            raise IllegalTransition(f"server {event.id} joined twice. Its story:\n{self.servers[event.id].story()}")
        self.servers[event.id] = Server(event.id, event.at)

    def published(self, event: Published) -> None:
        self._published[event.version] = event.location
        self.newest = event.version

    def swapped(self, event: Swapped) -> None:
        server = self.find(event.server)
        if (event.branch, event.version) <= (server.branch, server.version):
            return  # told again
        if server.loading != (event.branch, event.version):
            raise IllegalTransition(
                f"{server.label} tells of version {event.version} (branch {event.branch}), which it was not told to"
                f" load. Its story:\n{server.story()}"
            )
        server.move("serving", event.at, "version {}, branch {}", event.version, event.branch)
        server.version, server.branch, server.loading = event.version, event.branch, None
        self._loading -= 1
        self._refresh()

    def swaps(self, at: float) -> list[Swap]:
        """The next wave: servers that have no weights yet first, then those with the oldest, so that none is left
        behind however often new weights come."""
        if self.newest is None or self._loading >= self._wave:
            return []
        wanted = (self._branch, self.newest)
        behind = [s for s in self.servers.values() if s.loading is None and (s.branch, s.version) != wanted]
        behind.sort(key=_age)
        commands = []
        for server in behind[: self._wave - self._loading]:
            server.move("updating", at, "to version {}, branch {}", self.newest, self._branch)
            server.loading = wanted
            self._loading += 1
            commands.append(
                Swap(
                    server=server.id,
                    version=self.newest,
                    branch=self._branch,
                    location=self._published[self.newest],
                )
            )
        return commands

    def free(self) -> tuple[Version, ...]:
        """Versions that nobody loads or will load; asked when a new one is about to be written, and forgotten here."""
        loading = [server.loading[1] for server in self.servers.values() if server.loading is not None]
        useless = tuple(version for version in self._published if version != self.newest and version not in loading)
        for version in useless:
            del self._published[version]
        return useless

    def roll_back(self, branch: int) -> None:
        """What is published so far belongs to a history that didn't happen."""
        self._branch = branch
        self.newest = None
        self._refresh()

    def find(self, name: str) -> Server:
        server = self.servers.get(name)
        if server is None:
            raise IllegalTransition(f"an event tells of server {name}, which never joined")
        return server

    def _refresh(self) -> None:
        self.open = [server for server in self.servers.values() if server.branch == self._branch]
        self.newest_open = max((server.version for server in self.open), default=None)


def _age(server: Server) -> tuple[int, Version]:
    return server.branch, server.version
