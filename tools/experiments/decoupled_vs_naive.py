"""Does the decoupled objective matter where tokens are old? The quickstart's task with η = 8, three seeds each.

    python tools/experiments/decoupled_vs_naive.py [--steps 50] [--seeds 1 2 3] [--swap-after-s 4]

Real vLLM and DeepSpeed. `decoupled_ppo` clips π_θ/π_prox, the policy at the step's start (Eq. 5 of the AReaL paper);
`ppo` clips the ratio to whatever policy sampled the token, which may be eight steps old. Everything else is the same.
Tokens get old because swaps are slow: each begins some seconds after its weights are there, as it would with weights
that take so long to travel. Meanwhile the server goes on under its old ones and the trainer trains several steps.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import charts
import msgspec
import uvloop

from areal_async.config_file import load_config
from areal_async.controller import Controller
from areal_async.messages import Version
from areal_async.rollout.types import SwapTimes
from areal_async.rollout.vllm_http import VllmClient

QUICKSTART: Final = charts.ROOT / "configs" / "quickstart.yaml"
LOSSES: Final = ("decoupled_ppo", "ppo")
NAMES: Final = {"decoupled_ppo": "decoupled (Eq. 5)", "ppo": "naive (ratio to the sampling policy)"}
ETA: Final = 8
GOOD: Final = 0.9  # reward; the base model starts at about 0.6
WINDOW: Final = 5  # steps of the moving mean
LAST: Final = 10  # steps whose mean reward is the final one
FIELDS: Final = (
    "step", "time_s", "reward_mean", "lag_mean", "lag_max", "clip_share", "behav_ess", "grad_norm", "entropy",
    "eval_version", "eval_score",
)  # fmt: skip

Rows = list[dict[str, Any]]


def slow_swaps(after_s: float) -> None:
    """From now on every swap but a server's first begins so much later than it was asked for."""
    swap = VllmClient.swap

    async def later(self: VllmClient, version: Version, *arguments: Any) -> SwapTimes:
        if version:
            await asyncio.sleep(after_s)
        return await swap(self, version, *arguments)

    VllmClient.swap = later  # type: ignore[method-assign]


async def run(folder: Path, loss: str, seed: int, options: argparse.Namespace) -> Rows:
    config = load_config(
        QUICKSTART,
        [
            f"runs_dir={folder}", f"seed={seed}", f"train.loss={loss}", f"train.steps={options.steps}",
            f"train.lr={options.lr}", f"train.minibatches={options.minibatches}", f"rollout.max_staleness={ETA}",
            f"eval.every_steps={options.eval_every}", f"eval.limit={options.eval_limit}",
        ],
    )  # fmt: skip
    async with Controller(config) as controller:
        result = await controller.run()
    rows = [msgspec.to_builtins(row) for row in result.rows]
    found = [{field: row[field] for field in FIELDS} for row in rows]
    told = {row["eval_version"] for row in found}
    for each in result.evaluations:  # the one after the last step has no row after it
        if each.version not in told:
            found[-1] |= {"eval_version": each.version, "eval_score": each.score}
    return found


def smooth(values: Sequence[float]) -> list[float]:
    return [fmean(values[max(0, at + 1 - WINDOW) : at + 1]) for at in range(len(values))]


def steps_to_good(rows: Rows) -> int | None:
    reward = smooth([row["reward_mean"] for row in rows])
    return next((row["step"] for row, value in zip(rows, reward, strict=True) if value >= GOOD), None)


def evaluated(rows: Rows) -> list[tuple[int, float]]:
    return [(row["eval_version"], row["eval_score"]) for row in rows if row["eval_score"] is not None]


def draw(runs: dict[str, list[Rows]]) -> None:
    figure, (reward, evaluation, clip, lag) = charts.new(4, f"quickstart, η = {ETA}: mean and spread of the seeds")
    for number, (loss, of_seeds) in enumerate(runs.items()):
        colour, steps = charts.COLOURS[number], [row["step"] for row in of_seeds[0]]
        for axis, field in ((reward, "reward_mean"), (clip, "clip_share"), (lag, "lag_mean")):
            curves = [smooth([row[field] for row in rows]) for rows in of_seeds]
            across = list(zip(*curves, strict=True))
            axis.plot(steps, [fmean(values) for values in across], color=colour, label=NAMES[loss])
            axis.fill_between(steps, list(map(min, across)), list(map(max, across)), color=colour, alpha=0.2)
        points = [evaluated(rows) for rows in of_seeds]
        versions = [version for version, _ in points[0]]
        scores = list(zip(*([score for _, score in each] for each in points), strict=False))
        means = [fmean(values) for values in scores]
        below = [max(0.0, mean - min(values)) for mean, values in zip(means, scores, strict=True)]
        above = [max(0.0, max(values) - mean) for mean, values in zip(means, scores, strict=True)]
        shown = versions[: len(scores)]
        evaluation.errorbar(shown, means, yerr=[below, above], color=colour, marker="o", capsize=3)
    reward.set(xlabel="step", ylabel=f"training reward, mean of {WINDOW} steps")
    evaluation.set(xlabel="version", ylabel="score on held-out problems")
    clip.set(xlabel="step", ylabel="share of tokens clipped")
    lag.set(xlabel="step", ylabel="lag of trained tokens, mean")
    reward.legend(fontsize=7, loc="lower right")
    charts.save(figure, "decoupled_vs_naive.png")


def compared(where: str, found: dict[str, list[float]]) -> str:
    """found: a figure of each seed, by objective."""
    decoupled, naive = (fmean(found[loss]) for loss in LOSSES)
    between, within = abs(decoupled - naive), max(span(values) for values in found.values())
    return (
        f"{where} the decoupled objective is {'ahead' if decoupled > naive else 'behind'} by {between:.3f}; the seeds "
        f"of one objective differ by up to {within:.3f}, so this "
        f"{'is more than the spread of the seeds' if between > within else 'lies within the spread of the seeds'}."
    )


def tell(runs: dict[str, list[Rows]], options: argparse.Namespace) -> str:
    rows = []
    for loss, of_seeds in runs.items():
        final = [fmean(row["reward_mean"] for row in each[-LAST:]) for each in of_seeds]
        lowest = [min(smooth([row["reward_mean"] for row in each])[WINDOW:]) for each in of_seeds]
        held_out = [evaluated(each)[-1][1] for each in of_seeds]
        good = [steps_to_good(each) for each in of_seeds]
        flat = [row for each in of_seeds for row in each]
        when = ", ".join("never" if step is None else str(step) for step in good)
        rows.append(
            (NAMES[loss], spread(final), spread(held_out), when,
             spread(lowest), fmean(row["clip_share"] for row in flat) * 100, fmean(row["lag_mean"] for row in flat),
             max(row["lag_max"] for row in flat), fmean(row["behav_ess"] for row in flat))
        )  # fmt: skip
    columns = ("objective", f"reward, last {LAST} steps", "held-out, at the end", f"steps to {GOOD:g}, each seed",
               "lowest reward on the way", "clipped, % of tokens", "lag, mean", "lag, max",
               "effective sample size")  # fmt: skip
    reward = {loss: [fmean(row["reward_mean"] for row in each[-LAST:]) for each in runs[loss]] for loss in LOSSES}
    score = {loss: [evaluated(each)[-1][1] for each in runs[loss]] for loss in LOSSES}
    verdict = f"{compared('In the training reward at the end', reward)} {compared('On held-out problems', score)}\n"
    return (
        "## Decoupled and naive objective on old tokens\n\n"
        f"The quickstart's task and model with η = {ETA}, {options.minibatches} minibatches, learning rate "
        f"{options.lr:g}, swaps that begin {options.swap_after_s:g} s late, {options.steps} steps, seeds "
        f"{', '.join(map(str, options.seeds))}; real vLLM and DeepSpeed "
        f"(`tools/experiments/decoupled_vs_naive.py`). Ranges are over the seeds.\n\n"
        + charts.markdown(columns, rows)
        + "\n"
        + verdict
        + "\n![training reward, held-out score, clipped tokens and lag](experiments/decoupled_vs_naive.png)\n"
    )


def span(values: Sequence[float]) -> float:
    return max(values) - min(values)


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "not measured"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--swap-after-s", type=float, default=4.0, help="how long new weights travel")
    parser.add_argument("--eval-limit", type=int, default=64)
    options = parser.parse_args()
    slow_swaps(options.swap_after_s)
    runs: dict[str, list[Rows]] = {loss: [] for loss in LOSSES}
    for seed in options.seeds:
        for loss in LOSSES:
            with tempfile.TemporaryDirectory(prefix="aa-decoupled-") as folder:
                runs[loss].append(uvloop.run(run(Path(folder), loss, seed, options)))
            last = runs[loss][-1][-1]
            print(f"{loss}, seed {seed}: reward {last['reward_mean']:.3f} after {last['time_s']:.0f} s", flush=True)
    charts.write("decoupled_vs_naive.json", json.dumps(runs))
    draw(runs)
    text = tell(runs, options)
    charts.write("decoupled_vs_naive.part.md", text)
    print(text)


if __name__ == "__main__":
    main()
