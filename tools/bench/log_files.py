"""What the log's files cost: bytes a sample and a step, and the seconds in which a resume reads and opens them.

    python tools/bench/log_files.py [--samples 100000] [--tokens 512]

The bytes are those of a run on scripted peers. The log that is read has records of the kinds, and in the order, of a
run of groups of 16 and batches of 256 samples.
"""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import figures
import numpy as np

from areal_async.config_file import load_config
from areal_async.controller import Controller
from areal_async.log import format as fmt
from areal_async.log import reader
from areal_async.log.writer import RunLog
from areal_async.messages import (
    AnyRecord,
    Forget,
    GroupRead,
    Minibatch,
    ReadGroup,
    Rules,
    SampleDone,
    Score,
    Scored,
    StartSample,
    Train,
    TrainSample,
)
from areal_async.testing.recipes import scripted
from areal_async.testing.small_run import write_small_run

RECORDS_PER_S: Final = 200_000.0  # the budget
GROUP: Final = 16
BATCH: Final = 256
SEGMENT_BYTES: Final = 256 << 20
OF_A_SAMPLE: Final = ("StartSample", "SampleDone", "Score", "Scored")
OPTIONS: Final = ("train.steps=20", "train.batch_groups=16", "rollout.group_size=8", "rollout.max_concurrent=512")


def write_log(folder: Path, samples: int, tokens: int) -> None:
    rules = Rules(
        seed=1, steps=1000, batch_groups=16, group_size=GROUP, max_staleness=4, max_concurrent=512, minibatches=1,
        ranks=1, max_tokens_per_microbatch=8192, max_new_tokens=4096,
    )  # fmt: skip
    arrays = [np.zeros(tokens, dtype) for dtype in (np.int32, np.uint8, np.float32, np.int32)]
    with closing(RunLog(folder, SEGMENT_BYTES)) as log:
        log.append(rules)
        for number in range(samples):
            group, member = divmod(number, GROUP)
            name, at = f"{group}.{member}", 0.123456 * number
            if member == 0:
                log.append(ReadGroup(group=group, position=group))
                log.append(GroupRead(at=at, group=group, row=group, prompt_tokens=77))
            log.append(StartSample(sample=name, attempt=0, position=group, server="0", floor=3))
            done = SampleDone(
                at=at, sample=name, attempt=0, oldest=3, newest=4, prompt_tokens=77, length=tokens - 77,
                loss_tokens=tokens - 77, finish="stop",
            )  # fmt: skip
            log.append(done, log.put(name, 0, arrays))
            log.append(Score(sample=name, attempt=0))
            log.append(Scored(at=at, sample=name, attempt=0, verdict="right", reward=1.0))
            if number % BATCH == BATCH - 1:
                for record in step(number // BATCH):
                    log.append(record)
                log.flush()


def step(number: int) -> tuple[AnyRecord, ...]:
    names = [f"{i // GROUP}.{i % GROUP}" for i in range(number * BATCH, (number + 1) * BATCH)]
    parts = tuple((index,) for index in range(BATCH))
    train = Train(
        step=number, branch=0, groups=tuple(range(BATCH // GROUP)),
        samples=tuple(TrainSample(name, 0, 0.5) for name in names), minibatches=(Minibatch(float(BATCH), (parts,)),),
    )  # fmt: skip
    return train, Forget(samples=tuple(names))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def read_and_open(report: figures.Report, folder: Path, samples: int, tokens: int) -> None:
    write_log(folder, samples, tokens)
    records = sum(1 for _ in reader.read_records(folder))
    read = min(timed(lambda: sum(1 for _ in reader.read_records(folder))) for _ in range(3))
    opened = min(timed(lambda: RunLog(folder, SEGMENT_BYTES).close()) for _ in range(3))
    nbytes = sum(path.stat().st_size for path in folder.glob("payload-*.seg"))
    rows = [("read the decisions", records, *read), ("open to write on", samples, *opened)]
    report.table(
        f"A log of {samples:,} samples of {tokens} tokens: {nbytes / 1e9:.2f} GB of arrays, "
        f"{(folder / fmt.DECISIONS_NAME).stat().st_size / 1e6:.0f} MB of decisions",
        ("", "records or samples", "CPU s", "wall s"), rows,
    )  # fmt: skip
    report.budget(
        "records read, a second of CPU time", records / read[0], at_least=RECORDS_PER_S, bound_by="decoding of msgpack"
    )


async def live(folder: Path) -> tuple[Path, int]:
    """Log folder and steps of a run on scripted peers."""
    config = load_config(write_small_run(folder, *OPTIONS))
    async with Controller(config, recipes=scripted()) as run:
        result = await run.run()
    return result.folder / "log", result.steps


def sizes(report: figures.Report, log: Path, steps: int) -> None:
    records = list(reader.read_records(log))
    ends = [*(record.offset for record in records[1:]), (log / fmt.DECISIONS_NAME).stat().st_size]
    by_kind: Counter[str] = Counter()
    for record, end in zip(records, ends, strict=True):
        by_kind[type(record.message).__name__] += end - record.offset
    done = [record for record in records if isinstance(record.message, SampleDone)]
    arrays = sum(record.payload.nbytes for record in done if record.payload is not None)
    tokens = sum(r.message.prompt_tokens + r.message.length for r in done if isinstance(r.message, SampleDone))
    of_samples = sum(by_kind[kind] for kind in OF_A_SAMPLE)
    others = sum(by_kind.values()) - of_samples
    trained = sum(len(record.message.samples) for record in records if isinstance(record.message, Train))
    rows = [
        ("arrays, a sample", arrays / len(done)),
        ("arrays, a token", arrays / tokens),
        ("decisions, a sample (its own records)", of_samples / len(done)),
        ("decisions, a step (all others)", others / steps),
        ("decisions, a step, for each of its samples", others / trained),
        ("of them Train, a step", by_kind["Train"] / steps),
        ("of them Forget and Release, a step", (by_kind["Forget"] + by_kind["Release"]) / steps),
    ]
    report.table(
        f"Bytes in the log: {len(done)} samples of {tokens / len(done):.0f} tokens, {steps} steps of "
        f"{trained / steps:.0f} samples",
        ("", "bytes"), rows,
    )  # fmt: skip


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=512, help="of a sample, prompt and answer")
    options = parser.parse_args()
    report = figures.Report("log_files")
    with tempfile.TemporaryDirectory() as folder:
        sizes(report, *asyncio.run(live(Path(folder) / "run")))
        read_and_open(report, Path(folder) / "log", options.samples, options.tokens)
    report.finish(options.json)


if __name__ == "__main__":
    main()
