"""Tiny models, batches as the controller would send them, and an engine without DeepSpeed, for the trainer's tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from areal_async.messages import Aggregation, Minibatch, Train, TrainerSpec, TrainSample

VOCABULARY = 31
MOST_TOKENS = 14
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2, tied": Qwen2Config(**SHAPE, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, intermediate_size=48, num_key_value_heads=1, tie_word_embeddings=False),
    "mistral, window 5": MistralConfig(**SHAPE, intermediate_size=48, num_key_value_heads=2, sliding_window=5),
    "gemma": GemmaConfig(**SHAPE, intermediate_size=48, num_key_value_heads=1, head_dim=8),
    "gpt-neox": GPTNeoXConfig(**SHAPE, intermediate_size=48),
    "gpt2, learned positions, dropout 0.1": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4),
}
STATE_SPACE = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)


def save_tiny_model(folder: Path, config: PretrainedConfig, seed: int = 0) -> Path:
    """A model with weights large enough that its answers are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def spec_for(model: Path, **changes: Any) -> TrainerSpec:
    standard: dict[str, Any] = {
        "model_path": str(model),
        "dtype": "float32",
        "publish_dtype": "float32",
        "temperature": 1.0,
        "seed": 0,
        "zero_stage": 0,
        "lr": 1e-3,
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "adam_eps": 1e-8,
        "max_grad_norm": 1.0,
        "loss": "decoupled_ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "weight_cap": None,
        "over_cap": "mask",
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "kl_in": "loss",
        "reference_path": str(model),
        "lr_schedule": "constant",
        "min_lr_share": 0.0,
        "updates": 100,
        "gradient_checkpointing": False,
        "transport": "shm",
        "publish_folder": "/dev/shm",
        "shm_prefix": "areal-test",
    }
    return TrainerSpec(**(standard | changes))


def make_batch(
    *,
    samples: int,
    minibatches: int,
    ranks: int,
    per_micro: int,
    step: int = 0,
    seed: int = 0,
    aggregation: Aggregation = "token_mean",
    mask_below: int = 0,
    versions: int = 1,
) -> tuple[Train, list[list[np.ndarray]]]:
    """A step's header and each rank's arrays. per_micro: samples of a micro-batch; ranks get every ranks-th one.

    The same seed gives the same samples however they are split. Ranks with fewer micro-batches get empty ones.
    versions: the tokens are of so many, the newest the step's own.
    """
    numbers = np.random.default_rng(seed)
    content = [_sample(numbers, step, versions) for _ in range(samples)]
    share = samples // minibatches
    planned = []
    for first in range(0, samples, share):
        own = [list(range(first + rank, first + share, ranks)) for rank in range(ranks)]
        micros = [[tuple(part[i : i + per_micro]) for i in range(0, len(part), per_micro)] for part in own]
        most = max(map(len, micros))
        divisor = {
            "token_mean": sum(int(content[i][1].sum()) for i in range(first, first + share)),
            "sequence_mean": share,
            "constant": share * MOST_TOKENS,
        }[aggregation]
        planned.append(Minibatch(float(divisor), tuple((*m, *[()] * (most - len(m))) for m in micros)))
    train = Train(
        step=step,
        branch=0,
        groups=tuple(range(samples)),
        samples=tuple(TrainSample(f"{i}.0", 0, float(a)) for i, a in enumerate(numbers.standard_normal(samples))),
        minibatches=tuple(planned),
        mask_below=mask_below,
    )
    return train, [_arrays(train, rank, content) for rank in range(ranks)]


def _sample(numbers: np.random.Generator, step: int, versions: int) -> tuple[np.ndarray, ...]:
    """token_ids, loss_mask, logprobs, versions of one sample; a few tokens in its middle are others'."""
    prompt, answer = int(numbers.integers(1, 6)), int(numbers.integers(3, MOST_TOKENS))
    mask = np.array([0] * prompt + [1] * answer, dtype=np.uint8)
    mask[prompt + 1] = numbers.integers(0, 2)
    logprobs = np.where(mask, -3.0 + 0.5 * numbers.standard_normal(len(mask)), 0).astype(np.float32)
    token_ids = numbers.integers(0, VOCABULARY, len(mask)).astype(np.int32)
    ages = np.sort(np.arange(len(mask)) * 7919 % versions)[::-1] if versions > 1 else np.zeros(len(mask), int)
    return token_ids, mask, logprobs, np.where(mask, step - ages, -1).astype(np.int32)


def _arrays(train: Train, rank: int, content: Sequence[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    own = [content[i] for minibatch in train.minibatches for micro in minibatch.ranks[rank] for i in micro]
    lengths = np.array([len(sample[0]) for sample in own], dtype=np.int32)
    dtypes = (np.int32, np.uint8, np.float32, np.int32)
    return [lengths, *(np.concatenate([np.zeros(0, t), *(s[i] for s in own)]).astype(t) for i, t in enumerate(dtypes))]


class PlainEngine:
    """What `step` needs of DeepSpeed's engine, on one rank, with nothing of DeepSpeed in it."""

    def __init__(self, module: torch.nn.Module, spec: TrainerSpec) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=spec.lr, betas=spec.betas, eps=spec.adam_eps, weight_decay=spec.weight_decay
        )
        self.forwards = 0
        self.backwards: list[bool] = []  # was it the last of its minibatch?
        self.gradients: list[torch.Tensor] = []  # after clipping, at each update
        self._last = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        return self.module(*args, **kwargs)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        self._last = last

    def backward(self, loss: torch.Tensor) -> None:
        self.backwards.append(self._last)
        loss.backward()

    def step(self) -> None:
        self.gradients.append(flat_gradient(self.module))
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def flat_gradient(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
