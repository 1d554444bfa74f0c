"""The story of a training step: what it was made of, what it waited for, what it gave, and what became of that.

What always holds: lags, waits and sizes are counted from what the log says of the step's samples; where a sample's end
isn't in the log, nothing is guessed.
"""

from collections.abc import Iterator, Sequence

from areal_async.core import admission
from areal_async.log.turns import Turn
from areal_async.messages import (
    AnyEvent,
    CheckpointDone,
    Failed,
    Lost,
    Published,
    RolledBack,
    Rules,
    SampleDone,
    Scored,
    StepDone,
    Swapped,
    Train,
)
from areal_async.trace.life import GroupLife, SampleLife
from areal_async.trace.lives import Lives
from areal_async.trace.words import count, first_line, long, number, versions


class StepStory:
    """Of step `step`."""

    def __init__(self, step: int, rules: Rules) -> None:
        self._step = step
        self._lives = Lives(rules)
        self._first: int | None = None
        self._idle_since: float | None = None
        self._began_at: float | None = None
        self._done_at: float | None = None
        self._formed = False

    @property
    def known(self) -> str:
        if self._first is None or self._lives.step <= self._first:
            return "no step was formed"
        return f"steps {self._first} to {self._lives.step - 1} were formed"

    def take(self, turn: Turn) -> Iterator[tuple[float, str]]:
        before = self._lives.version
        over = self._lives.take(turn)
        yield from ((turn.event.at, text) for text in self._happened(turn.event, before))
        for command in turn.commands:
            if isinstance(command, Train):
                if self._first is None:
                    self._first = command.step
                if command.step == self._step:
                    yield from ((turn.event.at, text) for text in self._train(command, turn.event))
                self._idle_since = None
        if any(group.step == self._step for group in over):
            yield turn.event.at, "what it trained is released: training can't go back to it any more"

    def _happened(self, event: AnyEvent, before: int) -> Iterator[str]:
        made = self._formed and self._done_at is not None
        match event:
            case StepDone() if event.step == self._step and event.branch == self._lives.branch:
                yield from self._done(event)
            case Published() if event.branch == self._lives.branch:
                self._idle_since = event.at
                if made and event.version == self._step + 1:
                    yield f"its version {event.version} is published, {count(event.nbytes, 'byte')}"
            case CheckpointDone():
                self._idle_since = event.at
                if made and event.version == self._step + 1:
                    yield f"the checkpoint of its version {event.version} is complete, {count(event.nbytes, 'byte')}"
            case Swapped() if made and event.version == self._step + 1 and event.branch == self._lives.branch:
                yield f"server {event.server} answers with its version {event.version}, pause {long(event.pause_s)}"
            case Failed(of="checkpoint") if event.id == str(before):
                self._idle_since = event.at
            case Failed(of="train") if event.id == str(self._step):
                yield f"it failed: {first_line(event.why)}"
            case Lost(peer="trainer") if self._began_at is not None:
                yield f"the trainer is lost while it trains it: {first_line(event.why)}"
                self._began_at = None
            case RolledBack() if self._formed and event.to <= self._step:
                who = "the run is resumed" if event.resumed is not None else "the trainer was lost"
                yield (
                    f"training goes back from version {before} to {event.to}, branch {self._lives.branch} ({who}): it "
                    f"will be trained {'again' if made else 'once more'}, with the same groups"
                )
                self._done_at = self._began_at = None

    def _done(self, event: StepDone) -> Iterator[str]:
        took = "" if self._began_at is None else f" after {long(event.at - self._began_at)}"
        left_out = f"; the update was left out: {first_line(event.skipped)}" if event.skipped else ""
        yield f"done{took}: version {event.step + 1}{left_out}"
        metrics = [f"{name} {number(value)}" for name, value in event.metrics.items()]
        for start in range(0, len(metrics), 6):
            yield "  " + ", ".join(metrics[start : start + 6])
        self._done_at, self._began_at = event.at, None

    # ---------------------------------------------------------------------------------------------------- how it began

    def _train(self, train: Train, event: AnyEvent) -> Iterator[str]:
        again, self._formed = self._formed, True
        self._began_at = event.at
        groups = self._lives.trained(train.step)
        samples = [sample for entry in train.samples if (sample := self._lives.find(entry.sample)[1]) is not None]
        lags = [train.step - sample.done.oldest for sample in samples if sample.done is not None]
        lag = f"; lag mean {sum(lags) / len(lags):.2f}, max {max(lags)}" if lags else ""
        what = "trained again" if again else "formed"
        yield (
            f"{what} on branch {train.branch}: {count(len(train.groups), 'group')}, "
            f"{count(len(train.samples), 'sample')}{lag}"
        )
        yield "  " + self._waited(event)
        if train.mask_below:
            yield f"  tokens of versions below {train.mask_below} get no gradient"
        yield "  group    floor  deadline  ready for    versions          lag  rewards / advantages"
        yield from (self._row(group, train) for group in groups)
        yield from _split(train, samples)

    def _waited(self, event: AnyEvent) -> str:
        if self._idle_since is None:
            return "since when the trainer waited isn't in the log"
        match event:
            case Published() | CheckpointDone():
                return "the trainer didn't wait for it: its groups were ready"
            case SampleDone() | Scored():
                last = f"sample {event.sample}"
            case Failed():
                last = f"{event.of} {event.id}, which failed"
            case _:
                last = type(event).__name__
        return f"the trainer waited {long(event.at - self._idle_since)} for it, in the end for {last}"

    def _row(self, group: GroupLife, train: Train) -> str:
        rules = self._lives.rules
        floor = group.floor if group.floor is not None else -1
        answers = [sample for sample in group.samples if sample.done is not None and sample.advantage is not None]
        oldest = min((sample.done.oldest for sample in answers if sample.done is not None), default=floor)
        newest = max((sample.done.newest for sample in answers if sample.done is not None), default=floor)
        waited = "" if group.ready_at is None or group.handed_at is None else long(group.handed_at - group.ready_at)
        told = " ".join(f"{number(sample.reward)}/{sample.advantage:+.2f}" for sample in answers)
        return (
            f"  {group.id:<8} {floor:>5}  {admission.deadline(floor, rules):>8}  {waited:<11}  "
            f"{versions(oldest, newest):<17} {train.step - oldest:>3}  {told}"
        )


def _split(train: Train, samples: Sequence[SampleLife]) -> Iterator[str]:
    """Minibatches, and the micro-batches of each rank."""
    sizes = {s.id: s.done.prompt_tokens + s.done.length for s in samples if s.done is not None}
    for place, part in enumerate(train.minibatches):
        indices = [index for rank in part.ranks for micro in rank for index in micro]
        yield f"  minibatch {place}: {count(len(indices), 'sample')}, divided by {number(part.divisor)}"
        for rank, micros in enumerate(part.ranks):
            tokens = [sum(sizes.get(train.samples[index].sample, 0) for index in micro) for micro in micros]
            yield f"    rank {rank}: {count(len(micros), 'micro-batch').replace('hs', 'hes')} of " + (
                f"{', '.join(f'{each:,}' for each in tokens)} tokens"
            )
