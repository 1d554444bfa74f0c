"""What a dashboard asks of the core, in one look.

What always holds: it only looks, and takes no longer because more is in flight.
"""

from dataclasses import dataclass

from areal_async.core.parts import Parts
from areal_async.core.restarts import Restarted
from areal_async.messages import Version


@dataclass(frozen=True)
class ServerView:
    """version: -1 where it holds none of this run. load: samples placed on it."""

    name: str
    state: str
    version: Version
    load: int


@dataclass(frozen=True)
class PeerView:
    """One that works for the run: the trainer, a server, a reward worker. since: run clock at which its state began.
    restart_at: run clock from which it starts again, None if there is nothing to wait for. restarts: so far. why: the
    cause of its last loss."""

    label: str
    state: str
    since: float
    restart_at: float | None = None
    restarts: int = 0
    why: str = ""


@dataclass(frozen=True)
class View:
    """version, branch: of the trainer's weights. in_flight: samples with a place at a server. held: samples
    that ran when training went back, and start again when a server holds their floor. ready, outstanding:
    groups. balance: as `Orchestrator.balance`. peers: the trainer, the servers and the reward workers that have
    joined."""

    trainer_state: str
    version: Version
    branch: int
    in_flight: int
    held: int
    ready: int
    outstanding: int
    balance: dict[str, int]
    servers: tuple[ServerView, ...]
    peers: tuple[PeerView, ...]


def view(parts: Parts) -> View:
    trainer, ledger = parts.trainer, parts.ledger
    return View(
        trainer_state=trainer.state,
        version=trainer.version,
        branch=trainer.branch,
        in_flight=ledger.in_flight,
        held=ledger.held,
        ready=ledger.ready,
        outstanding=ledger.outstanding,
        balance=ledger.balance(),
        servers=tuple(
            ServerView(server.id, server.state, server.version, server.load) for server in parts.fleet.servers.values()
        ),
        peers=(
            _peer(trainer),
            *map(_peer, parts.fleet.servers.values()),
            *map(_peer, parts.rewards.workers.values()),
        ),
    )


def _peer(peer: Restarted) -> PeerView:
    return PeerView(peer.label, peer.state, peer.state_since, peer.restart_at, peer.restarts, peer.why)
