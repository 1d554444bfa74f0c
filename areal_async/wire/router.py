"""The controller's side of the wire: one ROUTER socket for all workers, in the controller's event loop.

What always holds:
- nobody without the run's secret and this protocol is heard; who isn't taken in is told why; what goes over `listen`
  is encrypted, and who doesn't know its key isn't even told why;
- a worker never has more unanswered requests than it granted credits (`window`);
- a request is held until it is answered or its deadline passes. When the worker's next incarnation says hello (same
  name, new nonce), or the same one after a break of its connection, it is sent again under its id;
- an answer is delivered once: answers to unknown ids, and anything from an incarnation that was replaced or given up,
  are dropped;
- nothing relies on a high-water mark: with credits, what is on the way is bounded; a mark would block or drop.

Identities: a worker's routing id is "<name>/<nonce>", so incarnations can't be mistaken for each other, and the same
incarnation keeps its id when it connects again (ROUTER_HANDOVER gives it to the newer connection).
"""

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, TypeAlias

import zmq
import zmq.asyncio

from areal_async.errors import NoAnswer, WireError
from areal_async.messages import PROTOCOL, AnyWire, Beat, Goodbye, Hello, Refused, Welcome, WorkerError
from areal_async.wire import beats, curve, frames
from areal_async.wire.arrays import Array
from areal_async.wire.window import Window

log = logging.getLogger(__name__)

LINGER_MS: Final = 500  # on closing: enough for goodbyes to workers that live; a stuck one may not hold up the end
MAX_CREDITS: Final = 65_536  # a worker that grants more is broken

Answer: TypeAlias = tuple[AnyWire, list[Array]]
Packed: TypeAlias = list[bytes | memoryview]


class _Request:
    """packed: its frames, kept so that they can be sent again. answer: what its asker waits for."""

    def __init__(self, packed: Packed, answer: asyncio.Future[Answer]) -> None:
        self.packed = packed
        self.answer = answer


class _Worker:
    """All incarnations of one name. identity: of the present one, or None. state: for error messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.window: Window[_Request] = Window()
        self.identity: bytes | None = None
        self.state = "it has not said hello yet"
        self.silence = beats.Silence()


class Router:
    """Workers join at `address` (ipc:// or tcp://) and are asked by name; an async context manager.

    listen: a TCP address for workers on other hosts, encrypted (`curve`); once inside the `async with`, it is
    `listening` (with the port that was taken, where 0 was asked for), and `public_key` is what they need to know.

    on_joined: a worker with the right secret says hello; return None to take it in, or why it isn't. on_lost: (name,
    why) of a worker that was taken in and fell silent, was replaced, or broke the protocol; not after `goodbye`. Both
    are called in the event loop and must not block. What they raise ends the `async with` block, as an ExceptionGroup.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        on_joined: Callable[[Hello], str | None],
        on_lost: Callable[[str, str], None],
        listen: str | None = None,
    ) -> None:
        frames.check_address(address)
        self.address = address
        self.listening = listen
        self._keys: curve.KeyPair | None = None
        if listen is not None:
            frames.check_address(listen)
            self._keys = curve.new_keys()
        self._secret = secret.encode()
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._workers: dict[str, _Worker] = {}
        self._joined: dict[bytes, _Worker] = {}

    @property
    def public_key(self) -> str:
        """Of the encrypted address; "" where there is none."""
        return self._keys.public if self._keys else ""

    async def __aenter__(self) -> "Router":
        self._context = zmq.asyncio.Context()
        try:
            self._socket = self._bind()
        except BaseException:
            self._context.term()
            raise
        self._outbox: asyncio.Queue[tuple[bytes, Packed] | None] = asyncio.Queue()
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._sending = self._tasks.create_task(self._send(), name="wire: send")
        self._loops = [
            self._tasks.create_task(self._receive(), name="wire: receive"),
            self._tasks.create_task(self._beat(), name="wire: beats"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            self.goodbye(worker.name)
            for request in worker.window.requests():
                if not request.answer.done():
                    request.answer.set_exception(WireError(f"the wire to {worker.name} was closed by the controller"))
        self._outbox.put_nowait(None)  # the sender ends when all goodbyes are out
        try:
            await asyncio.wait([self._sending], timeout=LINGER_MS / 1000)
        finally:
            for task in self._loops:
                task.cancel()
            try:
                # the block's own error goes on by itself; the group must know of a cancellation (it may be its own)
                cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
                await self._tasks.__aexit__(*((kind, error, traceback) if cancelled else (None, None, None)))
            finally:
                self._socket.close(linger=LINGER_MS)
                self._context.term()  # may block, for LINGER_MS at most, once, at the end

    async def request(
        self, name: str, message: AnyWire, arrays: Sequence[Array] = (), *, id: str, deadline_s: float
    ) -> Answer:
        """Ask worker `name` and return its answer: message and arrays.

        The worker may not have joined yet, or may be restarted meanwhile: `deadline_s` seconds from now count, whatever
        happens. The arrays must not change until this returns. The same id may be asked again when this has ended.
        Raises WireError: no answer in time; the worker answered with a WorkerError; the id is being asked already.
        """
        worker = self._workers.setdefault(name, _Worker(name))
        if worker.window.holds(id):
            raise WireError(f"{name} is already asked for {type(message).__name__} {id}; wait for that answer")
        packed = frames.pack(message, arrays, id=id)
        request = _Request(packed, asyncio.get_running_loop().create_future())
        worker.window.add(id, request)
        self._pump(worker)
        try:
            async with asyncio.timeout(deadline_s):
                answer, answer_arrays = await request.answer
        except TimeoutError:
            raise NoAnswer(
                f"{name} did not answer {type(message).__name__} {id} within {deadline_s:g} s:"
                f" {self._where(worker, id)}"
            ) from None
        finally:
            worker.window.abandon(id, request)
        if isinstance(answer, WorkerError):
            raise WireError(f"{name} failed at {type(message).__name__} {id}:\n{answer.why}")
        return answer, answer_arrays

    def outstanding(self, name: str) -> int:
        """Unanswered requests to this worker: at it (those whose askers gave up included), or waiting for a credit."""
        worker = self._workers.get(name)
        return len(worker.window) if worker else 0

    def goodbye(self, name: str) -> None:
        """Have the worker end by itself. It is no longer listened to, and `on_lost` isn't called for it.

        Requests that it has not answered stay held for its next incarnation.
        """
        worker = self._workers.get(name)
        if worker is not None and worker.identity is not None:
            self._say(worker.identity, Goodbye())
            self._leave(worker, "it was told to end")

    # ------------------------------------------------------------------------------------------------ the three loops

    async def _receive(self) -> None:
        while True:
            identity, *parts = await self._socket.recv_multipart(copy=False)
            self._take(identity.bytes, [part.buffer for part in parts])
            await asyncio.sleep(0)  # a ready message is received without a pause: let others have their turn

    async def _send(self) -> None:
        """The only place that sends, so messages to a worker keep their order.

        ZeroMQ copies the frames once. Its sending without a copy needs a thread of its own (pyzmq's collector) and
        costs more than the copy of a sample.
        """
        while (item := await self._outbox.get()) is not None:
            identity, packed = item
            try:
                await self._socket.send_multipart([identity, *packed])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                # its connection is gone: requests stay held, and it either says hello again or its beats are missed
                log.debug("%s can't be reached now", identity)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(beats.BEAT_S)
            for identity, worker in list(self._joined.items()):
                if worker.silence.beat():
                    silent_s = worker.silence.seconds
                    self._lose(worker, f"{worker.name} is dead or stands still: nothing was heard for {silent_s:g} s")
                else:
                    self._say(identity, Beat())

    # ---------------------------------------------------------------------------------------------- what has come in

    def _take(self, identity: bytes, parts: list[memoryview]) -> None:
        worker = self._joined.get(identity)
        try:
            id, message, arrays = frames.open_envelope(parts)
        except WireError as error:
            log.warning("from %s: %s", worker.name if worker else identity, error)
            self._say(identity, Refused(why=str(error)))
            if worker is not None:
                self._lose(worker, f"{worker.name} broke the protocol: {error}")
            return
        if worker is not None:
            worker.silence.heard()
        if isinstance(message, Hello):
            self._greet(identity, message)
        elif worker is None:
            why = "this controller doesn't know you (any more): you were silent for too long, or it is another run's"
            self._say(identity, Refused(why=why))
        elif not isinstance(message, Beat):
            self._deliver(worker, id, (message, arrays))

    def _deliver(self, worker: _Worker, id: str, answer: Answer) -> None:
        request = worker.window.answered(id)
        if request is None:
            log.debug("%s answered %s, which nobody waits for", worker.name, id)
        elif not request.answer.done():
            request.answer.set_result(answer)
        self._pump(worker)

    def _greet(self, identity: bytes, hello: Hello) -> None:
        worker = self._workers.get(hello.name)
        why = self._refusal(identity, hello)
        if why is None and worker is not None and worker.identity == identity:
            log.info("%s is connected again", hello.name)
        elif why is None:
            if worker is not None and worker.identity is not None:
                replaced = f"{worker.name} was replaced by a new incarnation of itself"
                self._say(worker.identity, Refused(why=replaced))
                self._lose(worker, replaced)
            why = self._on_joined(hello)
        if why is not None:
            log.warning("%r was refused: %s", hello.name, why)
            self._say(identity, Refused(why=why))
            return
        self._join(identity, hello)

    def _join(self, identity: bytes, hello: Hello) -> None:
        worker = self._workers.setdefault(hello.name, _Worker(hello.name))
        worker.identity, worker.state = identity, "it is there"
        worker.silence.heard()
        self._joined[identity] = worker
        self._say(identity, Welcome())
        worker.window.reopen(hello.credits)
        self._pump(worker)

    def _refusal(self, identity: bytes, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL:
            return (
                f"{hello.name!r} speaks protocol {hello.protocol}, the controller {PROTOCOL}:"
                " install the same areal-async on both sides"
            )
        if not hmac.compare_digest(hello.secret.encode(), self._secret):
            return (
                f"{hello.name!r} has not the secret of this run: it belongs to another run,"
                " or AREAL_ASYNC_SECRET isn't set for it"
            )
        if identity != f"{hello.name}/{hello.nonce}".encode() or not 1 <= hello.credits <= MAX_CREDITS:
            return (
                f"the hello of {hello.name!r} can't be: the routing id must be name/nonce,"
                f" and it must grant 1 to {MAX_CREDITS} credits, not {hello.credits}"
            )
        return None

    # ------------------------------------------------------------------------------------------------------- helpers

    def _pump(self, worker: _Worker) -> None:
        """Send what the credits allow."""
        while worker.identity is not None and (item := worker.window.take()) is not None:
            self._outbox.put_nowait((worker.identity, item[1].packed))

    def _say(self, identity: bytes, message: AnyWire) -> None:
        self._outbox.put_nowait((identity, frames.pack(message)))

    def _lose(self, worker: _Worker, why: str) -> None:
        self._leave(worker, why)
        self._on_lost(worker.name, why)

    def _leave(self, worker: _Worker, state: str) -> None:
        if worker.identity is not None:
            self._joined.pop(worker.identity, None)
        worker.identity, worker.state = None, state
        worker.window.close()

    def _where(self, worker: _Worker, id: str) -> str:
        if worker.identity is None:
            return f"the worker isn't there ({worker.state})"
        if worker.window.is_sent(id):
            return "the worker has it, and lives; is the deadline too short for this work?"
        return f"it still waits for a credit ({worker.window.at_worker} of {worker.window.credits} are in use)"

    def _bind(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, frames.MAX_FRAME_BYTES)
            self.address = self._bind_to(socket, self.address)
            if self.listening is not None and self._keys is not None:
                curve.serve(socket, self._keys)  # after the first bind: ZeroMQ takes a socket's options at each bind
                self.listening = self._bind_to(socket, self.listening)
        except BaseException:
            socket.close(linger=0)
            raise
        return socket

    def _bind_to(self, socket: zmq.asyncio.Socket, address: str) -> str:
        """The address as it is now, a port of 0 replaced by the one that was taken."""
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            hint = "; name an address of this host (its number), or 0.0.0.0" if address.startswith("tcp") else ""
            raise WireError(f"the controller can't listen at {address}: {error}{hint}") from None
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)
