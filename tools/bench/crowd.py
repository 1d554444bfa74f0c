"""Whole runs of the controller with thousands of samples in flight, for controller.py and log.py: what one costs.

What always holds: the real controller, core, log and wire, in this process; server and trainer in others, scripted, so
that nothing but the controller takes this process's time; rewards come from the workflow. Measured in a window in
the middle of the run: CPU time of the process (all threads), samples and tokens that were finished, wall time.
"""

import asyncio
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
import uvloop
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from areal_async.config import Config
from areal_async.config_file import load_config
from areal_async.controller import Controller
from areal_async.controller.garbage import collect_rarely
from areal_async.launch.recipes import Command, Recipes
from areal_async.rollout.answer import Answer
from areal_async.rollout.session import Session
from areal_async.rollout.workflow import Prompt, Sample
from areal_async.testing.recipes import scripted
from areal_async.testing.trainer import VOCAB_SIZE

FLOOD: Final = Path(__file__).with_name("flood.py")
FILES: Final = 65536  # a connection a sample, and some
GROUP: Final = 8
LOOK_S: Final = 0.005  # between two looks at how late the loop is
SAMPLING_S: Final = 0.005  # CPU time between two looks at what the process does
ROWS: Final = 4096
BATCHES_IN_FLIGHT: Final = 8
BUSY_SHARE: Final = 0.6
GUESSED_SAMPLE_S, GUESSED_CHUNK_S, GUESSED_TOKEN_S = 300e-6, 40e-6, 0.3e-6  # only to pace the answers

# What the process does, by the file of the innermost Python frame that is in this list; C code counts as its caller's.
PLACES: Final = (
    ("areal_async/core/", "core"),
    ("areal_async/messages/", "core"),
    ("areal_async/log/", "log"),
    ("controller/turn.py", "bookkeeping"),
    ("controller/record.py", "bookkeeping"),
    ("controller/metrics.py", "bookkeeping"),
    ("controller/samples.py", "bookkeeping"),
    ("rollout/answer.py", "reading answers (JSON)"),
    ("rollout/http.py", "HTTP (aiohttp, event loop)"),
    ("rollout/", "sessions and samples"),
    ("controller/rollouts.py", "sessions and samples"),
    ("controller/trainer.py", "wire to the trainer"),
    ("areal_async/wire/", "wire to the trainer"),
    ("/zmq/", "wire to the trainer"),
    ("aiohttp/", "HTTP (aiohttp, event loop)"),
    ("yarl/", "HTTP (aiohttp, event loop)"),
    ("multidict/", "HTTP (aiohttp, event loop)"),
    ("asyncio/", "HTTP (aiohttp, event loop)"),
    ("areal_async/", "the rest of the controller"),
)


@dataclass
class Cost:
    """What the middle of a run cost. samples: that were finished. tokens: that arrived, those of answers that went on
    included. late_s: how late the loop was, each time it was looked at; own_s: for how much of that this process had
    the CPU; in_flight: samples then. places: how often it was seen doing what."""

    in_flight: list[int] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    late_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)

    @property
    def sample_us(self) -> float:
        return self.cpu_s / self.samples * 1e6

    @property
    def busy_share(self) -> float:
        return self.cpu_s / self.wall_s

    @property
    def mean_in_flight(self) -> int:
        return round(sum(self.in_flight) / max(1, len(self.in_flight)))

    def late_ms(self, share: float) -> float:
        return _quantile(self.late_s, share) * 1e3

    def own_ms(self, share: float) -> float:
        return _quantile(self.own_s, share) * 1e3

    def place_us(self, *places: str) -> float:
        """CPU time a sample that was spent there."""
        return self.sample_us * sum(self.places[place] for place in places) / max(1, self.places.total())


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run(
    *,
    in_flight: int,
    tokens: int,
    chunk_tokens: int,
    window_s: float,
    warm_up: float,
    busy_share: float = BUSY_SHARE,
) -> Cost:
    """One run with answers of about `tokens` tokens (half to one and a half of it), chunk_tokens at a time.

    warm_up: how many samples have finished when the window of `window_s` begins, for each that is in flight. The
    server paces the answers so that this process is busy for about `busy_share` of the time; 1: as fast as they can.
    """
    raise_file_limit()
    collect_rarely()  # as `areal-async run` does
    paced = GUESSED_SAMPLE_S + GUESSED_CHUNK_S * tokens / chunk_tokens + GUESSED_TOKEN_S * tokens
    token_s = in_flight * paced / busy_share / tokens if busy_share < 1 else 0.0
    with tempfile.TemporaryDirectory(prefix="aa-bench-") as folder:
        config = configuration(
            Path(folder),
            f"rollout.max_concurrent={in_flight}",
            f"rollout.max_new_tokens={2 * tokens}",
            f"rollout.max_staleness={BATCHES_IN_FLIGHT * 4}",  # so that admission never holds samples back
            f"train.batch_groups={max(1, in_flight // GROUP // BATCHES_IN_FLIGHT)}",
            "train.steps=100000",
            f"server.stream_interval={chunk_tokens}",
        )
        return uvloop.run(measured(config, tokens, chunk_tokens, token_s, window_s, warm_up))


async def measured(
    config: Config, tokens: int, chunk_tokens: int, token_s: float, window_s: float, warm_up: float
) -> Cost:
    wanted = config.rollout.max_concurrent
    cost, workflow = Cost(), Answers(tokens, wanted)
    async with Controller(config, workflow=workflow, recipes=recipes(chunk_tokens, token_s)) as controller:
        going = asyncio.create_task(controller.run())
        while workflow.samples < warm_up * wanted and not going.done():
            await asyncio.wait({going}, timeout=LOOK_S)
        watching = asyncio.create_task(watch_loop(cost, workflow))
        gc.collect()  # answers of an earlier run in this process would be counted as growing, until they go
        arrived = workflow.tokens + growing()
        begun = (time.process_time(), time.perf_counter(), workflow.samples)
        start_sampling(cost.places)
        await asyncio.wait({going}, timeout=window_s)
        stop_sampling()
        ended = (time.process_time(), time.perf_counter(), workflow.samples)
        watching.cancel()
        cost.cpu_s, cost.wall_s, cost.samples = (end - begin for end, begin in zip(ended, begun, strict=True))
        cost.tokens = workflow.tokens + growing() - arrived
        if going.done():
            going.result()  # it can't have been done with all its steps: this raises
        going.cancel()
        await asyncio.wait({going})
    return cost


class Answers:
    """A workflow whose answers have a length by their sample's id, and a reward of their own.

    The first ones are shorter by a share of their own, so that from the beginning as many end as in the middle of a
    long run.
    """

    def __init__(self, tokens: int, at_once: int) -> None:
        self._tokens = tokens
        self._at_once = at_once
        self.started = self.samples = self.tokens = self.in_flight = 0

    async def run(self, session: Session, prompt: Prompt) -> Sample:
        drawn = zlib.crc32(session.sample.encode())
        length = self._tokens // 2 + drawn % (self._tokens + 1)
        if self.started < self._at_once:
            length = 1 + length * self.started // self._at_once
        self.started += 1
        self.in_flight += 1
        try:
            sampling = msgspec.structs.replace(session.sampling, max_tokens=length, stop_token_ids=())
            completion = await session.generate(prompt.token_ids, sampling)
        finally:
            self.in_flight -= 1
        self.samples += 1
        self.tokens += len(completion.token_ids)
        return Sample.single(prompt.token_ids, completion, reward=float(drawn >> 31))


def growing() -> int:
    """Tokens that have arrived of answers that aren't finished."""
    found = [thing for thing in gc.get_objects() if isinstance(thing, Answer)]
    return sum(len(answer.partial().token_ids) for answer in found if not answer.finished)


async def watch_loop(cost: Cost, workflow: Answers) -> None:
    """Note how much later than asked the loop comes back, again and again."""
    while True:
        begun, cpu = time.perf_counter(), time.thread_time()
        await asyncio.sleep(LOOK_S)
        late_s = max(0.0, time.perf_counter() - begun - LOOK_S)
        cost.late_s.append(late_s)
        cost.own_s.append(min(late_s, time.thread_time() - cpu))
        cost.in_flight.append(workflow.in_flight)


def recipes(chunk_tokens: int, token_s: float) -> Recipes:
    def server(*, uds: str, max_model_len: int, **_: object) -> Command:
        argv = [sys.executable, str(FLOOD), "--uds", uds, "--max-model-len", str(max_model_len)]
        return [*argv, "--chunk-tokens", str(chunk_tokens), "--token-s", str(token_s)], {}

    return Recipes(server=server, trainer=scripted().trainer)


def configuration(folder: Path, *overrides: str) -> Config:
    """A model folder without weights, a little data, a configuration on them."""
    model = folder / "model"
    model.mkdir()
    vocab = {chr(33 + number): number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "z", "pad_token": "!"}))
    (model / "model.safetensors").touch()
    shape = {"model_type": "qwen2", "vocab_size": VOCAB_SIZE, "max_position_embeddings": 16384}
    (model / "config.json").write_text(json.dumps(shape))
    rows = (json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(ROWS))
    (folder / "train.jsonl").write_text("".join(rows))
    path = folder / "bench.yaml"
    path.write_text(
        f"name: bench\nruns_dir: {folder}/runs\n"
        f"model: {{path: {model}, dtype: float32}}\n"
        f"data: {{train: {folder}/train.jsonl, chat_template: plain}}\n"
        f"rollout: {{group_size: {GROUP}}}\n"
        "train: {minibatches: 1, max_tokens_per_microbatch: 32768}\n"
    )
    return load_config(path, overrides)


def raise_file_limit() -> None:
    """As many open files as this process may have, for itself and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(FILES, hard) if hard != resource.RLIM_INFINITY else FILES
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def start_sampling(places: Counter[str]) -> None:
    def look(_: int, frame: FrameType | None) -> None:
        places[place_of(frame)] += 1

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, SAMPLING_S, SAMPLING_S)


def stop_sampling() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)


def place_of(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        for part, place in PLACES:
            if part in name:
                return place
        frame = frame.f_back
    return "event loop"


def places_table(costs: Sequence[tuple[str, Cost]]) -> tuple[tuple[str, ...], list[tuple[str | float, ...]]]:
    """(columns, rows): CPU µs a sample, by what was done."""
    names = sorted({place for _, cost in costs for place in cost.places}, key=lambda name: -costs[0][1].place_us(name))
    rows: list[tuple[str | float, ...]] = [(name, *(cost.place_us(name) for _, cost in costs)) for name in names]
    return ("CPU µs a sample", *(name for name, _ in costs)), rows
