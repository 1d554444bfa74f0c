"""Run under torchrun by test_deepspeed.py: real DeepSpeed engines, the real `Trainer`, and the gradients they get.

`gradient_ranks.py CASES.json`: for each case a fresh engine trains one step of one minibatch at learning rate 0, and
rank 0 writes the gradient that the optimiser was given, all parameters in order, to the case's file.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from deepspeed.utils import safe_get_full_grad

from areal_async.engines.deepspeed.engine import open_engine, start_ranks
from areal_async.engines.deepspeed.model import load_model
from areal_async.engines.deepspeed.step import Trainer
from areal_async.messages import Train
from tests.trainer.world import make_batch, spec_for

CPU = torch.device("cpu")


def full_gradient(engine: Any) -> torch.Tensor:
    """float32, on every rank; called when the gradients are averaged and not yet used."""
    sharded = engine.optimizer is not engine.basic_optimizer
    parts = [safe_get_full_grad(p) if sharded else p.grad for p in engine.module.parameters()]
    return torch.cat([part.float().flatten() for part in parts])


def run(case: dict[str, Any], rank: int, world: int) -> None:
    spec = spec_for(Path(case["model"]), **case["spec"])
    engine = open_engine(load_model(spec.model_path, spec.dtype, CPU), spec)
    trainer = Trainer(engine, spec, rank, world)
    train, arrays = make_batch(ranks=world, **case["batch"])
    if case["broken"] == "rank average":
        trainer._rank_factor = lambda: 1.0  # type: ignore[method-assign]
    if case["broken"] == "divisor":
        train = own_divisor(train, arrays[rank])
    seen: list[torch.Tensor] = []
    step = engine.step
    engine.step = lambda: (seen.append(full_gradient(engine)), step())
    done = trainer.train(train, arrays[rank])
    assert not done.skipped, done.skipped
    if rank == 0:
        np.save(case["out"], seen[0].numpy())


def own_divisor(train: Train, arrays: list[np.ndarray]) -> Train:
    """The classic mistake: each rank divides by the loss tokens that it holds itself, then ranks are averaged."""
    [minibatch] = train.minibatches
    own = msgspec.structs.replace(minibatch, divisor=float(arrays[2].sum()) * len(minibatch.ranks))
    return msgspec.structs.replace(train, minibatches=(own,))


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start_ranks(CPU)
    for case in json.loads(Path(sys.argv[1]).read_text()):
        run(case, rank, world)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
