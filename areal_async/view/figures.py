"""Which figures the overview has: what they draw of `metrics.jsonl`, in which unit, and what to say of them.

What always holds: every field that is named here is one of `StepRow`, and every number of `StepRow` is drawn somewhere
(tests/view/test_figures.py has the few exceptions, with reasons); a figure says its denominator.
"""

from typing import Final, NamedTuple, get_type_hints

from msgspec import Meta

from areal_async.controller.metrics import StepRow
from areal_async.view.api import Figure, Series

_HINTS: Final = get_type_hints(StepRow, include_extras=True)


class BusyParts(NamedTuple):
    """Shares of a step's wall time, mean over servers; they add up to 1."""

    both: float
    trainer: float  # trains while a server has nothing to do, stands still for new weights, or isn't there
    rollout: float  # a server generates while the trainer is idle
    nobody: float


def busy_parts(trainer_idle: float, rollout_idle: float, both_busy: float) -> BusyParts:
    """The four parts of wall time, from the three shares of a row.

    Who is busy is either both, or one alone, or nobody; of each share the others follow. Rounding may leave a part a
    little below 0: it is 0 then.
    """
    trainer, rollout = 1 - trainer_idle - both_busy, 1 - rollout_idle - both_busy
    parts = both_busy, trainer, rollout, 1 - both_busy - trainer - rollout
    return BusyParts(*(max(0.0, part) for part in parts))


def _says(field: str) -> str:
    """The description of a field of `StepRow`, as a sentence."""
    for meta in getattr(_HINTS[field], "__metadata__", ()):
        if isinstance(meta, Meta) and meta.description:
            return f"{meta.description[0].upper()}{meta.description[1:]}."
    raise AssertionError(f"StepRow.{field} has no description")


def _one(field: str, title: str, unit: str, *, about: str = "", log: bool = False, main: bool = False) -> Figure:
    """A figure of one field, which explains itself if its description does."""
    return Figure(
        key=field, title=title, unit=unit, about=about or _says(field), series=[Series(field=field, label=title)],
        log=log, main=main,
    )  # fmt: skip


_FIRST: Final = (
    Figure(
        key="reward", title="Reward", unit="reward", main=True,
        series=[Series(field="reward_mean", label="training"), Series(field="eval_score", label="evaluation")],
        about="Mean reward of the samples that a step trained. Points: mean reward of an evaluation, at the version "
        "that it evaluated.",
    ),
    Figure(
        key="lag", title="Lag", unit="steps", main=True,
        series=[Series(field="lag_max", label="oldest"), Series(field="lag_mean", label="mean")],
        about="Step minus the version that wrote a token: of the step's oldest trained token, and the mean over its "
        "trained tokens. At most η (`max_staleness`), unless `when_older` is `train`.",
    ),
    Figure(
        key="lags", title="Lags of tokens", unit="%", kind="lags", main=True,
        series=[Series(field="lag_mean", label="tokens")],
        about="How old trained tokens were: share of all trained tokens of the steps that are shown, by step minus "
        "version.",
    ),
    Figure(
        key="tokens_s", title="Tokens a second", unit="tokens/s", main=True,
        series=[
            Series(field="tokens_generated", label="generated", per="step_s"),
            Series(field="tokens_trained", label="trained", per="step_s"),
        ],
        about="Response tokens of the answers that were finished since the step before, and loss-mask tokens of the "
        "step, both divided by `step_s`, the wall time since the step before.",
    ),
    Figure(
        key="busy", title="Who was busy", unit="%", kind="busy", range=(0.0, 1.0), main=True,
        series=[
            Series(field="both_busy_share", label="both", stacked=True),
            Series(field="trainer_idle_share", label="only the trainer", stacked=True),
            Series(field="rollout_idle_share", label="only servers", stacked=True),
        ],
        about="Parts of `step_s`, mean over servers, so they add up to 100 %. The trainer is busy while it trains or "
        "publishes; a server is busy while it has something to generate, and not while it stands still for new weights "
        "or isn't there.",
    ),
    Figure(
        key="time", title="Time of a step", unit="s", main=True,
        series=[
            Series(field="step_s", label="whole step"),
            Series(field="train_s", label="training"),
            Series(field="trainer_wait_s", label="trainer idle"),
        ],
        about="Wall time since the step before was done; what the ranks took for the step; how long the trainer stood "
        "idle before it.",
    ),
    _one("swap_pause_s", "Swap pauses", "s", main=True),
    _one("entropy", "Entropy", "nats", main=True),
    _one("mismatch_max", "Mismatch", "nats", log=True, main=True,
         about="Largest |log π_prox − log π_behav| over trained tokens of lag 0, for which servers and trainer should "
         "compute the same: about 1e-5 in float32, a few hundredths in bfloat16. A step without one has no point."),
    Figure(
        key="clipped", title="Clipped and capped", unit="%", main=True,
        series=[Series(field="clip_share", label="clipped"), Series(field="capped_share", label="over weight_cap")],
        about="Shares of the step's trained tokens: ratio π_θ/π_prox clipped; behaviour weight π_prox/π_behav over "
        "`weight_cap`.",
    ),
    _one("response_len_mean", "Response length", "tokens", main=True),
    _one("truncated_share", "Truncated", "%", main=True),
)  # fmt: skip

_MORE: Final = (
    _one("loss", "Loss", "loss"),
    _one("grad_norm", "Gradient norm", "norm"),
    _one("lr", "Learning rate", "rate"),
    _one("kl_ref", "Distance to the reference", "nats",
         about="Distance to the reference model by `kl_estimator`, mean over trained tokens; 0 without a reference."),
    _one("behav_k3", "KL of behaviour and prox", "nats", about=_says("behav_k3") + " It grows with the lag."),
    _one("behav_ess", "Effective sample size", "%", about=_says("behav_ess") + " 100 %: all tokens count alike."),
    Figure(
        key="verdicts", title="Verdicts", unit="checks", series=[Series(field="verdicts/*", label="", stacked=True)],
        about=_says("verdicts"),
    ),
    Figure(
        key="pass_at", title="pass@k", unit="%", series=[Series(field="eval_pass_at/*", label="k = ")],
        about="Of each evaluation, at the version that it evaluated: estimated share of prompts of which at least one "
        "of k answers is right.",
    ),
    _one("mixed_share", "Samples of several versions", "%"),
    _one("versions_per_sample_max", "Versions in a sample", "versions"),
    Figure(
        key="tokens", title="Tokens", unit="tokens",
        series=[
            Series(field="tokens_generated", label="generated"),
            Series(field="tokens_trained", label="trained"),
            Series(field="mismatch_tokens", label="trained, of lag 0"),
        ],
        about="Response tokens of answers that were finished since the step before; loss-mask tokens that the step "
        "trained; of these, those of lag 0.",
    ),
    _one("samples", "Samples", "samples"),
    Figure(
        key="age", title="Tokens lost or kept by age", unit="tokens",
        series=[
            Series(field="tokens_older", label="trained though older"),
            Series(field="tokens_masked", label="masked"),
            Series(field="tokens_stale", label="dropped"),
        ],
        about="Tokens with a lag over `max_staleness`: trained (`when_older: train`), in the step without a gradient "
        "(`mask`), and of groups that were dropped since the step before (`drop`).",
    ),
    Figure(
        key="lost_by_length", title="What age costs, by length", unit="%",
        series=[Series(field="lost_by_length/*", label="quarter ")],
        about="Samples lost by their age / samples that ended, since the run began or was resumed, of each quarter of "
        "answers by length (1: the shortest).",
    ),
    Figure(
        key="lost", title="Not trained", unit="samples",
        series=[
            Series(field="samples_stale", label="dropped for their age"),
            Series(field="unwanted_length", label="of an unwanted length"),
        ],
        about="Since the step before: samples of groups that were dropped for their age (`when_older: drop`), and "
        "answers without a reward because of their length (`reward.min_tokens`, `reward.max_tokens`).",
    ),
    _one("tokens_discarded", "Tokens discarded", "tokens"),
    Figure(
        key="outstanding", title="Under way", unit="groups",
        series=[Series(field="ledger/outstanding", label="outstanding")],
        about="Groups that were admitted and have neither been handed to training nor given up, after the step.",
    ),
    Figure(
        key="idle_by_server", title="Idle, by server", unit="%", range=(0.0, 1.0),
        series=[Series(field="rollout_idle_by_server/*", label="server ")],
        about="Share of `step_s` in which a server had nothing to do, stood still for new weights, or was not there.",
    ),
    Figure(
        key="restarts", title="Restarts", unit="restarts",
        series=[Series(field="restarts", label="servers"), Series(field="reward_restarts", label="reward workers")],
        about="Servers and reward workers that were told to start again since the step before.",
    ),
    Figure(
        key="again", title="Done again", unit="requests, checks",
        series=[
            Series(field="continued", label="requests continued"),
            Series(field="checks_again", label="checks repeated"),
        ],
        about="Since the step before: requests that were sent again (what had arrived was kept), and checks that were "
        "made again because their worker or its sandbox was lost.",
    ),
    _one("tokens_inferred", "Tokens of an inferred version", "tokens"),
)  # fmt: skip

FIGURES: Final[list[Figure]] = [*_FIRST, *_MORE]
