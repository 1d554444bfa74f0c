"""The rollout servers: which weights they hold, what is placed on them, their swaps, their losses and restarts.

What always holds: a server is only ever told to load the newest version that is completely published on the present
branch, at most `wave` servers load at a time, and nothing is placed on a server that holds weights of an older branch
(its next swap would take it below the floors of what it runs), nor on one that was lost, while another could take it.
A server that was lost holds no version until it has been swapped again. What is told of a server's earlier life, or
told twice, changes nothing.
"""

from typing import Final

from areal_async.core.lifecycle import SERVER
from areal_async.core.restarts import Restarted
from areal_async.errors import IllegalTransition
from areal_async.messages import Failed, Joined, Lost, Published, Restart, Rules, Swap, Swapped, Version

SWAP_RETRY_S: Final = 1.0  # pause after a swap that left the server as it was: the others go on meanwhile
FAIR_S: Final = 30.0  # from a version's publication on, for which servers that have yet to load it are waited for
SWAP_TRIES: Final = 3  # so many swaps in a row that fail are a loss: a fresh process may be able to


class Server(Restarted):
    """version, branch: of the weights that it answers with, -1 before the first. load: samples placed on it.

    loading: branch and version that its swap in progress brings. evaluating: the version that an evaluation asks it
    for, which keeps it from being swapped. incarnation: how often it was lost; what was placed on an earlier one is its
    load no longer. retry_at: run clock from which it may be swapped again; None if there is nothing to wait for.
    """

    __slots__ = (
        "branch",
        "evaluating",
        "incarnation",
        "load",
        "loading",
        "retry_at",
        "swap_failures",
        "version",
    )
    lifecycle = SERVER

    def __init__(self, name: str, at: float) -> None:
        super().__init__(name, at)
        self.version: Version = -1
        self.branch = -1
        self.load = 0
        self.loading: tuple[int, Version] | None = None
        self.evaluating: Version | None = None
        self.incarnation = 0
        self.retry_at: float | None = None
        self.swap_failures = 0  # in a row

    def serve(self, branch: int, version: Version, at: float) -> None:
        self.work("serving", at, "version {}, branch {}", version, branch)
        self.version, self.branch, self.loading = version, branch, None
        self.swap_failures = 0

    def put_back(self, at: float, why: str) -> None:
        """Its swap failed before anything was loaded: it goes on with what it had."""
        version = self.loading[1] if self.loading is not None else None
        self.loading = None
        self.retry_at = at + SWAP_RETRY_S
        self.move(
            "serving" if self.version >= 0 else "starting",
            at,
            "version {} could not be loaded, another try at {} s: {}",
            version,
            self.retry_at,
            why,
        )

    def empty(self, why: str) -> None:
        """It is gone: what it held, did and ran is no more."""
        self.version = self.branch = -1
        self.load = self.swap_failures = 0
        self.loading = self.evaluating = self.retry_at = None
        self.incarnation += 1
        self.end(why)


class Fleet:
    """newest: the version that servers follow, None while none is published on the present branch.

    open: servers on which groups may be placed. newest_open: the highest version among them, None if there is none.
    wakeup: run clock from which `wake` has something to do. first_loss: who was lost first in this run, and why;
    last_lost: who was lost last.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._branch = 0
        self._published: dict[Version, str] = {}  # version -> location, of all that still takes up memory
        self._published_at = 0.0  # run clock
        self._loading = 0
        self._quarantined = 0
        self._behind: list[Server] = []  # those that don't hold the newest version; all while there is none
        self.servers: dict[str, Server] = {}
        self.newest: Version | None = None
        self.open: list[Server] = []
        self.newest_open: Version | None = None
        self.wakeup: float | None = None
        self.first_loss = ""
        self.last_lost: Server | None = None

    @property
    def is_alive(self) -> bool:
        """Whether there is a server that serves or may come to serve."""
        return self._quarantined < max(len(self.servers), self._rules.servers)

    def join(self, event: Joined) -> None:
        server = self.servers.get(event.id)
        if server is None:
            self.servers[event.id] = Server(event.id, event.at)
            self._refresh()
        elif event.at < server.since:
            return  # told again
        elif server.state == "lost" and server.restart_at is None:
            server.move("starting", event.at, "started again, restart {}", server.restarts)
            server.since = event.at
        elif event.at > server.since:
            raise IllegalTransition(f"server {event.id} joined twice. Its story:\n{server.story()}")

    def lost(self, event: Lost) -> None:
        """It is to be started again after a while, or left alone if that was done too often."""
        server = self.find(event.id)
        told = server.state == "quarantined" or server.restart_at is not None
        if not told and event.at >= server.since:
            self._lose(server, event.at, event.why)

    def wrong(self, event: Failed) -> None:
        """Its numbers are wrong, so that starting it again would not help: it is left alone."""
        server = self.find(event.id)
        if server.state != "quarantined" and event.at >= server.since:
            self._leave_alone(server, event.at, event.why)

    def published(self, event: Published) -> None:
        self._published_at = event.at
        self._published[event.version] = event.location
        self.newest = event.version
        self._refresh()

    def swapped(self, event: Swapped) -> None:
        server = self.find(event.server)
        told = (event.branch, event.version) <= (server.branch, server.version)
        if told or event.at < server.since or server.state in ("lost", "quarantined"):
            return
        if server.loading != (event.branch, event.version):
            raise IllegalTransition(
                f"{server.label} tells of version {event.version} (branch {event.branch}), which it was not told to"
                f" load. Its story:\n{server.story()}"
            )
        was_open = server.branch == self._branch
        server.serve(event.branch, event.version, event.at)
        self._loading -= 1
        if not was_open or self.newest_open is None:
            self._refresh()
            return
        self.newest_open = max(self.newest_open, event.version)
        if event.version == self.newest:
            self._behind.remove(server)

    def swap_failed(self, event: Failed) -> None:
        """The server goes on with what it had, and is swapped again a little later; too often in a row is a loss."""
        server = self.find(event.id)
        if server.loading is None or event.at < server.since:
            return
        server.swap_failures += 1
        if server.swap_failures >= SWAP_TRIES:
            self._lose(server, event.at, f"{SWAP_TRIES} swaps in a row failed, the last one with: {event.why}")
            return
        server.put_back(event.at, event.why)
        self._loading -= 1
        self._refresh()

    def wake(self, at: float) -> list[Restart]:
        """Lost servers whose pause is over are started again; where it is over after a swap, `swaps` may go on."""
        if self.wakeup is None or at < self.wakeup:
            return []
        commands = []
        for server in self.servers.values():
            if server.start_again(at):
                server.note(at, "told to start again")
                commands.append(Restart(peer="server", id=server.id, why=server.why))
            if server.retry_at is not None and server.retry_at <= at:
                server.retry_at = None
        self._refresh()
        return commands

    def swaps(self, at: float) -> list[Swap]:
        """The next wave: servers that have no weights yet first, then those with the oldest, so that none is left
        behind however often new weights come; of equals the one with least to do, since who has the newest weights
        first gets all groups that only they have room for."""
        if self.newest is None or self._loading >= len(self._behind) or self._loading >= self._rules.wave:
            return []  # who loads isn't up to date, so where all that aren't load, nobody is left
        wanted = (self._branch, self.newest)
        behind = sorted(filter(_may_swap, self._behind), key=_turn)
        commands = []
        for server in behind[: self._rules.wave - self._loading]:
            server.move("updating", at, "to version {}, branch {}", self.newest, self._branch)
            server.since = at
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

    def forget_published(self) -> None:
        """The trainer was lost, and with it may be what it has published: nobody is told to load that any more."""
        self.newest = None
        self._refresh()

    def roll_back(self, branch: int) -> None:
        """What is published so far belongs to a history that didn't happen."""
        self._branch = branch
        self.newest = None
        self._refresh()

    def resume(self, rules: Rules) -> None:
        """No server of before is there any more, nor anything that was published."""
        self._rules = rules
        self._published.clear()
        self.servers.clear()
        self._loading = self._quarantined = 0
        self.newest = None
        self.first_loss = ""
        self.last_lost = None
        self._refresh()

    def leave(self, name: str, incarnation: int) -> None:
        """A sample that was placed on this incarnation of a server is there no longer."""
        server = self.servers.get(name)
        if server is not None and server.incarnation == incarnation:
            server.load -= 1

    def is_ahead(self, server: Server, samples: int, at: float) -> bool:
        """Whether another server gets the same weights in a moment and has less to do, by so many samples: it is waited
        for. Else the one that is swapped first in each wave would get every group that only newer weights have room
        for, and the others none. One that was started again isn't waited for: it may need long, and has no load; nor is
        a wave that takes long, which may hang. (Nobody has to wake: who is ahead has samples, which come to an end.)"""
        if at - self._published_at >= FAIR_S:
            return False
        most, held = server.load - samples, (server.branch, server.version)
        for other in self._behind:  # the load first: it rules out nearly all
            if (
                other.load <= most
                and (other.branch, other.version) < held
                and (other.branch == self._branch or not other.incarnation)
                and _swaps_soon(other)
            ):
                return True
        return False

    def find(self, name: str) -> Server:
        server = self.servers.get(name)
        if server is None:
            raise IllegalTransition(f"an event tells of server {name}, which never joined")
        return server

    def _lose(self, server: Server, at: float, why: str) -> None:
        server.forgive(at)
        if server.restarts >= self._rules.max_restarts:
            self._leave_alone(server, at, why)
            return
        self._empty(server, at, why)
        server.wait_for_restart(at)
        self._refresh()

    def _leave_alone(self, server: Server, at: float, why: str) -> None:
        self._empty(server, at, why)
        server.move("quarantined", at, "after {} restarts: {}", server.restarts, why)
        self._quarantined += 1
        self._refresh()

    def _empty(self, server: Server, at: float, why: str) -> None:
        if server.loading is not None:
            self._loading -= 1
        server.empty(why)
        self.first_loss = self.first_loss or f"{server.label} at {at:.1f} s: {why}"
        self.last_lost = server

    def _refresh(self) -> None:
        self.open = [server for server in self.servers.values() if server.branch == self._branch]
        self.newest_open = max((server.version for server in self.open), default=None)
        self._behind = [s for s in self.servers.values() if s.version != self.newest or s.branch != self._branch]
        times = [time for s in self.servers.values() for time in (s.restart_at, s.retry_at) if time is not None]
        self.wakeup = min(times, default=None)


def _may_swap(server: Server) -> bool:
    return server.state in ("starting", "serving") and server.evaluating is None and server.retry_at is None


def _swaps_soon(server: Server) -> bool:
    return server.state == "updating" or _may_swap(server)


def _turn(server: Server) -> tuple[int, Version, int]:
    return server.branch, server.version, server.load
