"""What every walk of hypothesis over a `World` may do besides its own rules: wait, be told again, be told late."""

from collections.abc import Mapping

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from .servers import Book
from .world import World


class WorldMachine(RuleBasedStateMachine):
    """A walk over `world`, which the walk's own `initialize` makes."""

    world: World

    def _running(self) -> bool:
        return self.world.end is None

    def lose_one(self, peers: Mapping[str, Book], which: int) -> bool:
        """Whether there was one that may be lost; it is then."""
        names = [name for name, book in peers.items() if book.may_be_lost]
        if names:
            self.world.lose(names[which % len(names)])
        return bool(names)

    @precondition(lambda self: self._running() and self.world.core.next_wakeup() is not None)
    @rule()
    def time_passes(self) -> None:
        self.world.wake()

    @precondition(lambda self: self._running() and self.world.told)
    @rule(which=st.integers(0, 10_000))
    def tell_again(self, which: int) -> None:
        assert self.world.send(self.world.told[-1 - which % len(self.world.told)]) == []

    @precondition(lambda self: self._running() and self.world.late)
    @rule(which=st.integers(0, 10_000))
    def tell_late(self, which: int) -> None:
        wakeup = self.world.core.next_wakeup()
        if wakeup is not None and wakeup <= self.world.clock:
            self.world.wake()
        assert self.world.send(self.world.late[which % len(self.world.late)]) == []

    @rule()
    def nothing_happens(self) -> None:
        """After the end no other rule applies."""

    @invariant()
    def someone_can_say_who_waits(self) -> None:
        if hasattr(self, "world"):
            assert self.world.core.waiting(self.world.clock)
