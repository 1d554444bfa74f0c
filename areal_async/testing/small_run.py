"""The files of a small run on scripted peers: a model folder without weights, a little data, a configuration.

What always holds: nothing here depends on when it is written: the same folder and options give the same run.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from areal_async.testing.trainer import VOCAB_SIZE

ROWS: Final = 64
_FIRST: Final = 33  # the character of token 0; "z" ends an answer


def write_model(folder: Path) -> None:
    """A tokenizer of `VOCAB_SIZE` single characters, and a configuration; scripted peers need no weights."""
    folder.mkdir(parents=True)
    vocab = {chr(_FIRST + number): number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "z", "pad_token": "!"}))
    (folder / "model.safetensors").touch()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512})
    )


def prompt_of(row: int) -> str:
    """The prompt in a row of the data; all differ."""
    return f"{row}+{row}="


def row_of(token_ids: Sequence[int]) -> int | None:
    """Which row's prompt these tokens begin with; None if it is none of them."""
    text = "".join(chr(_FIRST + token) for token in token_ids)
    number = text.partition("+")[0]
    if not number.isascii() or not number.isdecimal() or not text.startswith(prompt_of(int(number))):
        return None
    return int(number) if int(number) < ROWS else None


def write_small_run(folder: Path, *overrides: str) -> Path:
    """Everything that the run reads, in `folder`; the path of its configuration, which has the `overrides` in it.

    Six steps of two prompts × two samples, two servers, a checkpoint every second step: a second of wall time.
    """
    write_model(folder / "model")
    rows = ({"prompt": prompt_of(row), "answer": str(2 * row)} for row in range(ROWS))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "s").mkdir(mode=0o700)  # sockets; short, since a socket's path has 107 bytes
    path = folder / "config.yaml"
    path.write_text(
        f"name: small\nruns_dir: {folder / 'runs'}\nruntime_dir: {folder / 's'}\nseed: 7\n"
        f"model: {{path: {folder / 'model'}, dtype: float32}}\n"
        f"data: {{train: {folder / 'train.jsonl'}, chat_template: plain}}\n"
        "rollout: {servers: 2, group_size: 2, max_new_tokens: 24, max_staleness: 2, max_concurrent: 32}\n"
        "train: {steps: 6, batch_groups: 2, minibatches: 1, max_tokens_per_microbatch: 256}\n"
        "checkpoint: {every_steps: 2, keep: 2}\n"
        "reward: {workers: 1}\n"
    )
    if overrides:
        from areal_async.config_file import dump_config, load_config

        path.write_text(dump_config(load_config(path, overrides)))
    return path
