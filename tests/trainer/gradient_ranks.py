"""Run under torchrun by test_gradients.py: real DeepSpeed engines, the real `Trainer`, and the gradients they get.

`gradient_ranks.py PLAN.json`: for each entry (an engine's options and its cases) one engine takes all the cases, each
one step of one minibatch. Rank 0 writes to the entry's folder the gradient that the optimiser was given, all
parameters in order, what the step reported, and the weights at the end.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.utils import safe_get_full_grad

from areal_async.engines.deepspeed import engine as engine_module
from areal_async.engines.deepspeed.model import load_model, save_activations, whole_tensors
from areal_async.engines.deepspeed.rank import leave
from areal_async.engines.deepspeed.reference import load_reference
from tests.trainer.gradients import CPU, UNCLIPPED, take_step
from tests.trainer.world import spec_for

RESIDENT_NUMBERS = 100  # the tiny model's matrices have more: ZeRO 3 splits them


def full_gradient(engine: Any) -> torch.Tensor:
    """float32, on every rank; called when the gradients are averaged and not yet used."""
    sharded = engine.optimizer is not engine.basic_optimizer
    parts = [safe_get_full_grad(p) if sharded else p.grad for p in engine.module.parameters()]
    return torch.cat([part.float().flatten() for part in parts])


def run(entry: dict[str, Any], rank: int, world: int) -> None:
    folder, out = Path(entry["model"]), Path(entry["out"])
    spec = spec_for(folder, **(UNCLIPPED | entry["spec"]))
    model = load_model(spec.model_path, spec.dtype, CPU)
    if spec.gradient_checkpointing:
        save_activations(model, spec.model_path)
    reference = load_reference(spec, model, CPU)
    engine = engine_module.open_engine(model, spec)
    seen: list[torch.Tensor] = []
    passes: list[int] = []
    step, backward = engine.step, engine.backward
    engine.step = lambda: (seen.append(full_gradient(engine)), step())
    engine.backward = lambda loss: (passes.append(1), backward(loss))
    reports = {}
    for name, case in entry["cases"].items():
        seen.clear()
        passes.clear()
        done = take_step(engine, reference, folder, {**case, "spec": entry["spec"] | case["spec"]}, rank, world)
        reports[name] = {"metrics": done.metrics, "skipped": done.skipped, "passes": len(passes)}
        if rank == 0 and seen:
            np.save(out / f"{len(reports) - 1}.npy", seen[-1].numpy())
    weights = torch.cat([tensor.float().flatten() for _, tensor in whole_tensors(engine.module)])
    if rank == 0:
        np.save(out / "weights.npy", weights.numpy())
    (out / f"reports-{rank}.json").write_text(json.dumps(reports))
    engine.destroy()


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    engine_module.RESIDENT_NUMBERS = RESIDENT_NUMBERS  # type: ignore[misc]
    engine_module.start_ranks(CPU)
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        run(entry, rank, world)
    torch.distributed.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
