"""Which prompts were asked: each position of the data order once, and again only where a group of it ended so.

What always holds: memory is eight bytes for each position (the row that stood there), and what waits to be asked again.
"""

from array import array
from heapq import heappop, heappush

from areal_async.audit.books import Books
from areal_async.messages import DataEnded, GroupId, GroupRead, ReadGroup

NO_ROW = -1


class Prompts:
    """next: the first position that nobody has asked for. end: the first one without a prompt, None while unknown."""

    def __init__(self, books: Books) -> None:
        self._add = books.add
        self._again: list[int] = []  # a heap
        self._perhaps: dict[int, GroupId] = {}  # positions of groups that may have been dropped before they were read
        self._rows = array("q")
        self.next = 0
        self.end: int | None = None
        self.asked_again = 0

    def ask_again(self, position: int) -> None:
        """Its group ended in a way that gives its prompt to another group."""
        heappush(self._again, position)

    def may_be_asked_again(self, position: int, group: GroupId) -> None:
        self._perhaps[position] = group

    def was_asked(self, position: int) -> None:
        """It isn't to be asked again, after all."""
        self._perhaps.pop(position, None)

    def ask(self, command: ReadGroup) -> GroupId | None:
        """Returns the group whose end is only known by this: it was dropped, and its prompt is asked again."""
        position, about = command.position, f"group {command.group}"
        if self._again and position == self._again[0]:
            heappop(self._again)
            self.asked_again += 1
            return None
        if position in self._perhaps:
            self.asked_again += 1
            return self._perhaps.pop(position)
        if position in self._again:
            self._again.remove(position)
            self._again.sort()
            self._add(
                "prompt.order", about, f"asks for position {position}; {self._again[0]} is to be asked again before"
            )
        elif position == self.next:
            if self._again:
                self._add(
                    "prompt.order",
                    about,
                    f"asks for the new position {position}; {self._again[0]} is to be asked again before",
                )
            if self.end is not None and position >= self.end:
                self._add("prompt.end", about, f"asks for position {position}; the data ended at {self.end}")
            self._see(position)
        elif position > self.next:
            self._add(
                "prompt.skipped",
                about,
                f"asks for position {position}; nobody has asked for {self.next}" + f" to {position - 1}",
            )
            self._see(position)
        else:
            self._add("prompt.twice", about, f"asks for position {position}, which another group has or had for good")
        return None

    def read(self, event: GroupRead, position: int) -> None:
        before = self._rows[position] if 0 <= position < len(self._rows) else NO_ROW
        if before not in (NO_ROW, event.row):
            self._add(
                "prompt.changed",
                f"group {event.group}",
                f"at position {position} there is row {event.row}; before it was row {before}",
            )
        if self.end is not None and position >= self.end:
            self._add("prompt.end", f"group {event.group}", f"position {position} was read; data ended at {self.end}")
        if 0 <= position < len(self._rows):
            self._rows[position] = event.row

    def ended(self, event: DataEnded, position: int) -> None:
        if 0 <= position < len(self._rows) and self._rows[position] != NO_ROW:
            self._add(
                "prompt.end",
                f"group {event.group}",
                f"position {position} is said to be past the end; row {self._rows[position]} was read there before",
            )
        self.end = position if self.end is None else min(position, self.end)

    def times_read(self) -> tuple[int, int, int]:
        """How many rows were read, and how often the least and the most often read one, at different positions."""
        counts: dict[int, int] = {}
        for row in self._rows:
            if row != NO_ROW:
                counts[row] = counts.get(row, 0) + 1
        return len(counts), min(counts.values(), default=0), max(counts.values(), default=0)

    def _see(self, position: int) -> None:
        self._rows.extend([NO_ROW] * (position + 1 - len(self._rows)))
        self.next = position + 1
