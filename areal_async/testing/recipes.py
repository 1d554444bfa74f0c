"""Runs with scripted servers and trainers: real processes on the real wire, no vLLM, no DeepSpeed, up in a second.

    async with Controller(config, recipes=scripted(books=tmp_path / "books.jsonl")) as run: …

The configuration's model must have a vocabulary of `trainer.VOCAB_SIZE` entries.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from areal_async.launch.recipes import Command, Recipes
from areal_async.testing.trainer import VOCAB_SIZE


def scripted(*, token_s: float = 0.0, chunk_tokens: int = 4, step_s: float = 0.0, books: Path | None = None) -> Recipes:
    """token_s: seconds a token of an answer. step_s: seconds a training step. books: what the trainer has trained."""

    def server(*, uds: str, dtype: str, max_model_len: int, **_: object) -> Command:
        argv = [sys.executable, "-m", "areal_async.testing.vllm_server", "--uds", uds, "--dtype", dtype]
        argv += ["--max-model-len", str(max_model_len), "--vocab-size", str(VOCAB_SIZE)]
        return [*argv, "--token-s", str(token_s), "--chunk-tokens", str(chunk_tokens)], {}

    def trainer(*, connect: str, spec: str, ranks: int, cores: str | None) -> Command:
        argv: Sequence[str] = [sys.executable, "-m", "areal_async.testing.trainer", "--connect", connect]
        argv = [*argv, "--spec", spec, "--ranks", str(ranks), "--step-s", str(step_s)]
        return [*argv, *(("--books", str(books)) if books else ())], {}

    return Recipes(server=server, trainer=trainer)
