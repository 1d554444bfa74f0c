"""What the world knows of its servers and reward workers: lives, losses, restarts, failed swaps, evaluations; and which
rules hold there.

What always holds: made from commands and events alone, like the other books of `world`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from areal_async.messages import Evaluate, Rules, Swap


@dataclass
class Book:
    """max_restarts: before it is given up. lives: how often it was lost. restarts: those not forgotten.

    due: when it must be told to start again, None if it need not be. gone: it was restarted too often. works_since:
    when it first did in this life what it is there for, None before that.
    """

    max_restarts: int
    lives: int = 0
    restarts: int = 0
    due: float | None = None
    gone: bool = False
    works_since: float | None = None

    @property
    def may_be_lost(self) -> bool:
        return self.due is None and not self.gone

    def lose(self, at: float) -> None:
        if self.works_since is not None and at - self.works_since >= 600:
            self.restarts = 0
        self.works_since = None
        self.lives += 1
        self.gone = self.restarts >= self.max_restarts
        self.due = None if self.gone else at + min(2.0**self.restarts, 60.0)
        self.restarts += 1


@dataclass
class ServerBook(Book):
    """holds: branch and version of its weights."""

    holds: tuple[int, int] = (-1, -1)
    failed_swaps: int = 0

    def lose(self, at: float) -> None:
        super().lose(at)
        self.holds, self.failed_swaps = (-1, -1), 0

    def swap(self, branch: int, version: int, at: float) -> None:
        self.holds, self.failed_swaps = (branch, version), 0
        if self.works_since is None:
            self.works_since = at


class EvaluationBook:
    """evaluated: the newest version of the present history that was. void: what is under way is of another history."""

    def __init__(self, rules: Rules, hold: Callable[[bool, str], None]) -> None:
        self._rules = rules
        self._hold = hold
        self.evaluated = 0
        self.void = False
        self.failures = 0
        self.all: list[int] = []

    def resume(self, rules: Rules) -> None:
        self._rules = rules
        self.void, self.failures = False, 0

    def begin(self, command: Evaluate, held: tuple[int, int], branch: int, *, trained: int, ends: bool) -> None:
        every, hold = self._rules.eval_every, self._hold
        hold(every > 0, "evaluates although nobody asked for it")
        hold(held == (branch, command.version), f"evaluates version {command.version} of a server with {held}")
        is_last = command.version == trained and (ends or trained == self._rules.steps)
        hold(command.version // every > self.evaluated // every or is_last, f"version {command.version} is not due")
        hold(command.version > self.evaluated, f"version {command.version} is evaluated twice")
        self.all.append(command.version)

    def done(self, version: int) -> None:
        if not self.void:
            self.evaluated, self.failures = version, 0
        self.void = False

    def failed(self) -> None:
        self.failures += not self.void
        self.void = False

    def roll_back(self, to: int, under_way: Iterable[Evaluate]) -> None:
        self.evaluated = min(self.evaluated, to)
        for command in under_way:
            self.void = self.void or command.version > to


def check_swap(command: Swap, published: tuple[int, int] | None, others: int, evaluates: bool, rules: Rules) -> str:
    """What is wrong with a swap; "" if nothing is."""
    if (command.branch, command.version) != published:
        return f"swaps to {command}, newest is {published}"
    if others >= rules.wave:
        return "more servers swap than a wave has"
    return "swaps a server in the middle of its evaluation" if evaluates else ""
