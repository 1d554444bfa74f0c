"""What a simulated run comes to: the figures of `metrics.jsonl`, over the whole run.

What always holds: same words, same definitions as in docs/metrics.md, so that a simulation and a real run can be
compared; shares are of virtual time from its beginning to its end and lie in 0..1; every response token of a finished
answer is in exactly one of trained, masked, discarded, stale and left.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from areal_async.messages import Rules, Train
from areal_async.simulate.models import Cluster
from areal_async.simulate.servers import Answering, Server

Quarters: TypeAlias = tuple[float, float, float, float]


def _about(text: str) -> Meta:
    return Meta(description=text)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one simulated run. Times are virtual seconds."""

    end: Annotated[str, _about("how it ended: `steps_done`")]
    seconds: Annotated[float, _about("from its beginning to its end")]
    steps: Annotated[int, _about("training steps")]
    steps_per_s: Annotated[float, _about("steps / seconds")]
    step_s: Annotated[list[float], _about("of each step: since the one before was done, the first since the beginning")]
    train_s: Annotated[list[float], _about("of each step: from its batch to its end, without the publication")]
    samples: Annotated[int, _about("trained samples")]
    tokens_generated: Annotated[int, _about("response tokens of finished answers")]
    tokens_trained: Annotated[int, _about("response tokens in steps, without `tokens_masked`")]
    tokens_masked: Annotated[int, _about("of tokens in steps, those that got no gradient for their age (`mask`)")]
    tokens_older: Annotated[int, _about("trained tokens with a lag over `max_staleness` (`train`)")]
    tokens_discarded: Annotated[int, _about("of finished answers that were filtered, failed or cancelled")]
    tokens_stale: Annotated[
        int, _about("of answers that were dropped for their age, unfinished ones included (`drop`)")
    ]
    tokens_left: Annotated[int, _about("of finished answers that were waiting to be trained at the end")]
    tokens_unfinished: Annotated[int, _about("of answers that were stopped before their end, stale ones included")]
    tokens_inferred: Annotated[int, _about("that had arrived from a server which was then lost, and were kept")]
    tokens_recomputed: Annotated[int, _about("whose cache was computed again after a swap")]
    tokens_per_s: Annotated[float, _about("tokens_generated / seconds")]
    tokens_trained_per_s: Annotated[float, _about("tokens_trained / seconds")]
    lag_tokens: Annotated[dict[int, int], _about("trained tokens by lag: step minus the token's version")]
    lag_mean: Annotated[float, _about("mean over trained tokens")]
    lag_max: Annotated[int, _about("largest of any trained token")]
    mixed_share: Annotated[float, _about("share of trained samples with tokens of two versions or more")]
    response_len_mean: Annotated[float, _about("tokens, mean over trained samples")]
    truncated_share: Annotated[float, _about("share of trained samples that were cut at the token limit")]
    trainer_wait_s: Annotated[float, _about("how long the trainer stood idle before its steps, all together")]
    trainer_idle_share: Annotated[float, _about("share of time in which the trainer neither trained nor published")]
    rollout_idle_share: Annotated[float, _about("share of time in which a server had nothing to do, stood still for "
                                                "new weights, or was not there; mean over servers")]  # fmt: skip
    both_busy_share: Annotated[float, _about("share of time in which the trainer trained and a server generated; mean "
                                             "over servers")]  # fmt: skip
    samples_stale: Annotated[int, _about("samples of groups that were dropped for their age (`drop`)")]
    lost_by_length: Annotated[Quarters, _about("what age has cost the answers of each quarter of length, shortest "
                                               "first: lost samples / samples that ended")]  # fmt: skip
    swaps: Annotated[int, _about("swaps that were done")]
    swap_pause_s: Annotated[float, _about("how long servers stood still for new weights, sum over servers")]
    stalled_s: Annotated[float, _about("how long servers computed prompts, and contexts again after swaps, sum over "
                                       "servers; nothing is decoded meanwhile")]  # fmt: skip
    restarts: Annotated[int, _about("servers that were told to start again")]
    continued: Annotated[int, _about("answers that went on at another server")]
    gpu_hours: Annotated[float, _about("GPUs of servers and trainer × seconds / 3600")]
    events: Annotated[int, _about("events that the core has handled")]
    ledger: Annotated[dict[str, int], _about("the balance of groups and samples at the end")]


class Tally:
    """Adds up what happens. Times are virtual seconds, never earlier than the one before."""

    def __init__(self, rules: Rules, cluster: Cluster) -> None:
        self._rules = rules
        self._cluster = cluster
        self._at = 0.0
        self._training = False
        self._busy = 0  # servers
        self._training_s = self._busy_s = self._both_s = 0.0
        self._begun_at = self._done_at = 0.0
        self._waits_since: float | None = 0.0
        self._trainer_wait_s = 0.0
        self._step_s: list[float] = []
        self._train_s: list[float] = []
        self._samples = self._mixed = self._truncated = self._length = 0
        self._masked = self._older = 0
        self._lags: Counter[int] = Counter()
        self._age_costs = rules.when_older in ("mask", "drop")  # else nothing is lost
        self._ended: Counter[int] = Counter()  # samples by length
        self._lost: Counter[int] = Counter()  # their tokens by the sample's length
        self.generated = self.discarded = self.stale = self.stale_finished = self.unfinished = self.inferred = 0
        self.events = self.swaps = self.restarts = self.continued = 0
        self.swap_pause_s = 0.0

    # ------------------------------------------------------------------------------------------------ who is busy when

    def busy(self, now: float, change: int) -> None:
        """So many more servers generate."""
        self._advance(now)
        self._busy += change

    def train(self, now: float, command: Train, batch: Sequence[Answering]) -> None:
        self._advance(now)
        self._training = True
        self._begun_at = now
        if self._waits_since is not None:
            self._trainer_wait_s += now - self._waits_since
        self._waits_since = None
        self._samples += len(batch)
        for answer in batch:
            self._trained(command, answer)

    def step_done(self, now: float) -> None:
        self._step_s.append(now - self._done_at)
        self._train_s.append(now - self._begun_at)
        self._done_at = now

    def published(self, now: float) -> None:
        self._advance(now)
        self._training = False
        self._waits_since = now

    def _advance(self, now: float) -> None:
        passed = now - self._at
        self._at = now
        self._busy_s += passed * self._busy
        if self._training:
            self._training_s += passed
            self._both_s += passed * self._busy

    # ------------------------------------------------------------------------------------------------ what became of it

    def finished(self, answer: Answering) -> None:
        self.generated += answer.length
        if self._age_costs:
            self._ended[answer.length] += 1

    def dropped(self, tokens: int, finished: bool) -> None:
        """A sample with so many tokens was lost for its age; where it never began, its length isn't known."""
        self.stale += tokens
        if finished:
            self.stale_finished += tokens
        else:
            self._ended[tokens] += tokens > 0
        self._lost[tokens] += tokens

    def _trained(self, command: Train, answer: Answering) -> None:
        step, below = command.step, command.mask_below
        self._length += answer.length
        self._truncated += answer.truncated
        past = answer.past
        if len(past) > 1:
            oldest, newest = answer.versions()
            self._mixed += oldest < newest
        for version, tokens in past:
            if version < below:
                self._masked += tokens
                self._lost[answer.length] += tokens
            else:
                self._lags[step - version] += tokens

    def _quarters(self) -> Quarters:
        """Lost / ended in each quarter: lengths up to the first quartile, the second, the third, and above."""
        whole, before = self._ended.total(), 0
        ended, lost = [0.0] * 4, [0.0] * 4
        quarter = 0
        for length in sorted(self._ended):
            while quarter < 3 and before >= whole * (quarter + 1) / 4:
                quarter += 1
            ended[quarter] += self._ended[length]
            lost[quarter] += self._lost[length] / max(length, 1)
            before += self._ended[length]
        first, second, third, fourth = (part / max(count, 1.0) for part, count in zip(lost, ended, strict=True))
        return first, second, third, fourth

    # -------------------------------------------------------------------------------------------------------- the whole

    def figures(self, now: float, end: str, servers: Sequence[Server], left: int, ledger: dict[str, int]) -> Figures:
        """left: tokens of finished answers that nobody has asked for yet."""
        self._advance(now)
        seconds = max(now, 1e-12)
        cluster, count = self._cluster, self._cluster.servers
        trained = self._lags.total()
        samples = max(self._samples, 1)
        return Figures(
            end=end,
            seconds=now,
            steps=len(self._step_s),
            steps_per_s=len(self._step_s) / seconds,
            step_s=self._step_s,
            train_s=self._train_s,
            samples=self._samples,
            tokens_generated=self.generated,
            tokens_trained=trained,
            tokens_masked=self._masked,
            tokens_older=sum(tokens for lag, tokens in self._lags.items() if lag > self._rules.max_staleness),
            tokens_discarded=self.discarded,
            tokens_stale=self.stale,
            tokens_left=left,
            tokens_unfinished=self.unfinished,
            tokens_inferred=self.inferred,
            tokens_recomputed=round(sum(server.recomputed for server in servers)),
            tokens_per_s=self.generated / seconds,
            tokens_trained_per_s=trained / seconds,
            lag_tokens=dict(sorted(self._lags.items())),
            lag_mean=sum(lag * tokens for lag, tokens in self._lags.items()) / max(trained, 1),
            lag_max=max(self._lags, default=0),
            mixed_share=self._mixed / samples,
            response_len_mean=self._length / samples,
            truncated_share=self._truncated / samples,
            trainer_wait_s=self._trainer_wait_s,
            trainer_idle_share=_share(1 - self._training_s / seconds),
            rollout_idle_share=_share(1 - self._busy_s / count / seconds),
            both_busy_share=_share(self._both_s / count / seconds),
            samples_stale=ledger["samples_stale"],
            lost_by_length=self._quarters(),
            swaps=self.swaps,
            swap_pause_s=self.swap_pause_s,
            stalled_s=sum(server.stalled_s for server in servers),
            restarts=self.restarts,
            continued=self.continued,
            gpu_hours=(cluster.server_gpus + cluster.trainer_gpus) * now / 3600,
            events=self.events,
            ledger=ledger,
        )


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
