"""What a span shows (its kind, which a page gives a colour) and what it is about (its thing, which has a story).

What always holds: both follow from the lane and from what `trace.drawing` calls the span; of several kinds that lie
over each other a later one is to be seen, so that what was lost is never hidden.
"""

from typing import Final, Protocol

from areal_async.trace.lanes import Args
from areal_async.trace.peers import CUT, PROMPTS, REWARDS, TRAINER, WEIGHTS

KINDS: Final = (
    "idle",
    "serving",
    "working",
    "starting",
    "reading",
    "generating",
    "not trained",
    "checking",
    "training",
    "publishing",
    "checkpointing",
    "evaluating",
    "ending",
    "swapping",
    "standing still",
    "cut off",
    "lost",
)
"""serving, working: of a server, a reward worker. generating: a sample's stay at a server, whatever became of it but
`not trained`: it was filtered, failed, stale or cancelled. checking: its wait for a place included. standing still: the
answers of a server, inside of a swap. cut off: what ended before it was done."""
NEVER_HIDDEN: Final = ("swapping", "cut off", "lost")  # a later one wins

_NUMBERS: Final = {name: number for number, name in enumerate(KINDS)}
_WORDS: Final = {
    **{"idle": "idle", "serving": "serving", "working": "working", "starting": "starting", "lost": "lost"},
    **{"quarantined": "lost", "train": "training", "publish": "publishing", "checkpoint": "checkpointing"},
    **{"evaluate": "evaluating", "ending": "ending", "swapping": "swapping", "to": "swapping"},
    **{"answers": "standing still", "group": "reading"},
}  # of a state's first word
_ENDURES: Final = ("idle", "serving", "working", "starting", "lost", "ending")  # has no end that it misses
_UNTRAINED: Final = ("filtered", "stale", "failed", "cancelled")  # fates


class Place(Protocol):
    """Of a lane. kind: state, load or slot."""

    @property
    def group(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...


def kind_of(lane: Place, name: str, args: Args) -> int:
    """An index into `KINDS`. name: of the span."""
    return _NUMBERS[_slot_kind(lane, name, args) if lane.kind == "slot" else _state_kind(name)]


def thing_of(lane: Place, name: str) -> str:
    """An id for a story. name: of the span."""
    if lane.kind == "slot":
        return name.partition(" ")[0]
    match lane.group:
        case str(group) if group == PROMPTS:
            return name.removeprefix("group ").partition(":")[0].partition(" ")[0]
        case str(group) if group == TRAINER:
            return _of_trainer(name)
        case str(group) if group == WEIGHTS:
            return _step_before(name.rpartition(" v")[2])
        case str(group) if group == REWARDS:
            return lane.name
    return lane.group


def _slot_kind(lane: Place, name: str, args: Args) -> str:
    is_whole = " " not in name
    if lane.group == REWARDS:
        return "checking" if is_whole or "verdict" in args else "cut off"
    if not is_whole:
        return "cut off"
    return "not trained" if args.get("fate") in _UNTRAINED else "generating"


def _state_kind(name: str) -> str:
    kind = _WORDS[name.partition(" ")[0].rstrip(",:")]
    return "cut off" if name.endswith((f", {CUT}", ", failed")) and kind not in _ENDURES else kind


def _of_trainer(name: str) -> str:
    words = name.replace(",", " ").split()
    match words[0]:
        case "train":
            return f"step {words[2]}"
        case "publish" | "checkpoint":
            return _step_before(words[1][1:])
    return TRAINER


def _step_before(version: str) -> str:
    """That a version came from; the first one is the trainer's own."""
    return f"step {int(version) - 1}" if version.isdecimal() and int(version) > 0 else TRAINER
