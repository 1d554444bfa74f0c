"""A repair of vLLM 0.32 on the CPU: seeded requests that are computed in several parts.

When a request is recomputed (after a swap dropped the KV cache, after a preemption) or its prompt is long, its prefill
may be cut to the token budget of a step. Each part but the last draws a token that is thrown away, and vLLM winds the
request's random generator back by a CUDA generator's offset. A CPU generator has none: the worker dies, and with it the
server and all answers that are under way.

What always holds after `install`: such a draw leaves the generator of its request as it was. GPUs aren't touched.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def install() -> None:
    """Repair the model runner class of this process; to be called in a CPU worker, once."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner._sample = _winding_back(CPUModelRunner._sample)
    CPUModelRunner._bookkeeping_sync = _without_generators(CPUModelRunner._bookkeeping_sync)


def _winding_back(sample: Callable[..., Any]) -> Callable[..., Any]:
    """`_sample` that restores the generators of requests whose token is thrown away."""

    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        thrown_away = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
        generators = [batch.generators[i] for i in thrown_away.tolist() if i in batch.generators]
        states = [generator.get_state() for generator in generators]
        output = sample(runner, *args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    return wrapped


def _without_generators(bookkeeping: Callable[..., Any]) -> Callable[..., Any]:
    """`_bookkeeping_sync` that finds no generator to wind back; it uses them for nothing else."""

    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            batch.generators = generators

    return wrapped
