"""Run under torchrun by test_checkpoint.py: real DeepSpeed engines that train, write checkpoints, begin with them.

`checkpoint_ranks.py PLAN.json`: for each entry one engine begins (with the model, or with the checkpoint `load`),
takes the steps `before`, writes the checkpoint `save`, and takes the steps `after`. Rank 0 writes to `out`: what the
steps reported, the weights at the checkpoint (in the model's precision), and the master weights at the end.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from areal_async.engines.deepspeed import checkpoint as checkpoint_module
from areal_async.engines.deepspeed import engine as engine_module
from areal_async.engines.deepspeed.checkpoint import Checkpoint, save
from areal_async.engines.deepspeed.model import load_model, whole_tensors
from areal_async.engines.deepspeed.rank import leave
from areal_async.engines.deepspeed.step import Trainer
from tests.trainer.world import make_batch, spec_for

CPU = torch.device("cpu")
RESIDENT_NUMBERS = 100  # the tiny model's matrices have more: ZeRO 3 splits them
BATCH = {"samples": 8, "minibatches": 2, "per_micro": 2}


def take_step(trainer: Trainer, step: int, rank: int, world: int) -> dict[str, float]:
    train, arrays = make_batch(**BATCH, ranks=world, step=step, seed=step)
    done = trainer.train(train, arrays[rank])
    assert not done.skipped
    return done.metrics


def run(entry: dict[str, Any], rank: int, world: int) -> None:
    spec = spec_for(Path(entry["model"]), **entry["spec"])
    checkpoint = Checkpoint(Path(entry["load"])) if entry["load"] else None
    model = load_model(spec.model_path, spec.dtype, CPU)
    if checkpoint is not None:
        checkpoint.load_weights(model)
    engine = engine_module.open_engine(model, spec)
    trainer = Trainer(engine, spec, rank, world)
    if checkpoint is not None:
        checkpoint.load_states(engine, rank)
        trainer.version, trainer.updates = checkpoint.version, checkpoint.updates
    metrics = [take_step(trainer, step, rank, world) for step in entry["before"]]
    save(engine, Path(entry["save"]), trainer.version, trainer.updates, rank, world)
    held = {name: tensor.clone() for name, tensor in whole_tensors(engine.module)}
    metrics += [take_step(trainer, step, rank, world) for step in entry["after"]]
    parameters = dict(engine.module.named_parameters())
    masters = {name: checkpoint_module._gathered(engine, p, "weight").clone() for name, p in parameters.items()}
    if rank == 0:
        out = Path(entry["out"])
        save_file(held, out / "held.safetensors")
        save_file({name: tensor.detach() for name, tensor in masters.items()}, out / "masters.safetensors")
        (out / "metrics.json").write_text(json.dumps(metrics))
    engine.destroy()


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    engine_module.RESIDENT_NUMBERS = RESIDENT_NUMBERS  # type: ignore[misc]
    engine_module.start_ranks(CPU)
    gc.freeze()  # DeepSpeed collects garbage with every engine: a second each, for what torch has imported
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        run(entry, rank, world)
    torch.distributed.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
