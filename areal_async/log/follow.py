"""A decision log that may still grow, turn by turn: what `log.turns` is for one that is over.

What always holds: turns are given in the order of the log, each of them once, and only when it is whole: the next event
is there, or the run is over with it, or the log has been quiet for `QUIET_S`. Nothing raises for what lies in the file:
`problem` says what there is to say, and what was given before stays true. Where it doesn't (a controller was killed
between an event and its commands, those were written when the run was resumed, and the event had been given without
them; or somebody put another log in its place) `outdated` says so: read it again from the start with a new `Follower`.
No more of the file is in memory than the reader's buffer.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from areal_async.errors import LogError
from areal_async.log.format import DECISIONS_NAME, HEAD_BYTES, HEADER_BYTES, Torn
from areal_async.log.reader import Record, parse, scan
from areal_async.log.turns import Gathering, Turn
from areal_async.messages import Command, Fail, Finish, Note, Rules, Woke

QUIET_S: Final = 1.0  # a controller writes an event and its commands at once; a note about them comes soon after


class Follower:
    """The log in `log_folder`, which may not be there yet.

    rules: that the run began with; None before they were written. notes: before the first event. offset: how far the
    file was read, size: how long it was at the last look, bytes. records: so many were read. problem: why there is no
    more to be had, "" if all is well; it goes away if the run goes on (a torn end), or is for good (damage, records of
    a newer version). outdated: what was given isn't what the log says now.
    """

    def __init__(self, log_folder: Path) -> None:
        self.path: Final = log_folder / DECISIONS_NAME
        self.rules: Rules | None = None
        self.notes: list[Note] = []
        self.offset = HEADER_BYTES
        self.size = 0
        self.records = 0
        self.problem = ""
        self.outdated = False
        self._over = False  # nothing more can be read
        self._file = -1  # its inode
        self._torn: Torn | None = None
        self._gathering = Gathering(self.path)
        self._given: Turn | None = None  # the newest, though the event after it hasn't come

    def turns(self, now: float) -> Iterator[Turn]:
        """Those that are whole now; may be left at any turn, and the next call goes on there. now: seconds since 1970,
        by the clock of the file's system."""
        if self._over or self.outdated:
            return
        self.problem = ""
        try:
            yield from self._read()
        except LogError:
            try:  # once more: a torn end may have been cut while it was read
                yield from self._read()
            except LogError as error:
                self.problem, self._over = str(error), True
                return
        if not self.outdated:
            yield from self._rest(now)

    def _read(self) -> Iterator[Turn]:
        if not self._is_more():
            return
        for item in scan(self.path, "decisions", self.offset):  # anew in each call: buffers know nothing of cuts
            if isinstance(item, Torn):
                self._torn = item
                break
            offset, body = item
            turn = self._take(parse(self.path, offset, body))
            if self.outdated:
                return
            self.offset = offset + HEAD_BYTES + len(body)
            self.records += 1
            if turn is not None:
                yield turn

    def _is_more(self) -> bool:
        """Whether there is something to read."""
        self._torn = None
        found = self._look()
        if found is None:
            return False
        if self.records and (found.st_ino != self._file or found.st_size < self.offset):
            self.outdated = True
            return False
        self._file = found.st_ino
        return found.st_size not in (0, self.offset)

    def _look(self) -> os.stat_result | None:
        try:
            found = self.path.stat()
        except OSError as error:
            self.problem = f"{self.path}: can't be read: {error.strerror}"
            return None
        self.size = found.st_size
        return found

    def _take(self, record: Record) -> Turn | None:
        """The turn that is whole by this record."""
        message, given = record.message, self._given
        if isinstance(message, Rules) and self.rules is None:
            self.rules = message
            return None
        if isinstance(message, Note) and self._gathering.turn is None:
            self.notes.append(message)
            return None
        if given is not None and isinstance(message, Command):
            self.outdated = True
            return None
        if given is not None and isinstance(message, Note):  # nothing happened but what is noted
            return Turn(given.number, Woke(at=given.event.at), None, record.offset, notes=[message])
        before = self._gathering.take(record)
        if given is not None:
            self._given = None
            return None
        return before

    def _rest(self, now: float) -> Iterator[Turn]:
        """The newest turn, when nothing more comes. What begins after it and isn't whole may be one of its commands."""
        found, turn = self._look(), self._gathering.turn
        if found is None:
            return
        quiet = abs(now - found.st_mtime) >= QUIET_S
        if self._torn is not None:
            self.problem = f"{self._torn}; it is left out, and cut when the run is resumed" if quiet else ""
            return
        if turn is None or self._given is not None or found.st_size != self.offset:
            return
        if quiet or any(isinstance(command, Finish | Fail) for command in turn.commands):
            turn.last = True
            self._given = turn
            yield turn
