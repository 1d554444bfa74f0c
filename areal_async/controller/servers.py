"""Carries out what the core says about servers: starts them, shakes hands, swaps their weights.

What always holds: a server joins only after the handshake; its first version is checked against the trainer's own
log-probabilities before any sample is asked of it; a swap that failed is reported with its stage, never repeated here.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from areal_async.config import Config
from areal_async.controller.crew import Crew
from areal_async.controller.starting import wait_for_start
from areal_async.errors import HandshakeError, ServerError, WireError
from areal_async.launch.child import Child, ChildSpec
from areal_async.launch.recipes import Recipes
from areal_async.messages import AnyEvent, Failed, Joined, Lost, Swap, Swapped
from areal_async.rollout.handshake import handshake, probe
from areal_async.rollout.types import ModelIdentity
from areal_async.rollout.vllm_http import VllmClient

HEALTH_POLL_S = 0.25  # a starting server doesn't answer at all; asking costs nothing
PROBE_TOKENS = 64  # per prompt: enough to see another temperature, tokenizer or model
FAILURE_PAUSE_S = 1.0  # after a request failed, before its server is looked at: a dying process takes a moment
STOP_GRACE_S = 1.0  # a server has nothing to save

# Largest mean |difference| between a server's log-probability of a token and the trainer's. In float32 they agree to
# 1e-6 where all is right; in bfloat16 unlikely tokens differ by some tenths, the mean by some thousandths.
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

ProbeTrainer = Callable[[npt.NDArray[np.int32], str], Awaitable[npt.NDArray[np.float32]]]


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
    identity: ModelIdentity,
) -> tuple[VllmClient, Child]:
    """Start one vLLM server and shake hands. `stack` stops it. Errors: LaunchError, HandshakeError."""
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
        extra=server.extra_args,
    )
    child = await Child.start(ChildSpec(name=f"server {name}", argv=tuple(argv), env=env, stderr_path=stderr))
    stack.push_async_callback(child.stop, STOP_GRACE_S)
    client = await stack.enter_async_context(VllmClient(name, f"unix:{socket}"))
    await wait_for_start(child, _answering(client), server.start_timeout_s)
    await handshake(client, identity)
    return client, child


async def _answering(client: VllmClient) -> None:
    """Return when the server says that it is well."""
    while True:
        with contextlib.suppress(ServerError):
            await client.health()
            return
        await asyncio.sleep(HEALTH_POLL_S)


class Servers:
    """The rollout servers of a run. clients: by name, from the handshake on."""

    def __init__(
        self,
        config: Config,
        recipes: Recipes,
        crew: Crew,
        identity: ModelIdentity,
        *,
        probe_prompts: Callable[[], list[list[int]]],
        probe_trainer: ProbeTrainer,
        paused: Callable[[int], None],
        take: Callable[[AnyEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._recipes = recipes
        self._crew = crew
        self._identity = identity
        self._probe_prompts = probe_prompts
        self._probe_trainer = probe_trainer
        self._paused = paused
        self._take = take
        self._now = now
        self._probed: set[str] = set()
        self.clients: dict[str, VllmClient] = {}
        self._children: dict[str, Child] = {}

    def names(self) -> list[str]:
        return [str(number) for number in range(self._config.own_servers)]

    async def start(self, stack: AsyncExitStack, name: str, socket: Path, stderr: Path) -> None:
        """Start one server and have it join. Errors: LaunchError, HandshakeError."""
        cores = self._config.server.cores
        parts = cores.split("|") if cores else [None] * self._config.own_servers
        number = self.names().index(name)
        client, child = await start_server(
            stack,
            self._config,
            self._recipes,
            name=name,
            model=self._config.model.path,
            socket=socket,
            stderr=stderr,
            cores=parts[number % len(parts)],
            identity=self._identity,
        )
        self.clients[name] = client
        self._children[name] = child
        self._crew.start(self._watch(name, child), f"watch server {name}")
        self._take(Joined(at=self._now(), peer="server", id=name))

    async def _watch(self, name: str, child: Child) -> None:
        await child.wait()
        self._take(Lost(at=self._now(), peer="server", id=name, why=child.why()))

    async def has_died(self, name: str) -> bool:
        """After a request failed: whether the server's process is gone. Then `Lost` tells of it, with the cause; what
        failed because of it need not be told."""
        await asyncio.sleep(FAILURE_PAUSE_S)
        try:
            os.kill(self._children[name].pid, 0)
        except ProcessLookupError:
            return True
        return False

    def swap(self, command: Swap) -> None:
        self._crew.start(self._swap(command), f"swap of server {command.server} to version {command.version}")

    async def _swap(self, command: Swap) -> None:
        client = self.clients[command.server]
        info = {"path": command.location}
        self._paused(1)
        try:
            if command.server not in self._probed:
                await client.check_weights(info)
            times = await client.swap(command.version, info, self._config.weights.swap_timeout_s)
        except ServerError as error:
            if not await self.has_died(command.server):
                self._take(Failed(at=self._now(), of="swap", id=command.server, why=str(error)))
            return
        finally:
            self._paused(-1)
        try:
            if command.server not in self._probed:
                await self._compare(client, command)
        except (ServerError, WireError) as error:
            self._take(Failed(at=self._now(), of="swap", id=command.server, why=str(error)))
            return
        self._probed.add(command.server)
        self._take(
            Swapped(
                at=self._now(),
                server=command.server,
                version=command.version,
                branch=command.branch,
                pause_s=times.total_s,
            )
        )

    async def _compare(self, client: VllmClient, command: Swap) -> None:
        """The server's log-probabilities of its own tokens against the trainer's: the same model, the same numbers."""
        temperature = self._config.rollout.temperature
        differences = []
        for number, prompt in enumerate(self._probe_prompts()):
            n = min(PROBE_TOKENS, self._identity.context_tokens - len(prompt))
            drawn, logprobs = await probe(client, np.asarray(prompt, np.int32), n, temperature)
            sequence = np.concatenate([np.asarray(prompt, np.int32), drawn])
            expected = await self._probe_trainer(sequence, f"probe of server {client.name}, {number}")
            differences.append(np.abs(expected[len(prompt) :] - logprobs))
        mean, largest = float(np.concatenate(differences).mean()), float(np.concatenate(differences).max())
        tolerance = PROBE_TOLERANCE[self._config.model.dtype]
        if not mean <= tolerance:
            raise HandshakeError(
                f"server {client.name} ({client.address}) can't be used: with the same weights (version "
                f"{command.version}) its log-probabilities differ from the trainer's by {mean:.2g} on average (at "
                f"most {largest:.2g}; {tolerance:g} on average is allowed in {self._config.model.dtype}). Nothing was "
                f"trained with it. Usual causes: another temperature or logits processor at the server "
                f"(--logprobs-mode, --generation-config), another dtype, another model"
            )
