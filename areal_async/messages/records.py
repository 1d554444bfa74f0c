"""What the decision log holds: the rules, events, commands, and notes."""

from typing import TypeAlias

import msgspec

from areal_async.messages.commands import AnyCommand
from areal_async.messages.events import AnyEvent
from areal_async.messages.rules import Rules


class Note(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="note"):
    """Logged, not handled: what an observer needs and the core doesn't (turns, attempts, versions of libraries)."""

    at: float
    what: str
    data: dict[str, str | int | float | bool | tuple[int | str, ...] | None]


AnyRecord: TypeAlias = Rules | Note | AnyEvent | AnyCommand
