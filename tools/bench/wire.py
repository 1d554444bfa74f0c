"""What the wire and the run log cost: `python tools/bench/wire.py`. Ratios are within this run; times are for scale.

Says per 4,096-token sample (ids int32, loss mask uint8, log-probabilities float32, versions int32): packing and
unpacking against msgpack of lists; a request over a Unix socket and back; putting it into the log, reading it again.
And per event of the decision log: append and flush.
"""

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import figures
import msgspec
import numpy as np

from areal_async.log.writer import RunLog
from areal_async.messages import PROTOCOL, Hello, Probe, ProbeResult, Rules, SampleDone
from areal_async.wire import frames
from areal_async.wire.arrays import Array
from areal_async.wire.dealer import Dealer
from areal_async.wire.router import Router

TOKENS = 4096
WANTED_RATIO = 10.0  # the budgets
ROUNDS = 7  # the best of these counts: the machine is shared


def main() -> None:
    options = figures.parser(__doc__).parse_args()
    report = figures.Report("wire")
    sample = a_sample()
    wire_us = per_call_us(lambda: through_frames(sample), 2000)
    lists_us = per_call_us(lambda: through_lists(sample), 20)
    copied_us = per_call_us(lambda: through_frames_with_copies(sample), 2000)
    rows: list[tuple[str, float]] = [
        (f"pack + unpack of a {TOKENS}-token sample", wire_us),
        ("the same as msgpack of lists", lists_us),
        ("pack, copy as the socket does, unpack", copied_us),
    ]
    with tempfile.TemporaryDirectory(prefix="aa-bench-") as folder:
        rows.append(("request over ipc:// and back", asyncio.run(round_trip_us(folder, sample))))
        rows += log_costs(Path(folder), sample)
    report.table("The wire and the run log", ("what", "µs"), rows)
    report.budget(
        f"wire: a {TOKENS:,}-token sample against msgpack of lists", lists_us / wire_us, at_least=WANTED_RATIO, unit="×"
    )
    report.finish(options.json)


def a_sample() -> list[Array]:
    random = np.random.default_rng(0)
    return [
        random.integers(0, 150_000, TOKENS, dtype=np.int32),
        np.ones(TOKENS, np.uint8),
        random.normal(-1, 1, TOKENS).astype(np.float32),
        np.full(TOKENS, 41, np.int32),
    ]


def through_frames(sample: list[Array]) -> None:
    frames.unpack(frames.pack(Probe(id="1307.5"), sample, id="1307.5"))


def through_frames_with_copies(sample: list[Array]) -> None:
    packed = frames.pack(Probe(id="1307.5"), sample, id="1307.5")
    frames.unpack([bytes(frame) for frame in packed])


def through_lists(sample: list[Array]) -> None:
    packed = msgspec.msgpack.encode([{"id": "1307.5"}, *(array.tolist() for array in sample)])
    _, *lists = msgspec.msgpack.decode(packed)
    for values, array in zip(lists, sample, strict=True):
        np.array(values, dtype=array.dtype)


async def round_trip_us(folder: str, sample: list[Array]) -> float:
    address, calls = f"ipc://{folder}/w", 300
    hello = Hello(protocol=PROTOCOL, secret="s", worker="reward", name="rewards.0", nonce="a", credits=1)

    def worker() -> None:
        with Dealer(address, hello) as dealer:
            while (request := dealer.receive(10)) is not None and isinstance(request.message, Probe):
                dealer.reply(request, ProbeResult(id=request.id), request.arrays)

    thread = threading.Thread(target=worker)
    async with Router(address, "s", lambda _: None, lambda *_: None) as router:
        thread.start()
        await router.request("rewards.0", Probe(id="x"), sample, id="x", deadline_s=10)
        began = time.perf_counter()
        for call in range(calls):
            await router.request("rewards.0", Probe(id="x"), sample, id=str(call), deadline_s=10)
        took = time.perf_counter() - began
    thread.join()
    return took / calls * 1e6


def log_costs(folder: Path, sample: list[Array]) -> list[tuple[str, float]]:
    rules = Rules(
        seed=1, steps=2, batch_groups=2, group_size=2, max_staleness=1, max_concurrent=4, minibatches=1, ranks=1,
        max_tokens_per_microbatch=64,
    max_new_tokens=4096,
    )  # fmt: skip
    event = SampleDone(
        at=1234.5, sample="1307.5", attempt=0, oldest=40, newest=41, prompt_tokens=90, length=TOKENS,
        loss_tokens=TOKENS, finish="stop",
    )  # fmt: skip
    with closing(RunLog(folder / "log", 64 << 20)) as log:
        log.append(rules)

        def events(count: int) -> None:
            for _ in range(count):
                log.append(event)
            log.flush()

        rows = [
            ("append + flush of one event", per_call_us(lambda: events(1), 2000)),
            ("the same, 100 events a flush, an event", per_call_us(lambda: events(100), 100) / 100),
        ]
        ref = log.put("1307.5", 0, sample)

        def put() -> None:
            log.append(event, log.put("1307.5", 0, sample))
            log.flush()

        rows += [
            (f"put + append + flush of a sample, {ref.nbytes} bytes", per_call_us(put, 500)),
            ("get of a sample", per_call_us(lambda: log.get("1307.5", 0), 500)),
        ]
        began = time.perf_counter()
        asyncio.run(log.sync())
        return [*rows, ("sync after all that", (time.perf_counter() - began) * 1e6)]


def per_call_us(call: Callable[[], object], calls: int) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - began)
    return best / calls * 1e6


if __name__ == "__main__":
    main()
