"""What one worker is asked: a queue in the order of asking, and a window of at most `credits` unanswered requests.

What always holds: no more than `credits` requests are at the worker at any time, those included whose askers have
given up (the worker is still busy with them); each request is answered at most once; a new incarnation gets the
unanswered ones again, in their order, before any new one. Pure: no sockets, no clock.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Window(Generic[T]):
    """T: whatever belongs to a request. Ids are unique among the unanswered."""

    def __init__(self) -> None:
        self.credits = 0
        self._waiting: OrderedDict[str, T] = OrderedDict()
        self._sent: OrderedDict[str, T | None] = OrderedDict()  # None: nobody waits for this answer any more

    def __len__(self) -> int:
        """Requests that are unanswered, waiting ones included."""
        return len(self._waiting) + len(self._sent)

    @property
    def at_worker(self) -> int:
        return len(self._sent)

    def holds(self, id: str) -> bool:
        """Whether somebody already waits for the answer to this id."""
        return id in self._waiting or self._sent.get(id) is not None

    def is_sent(self, id: str) -> bool:
        return id in self._sent

    def add(self, id: str, request: T) -> None:
        """Queue a request. If the worker is still at an abandoned one of the same id, that answer will do."""
        if self.holds(id):
            raise ValueError(f"request {id} is already waiting for its answer")
        if id in self._sent:
            self._sent[id] = request
        else:
            self._waiting[id] = request

    def take(self) -> tuple[str, T] | None:
        """The next request to send, if a credit is free; it counts as sent from now on."""
        if not self._waiting or len(self._sent) >= self.credits:
            return None
        id, request = self._waiting.popitem(last=False)
        self._sent[id] = request
        return id, request

    def answered(self, id: str) -> T | None:
        """The worker has answered: its credit is free again. None if nobody (any more) asked for this."""
        if id in self._waiting:  # answered before a break of the connection, which put it back into the queue
            return self._waiting.pop(id)
        return self._sent.pop(id, None)

    def abandon(self, id: str, request: T) -> None:
        """Its asker waits no longer. A request at the worker keeps its credit until it is answered.

        Nothing happens if it was answered, even if the same id has been asked again since.
        """
        if self._waiting.get(id) is request:
            del self._waiting[id]
        elif self._sent.get(id) is request:
            self._sent[id] = None

    def requests(self) -> list[T]:
        """Those that somebody waits for."""
        return [request for request in (*self._sent.values(), *self._waiting.values()) if request is not None]

    def close(self) -> None:
        """The worker is gone: what it had goes back to the head of the queue, and there are no credits."""
        self.credits = 0
        for id, request in reversed(self._sent.items()):
            if request is not None:
                self._waiting[id] = request
                self._waiting.move_to_end(id, last=False)
        self._sent.clear()

    def reopen(self, credits: int) -> None:
        """A worker is there that may know nothing of what was sent before."""
        self.close()
        self.credits = credits
