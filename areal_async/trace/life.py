"""A group, a sample and a happening, as a log tells of them.

What always holds: they are what was recorded, in the words of docs/lifecycles.md, and decide nothing.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from areal_async.log.format import PayloadRef
from areal_async.messages import GroupId, Note, SampleDone, SampleId, Verdict, Version
from areal_async.trace.words import first_line

GroupState: TypeAlias = Literal[
    "asked", "running", "ready", "training", "trained", "filtered", "stale", "failed", "cancelled"
]
SampleState: TypeAlias = Literal["waiting", "running", "held", "scoring", "scored", "failed"]
Outcome: TypeAlias = Literal["trained", "training", "filtered", "stale", "failed", "cancelled", "outstanding"]

_OF_MEMBERS: Final[dict[GroupState, Outcome]] = {
    **{"asked": "outstanding", "running": "outstanding", "ready": "outstanding", "training": "training"},
    **{"trained": "trained", "filtered": "filtered", "stale": "stale", "failed": "cancelled", "cancelled": "cancelled"},
}  # what a group's state is to members that have no end of their own
OVER: Final = ("filtered", "stale", "failed", "cancelled")


@dataclass(slots=True, eq=False)
class SampleLife:
    """state: as in docs/lifecycles.md, without what its group's state says. attempt: the last that was started, -1
    before. server, version: where that was placed, and what was held there. payload: of the arrays of `done`. asked_at:
    of its check. alone: its group is trained without it (no reward, or cut). place: minibatch, rank, micro-batch."""

    id: SampleId
    state: SampleState = "waiting"
    attempt: int = -1
    failures: int = 0
    server: str = ""
    version: Version = -1
    started_at: float = 0.0
    done: SampleDone | None = None
    payload: PayloadRef | None = None
    asked_at: float | None = None
    scored_at: float | None = None
    verdict: Verdict | None = None
    reward: float | None = None
    alone: bool = False
    advantage: float | None = None
    place: tuple[int, int, int] | None = None


@dataclass(slots=True, eq=False)
class GroupLife:
    """floor: known from its first sample's start on. step, branch: that trained it last, or is to. why: it is over."""

    id: GroupId
    position: int
    asked_at: float
    samples: list[SampleLife]
    state: GroupState = "asked"
    row: int | None = None
    prompt_tokens: int = 0
    read_at: float = 0.0
    floor: Version | None = None
    ready_at: float | None = None
    step: int | None = None
    branch: int = 0
    handed_at: float | None = None
    trained_at: float | None = None
    why: str = ""

    def outcome(self, sample: SampleLife) -> Outcome:
        """What became of a member, as far as it is known."""
        if sample.state == "failed":
            return "failed"
        if sample.alone:
            return "filtered"
        return _OF_MEMBERS[self.state]


class Happening(NamedTuple):
    """event: its number. sample: whose, or None where it is the group's."""

    event: int
    at: float
    sample: SampleId | None
    text: str


def noted(note: Note) -> str:
    """A note of a session in words."""
    data = note.data
    source, target, tokens = data.get("from"), data.get("to"), data.get("tokens")
    why = first_line(str(data.get("why", "")))
    match note.what:
        case "continued":
            instead = "" if source == target else f" instead of {source}"
            return f"goes on after {tokens} tokens, on server {target}{instead}: {why}"
        case "moved":
            return f"is asked of server {target} instead of {source}: {why}"
        case "repeated":
            return f"is asked of server {target} once more: {why}"
        case "completed":
            return f"was whole with {tokens} tokens when the stream of server {source} broke: {why}"
    return f"{note.what}: " + ", ".join(f"{key} {value}" for key, value in data.items() if key != "sample")
