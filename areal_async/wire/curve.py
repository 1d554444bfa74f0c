"""CURVE: encryption of what goes over TCP, with a key pair made for each run.

What always holds: whoever has not the run's public key can't begin to talk, and reads nothing of what others say. The
key says nothing about who a worker is: that is the secret's business, which travels inside, in `Hello`. Unix sockets
need none of this, since only the user can enter their folder.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from areal_async.errors import WireError

if TYPE_CHECKING:
    import zmq.asyncio


@dataclass(frozen=True)
class KeyPair:
    """public, secret: 40 characters each, as ZeroMQ writes keys (Z85)."""

    public: str
    secret: str = field(repr=False)


def new_keys() -> KeyPair:
    """A key pair that nobody has. Errors: WireError where ZeroMQ was built without libsodium."""
    if not zmq.has("curve"):
        raise WireError(
            "this ZeroMQ can't encrypt (it was built without libsodium), and workers on other hosts are only heard "
            "encrypted; install pyzmq from PyPI, whose wheels can"
        )
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def serve(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", keys: KeyPair) -> None:
    """Addresses that `socket` binds from now on are only for peers that know `keys.public`."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)


def connect(socket: "zmq.Socket[bytes]", server_key: str) -> None:
    """Addresses that `socket` connects to from now on must have `server_key`. Errors: WireError where it is no key."""
    own = new_keys()
    try:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_key)
    except zmq.ZMQError:
        raise WireError("the controller's public key is no key: it must have 40 characters") from None
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
