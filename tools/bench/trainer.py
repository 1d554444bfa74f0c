"""Tokens per second of a training step (forward, backward, update) on one thread: packed, padded, and transformers' own
padded loop. `python tools/bench/trainer.py`

The model has the quickstart's size; answers are heavy-tailed, as answers are: most are short, a few run to the limit.
Tokens are those of the samples, padding isn't counted. All three train the same loss on the same samples, and the
first losses are compared, so that nobody is fast by doing something else.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import figures
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config
from transformers.utils.logging import disable_progress_bar

from areal_async.core.packing import pack
from areal_async.engines.deepspeed.engine import open_engine, start_ranks
from areal_async.engines.deepspeed.model import load_model
from areal_async.engines.deepspeed.step import Trainer
from areal_async.messages import Minibatch, Train, TrainerSpec, TrainSample

CPU: Final = torch.device("cpu")
VOCABULARY: Final = 21
CONFIG: Final = Qwen2Config(  # as tools/make_quickstart.py makes it
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, tie_word_embeddings=False, max_position_embeddings=1024,
)  # fmt: skip
SAMPLES: Final = 128
PROMPT_TOKENS: Final = 8
SHORTEST, LONGEST, TAIL = 14, 512, 1.1  # answers: a Pareto distribution's quantiles, cut
MICRO_TOKENS: Final = 4096
PADDED_SAMPLES: Final = 16  # of transformers' loop: what a user sets per device
ROUNDS: Final = 5  # the fastest counts: the machine may be shared
LOSS_TOLERANCE: Final = 1e-4


@dataclass(frozen=True)
class Sample:
    """token_ids [PROMPT_TOKENS + answer]; logprobs of the answer's tokens under some policy; advantage."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    advantage: float


@dataclass
class Loop:
    """step: one training step; its loss. computed: tokens that go through the model, padding included."""

    name: str
    step: Callable[[], float]
    computed: int
    seconds: float = float("inf")


def main() -> None:
    options = figures.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    report = figures.Report("trainer")
    samples = make_samples()
    tokens = sum(len(sample.token_ids) for sample in samples)
    with TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
        alone_on_this_host()
        by_length = sorted(samples, key=lambda sample: len(sample.token_ids))
        loops = [
            transformers_loop("transformers, padded", folder, samples),
            transformers_loop("transformers, padded, sorted by length", folder, by_length),
            our_loop("ours, every micro-batch padded", folder, samples, padded=True),
            our_loop("ours, packed", folder, samples, padded=False),
        ]
        first = [loop.step() for loop in loops]
        if max(first) - min(first) > LOSS_TOLERANCE * abs(first[0]):
            raise SystemExit(f"the loops don't train the same loss: {first}")
        for _ in range(ROUNDS):
            for loop in loops:
                began = time.perf_counter()
                loop.step()
                loop.seconds = min(loop.seconds, time.perf_counter() - began)
        torch.distributed.destroy_process_group()
    base = loops[0].seconds
    rows = [
        (loop.name, tokens / loop.seconds, base / loop.seconds, loop.seconds, loop.computed / tokens) for loop in loops
    ]
    lengths = sorted(len(sample.token_ids) for sample in samples)
    report.table(
        f"{SAMPLES} samples of {lengths[0]} to {lengths[-1]} tokens, median {lengths[SAMPLES // 2]}, one thread",
        ("loop", "tokens/s", "× yardstick", "step, s", "computed per token"),
        rows,
    )
    report.note(what_bounds(tokens, loops[-1].seconds))
    report.finish(options.json)


def make_samples() -> list[Sample]:
    numbers = np.random.default_rng(0)
    places = (np.arange(SAMPLES) + 0.5) / SAMPLES
    answers = np.minimum(SHORTEST * (1 - places) ** (-1 / TAIL), LONGEST).astype(int)
    numbers.shuffle(answers)
    return [
        Sample(
            token_ids=numbers.integers(0, VOCABULARY, PROMPT_TOKENS + answer),
            logprobs=numbers.normal(-4, 0.3, answer),
            advantage=float(numbers.normal()),
        )
        for answer in answers
    ]


def alone_on_this_host() -> None:
    """What torchrun would say to the only rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    start_ranks(CPU)


def our_loop(name: str, folder: Path, samples: list[Sample], *, padded: bool) -> Loop:
    """The project's step under DeepSpeed, one minibatch. padded: samples are filled up to the longest beside them."""
    spec = trainer_spec(folder)
    trainer = Trainer(open_engine(load_model(str(folder), "float32", CPU), spec), spec, 0, 1)
    micros = [tuple(micro) for micro in pack([len(sample.token_ids) for sample in samples], MICRO_TOKENS)]
    filled = {i: max(len(samples[j].token_ids) for j in micro) if padded else 0 for micro in micros for i in micro}
    arrays = columns([(samples[i], filled[i]) for micro in micros for i in micro])
    train = Train(
        step=0,
        branch=0,
        groups=(0,),
        samples=tuple(TrainSample(f"0.{i}", 0, sample.advantage) for i, sample in enumerate(samples)),
        minibatches=(Minibatch(float(sum(len(s.logprobs) for s in samples)), (tuple(micros),)),),
    )

    def step() -> float:
        trainer.version = 0
        return trainer.train(train, arrays).metrics["loss"]

    return Loop(name, step, int(arrays[0].sum()))


def columns(samples: list[tuple[Sample, int]]) -> list[np.ndarray]:
    """What a rank is sent beside `Train`; each sample filled up to so many tokens at least."""
    parts: list[list[np.ndarray]] = [[] for _ in range(4)]
    for sample, filled in samples:
        rest = max(0, filled - len(sample.token_ids))
        used = np.array([0] * PROMPT_TOKENS + [1] * len(sample.logprobs) + [0] * rest)
        logprobs = np.concatenate([np.zeros(PROMPT_TOKENS), sample.logprobs, np.zeros(rest)])
        token_ids = np.concatenate([sample.token_ids, np.zeros(rest, int)])
        for part, values in zip(parts, (token_ids, used, logprobs, used - 1), strict=True):
            part.append(values)
    lengths = np.array([len(part) for part in parts[0]], dtype=np.int32)
    dtypes = (np.int32, np.uint8, np.float32, np.int32)
    return [lengths, *(np.concatenate(part).astype(t) for part, t in zip(parts, dtypes, strict=True))]


def transformers_loop(name: str, folder: Path, samples: list[Sample]) -> Loop:
    """What a user writes with transformers: padded batches in the order given, its own attention, all logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batches = [padded_batch(samples[i : i + PADDED_SAMPLES]) for i in range(0, SAMPLES, PADDED_SAMPLES)]
    divisor = float(sum(len(sample.logprobs) for sample in samples))

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = padded_loss(model, *batch) / divisor
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Loop(name, step, sum(batch[0].numel() for batch in batches))


def padded_batch(samples: list[Sample]) -> tuple[Tensor, ...]:
    """token_ids, attention mask, loss mask, log-probabilities [samples, longest]; advantages [samples, 1]."""
    longest = max(len(sample.token_ids) for sample in samples)
    ids, there, used = (torch.zeros(len(samples), longest, dtype=torch.int64) for _ in range(3))
    behav = torch.zeros(len(samples), longest)
    for row, sample in enumerate(samples):
        size = len(sample.token_ids)
        ids[row, :size] = torch.from_numpy(sample.token_ids)
        there[row, :size] = 1
        used[row, PROMPT_TOKENS:size] = 1
        behav[row, PROMPT_TOKENS:size] = torch.from_numpy(sample.logprobs)
    return ids, there, used, behav, torch.tensor([[sample.advantage] for sample in samples])


def padded_loss(
    model: PreTrainedModel, ids: Tensor, there: Tensor, used: Tensor, behav: Tensor, advantage: Tensor
) -> Tensor:
    logits = model(input_ids=ids, attention_mask=there, use_cache=False).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    weight, ratio = (logp.detach() - behav[:, 1:]).exp(), (logp - logp.detach()).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(weight * gain * used[:, 1:]).sum()


def trainer_spec(folder: Path) -> TrainerSpec:
    return TrainerSpec(
        model_path=str(folder), dtype="float32", publish_dtype="float32", temperature=1.0, seed=0, zero_stage=0,
        lr=1e-6, warmup_steps=0, weight_decay=0.01, betas=(0.9, 0.95), adam_eps=1e-8, max_grad_norm=1.0,
        loss="decoupled_ppo", clip_low=0.2, clip_high=0.2, dual_clip=None, weight_cap=None, over_cap="mask",
        aggregation="token_mean", kl_coef=0.0, kl_estimator="k3", kl_in="loss", reference_path=str(folder),
        lr_schedule="constant", min_lr_share=0.0, updates=100, gradient_checkpointing=False, transport="shm",
        publish_folder="/dev/shm", shm_prefix="areal-bench",
    )  # fmt: skip


def what_bounds(tokens: int, seconds: float) -> str:
    """The least that the linear layers' multiplications take, at the speed that this core multiplies such matrices."""
    layer = CONFIG.hidden_size * (4 * CONFIG.hidden_size + 3 * CONFIG.intermediate_size)
    weights = CONFIG.num_hidden_layers * layer + CONFIG.hidden_size * VOCABULARY
    operations = 6.0 * weights * tokens  # a multiplication and an addition, once forward and twice backward
    a, b = torch.randn(MICRO_TOKENS, CONFIG.hidden_size), torch.randn(CONFIG.hidden_size, CONFIG.intermediate_size)
    fastest = float("inf")
    for _ in range(ROUNDS * 4):
        began = time.perf_counter()
        torch.mm(a, b)
        fastest = min(fastest, time.perf_counter() - began)
    speed = 2.0 * a.shape[0] * a.shape[1] * b.shape[1] / fastest
    least = operations / speed
    return (
        f"\nWhat bounds it: the linear layers' {operations / 1e9:.0f} GFLOP take {least:.2f} s at {speed / 1e9:.0f} "
        f"GFLOP/s (measured on {a.shape[0]} × {a.shape[1]} by {b.shape[0]} × {b.shape[1]}), {least / seconds:.0%} of "
        f"the packed step; the rest is attention, norms and activations, which read and write memory."
    )


if __name__ == "__main__":
    main()
