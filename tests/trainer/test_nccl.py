"""Rank 0's side of weights from GPU to GPU, with a communicator that keeps what it is given."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_async.controller import nccl_swaps
from areal_async.engines.deepspeed import nccl
from areal_async.engines.deepspeed.nccl import Endpoint, Transfer
from areal_async.errors import TrainerError
from areal_async.messages import (
    AnyWire,
    JoinServers,
    LeaveServers,
    ParameterInfo,
    Probe,
    SendWeights,
    ServersJoined,
    ServersLeft,
    WeightsSent,
    WorkerError,
)
from areal_async.wire.dealer import Request

CPU = torch.device("cpu")
MANIFEST = (ParameterInfo("b", (2, 3), "BF16"), ParameterInfo("a", (4,), "F32"))
JOIN = JoinServers(host="h", port=1, world=3)
WAIT_S = 60.0


class Kept:
    """An endpoint that keeps what it sends; `hang`: it waits for a server that is gone."""

    def __init__(self, hang: bool = False) -> None:
        self.sent: list[tuple[str, Tensor]] = []
        self.aborted = threading.Event()
        self.sending = threading.Event()
        self._hang = hang

    def broadcast(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.sending.set()
        if self._hang:
            assert self.aborted.wait(WAIT_S)  # NCCL's kernels end then, and it says nothing
            return
        self.sent += [(name, tensor.clone()) for name, tensor in tensors]

    def abort(self) -> None:
        self.aborted.set()


class Answers:
    """What `Transfer` replies, in place of a dealer."""

    def __init__(self) -> None:
        self._come = threading.Condition()
        self._by_id: dict[str, AnyWire] = {}

    def reply(self, request: Request, message: AnyWire) -> None:
        with self._come:
            self._by_id[request.id] = message
            self._come.notify_all()

    def of(self, id: str) -> AnyWire:
        with self._come:
            assert self._come.wait_for(lambda: id in self._by_id, WAIT_S), f"no answer to {id}"
            return self._by_id[id]


class Driver:
    def __init__(self, *endpoints: Endpoint) -> None:
        self.opened: list[JoinServers] = []
        left = list(endpoints)

        def open_endpoint(join: JoinServers, device: torch.device) -> Endpoint:
            assert device == CPU
            self.opened.append(join)
            return left.pop(0)

        self.transfer = Transfer(CPU, MANIFEST, open_endpoint)
        self.answers: Any = Answers()
        self._count = 0

    def start(self, message: AnyWire) -> Callable[[], AnyWire]:
        self._count += 1
        id = str(self._count)
        assert self.transfer.take(self.answers, Request(id, message))
        return lambda: self.answers.of(id)

    def ask(self, message: AnyWire) -> AnyWire:
        return self.start(message)()


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {"b": torch.full((2, 3), value), "a": torch.full((4,), value)}


def test_a_snapshot_is_sent_in_the_manifests_order_while_the_model_goes_on() -> None:
    endpoint = Kept()
    driver = Driver(endpoint)
    model = tensors(1.0)
    location, nbytes = driver.transfer.publish(7, reversed(model.items()))
    assert (location, nbytes) == ("nccl:7", 6 * 2 + 4 * 4)
    for tensor in model.values():
        tensor.fill_(9.0)  # the next step
    assert isinstance(driver.ask(JOIN), ServersJoined)
    sent = driver.ask(SendWeights(version=7))
    assert isinstance(sent, WeightsSent)
    assert sent.version == 7
    assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in endpoint.sent] == [
        ("b", (2, 3), torch.bfloat16),
        ("a", (4,), torch.float32),
    ]
    assert all(bool((tensor == 1.0).all()) for _, tensor in endpoint.sent)
    assert driver.opened == [JOIN]


def test_other_requests_are_not_taken() -> None:
    driver = Driver()
    assert not driver.transfer.take(driver.answers, Request("1", Probe(id="1")))


def test_what_cant_be_sent_is_said_before_anything_is() -> None:
    endpoint = Kept()
    driver = Driver(endpoint)
    driver.transfer.publish(1, tensors().items())

    def why(version: int) -> str:
        answer = driver.ask(SendWeights(version=version))
        assert isinstance(answer, WorkerError)
        return answer.why

    assert "no server has joined" in why(1)
    driver.ask(JOIN)
    assert "it isn't published here (but: 1)" in why(2)
    driver.transfer.free((1, 5))
    assert "it isn't published here (but: none)" in why(1)
    driver.transfer.publish(3, {"b": torch.zeros(2, 3), "a": torch.zeros(5)}.items())
    assert "a can't be sent: the servers were told F32 (4,), it is torch.float32 (5,)" in why(3)
    driver.transfer.publish(4, {"b": torch.zeros(2, 3)}.items())
    assert "a can't be sent" in why(4)
    assert "missing" in why(4)
    assert endpoint.sent == []


def test_a_broadcast_that_hangs_ends_when_the_servers_are_left() -> None:
    hanging, again = Kept(hang=True), Kept()
    driver = Driver(hanging, again)
    driver.transfer.publish(1, tensors().items())
    driver.ask(JOIN)
    answer = driver.start(SendWeights(version=1))
    assert hanging.sending.wait(WAIT_S)
    assert isinstance(driver.ask(LeaveServers()), ServersLeft)
    failed = answer()
    assert isinstance(failed, WorkerError)
    assert "the communicator was given up meanwhile" in failed.why
    driver.ask(JOIN)
    assert isinstance(driver.ask(SendWeights(version=1)), WeightsSent)
    assert len(again.sent) == 2


def test_joining_again_gives_the_old_communicator_up() -> None:
    first, second = Kept(), Kept()
    driver = Driver(first, second)
    driver.ask(JOIN)
    assert not first.aborted.is_set()
    driver.ask(JOIN)
    assert first.aborted.is_set()
    assert not second.aborted.is_set()
    driver.transfer.close()
    assert second.aborted.is_set()
    assert isinstance(driver.ask(LeaveServers()), ServersLeft), "leaving twice is no error"


def test_an_endpoint_that_cant_be_opened_is_said_and_the_next_one_works() -> None:
    endpoint = Kept()
    driver = Driver(endpoint)
    opened, driver.transfer._open = driver.transfer._open, nccl.NcclEndpoint
    answer = driver.ask(JOIN)
    assert isinstance(answer, WorkerError)
    assert "needs GPUs" in answer.why
    driver.transfer._open = opened
    assert isinstance(driver.ask(JOIN), ServersJoined)


def test_nccl_on_the_cpu_is_refused() -> None:
    with pytest.raises(TrainerError, match="use shm or disk"):
        nccl.NcclEndpoint(JOIN, CPU)


def test_both_sides_pack_alike() -> None:
    assert nccl_swaps.PACKED == {
        "packed": True,
        "packed_buffer_size_bytes": nccl.BUFFER_BYTES,
        "packed_num_buffers": nccl.BUFFERS,
    }


@pytest.mark.slow
def test_vllm_takes_what_it_is_told() -> None:
    """vLLM's own classes read the payloads, and its functions have the names and parameters that the endpoint uses."""
    import inspect

    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    swaps = nccl_swaps.NcclSwaps(
        "10.0.0.1:29600", 1.0, None,  # type: ignore[arg-type]
        parameters=lambda: MANIFEST, serving=set, rank0=lambda: 0,
    )  # fmt: skip
    info = nccl_common.NCCLWeightTransferInitInfo(**swaps._join_info(29600, 1, 3))
    assert (info.master_address, info.master_port, info.rank_offset, info.world_size) == ("10.0.0.1", 29600, 1, 3)
    assert (info.packed, info.packed_buffer_size_bytes) == (True, packed_tensor.DEFAULT_PACKED_BUFFER_SIZE_BYTES)
    assert info.packed_num_buffers == packed_tensor.DEFAULT_PACKED_NUM_BUFFERS
    update = NCCLWeightTransferUpdateInfo(**swaps._update_info())
    assert [getattr(torch, name) for name in update.dtype_names] == [torch.bfloat16, torch.float32]
    assert update.shapes == [[2, 3], [4]]
    inspect.signature(nccl_common.stateless_init_process_group).bind("h", 1, 0, 3, 0)
    inspect.signature(packed_tensor.packed_nccl_broadcast_producer).bind(
        iterator=iter(()), group=None, src=0, post_iter_func=None, buffer_size_bytes=1, num_buffers=2
    )
    assert callable(PyNcclCommunicator.destroy)
    assert "nccl" in WeightTransferEngineFactory._registry
