"""One swap over NCCL in the middle of answers, on a machine with two GPUs: a vLLM server on one, a trainer rank on the
other, through the same parts as in a run.

    python tools/gpu/swap_nccl.py                                  # the quickstart's model, GPUs 0 and 1; two minutes
    python tools/gpu/swap_nccl.py --model DIR --server-gpu 0 --trainer-gpu 1
    python tools/gpu/swap_nccl.py --transport shm --cpu            # the same through a file, without a GPU: tries the
                                                                   # script itself

NCCL wants a GPU for each member: on a machine with one it says "Duplicate GPU detected". The environment is the one of
`pip install areal-async[gpu]`.

It must print a line for each of these, and at the end `all good` (exit code 0); anything else is a failure (code 1):
  1  join            seconds until server and rank are in one communicator (first time some seconds, NCCL's start)
  2  version 0       seconds of pause, start, update, finish, resume; the server's log-probabilities of its own tokens
                     agree with the trainer's: mean difference ≤ 0.05 in bfloat16 (1e-4 in float32)
  3  step 0          the trainer has trained on these answers; version 1 is published as nccl:1
  4  version 1       swapped in the middle of 32 answers: each of them begins with tokens of version 0 and ends with
                     tokens of version 1, none was lost or cut
  5  after the swap  tokens of version 1 agree with the trainer at version 1 as in line 2, so the update has reached
                     every layer and the KV cache was rebuilt; tokens of version 0 must differ from it by more than
                     twice as much (on the CPU through a file: 3e-6 against 0.36)
  6  beside a step   version 1 is sent again while the trainer trains step 1: the sending ended before the step did,
                     or (a step shorter than a swap) both ended well
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np

from areal_async.controller.nccl_swaps import NcclSwaps
from areal_async.controller.starting import wait_for_start
from areal_async.errors import ServerError
from areal_async.launch.child import Child, ChildSpec
from areal_async.launch.recipes import trainer_command, vllm_command
from areal_async.messages import (
    AnyWire,
    Hello,
    Minibatch,
    ParameterInfo,
    Probe,
    Publish,
    Published,
    StepDone,
    Train,
    TrainerSpec,
    TrainSample,
)
from areal_async.rollout.types import Completion, Sampling, SwapTimes
from areal_async.rollout.vllm_http import VllmClient
from areal_async.wire.arrays import Array
from areal_async.wire.router import Router

ROOT = Path(__file__).resolve().parents[2]
START_S = 600.0
ASK_S = 300.0
ANSWERS = 32
TOKENS = 1024  # an answer; it ends by nothing else, and takes seconds, whatever stalls for less
UNDER_WAY = 16  # tokens that each answer has when the swap begins
CONTEXT = 1280
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
LR = 3e-4  # large: version 1 has to be told from version 0


class Failed(Exception):
    """What must hold doesn't."""


def must(true: bool, what: str) -> None:
    if not true:
        raise Failed(what)


class Machine:
    """Server and rank. parameters: what the rank publishes."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, router: Router, hellos: "asyncio.Queue[Hello]"
    ) -> None:
        self.options = options
        self.folder = folder
        self.router = router
        self.hellos = hellos
        self.parameters: tuple[ParameterInfo, ...] = ()
        self.client = VllmClient("0", f"unix:{folder}/server.sock")
        self.swaps = NcclSwaps(
            options.address, ASK_S, self.ask_rank,
            parameters=lambda: self.parameters, serving=lambda: {"0"}, rank0=lambda: 0,
        )  # fmt: skip

    async def start(self, stack: AsyncExitStack, secret: str) -> None:
        options = self.options
        spec_path = self.folder / "spec.json"
        spec_path.write_bytes(msgspec.json.encode(spec_of(options)))
        argv, env = vllm_command(
            uds=f"{self.folder}/server.sock", model=str(options.model), dtype=options.dtype, kv_space_gib=1,
            cores=options.server_cores,
            enforce_eager=True, max_model_len=CONTEXT, stream_interval=8, max_num_seqs=ANSWERS, seed=1,
            gpus=None if options.cpu else options.server_gpu, gpu_memory=None if options.cpu else 0.5,
            backend="nccl" if options.transport == "nccl" else "areal_file", extra=longer_context(options.model),
        )  # fmt: skip
        server = await self._child(stack, "server", argv, env)
        argv, env = trainer_command(
            connect=self.router.address, spec=str(spec_path), ranks=1, cores=options.trainer_cores,
            gpus=None if options.cpu else options.trainer_gpu,
        )  # fmt: skip
        trainer = await self._child(stack, "trainer", argv, env | {"AREAL_ASYNC_SECRET": secret})
        await stack.enter_async_context(self.client)
        await wait_for_start(trainer, self._joined(), START_S, "START_S")
        await wait_for_start(server, self._answering(), START_S, "START_S")

    async def _joined(self) -> None:
        self.parameters = (await self.hellos.get()).parameters

    async def _answering(self) -> None:
        while True:
            with contextlib.suppress(ServerError):
                return await self.client.health()
            await asyncio.sleep(0.5)

    async def _child(self, stack: AsyncExitStack, name: str, argv: Sequence[str], env: dict[str, str]) -> Child:
        prefix = f"areal-{self.options.token}" if name == "trainer" else None
        output = self.options.output / f"{name}.log"
        child = await Child.start(ChildSpec(name=name, argv=argv, env=env, stderr_path=output, shm_prefix=prefix))
        stack.push_async_callback(child.stop, 2.0)
        return child

    async def ask(self, message: AnyWire, id: str, arrays: Sequence[Array] = ()) -> tuple[AnyWire, list[Array]]:
        return await self.router.request("trainer.0", message, arrays, id=id, deadline_s=ASK_S)

    async def ask_rank(self, message: AnyWire, id: str, deadline_s: float) -> AnyWire:
        answer, _ = await self.router.request("trainer.0", message, id=id, deadline_s=deadline_s)
        return answer

    async def publish(self, version: int) -> str:
        answer, _ = await self.ask(Publish(version=version, branch=0), f"publish {version}")
        assert isinstance(answer, Published)
        return answer.location

    async def swap(self, version: int, location: str) -> SwapTimes:
        if self.options.transport == "nccl":
            return await self.swaps.swap(self.client, version)
        return await self.client.swap(version, {"path": location}, ASK_S)

    async def answers(self, seed: int, tokens: int = TOKENS, ids: Sequence[str] = ()) -> list[Completion]:
        # no `min_tokens`: it would take the end of sequence out of the distribution, and the trainer doesn't
        sampling = Sampling(temperature=1.0, max_tokens=tokens, stop_token_ids=())
        return await asyncio.gather(
            *(
                self.client.generate(
                    prompt_of(number), msgspec.structs.replace(sampling, seed=seed + number), id, ASK_S
                )
                for number, id in enumerate(ids or [uuid.uuid4().hex for _ in range(ANSWERS)])
            )
        )

    async def trainers_view(self, number: int, answer: Completion, id: str) -> np.ndarray:
        """The trainer's log-probabilities of the answer's tokens."""
        sequence = np.concatenate([prompt_of(number), answer.token_ids]).astype(np.int32)
        _, [logprobs] = await self.ask(Probe(id=id), id, [sequence])
        return np.asarray(logprobs[-len(answer.token_ids) :])


def prompt_of(number: int) -> np.ndarray:
    return np.arange(2, 10, dtype=np.int32) + number % 8


def cores_on_the_cpu() -> tuple[str | None, str | None]:
    """Of server and trainer. A server that had all of them would compute without a pause: this script, which has to
    act in the middle of its answers, has been seen to wait for a core for six seconds."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    return (",".join(cores[:-1]), cores[-1]) if len(cores) > 1 else (None, None)


def longer_context(model: Path) -> list[str]:
    """The quickstart's model is made for 256 tokens; its arithmetic goes on behind them, in server and trainer."""
    made_for = msgspec.json.decode((model / "config.json").read_bytes())["max_position_embeddings"]
    return [] if made_for >= CONTEXT else ["--hf-overrides", f'{{"max_position_embeddings": {CONTEXT}}}']


def spec_of(options: argparse.Namespace) -> TrainerSpec:
    return TrainerSpec(
        model_path=str(options.model), dtype=options.dtype, publish_dtype=options.dtype, temperature=1.0, seed=1,
        zero_stage=0, lr=LR, warmup_steps=0, weight_decay=0.0, betas=(0.9, 0.95), adam_eps=1e-8, max_grad_norm=1.0,
        loss="decoupled_ppo", clip_low=0.2, clip_high=0.2, dual_clip=None, weight_cap=None, over_cap="mask",
        aggregation="token_mean", kl_coef=0.0, kl_estimator="k3", kl_in="loss", reference_path=str(options.model),
        lr_schedule="constant", min_lr_share=0.0, updates=100, gradient_checkpointing=False,
        transport=options.transport, publish_folder="/dev/shm", shm_prefix=f"areal-{options.token}",
    )  # fmt: skip


def batch_of(answers: Sequence[Completion], step: int) -> tuple[Train, list[Array]]:
    """All answers as one minibatch; every second one was good."""
    samples = tuple(TrainSample(f"{n}.0", 0, 1.0 if n % 2 else -1.0) for n in range(len(answers)))
    rows = tuple((number,) for number in range(len(answers)))
    tokens = sum(len(answer.token_ids) for answer in answers)
    train = Train(
        step=step, branch=0, groups=tuple(range(len(answers))), samples=samples,
        minibatches=(Minibatch(float(tokens), (rows,)),),
    )  # fmt: skip
    ids: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    versions: list[np.ndarray] = []
    for number, answer in enumerate(answers):
        prompt, length = prompt_of(number), len(answer.token_ids)
        ids += [prompt, answer.token_ids]
        masks += [np.zeros(len(prompt)), np.ones(length)]
        logprobs += [np.zeros(len(prompt)), answer.logprobs]
        versions += [np.full(len(prompt), -1), answer.versions]
    arrays: list[Array] = [
        np.array([len(prompt_of(n)) + len(answer.token_ids) for n, answer in enumerate(answers)], np.int32),
        np.concatenate(ids).astype(np.int32),
        np.concatenate(masks).astype(np.uint8),
        np.concatenate(logprobs).astype(np.float32),
        np.concatenate(versions).astype(np.int32),
    ]
    return train, arrays


def shown(times: SwapTimes) -> str:
    return ", ".join(f"{name[:-2]} {seconds:.3f}" for name, seconds in times._asdict().items()) + " s"


async def try_it(machine: Machine) -> None:
    tolerance = TOLERANCE[machine.options.dtype]
    location = await machine.publish(0)
    began = time.perf_counter()
    times = await machine.swap(0, location)
    print(f"1  join            {time.perf_counter() - began - times.total_s:.2f} s")
    first = await machine.answers(seed=100, tokens=64)
    views = [await machine.trainers_view(n, answer, f"first {n}") for n, answer in enumerate(first)]
    mean = float(np.mean([np.abs(v - a.logprobs).mean() for v, a in zip(views, first, strict=True)]))
    largest = float(np.max([np.abs(v - a.logprobs).max() for v, a in zip(views, first, strict=True)]))
    print(f"2  version 0       {shown(times)}; |log-prob difference|: mean {mean:.2g}, max {largest:.2g}")
    must(mean <= tolerance, f"server and trainer differ by {mean:.2g} on average under the same weights")

    train, arrays = batch_of(first, 0)
    done, _ = await machine.ask(train, "train 0", arrays)
    assert isinstance(done, StepDone)
    must(not done.skipped, f"step 0 was skipped: {done.skipped}")
    location = await machine.publish(1)
    print(f"3  step 0          grad norm {done.metrics['grad_norm']:.3g}, published as {location}")
    ids = [uuid.uuid4().hex for _ in range(ANSWERS)]
    answering = asyncio.create_task(machine.answers(seed=500, ids=ids))
    while not answering.done() and min(map(machine.client.tokens_so_far, ids)) < UNDER_WAY:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    must(not answering.done(), "the answers were over before the swap began: take a larger model, or more tokens")
    times = await machine.swap(1, location)
    mixed = await answering
    shares = [float((answer.versions == 1).mean()) for answer in mixed]
    print(
        f"4  version 1       {shown(times)}; tokens of version 1: {min(shares):.0%} to {max(shares):.0%} of an answer"
    )
    must(all(len(answer.token_ids) == TOKENS for answer in mixed), "an answer was cut")
    must(all(set(answer.versions.tolist()) == {0, 1} for answer in mixed), "an answer has not both versions")
    must(all((np.diff(answer.versions) >= 0).all() for answer in mixed), "a version came back")
    await compare(machine, mixed, tolerance)
    await beside_a_step(machine, mixed, location)


async def compare(machine: Machine, mixed: Sequence[Completion], tolerance: float) -> None:
    """Tokens of version 1 against the trainer at version 1; those of version 0 differ from it, as they must."""
    new, old = [], []
    for number, answer in enumerate(mixed):
        view = await machine.trainers_view(number, answer, f"mixed {number}")
        difference = np.abs(view - answer.logprobs)
        new.append(difference[answer.versions == 1])
        old.append(difference[answer.versions == 0])
    mean, largest, before = np.concatenate(new).mean(), np.concatenate(new).max(), np.concatenate(old).mean()
    print(
        f"5  after the swap  |log-prob difference| to the trainer at version 1: tokens of version 1 mean {mean:.2g}, "
        f"max {largest:.2g}; tokens of version 0 mean {before:.2g}"
    )
    must(
        mean <= tolerance, "tokens after the swap are not the trainer's: not every layer was updated, or a stale cache"
    )
    must(before > 2 * mean, "version 0 and version 1 can't be told apart; nothing is shown")


async def beside_a_step(machine: Machine, mixed: Sequence[Completion], location: str) -> None:
    train, arrays = batch_of(mixed, 1)
    ended: dict[str, float] = {}

    async def step() -> None:
        done, _ = await machine.ask(train, "train 1", arrays)
        assert isinstance(done, StepDone)
        ended["step"] = time.perf_counter()

    async def sending() -> None:
        await machine.swap(1, location)
        ended["swap"] = time.perf_counter()

    began = time.perf_counter()
    await asyncio.gather(step(), sending())
    print(
        f"6  beside a step   swap {ended['swap'] - began:.3f} s, step {ended['step'] - began:.3f} s, at the same time"
    )


async def run(options: argparse.Namespace) -> None:
    hellos: asyncio.Queue[Hello] = asyncio.Queue()
    secret = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="aa-") as short:
        address = f"ipc://{short}/wire.sock"
        router = Router(address, secret, hellos.put_nowait, lambda *lost: print(lost, file=sys.stderr))
        async with router, AsyncExitStack() as stack:
            machine = Machine(options, Path(short), router, hellos)
            await machine.start(stack, secret)
            await try_it(machine)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "configs" / "quickstart" / "model")
    parser.add_argument(
        "--dtype", choices=sorted(TOLERANCE), default=None, help="default: bfloat16; float32 with --cpu"
    )
    parser.add_argument("--transport", choices=["nccl", "shm"], default="nccl")
    parser.add_argument("--server-gpu", default="0")
    parser.add_argument("--trainer-gpu", default="1")
    parser.add_argument("--cpu", action="store_true", help="no GPU at all")
    parser.add_argument("--address", default="127.0.0.1:29600", help="meeting point of the communicator")
    parser.add_argument("--output", type=Path, default=None, help="folder for what server and trainer print")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.cpu else "bfloat16")
    options.server_cores, options.trainer_cores = cores_on_the_cpu() if options.cpu else (None, None)
    options.model = options.model.resolve()
    options.token = uuid.uuid4().hex[:8]
    options.output = options.output or Path(tempfile.mkdtemp(prefix="swap-"))
    options.output.mkdir(parents=True, exist_ok=True)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        asyncio.run(run(options))
    except Exception as error:
        print(f"FAILED: {type(error).__name__}: {error}\nserver and trainer have written to {options.output}")
        return 1
    print("all good")
    return 0


if __name__ == "__main__":
    sys.exit(main())
