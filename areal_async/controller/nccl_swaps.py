"""Swaps over NCCL: all servers of a wave and trainer rank 0 in one communicator, which load a version together.

The calls of a wave, each made of all its servers at the same time:
  leave, join      only where the communicator isn't one of exactly these servers' present lives: the old one is given
                   up, and each server joins a new one while rank 0 opens it (`JoinServers`)
  pause, start     as in any swap
  update           each server receives while rank 0 broadcasts (`SendWeights`)
  finish, resume   each server for itself

What always holds: a communicator is used only by those who formed it: after any failure, and when a server or the
trainer was started again or a server stays out of a wave, a new one is formed; there is one wave at a time; servers
learn the outcome together, so that they are told of the next version together. Before the first `start` a failure of
one leaves all others as they were, resumed; after it a server is resumed only if it said that it has received and
finished everything. What waits for a partner that failed is given up after `GRACE_S`, not at its own deadline: NCCL
would wait for ever.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from time import perf_counter
from typing import Final, Protocol, TypeAlias

from areal_async.errors import ArealError, ServerError
from areal_async.messages import AnyWire, JoinServers, LeaveServers, ParameterInfo, SendWeights, Version
from areal_async.rollout.types import RequestFailed, SwapFailed, SwapStage, SwapTimes

logger = logging.getLogger("areal_async")

GATHER_S: Final[float] = 1.0  # how long a wave waits for servers that have not asked, but evaluate or start
LEAVE_S: Final[float] = 15.0  # aborting NCCL's communicator takes vLLM 5 s at most
GRACE_S: Final[float] = 10.0  # what a call has left once a partner has failed; a broadcast of 100 GB is shorter
PORTS: Final = 8  # counted up from weights.nccl_address: one that hangs may hold its port
PACKED: Final = {"packed": True, "packed_buffer_size_bytes": 1 << 30, "packed_num_buffers": 2}
"""As `engines.deepspeed.nccl` packs them; a test compares the two."""

TORCH_NAMES: Final = {"F32": "float32", "BF16": "bfloat16"}

Info: TypeAlias = dict[str, object]
AskRank: TypeAlias = Callable[[AnyWire, str, float], Awaitable[object]]
"""(message, id, deadline in seconds) -> rank 0's answer. Raises ArealError."""


class Server(Protocol):
    """What is needed of a `VllmClient`; a restarted server has another one. All raise RequestFailed."""

    name: str

    async def world_size(self) -> int: ...
    async def leave_transfer(self) -> None: ...
    async def join_transfer(self, info: Info, deadline_s: float) -> None: ...
    async def pause(self) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, info: Info, deadline_s: float) -> None: ...
    async def finish_weight_update(self, version: Version, deadline_s: float) -> None: ...
    async def resume(self) -> None: ...


class _Member:
    """A server's part in a wave. times: seconds of the calls so far."""

    def __init__(self, server: Server, version: Version) -> None:
        self.server = server
        self.version = version
        self.times: list[float] = []
        self.outcome: asyncio.Future[SwapTimes] = asyncio.get_running_loop().create_future()

    def fail(self, stage: SwapStage, error: ArealError, *, usable: bool) -> None:
        fate = "It goes on under its old weights." if usable else "It must be restarted."
        name, version = self.server.name, self.version
        self.outcome.set_exception(
            SwapFailed(
                f"server {name} could not take version {version} over NCCL, at the stage {stage!r}: {error} {fate}",
                version=version, stage=stage, server_usable=usable,
            )
        )  # fmt: skip


class NcclSwaps:
    """The swaps of a run.

    address: HOST:PORT of the meeting point, on rank 0's host. timeout_s: of each call. parameters: what rank 0 sends,
    in this order. serving: names of the servers that live. rank0: which life of the trainer is there, None for none.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        ask: AskRank,
        *,
        parameters: Callable[[], Sequence[ParameterInfo]],
        serving: Callable[[], set[str]],
        rank0: Callable[[], int | None],
    ) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._timeout_s = timeout_s
        self._ask = ask
        self._parameters = parameters
        self._serving = serving
        self._rank0 = rank0
        self._waiting: list[_Member] = []
        self._arrived = asyncio.Event()
        self._one_wave = asyncio.Lock()
        self._joined: tuple[Server, ...] = ()  # who is in the present communicator, in the order of their ranks
        self._joined_rank0: int | None = None  # and which life of the trainer
        self._asked = 0  # of rank 0, for ids; a hanging request must not be taken for its repetition
        self._formed = 0

    async def swap(self, server: Server, version: Version) -> SwapTimes:
        """Give a server the weights of `version`, together with all others that ask for it. Raises SwapFailed."""
        member = _Member(server, version)
        self._waiting.append(member)
        self._arrived.set()
        async with self._one_wave:
            if not member.outcome.done():
                await self._gather(version)
                wave = [waiting for waiting in self._waiting if waiting.version == version]
                wave.sort(key=lambda other: (len(other.server.name), other.server.name))  # "2" before "10"
                self._waiting = [waiting for waiting in self._waiting if waiting.version != version]
                try:
                    await self._swap(wave)
                finally:
                    for left in wave:  # cancelled in the middle: nobody may wait for what doesn't come
                        left.outcome.cancel()
        return await member.outcome

    async def _gather(self, version: Version) -> None:
        try:
            async with asyncio.timeout(GATHER_S):
                while not self._serving() <= {m.server.name for m in self._waiting if m.version == version}:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            pass

    async def _swap(self, wave: list[_Member]) -> None:
        rank0 = self._rank0()
        if rank0 is None:  # nothing has begun: servers would wait for it in vain
            gone = ServerError("trainer rank 0 is not there.")
            for member in wave:
                member.fail("join", gone, usable=True)
            return
        together = self._joined_rank0 == rank0 and self._joined == tuple(member.server for member in wave)
        if not together and not await self._form(wave, rank0):
            return
        if not await self._pause(wave):
            return
        wave = await self._load(wave)
        wave = await self._stage(wave, "finish", lambda m: m.server.finish_weight_update(m.version, self._timeout_s))
        wave = await self._stage(wave, "resume", lambda m: m.server.resume())
        for member in wave:
            member.outcome.set_result(SwapTimes(*member.times))

    # ------------------------------------------------------------------------------------------------------- stages

    async def _form(self, wave: list[_Member], rank0: int) -> bool:
        """Form a communicator of these servers and this life of rank 0; False, with everybody told, if it could not
        be."""
        await self._give_up()
        servers = [member.server for member in wave]
        sizes: list[int] = []
        for member in wave:
            try:
                sizes.append(await member.server.world_size())
            except RequestFailed as error:
                self._not_formed(wave, [error if other is member else None for other in wave], error)
                return False
        await _together([server.leave_transfer() for server in servers])  # what fails here is seen when it joins
        port = self._port + self._formed % PORTS
        self._formed += 1
        offsets = [1 + sum(sizes[:index]) for index in range(len(sizes))]  # rank 0 is the trainer
        world = 1 + sum(sizes)
        *failures, failed_rank = await _together(
            [
                *(
                    server.join_transfer(self._join_info(port, offset, world), self._timeout_s)
                    for server, offset in zip(servers, offsets, strict=True)
                ),
                self._ask_rank(JoinServers(host=self._host, port=port, world=world), "join servers"),
            ]
        )
        first = next((error for error in (*failures, failed_rank) if error is not None), None)
        if first is None:
            self._joined, self._joined_rank0 = tuple(servers), rank0
            return True
        await self._give_up()
        self._not_formed(wave, failures, first)
        return False

    def _not_formed(self, wave: list[_Member], failures: Sequence[ArealError | None], first: ArealError) -> None:
        for member, failure in zip(wave, failures, strict=True):
            # one that has answered, whatever it said, isn't waiting for the others any more
            answered = failure is None or (isinstance(failure, RequestFailed) and failure.status is not None)
            member.fail("join", failure or first, usable=answered)

    async def _pause(self, wave: list[_Member]) -> bool:
        failures = await self._timed(wave, [member.server.pause() for member in wave])
        first = next((error for error in failures if error is not None), None)
        if first is None:
            return True
        refusals = await _together([member.server.resume() for member in wave])
        for member, failure, refusal in zip(wave, failures, refusals, strict=True):
            member.fail("pause", failure or first, usable=refusal is None)
        return False

    async def _load(self, wave: list[_Member]) -> list[_Member]:
        """Start and update; those that have received everything. The others are told."""
        started = await self._stage(wave, "start", lambda member: member.server.start_weight_update())
        if len(started) < len(wave):  # without one of its ranks a broadcast would hang
            for member in started:
                member.fail("start", ServerError("another server of its wave failed."), usable=False)
            await self._give_up()
            return []
        *failures, failed_rank = await self._timed(
            wave,
            [
                *(member.server.update_weights(self._update_info(), self._timeout_s) for member in wave),
                self._ask_rank(SendWeights(version=wave[0].version), f"send {wave[0].version}"),
            ],
        )
        if failed_rank is not None or any(failures):
            await self._give_up()
        for member, failure in zip(wave, failures, strict=True):
            if failure is not None:
                member.fail("update", failure, usable=False)
        return [member for member, failure in zip(wave, failures, strict=True) if failure is None]

    async def _stage(
        self, wave: list[_Member], stage: SwapStage, call: Callable[[_Member], Coroutine[object, object, None]]
    ) -> list[_Member]:
        """One call of each; those where it went well. The others are told."""
        failures = await self._timed(wave, [call(member) for member in wave])
        for member, failure in zip(wave, failures, strict=True):
            if failure is not None:
                member.fail(stage, failure, usable=False)
        return [member for member, failure in zip(wave, failures, strict=True) if failure is None]

    async def _timed(
        self, wave: list[_Member], calls: Sequence[Coroutine[object, object, None]]
    ) -> list[ArealError | None]:
        begun = perf_counter()
        failures = await _together(calls)
        for member in wave:
            member.times.append(perf_counter() - begun)
        return failures

    # ------------------------------------------------------------------------------------------------------ payloads

    def _join_info(self, port: int, rank_offset: int, world: int) -> Info:
        """Of vLLM's `NCCLWeightTransferInitInfo`."""
        where: Info = {"master_address": self._host, "master_port": port}
        return {**where, "rank_offset": rank_offset, "world_size": world, **PACKED}

    def _update_info(self) -> Info:
        """Of vLLM's `NCCLWeightTransferUpdateInfo`: what comes, in the order in which it comes."""
        parameters = self._parameters()
        return {
            "names": [parameter.name for parameter in parameters],
            "dtype_names": [TORCH_NAMES[parameter.dtype] for parameter in parameters],
            "shapes": [list(parameter.shape) for parameter in parameters],
        }

    async def _ask_rank(self, message: AnyWire, what: str, deadline_s: float | None = None) -> None:
        self._asked += 1
        await self._ask(message, f"{what}, request {self._asked}", deadline_s or self._timeout_s)

    async def _give_up(self) -> None:
        """Have rank 0 leave the communicator, also in the middle of a broadcast."""
        self._joined = ()
        try:
            await self._ask_rank(LeaveServers(), "leave servers", LEAVE_S)
        except ArealError as error:  # then it is busy dying; the next wave will hear of it
            logger.warning("trainer rank 0 could not leave the servers' communicator: %s", error)


async def _together(calls: Sequence[Coroutine[object, object, None]]) -> list[ArealError | None]:
    """Make all calls at the same time; what each failed with, or None. Once one has failed the others have `GRACE_S`.

    Those that are given up then say so, and because of what.
    """
    if not calls:
        return []
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    failures = [None if task.cancelled() else task.exception() for task in tasks]
    for error in failures:
        if error is not None and not isinstance(error, ArealError):
            raise error
    known = [error if isinstance(error, ArealError) else None for error in failures]
    cause = next((error for error in known if error is not None), None)
    given_up = ServerError(f"it was given up {GRACE_S:g} s after another one of its wave had failed: {cause}.")
    return [given_up if task.cancelled() else error for task, error in zip(tasks, known, strict=True)]
