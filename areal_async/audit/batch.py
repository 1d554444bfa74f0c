"""What must hold of a batch: its ages, whose turn it was, and its split over minibatches, ranks and micro-batches.

What always holds: pure functions over the command and what the log told of its samples; each gives what is broken, as
name, thing and text.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from areal_async.audit.books import Group
from areal_async.audit.outcomes import Answer
from areal_async.messages import Rules, Train, Version

Broken: TypeAlias = Iterator[tuple[str, str, str]]


def mask(train: Train, rules: Rules) -> Broken:
    """Which tokens get no gradient for their age."""
    below = max(train.step - rules.max_staleness, 0) if rules.when_older == "mask" else 0
    if train.mask_below != below:
        yield "lag.mask", f"step {train.step}", f"masks tokens below version {train.mask_below}, expected {below}"


def ages(train: Train, answers: Sequence[Answer | None], floors: Sequence[Version], rules: Rules) -> Broken:
    """No trained token is older than η where that is promised, none is older than the floor of its group. answers,
    floors: of the samples of the step."""
    promised = rules.when_older in ("wait", "drop")
    for entry, answer, floor in zip(train.samples, answers, floors, strict=True):
        if answer is None or not answer.loss_tokens:
            continue
        lag = train.step - answer.oldest
        if promised and lag > rules.max_staleness:
            text = f"step {train.step} trains a token of version {answer.oldest}: lag {lag}, {rules.max_staleness} is"
            yield "lag.over", f"sample {entry.sample}", text + f" the bound (rollout.when_older {rules.when_older})"
        if answer.oldest < floor:
            text = f"step {train.step} trains a token of version {answer.oldest}; the floor of its group is {floor}"
            yield "lag.floor", f"sample {entry.sample}", text


def turn(train: Train, ready: Iterable[Group]) -> Broken:
    """Of the ready groups the earliest deadlines come first, then the earliest admissions. ready: before the step."""
    first = sorted(ready, key=lambda group: (group.floor or 0, group.id))[: len(train.groups)]
    wanted = sorted(group.id for group in first)
    if wanted != sorted(train.groups):
        yield (
            "step.turn",
            f"step {train.step}",
            f"trains groups {listed(train.groups)}; it was the turn of {listed(wanted)}",
        )


def behind(train: Train, by_floor: Mapping[Version, int], rules: Rules) -> Broken:
    """The batch test: at most k · B groups of a deadline at or before step + k stay behind. by_floor: outstanding
    groups after the step was formed, by their (highest possible) floor."""
    if rules.when_older != "wait":
        return
    count = 0
    for floor in sorted(by_floor):
        count += by_floor[floor]
        steps = max(floor + rules.max_staleness - train.step, 0)
        if count > steps * rules.batch_groups:
            text = f"leaves {count} groups behind that must be trained by step {floor + rules.max_staleness}; "
            yield "step.behind", f"step {train.step}", text + f"{steps} steps train {steps * rules.batch_groups}"
            return


def split(train: Train, rules: Rules) -> Broken:
    """Each sample once in one micro-batch, as many micro-batches for each rank."""
    about = f"step {train.step}"
    seen = Counter(index for part in train.minibatches for rank in part.ranks for micro in rank for index in micro)
    if seen.total() != len(seen) or set(seen) != set(range(len(train.samples))):
        wrong = [index for index in range(len(train.samples)) if seen[index] != 1]
        names = listed(train.samples[index].sample for index in wrong)
        yield "step.split", about, f"samples that are not in exactly one micro-batch: {names}"
    for number, part in enumerate(train.minibatches):
        if len(part.ranks) != rules.ranks or len({len(rank) for rank in part.ranks}) != 1:
            passes = listed(len(rank) for rank in part.ranks)
            yield "step.split", about, f"minibatch {number}: micro-batches of its {rules.ranks} ranks: {passes}"


def sizes(train: Train, answers: Sequence[Answer], rules: Rules) -> Broken:
    """No micro-batch is over the token budget; divisors count what `train.aggregation` says."""
    about = f"step {train.step}"
    for number, part in enumerate(train.minibatches):
        micros = [micro for rank in part.ranks for micro in rank]
        if any(not 0 <= index < len(answers) for micro in micros for index in micro):
            return  # `split` has told it
        largest = max((sum(answers[index].tokens for index in micro) for micro in micros), default=0)
        if largest > rules.max_tokens_per_microbatch:
            text = f"minibatch {number}: a micro-batch of {largest} tokens, {rules.max_tokens_per_microbatch} fit"
            yield "step.split", about, text
        losses = [answers[index].loss_tokens for micro in micros for index in micro]
        count = {
            "token_mean": sum(losses),
            "sequence_mean": sum(loss > 0 for loss in losses),
            "constant": len(losses) * rules.max_new_tokens,
        }[rules.aggregation]
        if part.divisor != max(count, 1):
            yield "step.divisor", about, f"minibatch {number}: divides by {part.divisor}, expected {max(count, 1)}"


def listed(things: Iterable[object], most: int = 8) -> str:
    """ "1, 2, 3 and 4 more"."""
    names = [str(thing) for thing in things]
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
