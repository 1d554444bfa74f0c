"""What a dashboard asks of the core, in one look.

What always holds: it only looks, and takes no longer because more is in flight.
"""

from dataclasses import dataclass

from areal_async.core.parts import Parts
from areal_async.messages import Version


@dataclass(frozen=True)
class ServerView:
    """version: -1 where it holds none of this run. load: samples placed on it."""

    name: str
    state: str
    version: Version
    load: int


@dataclass(frozen=True)
class View:
    """version, branch: of the trainer's weights. in_flight: samples with a place at a server. ready, outstanding:
    groups. balance: as `Orchestrator.balance`."""

    trainer_state: str
    version: Version
    branch: int
    in_flight: int
    ready: int
    outstanding: int
    balance: dict[str, int]
    servers: tuple[ServerView, ...]


def view(parts: Parts) -> View:
    trainer, ledger = parts.trainer, parts.ledger
    return View(
        trainer_state=trainer.state,
        version=trainer.version,
        branch=trainer.branch,
        in_flight=ledger.in_flight,
        ready=ledger.ready,
        outstanding=ledger.outstanding,
        balance=ledger.balance(),
        servers=tuple(
            ServerView(server.id, server.state, server.version, server.load) for server in parts.fleet.servers.values()
        ),
    )
