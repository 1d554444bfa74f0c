"""A model folder without weights (the scripted peers need none), a little data, and runs on them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from areal_async.config import Config
from areal_async.config_file import load_config
from areal_async.testing.trainer import VOCAB_SIZE

ROWS = 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """128 character tokens; "z" ends an answer."""
    folder = tmp_path / "model"
    folder.mkdir()
    vocab = {chr(33 + number): number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "z", "pad_token": "!"}))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512})
    )
    return folder


@pytest.fixture
def make_config(tmp_path: Path, model: Path) -> Callable[..., Config]:
    """A run of 4 steps of 4 prompts × 2 samples, some options changed: make_config("train.steps=2")."""

    def make(*overrides: str) -> Config:
        data = tmp_path / "train.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(ROWS)))
        path = tmp_path / "config.yaml"
        path.write_text(
            f"name: scripted\nruns_dir: {tmp_path / 'runs'}\n"
            f"model: {{path: {model}, dtype: float32}}\n"
            f"data: {{train: {data}, eval: {data}, chat_template: plain}}\n"
            "rollout: {group_size: 2, max_new_tokens: 64, max_staleness: 2, max_concurrent: 64}\n"
            "train: {steps: 4, batch_groups: 4, minibatches: 2, max_tokens_per_microbatch: 512}\n"
        )
        return load_config(path, overrides)

    return make
