"""What a step is measured by: the row of `metrics.jsonl`, and the meter of who was busy when.

What always holds: every field has its unit and its denominator in its description, from which docs/metrics.md is
drawn; shares are of wall time since the step before was done, and lie in 0..1.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from areal_async.controller.samples import Kept
from areal_async.messages import StepDone, Train, Version


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
    tokens_trained: Annotated[int, _about("loss-mask tokens in the step, without `tokens_masked`")]
    tokens_generated: Annotated[int, _about("response tokens of answers that were finished since the step before")]
    tokens_discarded: Annotated[int, _about("response tokens of finished answers that were filtered, failed or "
                                            "cancelled since the step before")]  # fmt: skip
    lag_max: Annotated[int, _about("step minus the oldest version of any trained token; at most `max_staleness`, "
                                   "unless `when_older` is `train`")]  # fmt: skip
    lag_mean: Annotated[float, _about("mean over trained tokens of step minus the token's version")]
    trainer_wait_s: Annotated[float, _about("how long the trainer stood idle before this step, seconds")]
    tokens_older: Annotated[int, _about("trained tokens with a lag over `max_staleness` (`when_older: train`)")]
    tokens_masked: Annotated[int, _about("loss-mask tokens that got no gradient for their age (`when_older: mask`)")]
    samples_stale: Annotated[int, _about("samples of groups that were dropped for their age since the step before "
                                         "(`when_older: drop`)")]  # fmt: skip
    tokens_stale: Annotated[int, _about("response tokens generated for these, unfinished answers included")]
    lost_by_length: Annotated[tuple[float, float, float, float], _about(
        "what age has cost the answers of each quarter of length, shortest first, since the run began or was resumed: "
        "lost samples / samples that ended (see below the table)")]  # fmt: skip
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
    capped_share: Annotated[float, _about("share of trained tokens whose behaviour weight was over `weight_cap`")]
    kl_ref: Annotated[float, _about("`kl_estimator` of the distance to the reference model, mean over trained tokens, "
                                    "nats; 0 without one")]  # fmt: skip
    lr: Annotated[float, _about("learning rate of the step's last optimiser step")]
    response_len_mean: Annotated[float, _about("mean response length of the step's samples, tokens")]
    truncated_share: Annotated[float, _about("share of the step's samples that were cut at the token limit")]
    swap_pause_s: Annotated[float, _about("how long servers stood still for new weights since the step before, sum "
                                          "over servers, seconds")]  # fmt: skip
    step_s: Annotated[float, _about("wall time since the step before was done, seconds")]
    train_s: Annotated[float, _about("time that the ranks took for the step, seconds")]
    trainer_idle_share: Annotated[float, _about("share of step_s in which the trainer neither trained nor published")]
    rollout_idle_share: Annotated[float, _about("share of step_s in which a server had nothing to do, stood still for "
                                                "new weights, or was not there; mean over servers")]  # fmt: skip
    rollout_idle_by_server: Annotated[dict[str, float], _about("the same for each server that has joined")]
    both_busy_share: Annotated[float, _about("share of step_s in which the trainer trained and a server generated; "
                                             "mean over servers")]  # fmt: skip
    restarts: Annotated[int, _about("servers that were told to start again since the step before")]
    continued: Annotated[int, _about("requests that were sent again since the step before, to another server or the "
                                     "same one: what had arrived was kept")]  # fmt: skip
    tokens_inferred: Annotated[int, _about("tokens that were kept of answers that had broken off since the step "
                                           "before; their version is the oldest that it can be")]  # fmt: skip
    waited_for: Annotated[str, _about("what the trainer last waited for before this step; empty: it did not wait")]
    verdicts: Annotated[dict[str, int], _about("checks that ended since the step before, by verdict")]
    checks_again: Annotated[int, _about("checks that were made again since the step before: their worker was lost, or "
                                        "its sandbox (`infrastructure`)")]  # fmt: skip
    reward_restarts: Annotated[int, _about("reward workers that were told to start again since the step before")]
    unwanted_length: Annotated[int, _about("answers since the step before that have no reward because of their length "
                                           "(`reward.min_tokens`, `reward.max_tokens`)")]  # fmt: skip
    eval_version: Annotated[int | None, _about("version of the last evaluation that ended since the step before; null: "
                                               "none did")]  # fmt: skip
    eval_score: Annotated[float | None, _about("its mean reward; null: there was none")]
    eval_pass_at: Annotated[dict[int, float], _about("its pass@k for k = 1, 2, 4, …; empty: there was none "
                                                     "(docs/evaluation.md)")]  # fmt: skip
    skipped: Annotated[str, _about("why the update was left out; empty: it was not")]
    ledger: Annotated[dict[str, int], _about("the balance of groups and samples after the step")]


class Lap(NamedTuple):
    """seconds: since the lap before. Shares are of it. by_server: each server's idle share."""

    seconds: float
    trainer_idle: float
    rollout_idle: float
    both_busy: float
    by_server: dict[str, float]


class _Server:
    """serving: it answers. load: how much is asked of it. busy_s: in this lap, up to `since`."""

    __slots__ = ("busy_s", "load", "serving", "since")

    def __init__(self) -> None:
        self.serving = False
        self.load = 0
        self.busy_s = 0.0
        self.since = 0.0

    @property
    def is_busy(self) -> bool:
        return self.serving and self.load > 0

    def advance(self, now: float) -> None:
        if self.is_busy:
            self.busy_s += max(0.0, now - self.since)
        self.since = now


class Meter:
    """Adds up who was busy for how long, from `since` on. Times are run-clock seconds.

    A server is busy while it serves and something is asked of it; one that never joined, or was lost, is idle. A change
    at one server costs the same however many there are.
    """

    def __init__(self, servers: int, since: float = 0.0) -> None:
        self._count = servers
        self._since = since
        self._training = False
        self._busy = 0
        self._servers: dict[str, _Server] = {}
        self._elapsed_s = self._training_s = self._both_s = 0.0
        self.total_s = self.total_training_s = self.total_rollout_s = self.total_both_s = 0.0

    def training(self, now: float, training: bool) -> None:
        self._advance(now)
        self._training = training

    def serving(self, now: float, server: str, serving: bool) -> None:
        """Whether a server answers: not while it loads weights, nor when it is lost."""
        changed = self._changing(now, server)
        changed.serving = serving
        self._busy += changed.is_busy

    def lost(self, now: float, server: str) -> None:
        """It is gone, with all that was asked of it."""
        changed = self._changing(now, server)
        changed.serving, changed.load = False, 0

    def load(self, now: float, server: str, change: int) -> None:
        """So many more answers (or evaluations) are asked of a server."""
        changed = self._changing(now, server)
        changed.load += change
        self._busy += changed.is_busy

    def lap(self, now: float) -> Lap:
        """Since the last lap."""
        self._advance(now)
        for server in self._servers.values():
            server.advance(now)
        busy_s = {name: server.busy_s for name, server in self._servers.items()}
        elapsed, rollout_s = self._elapsed_s, sum(busy_s.values()) / self._count
        whole = max(elapsed, 1e-9)
        self.total_s += elapsed
        self.total_training_s += self._training_s
        self.total_rollout_s += rollout_s
        self.total_both_s += self._both_s
        lap = Lap(
            elapsed,
            _share(1 - self._training_s / whole),
            _share(1 - rollout_s / whole),
            _share(self._both_s / whole),
            {name: _share(1 - seconds / whole) for name, seconds in busy_s.items()},
        )
        self._elapsed_s = self._training_s = self._both_s = 0.0
        for server in self._servers.values():
            server.busy_s = 0.0
        return lap

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._since)
        self._since = now
        self._elapsed_s += elapsed
        if self._training:
            self._training_s += elapsed
            self._both_s += elapsed * self._busy / self._count

    def _changing(self, now: float, name: str) -> _Server:
        """The server, up to date; taken out of the count of busy ones until it is changed."""
        self._advance(now)
        server = self._servers.get(name)
        if server is None:
            server = self._servers[name] = _Server()
        server.advance(now)
        self._busy -= server.is_busy
        return server


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


class LostByLength:
    """What age costs answers of different lengths. Lengths are response tokens."""

    def __init__(self) -> None:
        self._ended = np.zeros(1024, np.int64)  # samples of each length
        self._lost = np.zeros(1024, np.float64)

    def ended(self, length: int) -> None:
        """A sample is finished, or was stopped at this length."""
        while length >= len(self._ended):
            self._ended = np.concatenate([self._ended, np.zeros_like(self._ended)])
            self._lost = np.concatenate([self._lost, np.zeros_like(self._lost)])
        self._ended[length] += 1

    def lost(self, length: int, share: float) -> None:
        """This share of a sample that has ended is lost."""
        self._lost[length] += share

    def quarters(self) -> tuple[float, float, float, float]:
        """Lost / ended in each quarter: lengths up to the first quartile, the second, the third, and above. 0 where a
        quarter is empty, as happens when many answers have one length."""
        reached = np.cumsum(self._ended)
        edges = [int(np.searchsorted(reached, reached[-1] * quarter / 4)) + 1 for quarter in (1, 2, 3)]
        ended, lost = np.split(self._ended, edges), np.split(self._lost, edges)
        first, second, third, fourth = (
            float(part.sum() / max(whole.sum(), 1)) for part, whole in zip(lost, ended, strict=True)
        )
        return first, second, third, fourth


class BatchFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a batch before it is trained; fields as in `StepRow`."""

    reward_mean: float
    samples: int
    tokens_trained: int
    tokens_older: int
    tokens_masked: int
    lag_max: int
    lag_mean: float
    mixed_share: float
    versions_per_sample_max: int
    response_len_mean: float
    truncated_share: float


def batch_figures(command: Train, batch: list[Kept], max_staleness: int) -> BatchFigures:
    """Figures of a batch; all 0 where it has no sample. Lags are those of tokens that age has not masked."""
    if not batch:
        return BatchFigures(
            reward_mean=0.0, samples=0, tokens_trained=0, tokens_older=0, tokens_masked=0, lag_max=0, lag_mean=0.0,
            mixed_share=0.0, versions_per_sample_max=0, response_len_mean=0.0, truncated_share=0.0,
        )  # fmt: skip
    versions: Counter[Version] = Counter()
    for kept in batch:
        versions.update(kept.by_version)
    lags = {command.step - version: count for version, count in versions.items() if version >= command.mask_below}
    trained = sum(lags.values())
    return BatchFigures(
        reward_mean=sum(kept.reward or 0.0 for kept in batch) / len(batch),
        samples=len(batch),
        tokens_trained=trained,
        tokens_older=sum(count for lag, count in lags.items() if lag > max_staleness),
        tokens_masked=versions.total() - trained,
        lag_max=max(lags, default=0),
        lag_mean=sum(lag * count for lag, count in lags.items()) / max(trained, 1),
        mixed_share=sum(len(kept.by_version) > 1 for kept in batch) / len(batch),
        versions_per_sample_max=max(len(kept.by_version) for kept in batch),
        response_len_mean=sum(kept.length for kept in batch) / len(batch),
        truncated_share=sum(kept.sample.finish == "length" for kept in batch) / len(batch),
    )


class Totals(msgspec.Struct, kw_only=True):
    """Counts that only grow, since the run began; a row has what came to them since the row before. Tokens, seconds,
    samples, servers, workers, answers, checks."""

    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_discarded: int = 0
    tokens_stale: int = 0
    tokens_masked: int = 0
    tokens_evaluated: int = 0
    samples_stale: int = 0
    trainer_wait_s: float = 0.0
    swap_pause_s: float = 0.0
    unwanted_length: int = 0
    restarts: int = 0
    reward_restarts: int = 0
    checks_again: int = 0
    continued: int = 0
    tokens_inferred: int = 0


PER_STEP: Final = (
    "tokens_generated", "tokens_discarded", "tokens_stale", "samples_stale", "trainer_wait_s", "swap_pause_s",
    "unwanted_length", "restarts", "reward_restarts", "checks_again", "continued", "tokens_inferred",
)  # fmt: skip
TRAINER_METRICS: Final = (
    "mismatch_max", "mismatch_tokens", "behav_k3", "behav_ess", "loss", "grad_norm", "entropy", "clip_share",
    "capped_share", "kl_ref", "lr", "train_s",
)  # fmt: skip


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Of an evaluation; fields as in `StepRow`."""

    eval_version: int | None = None
    eval_score: float | None = None
    eval_pass_at: dict[int, float] = {}


def step_row(
    done: StepDone,
    figures: BatchFigures,
    lap: Lap,
    scores: Scores,
    *,
    totals: Totals,
    before: Totals,
    lost_by_length: tuple[float, float, float, float],
    waited_for: str,
    verdicts: dict[str, int],
    ledger: Mapping[str, int],
) -> StepRow:
    """totals, before: now, and at the row before."""
    trainer = {name: done.metrics.get(name, 0.0) for name in TRAINER_METRICS}
    return msgspec.convert(
        {
            **msgspec.structs.asdict(figures),
            **msgspec.structs.asdict(scores),
            **{name: getattr(totals, name) - getattr(before, name) for name in PER_STEP},
            **trainer,
            "mismatch_tokens": int(trainer["mismatch_tokens"]),
            "step": done.step,
            "version": done.step + 1,
            "branch": done.branch,
            "time_s": round(done.at, 3),
            "lost_by_length": lost_by_length,
            "step_s": lap.seconds,
            "trainer_idle_share": lap.trainer_idle,
            "rollout_idle_share": lap.rollout_idle,
            "rollout_idle_by_server": lap.by_server,
            "both_busy_share": lap.both_busy,
            "waited_for": waited_for,
            "verdicts": verdicts,
            "skipped": done.skipped,
            "ledger": dict(ledger),
        },
        StepRow,
    )
