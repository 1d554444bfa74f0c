"""Weights from GPU to GPU: snapshots on rank 0's device, and the communicator that broadcasts them to the servers.

The other side is vLLM's own engine (`--weight-transfer-config '{"backend": "nccl"}'`), whose workers are ranks 1 … of
the communicator; tensors go packed, as its own trainer side packs them.

What always holds: a snapshot is a copy, so training goes on while it is sent; tensors are sent in the order of the
manifest, each checked against it first (the workers cut what comes by names and shapes that they were told, so a
difference would load garbage); joining, sending and leaving are answered beside the requests of the training thread; a
broadcast that hangs because a server is gone ends with `LeaveServers`, and so does the rank with everything else.

Each of these requests has a thread of its own, since NCCL blocks, and may do so for ever: then that thread stays
behind, and the next communicator is formed without it.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from areal_async.errors import ArealError, TrainerError, WireError
from areal_async.messages import (
    AnyWire,
    JoinServers,
    LeaveServers,
    ParameterInfo,
    SendWeights,
    ServersJoined,
    ServersLeft,
    Version,
    WeightsSent,
    WorkerError,
)
from areal_async.wire.dealer import Dealer, Request

log = logging.getLogger(__name__)

# How tensors are packed. vLLM is told the same (`controller.nccl_swaps`); a change here alone would load garbage there.
BUFFER_BYTES: Final = 1 << 30
BUFFERS: Final = 2

_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16}

Named: TypeAlias = tuple[str, Tensor]


class Endpoint(Protocol):
    """Rank 0 of a communicator with all workers of the servers."""

    def broadcast(self, tensors: Iterator[Named]) -> None:
        """Send them all; returns when they are sent. May block for ever if a worker is gone."""

    def abort(self) -> None:
        """Give the communicator up, from any thread. A broadcast in progress ends soon, with or without an error."""


OpenEndpoint: TypeAlias = Callable[[JoinServers, torch.device], Endpoint]


class NcclEndpoint:
    """NCCL's, through vLLM's own functions. Blocks until all workers are there."""

    def __init__(self, join: JoinServers, device: torch.device) -> None:
        if device.type != "cuda":
            raise TrainerError("weights.transport: nccl needs GPUs, and this trainer runs on the CPU; use shm or disk")
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        self._device = device
        with torch.cuda.device(device):
            self._group: Any = stateless_init_process_group(join.host, join.port, 0, join.world, device.index)
        if not self._group.available:
            raise TrainerError("weights.transport: nccl: the NCCL library can't be loaded (VLLM_NCCL_SO_PATH)")

    def broadcast(self, tensors: Iterator[Named]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        with torch.cuda.device(self._device):
            packed_nccl_broadcast_producer(
                iterator=tensors,
                group=self._group,
                src=0,
                post_iter_func=lambda named: named[1],
                buffer_size_bytes=BUFFER_BYTES,
                num_buffers=BUFFERS,
            )

    def abort(self) -> None:
        self._group.destroy()  # vLLM's: aborts in a thread, waits 5 s for it


class Transfer:
    """Rank 0's side of the transport. manifest: what it sends, in this order."""

    def __init__(
        self,
        device: torch.device,
        manifest: tuple[ParameterInfo, ...],
        open_endpoint: OpenEndpoint = NcclEndpoint,
    ) -> None:
        self._device = device
        self._manifest = manifest
        self._open = open_endpoint
        self._lock = threading.Lock()  # for what follows: the training thread and the transfer's own touch it
        self._snapshots: dict[Version, dict[str, Tensor]] = {}
        self._endpoint: Endpoint | None = None

    # ---------------------------------------------------------------------- called by the training thread

    def publish(self, version: Version, tensors: Iterable[Named]) -> tuple[str, int]:
        """Copy `tensors` on the device as `version`; its location, and how many bytes."""
        dtypes = {info.name: _DTYPES[info.dtype] for info in self._manifest}
        snapshot = {name: tensor.to(dtypes[name], copy=True).contiguous() for name, tensor in tensors}
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the transfer reads it on streams of its own
        with self._lock:
            self._snapshots[version] = snapshot
        return self.location(version), sum(tensor.nbytes for tensor in snapshot.values())

    @staticmethod
    def location(version: Version) -> str:
        return f"nccl:{version}"

    def free(self, versions: tuple[Version, ...]) -> None:
        """Give back the memory of these versions; those that aren't there are passed over."""
        with self._lock:
            for version in versions:
                self._snapshots.pop(version, None)

    def close(self) -> None:
        """Give up everything; threads that hang in NCCL are left to the end of the process."""
        self._leave()
        with self._lock:
            self._snapshots.clear()

    # ---------------------------------------------------------------------- called by the wire's thread

    def take(self, dealer: Dealer, request: Request) -> bool:
        """Do this request beside the others, if it is one of ours (`Dealer`'s `aside`)."""
        work: Callable[[], AnyWire]
        match request.message:
            case JoinServers() as join:
                work = lambda: self._join(join)  # noqa: E731
            case SendWeights() as send:
                work = lambda: self._send(send)  # noqa: E731
            case LeaveServers():
                work = self._leave
            case _:
                return False
        name = f"transfer: {request.id}"
        threading.Thread(target=self._answer, args=(dealer, request, work), name=name, daemon=True).start()
        return True

    # ---------------------------------------------------------------------- in threads of their own

    def _answer(self, dealer: Dealer, request: Request, work: Callable[[], AnyWire]) -> None:
        try:
            message = work()
        except Exception as error:
            why = str(error) if isinstance(error, ArealError) else traceback.format_exc()
            log.error("request %s failed: %s", request.id, why)
            message = WorkerError(why=why)
        try:
            dealer.reply(request, message)
        except WireError as error:  # the training thread hears of it too, and ends the rank
            log.info("request %s: nobody to answer: %s", request.id, error)

    def _join(self, join: JoinServers) -> ServersJoined:
        self._leave()
        begun = time.monotonic()
        endpoint = self._open(join, self._device)
        with self._lock:
            self._endpoint = endpoint
        return ServersJoined(seconds=time.monotonic() - begun)

    def _send(self, send: SendWeights) -> WeightsSent:
        with self._lock:
            endpoint, snapshot = self._endpoint, self._snapshots.get(send.version)
            held = ", ".join(map(str, self._snapshots)) or "none"
        if endpoint is None:
            raise TrainerError(f"version {send.version} can't be sent: no server has joined")
        if snapshot is None:
            raise TrainerError(f"version {send.version} can't be sent: it isn't published here (but: {held})")
        tensors = list(self._in_order(snapshot))  # all checked before the first is sent
        begun = time.monotonic()
        endpoint.broadcast(iter(tensors))
        with self._lock:
            if self._endpoint is not endpoint:
                raise TrainerError(f"version {send.version} was not sent: the communicator was given up meanwhile")
        return WeightsSent(version=send.version, seconds=time.monotonic() - begun)

    def _in_order(self, snapshot: dict[str, Tensor]) -> Iterator[Named]:
        for info in self._manifest:
            tensor = snapshot.get(info.name)
            if tensor is None or tuple(tensor.shape) != info.shape or tensor.dtype != _DTYPES[info.dtype]:
                there = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise TrainerError(
                    f"{info.name} can't be sent: the servers were told {info.dtype} {info.shape}, it is {there}"
                )
            yield info.name, tensor

    def _leave(self) -> ServersLeft:
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.abort()
        return ServersLeft()
