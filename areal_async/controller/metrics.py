"""What a step is measured by: the row of `metrics.jsonl`, and the meter of who was busy when.

What always holds: every field has its unit and its denominator in its description, from which docs/metrics.md is
drawn; shares are of wall time since the step before was done, and lie in 0..1.
"""

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from areal_async.controller.samples import Kept
from areal_async.messages import StepDone, Train


def _about(text: str) -> Meta:
    return Meta(description=text)


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `metrics.jsonl`."""

    step: Annotated[int, _about("training step, from 0")]
    version: Annotated[int, _about("version of the weights after it: step + 1")]
    branch: Annotated[int, _about("grows each time training goes back to a checkpoint")]
    time_s: Annotated[float, _about("run clock when the step was done, seconds")]
    reward_mean: Annotated[float, _about("mean reward of the trained samples")]
    samples: Annotated[int, _about("samples in the step")]
    tokens_trained: Annotated[int, _about("loss-mask tokens in the step")]
    tokens_generated: Annotated[int, _about("response tokens of answers that were finished since the step before")]
    tokens_discarded: Annotated[int, _about("response tokens of finished answers that were filtered, failed or "
                                            "cancelled since the step before")]  # fmt: skip
    lag_max: Annotated[int, _about("step minus the oldest version of any trained token; at most `max_staleness`")]
    lag_mean: Annotated[float, _about("mean over trained tokens of step minus the token's version")]
    mixed_share: Annotated[float, _about("share of the step's samples with tokens of two versions or more")]
    versions_per_sample_max: Annotated[int, _about("most versions in one sample of the step")]
    mismatch_max: Annotated[float, _about("largest |log π_prox − log π_behav| over trained tokens of lag 0, nats; "
                                          "0 if there are none")]  # fmt: skip
    mismatch_tokens: Annotated[int, _about("trained tokens of lag 0")]
    behav_k3: Annotated[float, _about("k3 estimate of KL(behav ‖ prox): mean over trained tokens of exp(d) − 1 − d, "
                                      "d = log π_prox − log π_behav, nats")]  # fmt: skip
    behav_ess: Annotated[float, _about("effective sample size of the weights w = π_prox/π_behav: (Σw)² / (n·Σw²)")]
    loss: Annotated[float, _about("Eq. 5, mean over the minibatches")]
    grad_norm: Annotated[float, _about("gradient's norm before clipping, mean over the minibatches")]
    entropy: Annotated[float, _about("entropy of the policy, mean over trained tokens, nats")]
    clip_share: Annotated[float, _about("share of trained tokens whose ratio was clipped")]
    lr: Annotated[float, _about("learning rate of the step's last optimiser step")]
    response_len_mean: Annotated[float, _about("mean response length of the step's samples, tokens")]
    truncated_share: Annotated[float, _about("share of the step's samples that were cut at the token limit")]
    swap_pause_s: Annotated[float, _about("how long servers stood still for new weights since the step before, sum "
                                          "over servers, seconds")]  # fmt: skip
    step_s: Annotated[float, _about("wall time since the step before was done, seconds")]
    train_s: Annotated[float, _about("time that the ranks took for the step, seconds")]
    trainer_idle_share: Annotated[float, _about("share of step_s in which the trainer neither trained nor published")]
    rollout_idle_share: Annotated[float, _about("share of step_s in which servers had nothing to do or stood still")]
    both_busy_share: Annotated[float, _about("share of step_s in which the trainer trained and servers generated")]
    waited_for: Annotated[str, _about("what the trainer last waited for before this step; empty: it did not wait")]
    verdicts: Annotated[dict[str, int], _about("checks that ended since the step before, by verdict")]
    skipped: Annotated[str, _about("why the update was left out; empty: it was not")]
    ledger: Annotated[dict[str, int], _about("the balance of groups and samples after the step")]


class Meter:
    """Adds up who was busy for how long. Times are run-clock seconds; `advance` before every change."""

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._since = 0.0
        self._paused = 0
        self._training = False
        self._in_flight = 0
        self._elapsed_s = self._training_s = self._rollout_s = self._both_s = 0.0
        self.total_s = self.total_training_s = self.total_rollout_s = self.total_both_s = 0.0

    def advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._since)
        self._since = now
        generating = 0.0 if self._in_flight == 0 else 1.0 - self._paused / self._servers
        self._elapsed_s += elapsed
        self._rollout_s += elapsed * generating
        if self._training:
            self._training_s += elapsed
            self._both_s += elapsed * generating

    def training(self, now: float, training: bool) -> None:
        self.advance(now)
        self._training = training

    def in_flight(self, now: float, samples: int) -> None:
        self.advance(now)
        self._in_flight = samples

    def paused(self, now: float, change: int) -> None:
        self.advance(now)
        self._paused += change

    def lap(self, now: float) -> tuple[float, float, float, float]:
        """(seconds, trainer idle share, rollout idle share, both busy share) since the last lap."""
        self.advance(now)
        elapsed = self._elapsed_s
        whole = max(elapsed, 1e-9)
        shares = (1 - self._training_s / whole, 1 - self._rollout_s / whole, self._both_s / whole)
        self.total_s += elapsed
        self.total_training_s += self._training_s
        self.total_rollout_s += self._rollout_s
        self.total_both_s += self._both_s
        self._elapsed_s = self._training_s = self._rollout_s = self._both_s = 0.0
        trainer, rollout, both = (min(1.0, max(0.0, share)) for share in shares)
        return elapsed, trainer, rollout, both


class BatchFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a batch before it is trained; fields as in `StepRow`."""

    reward_mean: float
    samples: int
    tokens_trained: int
    lag_max: int
    lag_mean: float
    mixed_share: float
    versions_per_sample_max: int
    response_len_mean: float
    truncated_share: float


def batch_figures(command: Train, batch: list[Kept]) -> BatchFigures:
    """Figures of a batch; all 0 where it has no sample."""
    if not batch:
        return BatchFigures(
            reward_mean=0.0, samples=0, tokens_trained=0, lag_max=0, lag_mean=0.0, mixed_share=0.0,
            versions_per_sample_max=0, response_len_mean=0.0, truncated_share=0.0,
        )  # fmt: skip
    versions = [kept.sample.versions[kept.sample.loss_mask != 0] for kept in batch]
    distinct = [len(np.unique(of_sample)) for of_sample in versions]
    lags = command.step - np.concatenate(versions)
    return BatchFigures(
        reward_mean=sum(kept.reward or 0.0 for kept in batch) / len(batch),
        samples=len(batch),
        tokens_trained=len(lags),
        lag_max=int(lags.max()),
        lag_mean=float(lags.mean()),
        mixed_share=sum(count > 1 for count in distinct) / len(batch),
        versions_per_sample_max=max(distinct),
        response_len_mean=sum(kept.length for kept in batch) / len(batch),
        truncated_share=sum(kept.sample.finish == "length" for kept in batch) / len(batch),
    )


TRAINER_METRICS = (
    "mismatch_max", "mismatch_tokens", "behav_k3", "behav_ess", "loss", "grad_norm", "entropy", "clip_share", "lr",
    "train_s",
)  # fmt: skip


def step_row(
    done: StepDone,
    figures: BatchFigures,
    *,
    lap: tuple[float, float, float, float],
    tokens_generated: int,
    tokens_discarded: int,
    swap_pause_s: float,
    waited_for: str,
    verdicts: dict[str, int],
    ledger: dict[str, int],
) -> StepRow:
    elapsed, trainer_idle, rollout_idle, both = lap
    trainer = {name: done.metrics.get(name, 0.0) for name in TRAINER_METRICS}
    return msgspec.convert(
        {
            **msgspec.structs.asdict(figures),
            **trainer,
            "mismatch_tokens": int(trainer["mismatch_tokens"]),
            "step": done.step,
            "version": done.step + 1,
            "branch": done.branch,
            "time_s": round(done.at, 3),
            "tokens_generated": tokens_generated,
            "tokens_discarded": tokens_discarded,
            "swap_pause_s": swap_pause_s,
            "step_s": elapsed,
            "trainer_idle_share": trainer_idle,
            "rollout_idle_share": rollout_idle,
            "both_busy_share": both,
            "waited_for": waited_for,
            "verdicts": verdicts,
            "skipped": done.skipped,
            "ledger": ledger,
        },
        StepRow,
    )
