"""What a message of the log is about: the labels of the things in it, as the core calls them ("sample 17.3").

What always holds: it names what stands in the message and nothing else; the first name is the one that matters most.
"""

from collections.abc import Iterator

from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    DataEnded,
    Evaluate,
    EvaluationDone,
    Failed,
    Forget,
    GroupRead,
    Joined,
    Lost,
    PeerKind,
    ReadGroup,
    Release,
    Restart,
    SampleDone,
    Score,
    Scored,
    StartSample,
    StopRequested,
    Swap,
    Swapped,
    Train,
    Woke,
)
from areal_async.messages.commands import Fail, Finish

TRAINER = "trainer"


def named(message: AnyEvent | AnyCommand) -> Iterator[str]:
    """Labels of what the message is about."""
    match message:
        case SampleDone() | Scored() | Score() | Cancel():
            yield f"sample {message.sample}"
        case StartSample():
            yield f"sample {message.sample}"
            yield f"server {message.server}"
        case GroupRead() | DataEnded() | ReadGroup():
            yield f"group {message.group}"
        case Swap() | Swapped() | Evaluate() | EvaluationDone():
            yield f"server {message.server}"
        case Joined() | Lost() | Restart():
            yield _peer(message.peer, message.id)
        case Failed(of="sample" | "group" as kind):
            yield f"{kind} {message.id}"
        case Failed(of="swap" | "server"):
            yield f"server {message.id}"
        case Forget() | Release():
            yield from (f"sample {sample}" for sample in message.samples)
        case Train():
            yield TRAINER
            yield from (f"group {group}" for group in message.groups)
            yield from (f"sample {part.sample}" for part in message.samples)
        case Woke() | StopRequested() | Finish() | Fail():
            return
        case _:  # steps, versions, checkpoints
            yield TRAINER


def names(id: str, message: AnyEvent | AnyCommand) -> bool:
    """Whether the message is about the thing of this id ("17.3") or label ("sample 17.3")."""
    return any(id in (label, label.rpartition(" ")[2]) for label in named(message))


def _peer(kind: PeerKind, id: str) -> str:
    match kind:
        case "server":
            return f"server {id}"
        case "rewards":
            return f"reward worker {id}"
        case "trainer":
            return TRAINER
