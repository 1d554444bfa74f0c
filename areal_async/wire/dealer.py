"""A worker's side of the wire: requests in, answers out, without asyncio.

A thread of its own (`_Link`) owns the DEALER socket, so that beats go out and come in while the worker computes; the
worker's threads talk to it over queues. Methods of `Dealer` may be called from any thread.

What always holds:
- a request reaches the worker once, however often it comes: while it is worked on a repetition is ignored, afterwards
  the same answer is sent again from memory;
- if the controller refuses this worker, breaks the protocol, or is gone, `receive` and `reply` raise WireError, so that
  a worker without a controller ends by itself;
- on leaving the `with` block thread, sockets and descriptors are gone within `LINGER_MS`.
"""

import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from areal_async.errors import WireError
from areal_async.messages import AnyWire, Beat, Goodbye, Hello, Refused, Welcome
from areal_async.wire import beats, curve, frames
from areal_async.wire.arrays import Array

log = logging.getLogger(__name__)

WELCOME_S: Final[float] = 30.0  # a controller that is busy starting everything may take its time
RECONNECT_S: Final[float] = 4.0  # a broken connection of a controller that lives is there again within 0.1 s
LINGER_MS: Final = 1000  # an answer that was given may still go out; a controller that is gone may not hold us up
SPARE_REPLIES: Final = 4  # answers remembered beyond the credits: what can be asked again is at most the credits
MAX_ROUTING_ID_BYTES: Final = 255  # ZeroMQ's limit

# Why there is no welcome, as far as ZeroMQ tells a client.
_BROKEN_OFF: Final = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_NO_HANDSHAKE: Final = (
    "somebody listens there, but breaks off before a word is said: the public key isn't that of this controller "
    "(the connection file is another run's), or it is no controller"
)
_NOBODY_LISTENS: Final = "nobody listens there (is the run over, or a firewall in between?)"
_SILENT: Final = "the connection stands, but the controller says nothing"

Packed: TypeAlias = list[bytes]


@dataclass(frozen=True, eq=False)
class Request:
    """message: what is asked; `Goodbye` (with id "") asks the worker to end and isn't answered.

    arrays: those that the message's docstring promises; they belong to the receiver, who may write to them.
    """

    id: str
    message: AnyWire
    arrays: list[Array] = field(default_factory=list)


class Dealer:
    """The connection of a worker to the controller at `address`; a context manager.

    Entering it says `hello` and waits for the welcome: WireError if refused (with the controller's reason), or if no
    controller answers within `WELCOME_S`.

    server_key: of an encrypted address. aside: takes a request out of the order of the others, for work that goes on
    beside them, by returning True; `receive` doesn't give it then, and whoever took it replies. It is called in the
    thread with the socket: it must not block or raise.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        server_key: str | None = None,
        aside: Callable[["Dealer", Request], bool] | None = None,
    ) -> None:
        frames.check_address(address)
        routing_id = f"{hello.name}/{hello.nonce}".encode()
        if not 1 < len(routing_id) <= MAX_ROUTING_ID_BYTES:
            raise WireError(f"worker {hello.name!r}: name and nonce may have {MAX_ROUTING_ID_BYTES - 1} bytes in all")
        self._address = address
        self._link = _Link(address, hello, routing_id, server_key, aside and (lambda request: aside(self, request)))
        self._said_goodbye = False

    def __enter__(self) -> "Dealer":
        self._link.start()
        try:
            first = self._link.inbox.get(timeout=WELCOME_S)
        except queue.Empty:
            self._link.stop()
            why = f"; {self._link.unheard}" if self._link.unheard else ""
            raise WireError(f"no controller answered at {self._address} within {WELCOME_S:g} s{why}") from None
        if isinstance(first, WireError):
            self._link.stop()
            raise first
        return self

    def __exit__(self, *_: object) -> None:
        self._link.stop()

    def receive(self, timeout_s: float) -> Request | None:
        """The next request, or None if none came within `timeout_s` seconds.

        Raises WireError when the controller is gone or has given this worker up, and after `Goodbye` was received.
        """
        self._check()
        if self._said_goodbye:
            raise WireError("the controller said goodbye; the worker should have ended")
        try:
            item = self._link.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, WireError):
            raise item
        self._said_goodbye = isinstance(item.message, Goodbye)
        return item

    def reply(self, request: Request, message: AnyWire, arrays: Sequence[Array] = ()) -> None:
        """Answer `request`, once. The arrays are copied and may be changed afterwards.

        Raises WireError when the controller is gone or has given this worker up, or if it was answered already.
        """
        self._check()
        packed = [bytes(frame) for frame in frames.pack(message, arrays, id=request.id)]
        self._link.send(request.id, packed)

    def _check(self) -> None:
        if self._link.error is not None:
            raise WireError(str(self._link.error))


class _Link:
    """The thread with the socket. inbox: first the welcome, then requests; an error comes last.

    error: why nothing can be received or sent any more; set before it is put into the inbox. unheard: what is known of
    a connection that doesn't come about.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        routing_id: bytes,
        server_key: str | None,
        aside: Callable[[Request], bool] | None,
    ) -> None:
        self.inbox: queue.SimpleQueue[Request | WireError] = queue.SimpleQueue()
        self.error: WireError | None = None
        self.unheard = ""
        self._address = address
        self._hello = hello
        self._routing_id = routing_id
        self._server_key = server_key
        self._aside = aside
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"wire of {hello.name}", daemon=True)

        self._welcomed = False
        self._left = False  # the controller said goodbye: its silence is no error any more
        self._connections = 0
        self._broken_since: float | None = None
        self._silence = beats.Silence()

        self._lock = threading.Lock()  # for what both sides touch, below; held for moments only
        self._wake = -1  # an eventfd: there is something in the outbox, or the end has come
        self._outbox: deque[Packed] = deque()
        self._working: set[str] = set()
        self._replies: OrderedDict[str, Packed] = OrderedDict()

    # ------------------------------------------------------------------------- called by the worker's threads

    def start(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()

    def send(self, id: str, packed: Packed) -> None:
        with self._lock:
            if self._wake < 0 or id not in self._working:
                raise WireError(f"request {id!r} can't be answered: it was already, or the connection is closed")
            # moved in one step: a repetition that comes right now must find it in one of the two
            self._working.remove(id)
            self._replies[id] = packed
            while len(self._replies) > self._hello.credits + SPARE_REPLIES:
                self._replies.popitem(last=False)
            self._outbox.append(packed)
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    # ----------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            self._connect_and_serve()
        except WireError as error:
            self._end(error)
        except Exception as error:
            log.exception("the wire to %s failed", self._address)
            self._end(WireError(f"the wire to {self._address} failed: {type(error).__name__}: {error}"))

    def _end(self, error: WireError) -> None:
        self.error = error
        self.inbox.put(error)

    def _connect_and_serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as self._socket:
            self._socket.setsockopt(zmq.ROUTING_ID, self._routing_id)
            self._socket.setsockopt(zmq.LINGER, LINGER_MS)
            self._socket.setsockopt(zmq.SNDHWM, 0)  # credits bound what is on the way
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, frames.MAX_FRAME_BYTES)
            if self._server_key is not None:
                curve.connect(self._socket, self._server_key)
            events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED | _BROKEN_OFF
            monitor = self._socket.get_monitor_socket(events)
            try:
                self._socket.connect(self._address)
                self._say(self._hello)
                self._serve(monitor)
            finally:
                if self._left or not self._welcomed or self._broken_since is not None:
                    self._socket.setsockopt(zmq.LINGER, 0)  # nobody is there to take what hasn't gone out
                self._socket.disable_monitor()
                monitor.close(linger=0)

    def _serve(self, monitor: zmq.SyncSocket) -> None:
        poller = zmq.Poller()
        for source in (self._socket, monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        next_beat = time.monotonic() + beats.BEAT_S
        while not self._stopping:
            ready = dict(poller.poll(1 + int(max(0.0, next_beat - time.monotonic()) * 1000)))
            if monitor in ready:
                self._watch(monitor)
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._socket in ready:
                self._receive()
            self._send_replies()
            if time.monotonic() >= next_beat:
                self._beat()
                next_beat = time.monotonic() + beats.BEAT_S
        self._send_replies()

    def _watch(self, monitor: zmq.SyncSocket) -> None:
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.Event.DISCONNECTED or event & _BROKEN_OFF:
            self._broken_since = self._broken_since or time.monotonic()
            if not self._connections:
                self.unheard = _NO_HANDSHAKE
        elif event == zmq.Event.CONNECT_RETRIED:
            self.unheard = self.unheard or _NOBODY_LISTENS
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.unheard = _SILENT
            self._broken_since = None
            self._connections += 1
            if self._connections > 1:  # requests may have been lost with the old connection: have them sent again
                self._say(self._hello)

    def _receive(self) -> None:
        while not self._stopping:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            id, message, arrays = frames.open_envelope([part.buffer for part in parts])
            self._silence.heard()
            self._take(Request(id, message, arrays))

    def _take(self, request: Request) -> None:
        match request.message:
            case Beat():
                pass
            case Welcome():
                if not self._welcomed:
                    self._welcomed = True
                    self.inbox.put(request)
            case Refused(why=why):
                if not self._left:
                    raise WireError(f"the controller refused {self._hello.name}: {why}")
            case Goodbye():
                self._left = True
                self.inbox.put(request)
            case _:
                self._take_request(request)

    def _take_request(self, request: Request) -> None:
        with self._lock:
            remembered = self._replies.get(request.id)
            if remembered is not None:
                self._outbox.append(remembered)
            if remembered is not None or request.id in self._working:
                return
            self._working.add(request.id)
        if self._aside is None or not self._aside(request):
            self.inbox.put(request)

    def _send_replies(self) -> None:
        while self._outbox:
            self._socket.send_multipart(self._outbox.popleft())

    def _beat(self) -> None:
        if self._left:
            return
        if self._broken_since is not None and time.monotonic() - self._broken_since > RECONNECT_S:
            if not self._connections:
                raise WireError(f"there is no talking to {self._address}: {self.unheard}")
            raise WireError(f"the controller at {self._address} is gone: the connection broke {RECONNECT_S:g} s ago")
        if not self._welcomed:
            return
        if self._silence.beat():
            raise WireError(
                f"the controller at {self._address} is gone: nothing was heard of it for {self._silence.seconds:g} s"
            )
        self._say(Beat())

    def _say(self, message: AnyWire) -> None:
        self._socket.send_multipart(frames.pack(message))
