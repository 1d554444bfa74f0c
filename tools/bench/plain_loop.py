"""The loop that a person writes without areal-async: generate a batch, train it, give the server the weights, again.

    taskset -c 1 python tools/bench/plain_loop.py --task TASK.json --out FILE      (async_vs_sync.py does it)

No controller, no log, no wire: vLLM over HTTP on one core, DeepSpeed in this process. The same prompts, lengths, batch,
minibatches and optimiser as the runs that it is compared with. Then each phase alone: generation with the run's
concurrency and no trainer; training on the recorded batches and no server's work.
"""

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Final

import alone
import heavy
import msgspec
import numpy as np

from areal_async.core import packing
from areal_async.messages import Minibatch, Train, TrainerSpec, TrainSample
from areal_async.rollout.text import Text
from areal_async.rollout.types import Sampling
from areal_async.rollout.vllm_http import VllmClient
from areal_async.rollout.workflow import Sample

SHM: Final = Path("/dev/shm")
DEADLINE_S: Final = 600.0


class Task(msgspec.Struct, kw_only=True):
    """What to run. spec: how the trainer of the runs is started."""

    spec: TrainerSpec
    data: str
    steps: int
    warm_up: int
    batch_groups: int
    group_size: int
    minibatches: int
    max_tokens_per_microbatch: int
    max_concurrent: int
    max_num_seqs: int
    alone_s: float


class Found(msgspec.Struct, kw_only=True):
    """tokens/s of the loop and of each phase alone; seconds a step of each phase in the loop."""

    loop: float
    generate_alone: float
    train_alone: float
    generate_s: float
    train_s: float
    publish_s: float
    swap_s: float


class Server:
    """Answers of drawn lengths."""

    def __init__(self, client: VllmClient, task: Task) -> None:
        text = Text(task.spec.model_path, "plain")
        self._client = client
        lines = Path(task.data).read_bytes().splitlines()
        self._prompts = [text.encode(row["prompt"]) for row in map(msgspec.json.decode, lines)]
        self._group_size = task.group_size
        self._numbers = count()

    async def group(self, group: int) -> list[Sample]:
        return await asyncio.gather(*(self.sample(group, member) for member in range(self._group_size)))

    async def sample(self, group: int, member: int) -> Sample:
        name = f"{group}.{member}"
        prompt = self._prompts[group % len(self._prompts)]
        sampling = Sampling(temperature=1.0, max_tokens=heavy.length(name), stop_token_ids=())
        answer = await self._client.generate(prompt, sampling, f"{name}-{next(self._numbers)}", DEADLINE_S)
        return Sample.single(prompt, answer, reward=heavy.reward(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, required=True, help="JSON of a Task")
    parser.add_argument("--out", type=Path, required=True, help="where the findings go, JSON")
    options = parser.parse_args()
    task = msgspec.json.decode(options.task.read_bytes(), type=Task)
    options.out.write_bytes(msgspec.json.encode(asyncio.run(measure(task))))


async def measure(task: Task) -> Found:
    import torch

    from areal_async.engines.deepspeed.engine import open_engine, start_ranks
    from areal_async.engines.deepspeed.model import load_model, published_tensors
    from areal_async.engines.deepspeed.publish import Publisher
    from areal_async.engines.deepspeed.step import Trainer

    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    device = torch.device("cpu")
    start_ranks(device)
    engine = open_engine(load_model(task.spec.model_path, task.spec.dtype, device), task.spec)
    trainer, publisher = Trainer(engine, task.spec, 0, 1), Publisher(task.spec.shm_prefix, SHM)
    phases: dict[str, float] = dict.fromkeys(("generate", "train", "publish", "swap"), 0.0)

    async def timed(phase: str, call: Callable[[], Awaitable[object]]) -> object:
        begun = time.perf_counter()
        result = await call()
        phases[phase] += time.perf_counter() - begun
        return result

    batches: list[tuple[Train, list[np.ndarray]]] = []
    tokens, begun = 0, 0.0
    model = Path(task.spec.model_path)
    try:
        async with alone.server(model, max_num_seqs=task.max_num_seqs) as client:
            server = Server(client, task)
            for step in range(task.warm_up + task.steps):
                if step == task.warm_up:
                    begun, tokens = time.perf_counter(), 0
                    phases = dict.fromkeys(phases, 0.0)
                numbers = range(step * task.batch_groups, (step + 1) * task.batch_groups)
                groups = await timed("generate", lambda: asyncio.gather(*map(server.group, numbers)))  # noqa: B023
                batch = batch_of(groups, step, task)  # type: ignore[arg-type]
                batches.append(batch)
                tokens += int(batch[1][2].sum())

                async def train() -> None:
                    trainer.train(*batch)  # noqa: B023

                async def publish() -> None:
                    version = trainer.version
                    publisher.publish(version, published_tensors(engine.module, task.spec.publish_dtype))
                    publisher.free((version - 1,))

                await timed("train", train)
                await timed("publish", publish)
                info = {"path": str(publisher.path(trainer.version))}
                await timed("swap", lambda: client.swap(trainer.version, info))  # noqa: B023
            loop = tokens / (time.perf_counter() - begun)
            per_step = {phase: seconds / task.steps for phase, seconds in phases.items()}
            generate_alone = await keep_generating(server, task)
        begun, tokens = time.perf_counter(), 0
        for train_again, arrays in batches[task.warm_up :]:
            trainer.train(msgspec.structs.replace(train_again, step=trainer.version), arrays)
            tokens += int(arrays[2].sum())
        train_alone = tokens / (time.perf_counter() - begun)
    finally:
        publisher.close()
    return Found(
        loop=loop, generate_alone=generate_alone, train_alone=train_alone, generate_s=per_step["generate"],
        train_s=per_step["train"], publish_s=per_step["publish"], swap_s=per_step["swap"],
    )  # fmt: skip


async def keep_generating(server: Server, task: Task) -> float:
    """tokens/s of the server with the run's concurrency, in the steady state: nothing else happens."""
    tokens, ids = 0, count(1_000_000)

    async def one_after_the_other() -> None:
        nonlocal tokens
        while True:
            sample = await server.sample(next(ids), 0)
            tokens += int(sample.loss_mask.sum())  # after the await: others add meanwhile

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one_after_the_other()) for _ in range(task.max_concurrent)]
        await asyncio.sleep(task.alone_s / 2)
        before, begun = tokens, time.perf_counter()
        await asyncio.sleep(task.alone_s)
        rate = (tokens - before) / (time.perf_counter() - begun)
        for each in tasks:
            each.cancel()
    return rate


def batch_of(groups: list[list[Sample]], step: int, task: Task) -> tuple[Train, list[np.ndarray]]:
    """The training step of these groups: reward minus the group's mean, whole groups to minibatches, packed."""
    samples, entries = [sample for group in groups for sample in group], []
    for number, group in enumerate(groups):
        rewards = [sample.reward or 0.0 for sample in group]
        mean, spread = float(np.mean(rewards)), float(np.std(rewards)) + 1e-6
        entries += [TrainSample(f"{number}.{m}", 0, (reward - mean) / spread) for m, reward in enumerate(rewards)]
    size = len(samples) // task.minibatches
    minibatches, order = [], []
    for first in range(0, len(samples), size):
        lengths = [len(sample.token_ids) for sample in samples[first : first + size]]
        packed = packing.pack(lengths, task.max_tokens_per_microbatch)
        micros = tuple(tuple(first + place for place in micro) for micro in packed)
        divisor = float(sum(int(sample.loss_mask.sum()) for sample in samples[first : first + size]))
        minibatches.append(Minibatch(divisor=divisor, ranks=(micros,)))
        order += [samples[index] for micro in micros for index in micro]
    train = Train(
        step=step, branch=0, groups=tuple(range(len(groups))), samples=tuple(entries), minibatches=tuple(minibatches)
    )  # fmt: skip
    fields = ("token_ids", "loss_mask", "logprobs", "versions")
    arrays = [np.concatenate([getattr(sample, field) for sample in order]) for field in fields]
    return train, [np.array([len(sample.token_ids) for sample in order], np.int32), *arrays]


if __name__ == "__main__":
    main()
