"""What an audit finds: which promise is broken, of what, where in the log.

What always holds: memory is bounded, however much is wrong: the first findings are kept, all are counted.
"""

from collections import Counter
from typing import Final

import msgspec

KEPT: Final = 1000  # findings kept whole; one lie makes others look like lies, and the first ones matter


class Finding(msgspec.Struct, frozen=True):
    """name: of the broken promise (docs/audit.md has them all). about: such as "sample 3.1". record: number of the
    record in `decisions.log`, from 0. offset: its first byte there. text: what the log says, and what was expected."""

    name: str
    about: str
    record: int
    offset: int
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.about}: {self.text} (record {self.record}, offset {self.offset})"


class Findings:
    """kept: the first ones. counts: of all, by name. record, offset: of the record that is looked at."""

    def __init__(self) -> None:
        self.kept: list[Finding] = []
        self.counts: Counter[str] = Counter()
        self.record = -1
        self.offset = 0

    def add(self, name: str, about: str, text: str) -> None:
        self.counts[name] += 1
        if len(self.kept) < KEPT:
            self.kept.append(Finding(name, about, self.record, self.offset, text))

    @property
    def count(self) -> int:
        return self.counts.total()
