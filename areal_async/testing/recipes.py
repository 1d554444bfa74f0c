"""Runs with scripted servers and trainers: real processes on the real wire, no vLLM, no DeepSpeed, up in a second.

    async with Controller(config, recipes=scripted(books=tmp_path / "books.jsonl")) as run: …

The configuration's model must have a vocabulary of `trainer.VOCAB_SIZE` entries.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from areal_async.launch.recipes import Command, Recipes
from areal_async.testing.trainer import VOCAB_SIZE, TrainerOrder
from areal_async.testing.vllm_server import Order


def scripted(
    *,
    token_s: float = 0.0,
    chunk_tokens: int = 4,
    step_s: float = 0.0,
    books: Path | None = None,
    server_book: Path | None = None,
    orders: Mapping[str, Sequence[Sequence[Order]]] | None = None,
    trainer_orders: Sequence[Sequence[TrainerOrder]] = (),
) -> Recipes:
    """token_s: seconds a token of an answer. step_s: seconds a training step. books: what the trainer has trained.
    server_book: what was asked of the servers. orders: by server (the name of its socket, `server-0`), the faults of
    its first life, of its second, …; later lives have none. trainer_orders: the same of the trainer."""
    lives: Counter[str] = Counter()

    def server(*, uds: str, dtype: str, max_model_len: int, backend: str = "areal_file", **_: object) -> Command:
        name = Path(uds).stem
        told = (orders or {}).get(name, ())
        mine = told[lives[name]] if lives[name] < len(told) else ()
        lives[name] += 1
        argv = [sys.executable, "-m", "areal_async.testing.vllm_server", "--uds", uds, "--dtype", dtype]
        argv += ["--max-model-len", str(max_model_len), "--vocab-size", str(VOCAB_SIZE), "--backend", backend]
        argv += ["--token-s", str(token_s), "--chunk-tokens", str(chunk_tokens)]
        argv += ["--orders", msgspec.json.encode(list(mine)).decode()]
        return [*argv, *(("--book", str(server_book)) if server_book else ())], {}

    def trainer(*, connect: str, spec: str, ranks: int, **_: object) -> Command:
        argv: Sequence[str] = [sys.executable, "-m", "areal_async.testing.trainer", "--connect", connect]
        mine = trainer_orders[lives["trainer"]] if lives["trainer"] < len(trainer_orders) else ()
        lives["trainer"] += 1
        argv = [*argv, "--spec", spec, "--ranks", str(ranks), "--step-s", str(step_s)]
        argv = [*argv, "--orders", msgspec.json.encode(list(mine)).decode()]
        return [*argv, *(("--books", str(books)) if books else ())], {}

    return Recipes(server=server, trainer=trainer)
