"""Runs with scripted servers and trainers: real processes on the real wire, no vLLM, no DeepSpeed, up in a second.

    async with Controller(config, recipes=scripted(books=tmp_path / "books.jsonl")) as run: …

The configuration's model must have a vocabulary of `trainer.VOCAB_SIZE` entries.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from areal_async.errors import ConfigError
from areal_async.launch.recipes import Command, Recipes, rewards_command
from areal_async.rollout.text import model_settings
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
    recorded: Path | None = None,
    pace: float = 1.0,
) -> Recipes:
    """token_s: seconds a token of an answer. step_s: seconds a training step. books: what the trainer has trained.
    server_book: what was asked of the servers. orders: by server (the name of its socket, `server-0`), the faults of
    its first life, of its second, …; later lives have none. trainer_orders: the same of the trainer. recorded:
    log folder of a run whose answers, steps and verdicts these peers give, in its durations times `pace`
    (`testing.recorded.recorded` looks whether it can be done)."""
    lives: Counter[str] = Counter()

    played = ["--recorded", str(recorded), "--pace", str(pace)] if recorded is not None else []

    def server(
        *, uds: str, model: str, dtype: str, max_model_len: int, backend: str = "areal_file", **_: object
    ) -> Command:
        name = Path(uds).stem
        told = (orders or {}).get(name, ())
        mine = told[lives[name]] if lives[name] < len(told) else ()
        lives[name] += 1
        argv = [sys.executable, "-m", "areal_async.testing.vllm_server", "--uds", uds, "--dtype", dtype]
        vocab_size = vocabulary(model) if recorded is not None else VOCAB_SIZE
        argv += ["--max-model-len", str(max_model_len), "--vocab-size", str(vocab_size), "--backend", backend]
        argv += ["--token-s", str(token_s), "--chunk-tokens", str(chunk_tokens)]
        argv += ["--orders", msgspec.json.encode(list(mine)).decode()]
        return [*argv, *played, *(("--book", str(server_book)) if server_book else ())], {}

    def trainer(*, connect: str, spec: str, ranks: int, **_: object) -> Command:
        argv: Sequence[str] = [sys.executable, "-m", "areal_async.testing.trainer", "--connect", connect]
        mine = trainer_orders[lives["trainer"]] if lives["trainer"] < len(trainer_orders) else ()
        lives["trainer"] += 1
        argv = [*argv, "--spec", spec, "--ranks", str(ranks), "--step-s", str(step_s)]
        argv = [*argv, "--orders", msgspec.json.encode(list(mine)).decode()]
        return [*argv, *played, *(("--books", str(books)) if books else ())], {}

    def rewards(*, connect: str, spec: str, name: str) -> Command:
        argv = [sys.executable, "-m", "areal_async.testing.rewards", "--connect", connect, "--spec", spec]
        return [*argv, "--name", name, *played], {}

    return Recipes(server=server, trainer=trainer, rewards=rewards if recorded is not None else rewards_command)


def vocabulary(model_path: str) -> int:
    """Entries of a model's output layer, by its config.json. Errors: ConfigError where it doesn't say."""
    size = model_settings(model_path).get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"{model_path}/config.json: says nothing of vocab_size")
    return size
