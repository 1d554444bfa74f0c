"""Carries out what the core says about servers: has them (its own, and those by URL), shakes hands, swaps, restarts.

What always holds: a server joins only after the handshake; the first version of each of its lives is compared with the
trainer's own log-probabilities before any sample is asked of it; the end of a life is told once, as `Lost`, be it that
the process has ended, or that it lives and nothing comes of it (`rollout.pulse`), when it is ended here; a swap that
failed is reported with its stage and never repeated here, and a server whose update had begun is not resumed.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from areal_async.config import Config
from areal_async.controller.crew import Crew
from areal_async.controller.nccl_swaps import AskRank, NcclSwaps
from areal_async.controller.runfolder import RunFolder
from areal_async.controller.starting import SERVER_MEMORY, explained, wait_for_start
from areal_async.errors import ArealError, HandshakeError, ServerError, WireError
from areal_async.launch.child import Child, ChildSpec
from areal_async.launch.placement import gpus_here, place
from areal_async.launch.recipes import Recipes
from areal_async.messages import AnyEvent, Failed, Joined, Lost, ParameterInfo, Restart, Swap, Swapped, Version
from areal_async.rollout.fleet import Fleet, Live
from areal_async.rollout.handshake import handshake, probe
from areal_async.rollout.pulse import Pulse
from areal_async.rollout.types import ModelIdentity, SwapFailed, SwapTimes, WeightsDiffer
from areal_async.rollout.vllm_http import VllmClient

logger = logging.getLogger("areal_async")

HEALTH_POLL_S = 0.25  # a starting server doesn't answer at all; asking costs nothing
WATCH_S = 2.0  # between looks at a server's health; a failed request has it looked at once
WATCH_AGAIN_S = 0.5  # after a look that found it unwell
WATCH_DEADLINE_S = 10.0  # of a look: its process may be busy with thousands of answers
UNWELL = 2  # looks in a row: one may have met a full queue
PROBE_TOKENS = 64  # per prompt: enough to see another temperature, tokenizer or model
FAILURE_PAUSE_S = 1.0  # after a request failed, before its server is looked at: a dying process takes a moment
CLEANING_S = (
    15.0  # between the end of a server's process and the end of all that it had started; then the cause is known
)
STOP_GRACE_S = 1.0  # a server has nothing to save

# Largest mean |difference| between a server's log-probability of a token and the trainer's. In float32 they agree to
# 1e-6 where all is right; in bfloat16 unlikely tokens differ by some tenths, the mean by some thousandths.
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
# The same where the trainer holds other weights than the server by now, some steps further: what steps of training do
# to a policy is below it, another model or tokenizer far above.
MOVED_ON_TOLERANCE = 0.5

ProbeTrainer = Callable[[npt.NDArray[np.int32], str], Awaitable[tuple[npt.NDArray[np.float32], Version]]]
"""Log-probabilities of a sequence under the trainer's weights, and the version of these."""


async def start_server(
    stack: AsyncExitStack,
    config: Config,
    recipes: Recipes,
    *,
    name: str,
    model: str,
    socket: Path,
    stderr: Path,
    cores: str | None,
    gpus: str | None = None,
    identity: ModelIdentity,
) -> tuple[VllmClient, Child]:
    """Start one vLLM server and shake hands. `stack` stops it, at the latest. Errors: LaunchError, HandshakeError."""
    server = config.server
    argv, env = recipes.server(
        uds=str(socket),
        model=model,
        dtype=config.model.dtype,
        cores=cores,
        kv_space_gib=server.kv_cache_gib,
        enforce_eager=server.enforce_eager,
        max_model_len=identity.context_tokens,
        stream_interval=server.stream_interval,
        max_num_seqs=server.max_num_seqs,
        seed=config.seed,
        gpus=gpus,
        tensor_parallel=server.tensor_parallel,
        gpu_memory=server.gpu_memory if gpus is not None else None,
        backend=identity.backend,
        extra=server.extra_args,
    )
    child = await Child.start(ChildSpec(name=f"server {name}", argv=tuple(argv), env=env, stderr_path=stderr))
    stack.push_async_callback(child.stop, STOP_GRACE_S)
    client = await stack.enter_async_context(VllmClient(name, f"unix:{socket}"))
    try:
        deadline = "server.start_timeout_s"
        await wait_for_start(child, _answering(client), server.start_timeout_s, deadline, SERVER_MEMORY)
        await handshake(client, identity)
    except ArealError:
        await child.stop(STOP_GRACE_S)  # the run may go on without it
        raise
    return client, child


async def _answering(client: VllmClient) -> None:
    """Return when the server says that it is well."""
    while True:
        with contextlib.suppress(ServerError):
            await client.health()
            return
        await asyncio.sleep(HEALTH_POLL_S)


class _Life:
    """One life of a server, from its handshake to its loss. probed: its numbers have been compared with the trainer's.
    swapping: a swap is under way, which has deadlines of its own. silent_s: for how long no token of its requests came.
    child: None for one by URL."""

    def __init__(self, live: Live, child: Child | None) -> None:
        self.live = live
        self.child = child
        self.probed = False
        self.swapping = False
        self.silent_s = 0.0

    @property
    def client(self) -> VllmClient:
        return self.live.client

    async def close(self) -> None:
        """End the process, if it is ours, and the connections; nothing if that is done."""
        if self.child is not None:
            await self.child.stop(STOP_GRACE_S)
        await self.client.close()


class Servers:
    """The rollout servers of a run: `0`, `1`, … its own, then those by URL. fleet: as the rollouts see them.

    clients: by name, from the handshake on, also of servers that are lost now.
    """

    def __init__(
        self,
        config: Config,
        recipes: Recipes,
        crew: Crew,
        identity: ModelIdentity,
        folder: RunFolder,
        *,
        probe_prompts: Callable[[], list[list[int]]],
        probe_trainer: ProbeTrainer,
        take: Callable[[AnyEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._recipes = recipes
        self._crew = crew
        self._identity = identity
        self._folder = folder
        self._probe_prompts = probe_prompts
        self._probe_trainer = probe_trainer
        self._take = take
        self._now = now
        self._nccl: NcclSwaps | None = None
        self._lives: dict[str, _Life] = {}
        self._stack = AsyncExitStack()
        self.fleet = Fleet()
        self.clients: dict[str, VllmClient] = {}

    # ---------------------------------------------------------------------------------------------- starts and ends

    def use_nccl(
        self,
        address: str,
        ask: AskRank,
        *,
        parameters: Callable[[], Sequence[ParameterInfo]],
        rank0: Callable[[], int | None],
    ) -> None:
        """Have servers swap together, from GPU to GPU. address: of the meeting point. Others: see `NcclSwaps`."""
        self._nccl = NcclSwaps(
            address, self._config.weights.swap_timeout_s, ask,
            parameters=parameters, serving=self._serving, rank0=rank0,
        )  # fmt: skip

    def _serving(self) -> set[str]:
        return {name for name, life in self._lives.items() if not life.live.gone.is_set()}

    def waits(self) -> str:
        """Which servers give no token though they have requests, and since when, for people; "" if all do."""
        silent = {name: life.silent_s for name, life in self._lives.items() if not life.live.gone.is_set()}
        return ", ".join(f"server {name} has given no token for {s:g} s" for name, s in silent.items() if s)

    def addresses(self) -> dict[str, str]:
        """Where servers that have joined are asked, by name."""
        return {name: client.address for name, client in self.clients.items()}

    def names(self) -> list[str]:
        return [str(number) for number in range(self._config.own_servers + len(self._config.rollout.urls))]

    async def start(self, stack: AsyncExitStack, name: str) -> None:
        """The first life of a server; `stack` ends it and those after it, whatever happens. Errors: LaunchError,
        HandshakeError."""
        self._stack = stack
        await self._begin(name)
        self._take(Joined(at=self._now(), peer="server", id=name))

    def restart(self, command: Restart) -> None:
        logger.warning("server %s is started again", command.id)
        self._crew.start(self._restart(command.id), f"restart of server {command.id}")

    async def _restart(self, name: str) -> None:
        try:
            if old := self._lives.get(name):
                self.fleet.lose(old.live, "it is started again")
                await old.close()
            await self._begin(name)
        except (ArealError, OSError) as error:
            self._take(Lost(at=self._now(), peer="server", id=name, why=f"it could not be started again: {error}"))
            return
        self._take(Joined(at=self._now(), peer="server", id=name))

    async def _begin(self, name: str) -> None:
        by_url = int(name) - self._config.own_servers
        if by_url < 0:
            client, child = await self._start_child(name)
            life = _Life(self.fleet.join(client), child)
            self._crew.start(self._watch_child(life, child), f"watch server {name}")
        else:
            client = await self._connect(name, self._config.rollout.urls[by_url])
            life = _Life(self.fleet.join(client), None)
        self._lives[name], self.clients[name] = life, client
        self._crew.start(self._watch_health(life), f"watch the health of server {name}")
        self._crew.start(self._watch_work(life), f"watch the work of server {name}")

    async def close(self) -> None:
        """End all of them at the same time."""
        await asyncio.gather(*(life.close() for life in self._lives.values()))

    async def _start_child(self, name: str) -> tuple[VllmClient, Child]:
        config, number = self._config, int(name)
        cores = config.server.cores.split("|") if config.server.cores else [None] * config.own_servers
        socket = self._folder.socket(f"server-{name}")
        socket.unlink(missing_ok=True)  # of an earlier life, which was killed: vLLM can't listen on it again
        return await start_server(
            self._stack,
            config,
            self._recipes,
            name=name,
            model=config.model.path,
            socket=socket,
            stderr=self._folder.stderr(f"server-{name}"),
            cores=cores[number % len(cores)],
            gpus=place(config, gpus_here()).servers[number],
            identity=self._identity,
        )

    async def _connect(self, name: str, url: str) -> VllmClient:
        client = await self._stack.enter_async_context(VllmClient(name, url))
        try:
            async with asyncio.timeout(self._config.server.start_timeout_s):
                try:
                    await client.health()
                except ServerError as error:
                    logger.warning("%s; waiting for it", error)
                    await _answering(client)
            await handshake(client, self._identity)
        except TimeoutError as error:
            await client.close()
            raise HandshakeError(
                f"server {name} ({url}) has not been well for server.start_timeout_s = "
                f"{self._config.server.start_timeout_s:g} s; start it as docs/servers.md says, or take it out of "
                f"rollout.urls"
            ) from error
        except HandshakeError:
            await client.close()
            raise
        return client

    async def _watch_child(self, life: _Life, child: Child) -> None:
        await child.wait()
        self._lose(life, explained(child, SERVER_MEMORY))

    async def _watch_health(self, life: _Life) -> None:
        """Looked at now and then, and at once when a request failed there. A child, too: vLLM whose engine died refuses
        connections and yet lives on for as long as somebody waits for it to answer, be it a swap."""
        unwell, why = 0, ""
        while not life.live.gone.is_set() and unwell < UNWELL:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_AGAIN_S if unwell else WATCH_S):
                    await (life.live.gone if unwell else life.live.suspected).wait()
            life.live.suspected.clear()
            try:
                await life.client.health(WATCH_DEADLINE_S)
            except ServerError as error:
                late = isinstance(error.__cause__, TimeoutError)  # a child that lives may be busy for long: see pulse
                unwell, why = 0 if late and life.child is not None else unwell + 1, str(error)
            else:
                unwell = 0
        if life.child is None:
            self._lose(life, why)
        elif not await self._is_gone(life):  # else its end is told, with the cause
            self._lose(life, f"{why}. {life.child.why()}")
            await life.close()

    async def _watch_work(self, life: _Life) -> None:
        """Of a server that lives: whether anything comes of its requests."""
        pulse, client = Pulse(self._config.server.stall_timeout_s), life.client
        why = ""
        while not why:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pulse.look_s):
                    await life.live.gone.wait()
            if life.live.gone.is_set():
                return
            if life.swapping:
                pulse.rest()
            else:
                why = pulse.look(client.running, client.ended, client.tokens, client.errors)
            life.silent_s = pulse.silent_s
        output = f". {life.child.why()}" if life.child is not None else ""
        self._lose(life, f"{why}{output}")
        await life.close()

    def _lose(self, life: _Life, why: str) -> None:
        """Tell that a life has ended, unless it was told or was ended by us."""
        if self.fleet.lose(life.live, why):
            self._take(Lost(at=self._now(), peer="server", id=life.live.name, why=why))

    async def _is_gone(self, life: _Life) -> bool:
        """After a call failed: whether the server is lost. A dying process takes a moment."""
        life.live.suspected.set()
        for patience_s in (FAILURE_PAUSE_S, CLEANING_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await life.live.gone.wait()
            if life.child is None or life.child.is_running:
                break
        return life.live.gone.is_set()

    async def has_died(self, name: str) -> bool:
        """After a request failed: whether its server is gone. Then `Lost` tells of it, with the cause."""
        life = self._lives.get(name)
        return life is None or await self._is_gone(life)

    # -------------------------------------------------------------------------------------------------------- swaps

    def swap(self, command: Swap) -> None:
        self._crew.start(self._swap(command), f"swap of server {command.server} to version {command.version}")

    async def _swap(self, command: Swap) -> None:
        life = self._lives.get(command.server)
        if life is None or life.live.gone.is_set():
            return  # `Lost` is told, or a restart is under way
        self.fleet.loading(life.live, command.version)
        life.swapping = True
        try:
            times = await self._load(life, command)
            if not life.probed:
                await self._compare(life.client, command)
        except (WeightsDiffer, HandshakeError) as error:
            await self._reject(life, error)
        except SwapFailed as error:
            if error.server_usable:
                self._failed("swap", command.server, error)
            elif not await self._is_gone(life):
                self._lose(life, str(error))
                await life.close()
        except (ServerError, WireError) as error:  # before the swap, or in the comparison after it
            if not await self._is_gone(life):
                self._failed("swap", command.server, error)
        else:
            life.probed = True
            self.fleet.swapped(life.live, command.version)
            self._take(
                Swapped(
                    at=self._now(),
                    server=command.server,
                    version=command.version,
                    branch=command.branch,
                    pause_s=times.total_s,
                )
            )
        finally:
            life.swapping = False

    async def _load(self, life: _Life, command: Swap) -> SwapTimes:
        if self._nccl is not None:
            return await self._nccl.swap(life.client, command.version)
        if self._config.weights.transport == "shm" and not os.path.exists(command.location):  # noqa: ASYNC240 (memory)
            raise SwapFailed(  # nothing has begun yet: the server needn't pay for the trainer's death
                f"server {command.server} can't take version {command.version}: {command.location} is gone, and with "
                f"it the trainer that had published it. The server goes on under its old weights.",
                version=command.version, stage="pause", server_usable=True,
            )  # fmt: skip
        info = {"path": command.location}
        if not life.probed:
            await life.client.check_weights(info)
        return await life.client.swap(command.version, info, self._config.weights.swap_timeout_s)

    async def _reject(self, life: _Life, error: ServerError) -> None:
        """Its numbers are not the trainer's: it is given up, and another start wouldn't mend it."""
        if self.fleet.lose(life.live, str(error)):
            self._failed("server", life.live.name, error)
        await life.close()

    def _failed(self, of: Literal["swap", "server"], name: str, error: ArealError) -> None:
        self._take(Failed(at=self._now(), of=of, id=name, why=str(error)))

    async def _compare(self, client: VllmClient, command: Swap) -> None:
        """The server's log-probabilities of its own tokens against the trainer's: the same model, the same numbers."""
        config, differences, versions = self._config, [], set()
        prompts = [np.asarray(prompt, np.int32) for prompt in self._probe_prompts()]
        room = [min(PROBE_TOKENS, self._identity.context_tokens - len(prompt)) for prompt in prompts]
        temperature = config.rollout.temperature
        answers = await asyncio.gather(
            *(probe(client, prompt, n, temperature) for prompt, n in zip(prompts, room, strict=True))
        )
        for number, (prompt, (drawn, logprobs)) in enumerate(zip(prompts, answers, strict=True)):
            name = f"probe of server {client.name} after its swap at {self._now():.3f} s, {number}"
            expected, version = await self._probe_trainer(np.concatenate([prompt, drawn]), name)
            differences.append(np.abs(expected[len(prompt) :] - logprobs))
            versions.add(version)
        mean, largest = float(np.concatenate(differences).mean()), float(np.concatenate(differences).max())
        same = versions == {command.version}
        tolerance = PROBE_TOLERANCE[config.model.dtype] if same else MOVED_ON_TOLERANCE
        if not mean <= tolerance:
            trainer = "with the same weights" if same else f"the trainer is at version {max(versions)} already, but"
            raise HandshakeError(
                f"server {client.name} ({client.address}) can't be used: {trainer} (version "
                f"{command.version}) its log-probabilities differ from the trainer's by {mean:.2g} on average (at "
                f"most {largest:.2g}; {tolerance:g} on average is allowed in {config.model.dtype}). Nothing was "
                f"trained with it. Usual causes: another temperature or logits processor at the server "
                f"(--logprobs-mode, --generation-config), another dtype, another model"
            )
