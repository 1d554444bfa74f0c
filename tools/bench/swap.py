"""How long answers stand still for new weights, under load, against the bare load of the same weights. Real vLLM.

    python tools/bench/swap.py [--model configs/smollm2/model --dtype bfloat16]

Under load: from the last token that arrived before the pause, of any answer, to the first one after it. Bare load: the
same server with nothing to do, from `start_weight_update` to the end of `finish_weight_update`.
"""

import asyncio
import random
import time
from itertools import count, pairwise
from pathlib import Path
from typing import Final, NamedTuple

import alone
import figures
import msgspec

from areal_async.rollout.http import Http
from areal_async.rollout.types import SwapTimes
from areal_async.rollout.vllm_http import GENERATE, VllmClient

RATIO: Final = 1.5  # the budget, for the 135M model
TINY: Final = figures.ROOT / "configs" / "quickstart" / "model"
BIG: Final = figures.ROOT / "configs" / "smollm2" / "model"
SHM: Final = Path("/dev/shm")
PROMPT_TOKENS: Final = 16
USUAL_S: Final = 1.0
SETTLE_S: Final = 3.0  # after the first answers have begun, and between two swaps


class Load:
    """Answers that never stop coming. arrivals: when a chunk came, of any of them, seconds."""

    def __init__(self, client: VllmClient, at_once: int, shape: alone.Shape, context: int) -> None:
        self._http = Http(client.address)
        self._at_once = at_once
        self._vocab_size = shape.vocab_size
        self._tokens = context - PROMPT_TOKENS
        self._ids = count()
        self._random = random.Random(1)
        self.arrivals: list[float] = []

    async def go(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(self._at_once):
                    group.create_task(self._keep_asking(place))
        finally:
            await self._http.close()

    async def _keep_asking(self, place: int) -> None:
        first = self._tokens * (place + 1) // self._at_once  # so that not all of them end, and begin, together
        while True:
            params = {"max_tokens": max(first, 2), "ignore_eos": True, "temperature": 1.0, "logprobs": 0,
                      "detokenize": False}  # fmt: skip
            prompt = [self._random.randrange(self._vocab_size) for _ in range(PROMPT_TOKENS)]
            body = {"request_id": f"load-{next(self._ids)}", "token_ids": prompt, "sampling_params": params,
                    "stream": True}  # fmt: skip
            status, why = await self._http.send(GENERATE, msgspec.json.encode(body), self._arrived)
            if status != 200:
                raise SystemExit(f"the server answered {status}: {why.decode()}")
            first = self._tokens

    def _arrived(self, piece: bytes) -> None:
        self.arrivals.append(time.perf_counter())


class Measured(NamedTuple):
    """Seconds, an entry a swap. usual: the longest time without a token just before it, for a step's length."""

    bare: list[float]
    pauses: list[float]
    times: list[SwapTimes]
    usual: list[float]


async def measure(model: Path, dtype: str, at_once: int, swaps: int, context: int) -> Measured:
    shape = alone.shape(model)
    file = SHM / f"aa-bench-swap-{time.time_ns()}.safetensors"
    info = alone.weights_file(model, dtype, file)
    try:
        async with alone.server(
            model, dtype=dtype, cores="0-1", context=context, max_num_seqs=at_once, stream_interval=1
        ) as client:
            await client.check_weights(info)
            versions = count(1)
            bare = [await bare_load(client, info, next(versions)) for _ in range(swaps + 1)][1:]
            pauses, times, usual = [], [], []
            load = Load(client, at_once, shape, context)
            going = asyncio.create_task(load.go())
            while not load.arrivals and not going.done():
                await asyncio.wait({going}, timeout=0.1)
            for _ in range(swaps):
                await asyncio.wait({going}, timeout=SETTLE_S)
                begun = time.perf_counter()
                usual.append(longest_gap(load.arrivals, begun - USUAL_S, begun))
                times.append(await client.swap(next(versions), info))
                ended = time.perf_counter()
                while not (load.arrivals[-1] > ended) and not going.done():
                    await asyncio.wait({going}, timeout=0.05)
                if going.done():
                    going.result()
                pauses.append(longest_gap(load.arrivals, begun, load.arrivals[-1]))
                load.arrivals[:] = load.arrivals[-1:]
            going.cancel()
            await asyncio.wait({going})
            return Measured(bare, pauses, times, usual)
    finally:
        file.unlink()


async def bare_load(client: VllmClient, info: dict[str, str], version: int) -> float:
    begun = time.perf_counter()
    await client.start_weight_update()
    await client.update_weights(info)
    await client.finish_weight_update(version)
    return time.perf_counter() - begun


def longest_gap(arrivals: list[float], begun: float, ended: float) -> float:
    """The longest time without any token that touches begun..ended."""
    return max(after - before for before, after in pairwise(arrivals) if after >= begun and before <= ended)


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--model", type=Path, action="append", help="folder; the tiny model and SmolLM2 if it is there")
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=32)
    options = parser.parse_args()
    report = figures.Report("swap")
    rows, ratios = [], []
    for model in options.model or [TINY, *([BIG] if BIG.is_dir() else [])]:
        dtype = "float32" if model == TINY else "bfloat16"
        context = min(alone.shape(model).max_position_embeddings, 512)
        found = asyncio.run(measure(model, dtype, options.in_flight, options.swaps, context))
        load_s, pause_s, usual_s = alone.middle(found.bare), alone.middle(found.pauses), alone.middle(found.usual)
        calls = [alone.middle([getattr(time, name) for time in found.times]) for name in SwapTimes._fields]
        name = model.parent.name
        after = pause_s - sum(calls)
        rows.append((name, load_s * 1e3, usual_s * 1e3, pause_s * 1e3, *(call * 1e3 for call in calls), after * 1e3))
        ratios.append((name, pause_s / load_s, calls, after, pause_s))
    calls_ms = [f"/{name.removesuffix('_s')}, ms" for name in SwapTimes._fields]
    columns = ("model", "bare load, ms", "longest gap before, ms", "gap at the swap, ms", *calls_ms,
               "outside the calls, ms")  # fmt: skip
    report.table(f"A swap with {options.in_flight} answers in flight, medians of {options.swaps}", columns, rows)
    for name, ratio, calls, after, pause_s in ratios:
        shares = {
            field.removesuffix("_s"): call / pause_s for field, call in zip(SwapTimes._fields, calls, strict=True)
        }
        shares["outside the calls: the first step computes the KV cache of all answers again"] = after / pause_s
        most = sorted(shares, key=lambda share: -shares[share])[:3]
        report.budget(
            f"generation pause per swap under load against the bare load ({name})", ratio, at_most=RATIO, unit="×",
            bound_by=", ".join(f"{share} {shares[share]:.0%}" for share in most),
        )  # fmt: skip
    report.finish(options.json)


if __name__ == "__main__":
    main()
