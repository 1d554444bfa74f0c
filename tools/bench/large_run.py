"""The folder of a large run that never was, for view.py: a log by the real core, in virtual time, with texts.

What always holds: the same arguments give the same log, byte for byte; the core decides, as in a run; answers take as
long as their tokens, servers swap one after another, so versions change in the middle of answers.
"""

import contextlib
import heapq
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders, models

from areal_async.controller.metrics import StepRow
from areal_async.core.orchestrator import Orchestrator
from areal_async.log.format import PayloadRef
from areal_async.log.writer import RunLog
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Checkpoint,
    CheckpointDone,
    Finish,
    Forget,
    GroupRead,
    Joined,
    Note,
    Publish,
    Published,
    ReadGroup,
    Release,
    Rules,
    SampleDone,
    Score,
    Scored,
    StartSample,
    StepDone,
    Swap,
    Swapped,
    Train,
    Woke,
)
from areal_async.wire.arrays import Array

SERVERS: Final = 4
GROUP: Final = 8
BATCH: Final = 16
PROMPT_TOKENS: Final = 20
TOKEN_S: Final = 0.01
WORDS: Final = 4000
SEGMENT_BYTES: Final = 64 << 20
FLUSHED_EVERY: Final = 256  # events
MADE_OF: Final = "bcdfghklmnprstvw", "aeiou"


def write(folder: Path, *, steps: int, tokens: int, notes: int, checkpoint_steps: int = 0) -> None:
    """A run of steps × 16 groups × 8 samples in `folder`. tokens: of an answer, on average (about 6 characters each).
    notes: of a sample."""
    folder.mkdir(parents=True)
    _write_model(folder / "model")
    (folder / "config.yaml").write_text(
        f"name: large\nmodel: {{path: {folder / 'model'}}}\ntrain: {{steps: {steps}}}\n"
    )
    with contextlib.closing(RunLog(folder / "log", SEGMENT_BYTES)) as log:
        _Run(log, steps, tokens, notes, checkpoint_steps).run()
    _write_rows(folder / "metrics.jsonl", steps)


class _Run:
    def __init__(self, log: RunLog, steps: int, tokens: int, notes: int, checkpoint_steps: int) -> None:
        self._log = log
        self._tokens = tokens
        self._notes = notes
        self._rules = Rules(
            seed=1, steps=steps, batch_groups=BATCH, group_size=GROUP, max_staleness=4, max_concurrent=512,
            minibatches=2, ranks=1, max_tokens_per_microbatch=32768, max_new_tokens=4 * tokens, min_group=GROUP,
            servers=SERVERS, checkpoint_steps=checkpoint_steps, checkpoint_keep=2,
        )  # fmt: skip
        self._draw = random.Random(1)
        self._words = np.random.default_rng(1)
        self._due: list[tuple[float, int, AnyEvent | Note, list[Array] | None]] = []
        self._count = itertools.count()
        self._versions = {str(number): 0 for number in range(SERVERS)}
        self._version_since: dict[str, list[tuple[float, int]]] = {name: [(0.0, 0)] for name in self._versions}

    def run(self) -> None:
        core = Orchestrator(self._rules)
        self._log.append(self._rules)
        self._later(0.0, Woke(at=0.0))
        self._later(1.0, Joined(at=1.0, peer="trainer", id="trainer"))
        self._later(1.1, Joined(at=1.1, peer="rewards", id="rewards.0"))
        for name in self._versions:
            self._later(1.2, Joined(at=1.2, peer="server", id=name))
        for number in itertools.count():
            at, _, event, arrays = heapq.heappop(self._due)
            if isinstance(event, Note):
                self._log.append(event)
                continue
            ref: PayloadRef | None = None
            if isinstance(event, SampleDone) and arrays is not None:
                ref = self._log.put(event.sample, event.attempt, arrays)
            self._log.append(event, ref)
            over = False
            for command in core.handle(event):
                self._log.append(command)
                self._answer(command, at)
                over = over or isinstance(command, Finish)
            if over:
                return
            if not number % FLUSHED_EVERY:
                self._log.flush()

    def _later(self, at: float, event: AnyEvent | Note, arrays: list[Array] | None = None) -> None:
        heapq.heappush(self._due, (at, next(self._count), event, arrays))

    def _answer(self, command: AnyCommand, at: float) -> None:
        match command:
            case ReadGroup(group=group, position=position):
                self._later(
                    at + 0.01, GroupRead(at=at + 0.01, group=group, row=position % 5000, prompt_tokens=PROMPT_TOKENS)
                )
            case StartSample():
                self._sample(command, at)
            case Score(sample=sample, attempt=attempt):
                right = self._draw.random() < 0.5
                done = at + 0.05 * self._draw.random()
                self._later(done, Scored(
                    at=done, sample=sample, attempt=attempt, verdict="right" if right else "wrong", reward=float(right)
                ))  # fmt: skip
            case Train(step=step, branch=branch):
                self._later(at + 1.0, StepDone(at=at + 1.0, step=step, branch=branch, metrics={"loss": 0.1}))
            case Publish(version=version, branch=branch):
                self._later(at + 0.1, Published(at=at + 0.1, version=version, branch=branch, location="x", nbytes=1))
            case Checkpoint(version=version, branch=branch):
                saved = CheckpointDone(at=at + 0.1, version=version, branch=branch, seconds=0.1, nbytes=1)
                self._later(at + 0.1, saved)
            case Swap(server=server, version=version, branch=branch):
                self._versions[server] = version
                self._version_since[server].append((at + 0.2, version))
                self._later(at + 0.2, Swapped(at=at + 0.2, server=server, version=version, branch=branch, pause_s=0.1))
            case Forget(samples=samples):
                self._log.forget(samples)
            case Release(samples=samples):
                self._log.release(samples)

    def _sample(self, command: StartSample, at: float) -> None:
        length = max(4, int(self._draw.lognormvariate(0.0, 0.5) * self._tokens * 0.88))
        length = min(length, 4 * self._tokens)
        done = at + length * TOKEN_S
        for number in range(self._notes):
            moment = at + (number + 1) / (self._notes + 1) * (done - at)
            self._later(moment, Note(at=moment, what="turn", data={"sample": command.sample, "turn": number}))
        # what the server held when each token came; swaps of the time in between aren't known yet, so of before it
        newest = self._versions[command.server]
        oldest = max(0, newest - (self._draw.random() < 0.5), command.floor)
        ids = (self._words.zipf(1.3, PROMPT_TOKENS + length) % WORDS).astype(np.int32)
        mask = np.ones(len(ids), np.uint8)
        mask[:PROMPT_TOKENS] = 0
        versions = np.full(len(ids), newest, np.int32)
        versions[: PROMPT_TOKENS + length // 2] = oldest
        versions[:PROMPT_TOKENS] = -1
        event = SampleDone(
            at=done, sample=command.sample, attempt=command.attempt, oldest=min(oldest, newest), newest=newest,
            prompt_tokens=PROMPT_TOKENS, length=length, loss_tokens=length,
            finish="length" if length == 4 * self._tokens else "stop",
        )  # fmt: skip
        self._later(done, event, [ids, mask, np.where(mask, -0.5, 0).astype(np.float32), versions])


def _words() -> Iterator[str]:
    draw = random.Random(2)
    seen: set[str] = set()
    while len(seen) < WORDS:
        word = " " + "".join(draw.choice(letters) for _ in range(draw.randrange(1, 4)) for letters in MADE_OF)
        if word not in seen:
            seen.add(word)
            yield word


def _write_model(folder: Path) -> None:
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_words())}, unk_token=" ba"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": WORDS}))


def _write_rows(path: Path, steps: int) -> None:
    """A line of each step, with a number in each field that has one."""
    draw = random.Random(3)
    with path.open("wb") as file:
        for step in range(steps):
            row: dict[str, object] = {}
            for field in msgspec.structs.fields(StepRow):
                kind = msgspec.inspect.type_info(field.type)
                if isinstance(kind, msgspec.inspect.IntType):
                    row[field.name] = draw.randrange(100)
                elif isinstance(kind, msgspec.inspect.FloatType | msgspec.inspect.UnionType):
                    row[field.name] = draw.random()
            row |= {"step": step, "version": step + 1, "branch": 0, "time_s": 1.3 * (step + 1)}
            file.write(msgspec.json.encode(row) + b"\n")
