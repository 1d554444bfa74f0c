"""Which weights servers held, by what they were told and what they said: publications and swaps.

What always holds: a server counts as holding only what it said that it holds, on the branch of the time.
"""

from areal_async.audit.books import Books
from areal_async.messages import (
    Evaluate,
    EvaluationDone,
    Failed,
    Joined,
    Publish,
    Published,
    Swap,
    Swapped,
    Version,
)

NOTHING = (-1, -1)


class Server:
    """held: branch and version of its weights. loading: those that its swap in progress brings. there: it joined and
    was not lost. doubtful: a swap failed, which may have been one too many. evaluating: what an evaluation asks it
    for."""

    __slots__ = ("doubtful", "evaluating", "held", "loading", "there")

    def __init__(self) -> None:
        self.empty()
        self.there = True

    def empty(self) -> None:
        self.held = NOTHING
        self.loading: tuple[int, Version] | None = None
        self.evaluating: Version | None = None
        self.there = self.doubtful = False


class Servers:
    """held: versions of the present branch that servers hold, ascending. newest_told: the highest version of it that
    any server was told to load."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._add = books.add
        self._servers: dict[str, Server] = {}
        self._asked: tuple[int, Version] | None = None  # to be published
        self._published: dict[Version, tuple[int, str]] = {}  # branch and location
        self._newest: Version | None = None
        self.branch = 0
        self.held: tuple[Version, ...] = ()
        self.newest_told: Version = -1

    def joined(self, event: Joined) -> None:
        server = self._servers.get(event.id)
        if server is None:
            self._servers[event.id] = Server()
        elif not server.there:
            server.there = True

    def lost(self, name: str) -> None:
        server = self._servers.get(name)
        if server is None:
            self._add("server.unknown", f"server {name}", "it was lost, and had never joined")
            return
        server.empty()
        self._refresh()

    def restarted(self, name: str) -> None:
        """Told to start again: it was lost, whoever noticed."""
        if name not in self._servers:
            self._add("server.unknown", f"server {name}", "it is to start again, and had never joined")
        elif self._servers[name].held != NOTHING or self._servers[name].loading:
            self.lost(name)

    def publish(self, command: Publish) -> None:
        loading = [server.loading[1] for server in self._servers.values() if server.loading is not None]
        for version in command.free:
            if version in loading or (version == self._newest):
                self._add("publish.free", f"version {version}", "it is freed while servers load it or will load it")
            self._published.pop(version, None)
        self._asked = command.branch, command.version

    def published(self, event: Published) -> None:
        done = self._asked is not None and event.version < self._asked[1]
        if event.branch < self.branch or done or self._published.get(event.version, (-1, ""))[0] == event.branch:
            return  # of a history that didn't happen, or told again
        if self._asked != (event.branch, event.version):
            self._add(
                "publish.untold",
                f"version {event.version}",
                f"branch {event.branch} is said to be published; asked for was {_named(self._asked)}",
            )
            return
        self._published[event.version] = event.branch, event.location
        self._newest = event.version

    def swap(self, command: Swap) -> None:
        name, wanted = f"server {command.server}", (command.branch, command.version)
        server = self._servers.get(command.server)
        if server is None or not server.there:
            self._add("swap.absent", name, f"it is to load version {command.version}, and isn't there")
            return
        if command.branch != self.branch or self._published.get(command.version) != (self.branch, command.location):
            present = (str(version) for version, (branch, _) in self._published.items() if branch == self.branch)
            have = ", ".join(present) or "none"
            self._add(
                "swap.unpublished",
                name,
                f"it is to load version {command.version} of branch {command.branch} from {command.location!r};"
                f" published on branch {self.branch} are: {have}",
            )
        elif command.version != self._newest:
            self._add("swap.old", name, f"it is to load version {command.version}, the newest is {self._newest}")
        if server.held != NOTHING and wanted <= server.held:
            self._add("swap.backwards", name, f"it is to load {_named(wanted)}, and holds {_named(server.held)}")
        if server.loading is not None or server.evaluating is not None:
            self._add("swap.busy", name, f"it is to load {_named(wanted)}, and loads or evaluates already")
        server.loading, server.doubtful = wanted, False
        loading = sum(each.loading is not None for each in self._servers.values())
        if loading > self._books.rules.wave:
            self._add("swap.wave", name, f"{loading} servers load at a time, weights.wave is {self._books.rules.wave}")
        self.newest_told = max(self.newest_told, command.version)

    def swapped(self, event: Swapped) -> None:
        name, said = f"server {event.server}", (event.branch, event.version)
        server = self._servers.get(event.server)
        if server is None:
            self._add("server.unknown", name, f"it says that it holds version {event.version}, and had never joined")
        elif server.loading == said:
            server.held, server.loading, server.doubtful = said, None, False
            self._refresh()
        elif server.there and said > server.held and event.branch == self.branch:
            self._add(
                "swap.untold", name, f"it says that it holds {_named(said)}; it was to load {_named(server.loading)}"
            )

    def swap_failed(self, event: Failed) -> None:
        server = self._servers.get(event.id)
        if server is not None and server.loading is not None:
            server.loading, server.doubtful = None, True

    def evaluate(self, command: Evaluate) -> None:
        server = self._servers.get(command.server)
        if server is None or server.held != (self.branch, command.version):
            held = NOTHING if server is None else server.held
            self._add(
                "evaluation.other",
                f"server {command.server}",
                f"it is to answer for version {command.version}, and holds {_named(held)}",
            )
        elif any(each.evaluating is not None for each in self._servers.values()):
            self._add("evaluation.two", f"server {command.server}", "another evaluation is under way")
        if server is not None:
            server.evaluating = command.version

    def evaluated(self, event: EvaluationDone | Failed) -> None:
        """One that is under way is answered."""
        version = event.version if isinstance(event, EvaluationDone) else int(event.id)
        for server in self._servers.values():
            if server.evaluating == version:
                server.evaluating = None

    def forget_published(self) -> None:
        """The trainer was lost, and what it has published may be lost with it."""
        self._newest = None

    def roll_back(self, branch: int, *, anew: bool) -> None:
        """anew: all processes have ended, and start again."""
        self.branch = branch
        self._asked = self._newest = None
        self.newest_told = -1
        if anew:
            self._servers.clear()
            self._published.clear()
        self._refresh()

    def holds(self, name: str, floor: Version) -> bool:
        """Whether this server holds this version of the present branch, or a newer one."""
        server = self._servers.get(name)
        return server is not None and server.held[0] == self.branch and server.held[1] >= floor

    def any_holds(self, floor: Version) -> bool:
        """Whether some server does without any doubt."""
        return any(
            each.held[0] == self.branch and each.held[1] >= floor and not each.doubtful
            for each in self._servers.values()
        )

    def _refresh(self) -> None:
        held = {each.held[1] for each in self._servers.values() if each.held[0] == self.branch}
        self.held = tuple(sorted(held))


def _named(weights: tuple[int, Version] | None) -> str:
    if weights is None or weights == NOTHING:
        return "nothing"
    return f"version {weights[1]} of branch {weights[0]}"
