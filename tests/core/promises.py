"""What a step that is about to be trained must keep: ages, and its split over minibatches, ranks and micro-batches.

What always holds: made from the command and what answers have told, like the other books of `world`; each function
gives what is broken, in words.
"""

from collections.abc import Iterator, Mapping

from areal_async.messages import Rules, SampleDone, Train

from . import expected


def age(command: Train, done: Mapping[str, SampleDone], floors: Mapping[str, int], rules: Rules) -> Iterator[str]:
    """Against what `when_older` promises. floors: of each sample's group."""
    bound = rules.max_staleness
    below = max(command.step - bound, 0) if rules.when_older == "mask" else 0
    if command.mask_below != below:
        yield f"step {command.step} masks below {command.mask_below}, not {below}"
    for sample in command.samples:
        oldest = done[sample.sample].oldest
        if command.step - oldest > bound and rules.when_older in ("wait", "drop"):
            yield f"step {command.step} trains {sample.sample} with lag {command.step - oldest}"
        if oldest < floors[sample.sample]:
            yield f"{sample.sample} has a token of version {oldest}, its floor is {floors[sample.sample]}"


def split(command: Train, done: Mapping[str, SampleDone], rules: Rules) -> Iterator[str]:
    """Every sample once, as many passes for every rank, the divisors."""
    seen: list[int] = []
    for part in command.minibatches:
        if len(part.ranks) != rules.ranks:
            yield "a rank is left out"
        if len({len(rank) for rank in part.ranks}) != 1:
            yield "ranks differ in their number of passes"
        indices = [index for rank in part.ranks for micro in rank for index in micro]
        wanted = expected.divisor(rules, [done[command.samples[index].sample] for index in indices])
        if part.divisor != wanted:
            yield f"the divisor is {part.divisor}, not {wanted}"
        seen += indices
    if sorted(seen) != list(range(len(command.samples))):
        yield "a sample is trained twice or not at all"
