"""What each answer to old tokens costs: `rollout.when_older` on answers of very different lengths. Scripted peers.

    python tools/experiments/when_older.py [--steps 60]

The real controller and core; a server that takes real time for each token and costs no CPU; a trainer that takes a
fixed time for a step. Lengths are log-normal and follow from a sample's name, so every policy meets the same ones. The
longest answers take many more than η steps. What is told of tokens is read from the run logs.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import charts
import crowd
import heavy
import numpy as np
import uvloop

from areal_async.controller import Controller, RunResult
from areal_async.launch.recipes import Command, Recipes
from areal_async.log.reader import index_payloads, read_payload, read_records
from areal_async.messages import Cancel, Forget, StartSample, Train, group_of
from areal_async.testing.recipes import scripted

POLICIES: Final = {
    "wait": ("rollout.when_older=wait",),
    "train": ("rollout.when_older=train",),
    "mask": ("rollout.when_older=mask",),
    "drop": ("rollout.when_older=drop",),
    "drop, requeue": ("rollout.when_older=drop", "rollout.requeue=true"),
}
ETA: Final = 2
TOKEN_S: Final = 0.004
STEP_S: Final = 0.25
WARM_UP: Final = 5  # steps that are left out
BATCH: Final = 16  # groups of crowd.GROUP samples
QUARTERS: Final = 4


@dataclass
class Price:
    """What one policy did. lags: share of trained tokens by lag. lost_samples, lost_tokens: by quarter of length, the
    shortest first, shares of what was started and came to an end (trained or lost)."""

    policy: str
    steps_per_s: float
    tokens_per_s: float
    trainer_wait_s: float
    lags: dict[int, float]
    lost_samples: list[float]
    lost_tokens: list[float]
    trained_length: float


async def run(folder: Path, policy: str, steps: int) -> Price:
    config = crowd.configuration(
        folder,
        "seed=1",
        "rollout.max_concurrent=512",
        f"rollout.max_new_tokens={heavy.LONGEST}",
        f"rollout.max_staleness={ETA}",
        f"train.batch_groups={BATCH}",
        f"train.steps={steps + ETA + 1}",  # in the last ones nothing new is admitted
        *POLICIES[policy],
    )
    async with Controller(config, workflow=heavy.HeavyTail(), recipes=recipes()) as controller:
        result = await controller.run()
    return price(policy, result, steps)


def recipes() -> Recipes:
    def server(*, uds: str, max_model_len: int, **_: object) -> Command:
        argv = [sys.executable, str(crowd.FLOOD), "--uds", uds, "--max-model-len", str(max_model_len)]
        return [*argv, "--chunk-tokens", "8", "--token-s", str(TOKEN_S)], {}

    return Recipes(server=server, trainer=scripted(step_s=STEP_S).trainer)


def price(policy: str, result: RunResult, steps: int) -> Price:
    rows = result.rows[:steps]
    kept = rows[WARM_UP:]
    seconds = kept[-1].time_s - rows[WARM_UP - 1].time_s
    log = result.folder / "log"
    versions = {header.sample: read_payload(log, ref).arrays[3] for header, ref in index_payloads(log)}
    trained: dict[str, tuple[int, int]] = {}  # step, oldest version with a gradient
    gone: set[str] = set()
    started: set[str] = set()
    for record in read_records(log):
        match record.message:
            case StartSample(sample=sample):
                started.add(sample)
            case Train() as train:
                trained |= {entry.sample: (train.step, train.mask_below) for entry in train.samples}
            case Cancel(sample=sample):
                gone.add(sample)
            case Forget(samples=samples):
                gone |= set(samples)
    dropped = {group_of(sample) for sample in gone - trained.keys()}
    lost = {sample for sample in started if group_of(sample) in dropped and sample not in trained}
    lags: Counter[int] = Counter()
    masked: Counter[str] = Counter()
    for sample, (step, below) in trained.items():  # a step trains what is there, the first and last ones too
        of_sample = versions[sample][versions[sample] >= 0]
        masked[sample] = int(np.count_nonzero(of_sample < below))
        lags.update((step - of_sample[of_sample >= below]).tolist())
    ended = sorted(trained.keys() | lost, key=heavy.length)
    quarters = [ended[len(ended) * q // QUARTERS : len(ended) * (q + 1) // QUARTERS] for q in range(QUARTERS)]
    lost_tokens = [
        sum(heavy.length(sample) if sample in lost else masked[sample] for sample in quarter)
        / sum(map(heavy.length, quarter))
        for quarter in quarters
    ]
    return Price(
        policy=policy,
        steps_per_s=len(kept) / seconds,
        tokens_per_s=sum(row.tokens_trained for row in kept) / seconds,
        trainer_wait_s=sum(row.trainer_wait_s for row in kept) / len(kept),
        lags={lag: count / lags.total() for lag, count in sorted(lags.items())},
        lost_samples=[sum(sample in lost for sample in quarter) / len(quarter) for quarter in quarters],
        lost_tokens=lost_tokens,
        trained_length=float(np.mean([heavy.length(sample) for sample in trained])),
    )


def draw(prices: list[Price]) -> None:
    figure, (lags, lost, speed) = charts.new(3, f"when_older, η = {ETA}, log-normal lengths")
    for number, each in enumerate(prices):
        lags.step(list(each.lags), [share * 100 for share in each.lags.values()], where="mid", label=each.policy,
                  color=charts.COLOURS[number])  # fmt: skip
        lost.plot(range(1, QUARTERS + 1), [share * 100 for share in each.lost_tokens], "o-", label=each.policy,
                  color=charts.COLOURS[number])  # fmt: skip
        speed.barh(each.policy, each.steps_per_s, color=charts.COLOURS[number])
    lags.axvline(ETA + 0.5, color="black", linewidth=0.8, linestyle=":")
    lags.set(xlabel="lag of a trained token, steps", ylabel="share of trained tokens, %", yscale="log")
    lost.set(xlabel="quarter of length, 4 = longest", ylabel="tokens without a gradient, %", xticks=range(1, 5))
    speed.set(xlabel="steps/s")
    speed.invert_yaxis()
    lags.legend(fontsize=8)
    charts.save(figure, "when_older.png")


def tell(prices: list[Price], steps: int) -> str:
    columns = ("policy", "steps/s", "tokens trained/s", "trainer waits, s a step", "lag, mean", "lag, max",
               f"tokens older than η = {ETA}, %", "samples lost, % (by quarter of length)",
               "tokens without gradient, % (by quarter)", "trained length, mean")  # fmt: skip
    rows = [
        (each.policy, each.steps_per_s, each.tokens_per_s, each.trainer_wait_s,
         sum(lag * share for lag, share in each.lags.items()), max(each.lags),
         sum(share for lag, share in each.lags.items() if lag > ETA) * 100, quartered(each.lost_samples),
         quartered(each.lost_tokens), each.trained_length)
        for each in prices
    ]  # fmt: skip
    fastest, wait = max(prices, key=lambda each: each.steps_per_s), prices[0]
    drop = next(each for each in prices if each.policy == "drop")
    return (
        "## What is done about old tokens\n\n"
        f"`rollout.when_older` on lengths that are log-normal (median {heavy.MEDIAN_TOKENS} tokens, at most "
        f"{heavy.LONGEST}); a step takes {STEP_S:g} s, the longest answer {heavy.LONGEST * TOKEN_S:.1f} s, η = {ETA}. "
        f"Real controller, scripted peers, {steps} steps of {BATCH * crowd.GROUP} samples, the first {WARM_UP} left "
        f"out of what is a rate (`tools/experiments/when_older.py`).\n\n" + charts.markdown(columns, rows) + "\n"
        f"`{fastest.policy}` makes {fastest.steps_per_s / wait.steps_per_s:.1f} × the steps of `wait`, which "
        f"keeps every token within η and loses none. `drop` loses {drop.lost_samples[0]:.0%} of the shortest quarter "
        f"and {drop.lost_samples[-1]:.0%} of the longest, and what it trains has {drop.trained_length:.0f} tokens on "
        f"average, {wait.trained_length:.0f} with `wait`.\n\n"
        "![lag, loss by length and steps a second of each policy](experiments/when_older.png)\n"
    )


def quartered(shares: list[float]) -> str:
    return " · ".join(f"{share * 100:.1f}" for share in shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    options = parser.parse_args()
    crowd.raise_file_limit()
    prices = []
    for policy in options.policies:
        with tempfile.TemporaryDirectory(prefix="aa-older-") as folder:
            prices.append(uvloop.run(run(Path(folder), policy, options.steps)))
        print(prices[-1], flush=True)
    draw(prices)
    charts.write("when_older.json", json.dumps([asdict(each) for each in prices], indent=1))
    text = tell(prices, options.steps)
    charts.write("when_older.part.md", text)
    print(text)


if __name__ == "__main__":
    main()
