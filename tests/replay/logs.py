"""The recorded logs in `tests/logs`, and logs that are like them but for something."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from areal_async.log import format as fmt
from areal_async.log.reader import scan
from areal_async.log.turns import Turn, read_turns
from areal_async.messages import Rules, Train

LOGS: Final = Path(__file__).parent.parent / "logs"
WAIT: Final = LOGS / "wait-gone-back-resumed"
DROP: Final = LOGS / "drop-requeue-gone-back"
BOTH: Final = (WAIT, DROP)


class Recording(NamedTuple):
    rules: Rules
    turns: list[Turn]

    def first(self, wanted: Callable[[Turn], object]) -> int:
        """Number of the first event for which it holds."""
        return next(turn.number for turn in self.turns if wanted(turn))

    def trains(self, step: int) -> int:
        """Number of the event that forms the step."""
        return self.first(lambda turn: any(isinstance(c, Train) and c.step == step for c in turn.commands))


def recording(log: Path) -> Recording:
    recorded = read_turns(log)
    assert recorded is not None
    return Recording(recorded.rules, list(recorded.turns))


def bodies(log: Path) -> list[Any]:
    """The records of a log as plain lists and dicts, as another areal-async might read them."""
    path = log / fmt.DECISIONS_NAME
    return [msgspec.msgpack.decode(item[1]) for item in scan(path, "decisions") if not isinstance(item, fmt.Torn)]


def write(folder: Path, records: Iterable[Any]) -> Path:
    """A log of such records."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [fmt.file_header("decisions")]
    for record in records:
        body = msgspec.msgpack.encode(record)
        parts += [fmt.record_head([body]), body]
    (folder / fmt.DECISIONS_NAME).write_bytes(b"".join(parts))
    return folder
