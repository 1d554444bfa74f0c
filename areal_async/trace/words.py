"""How things of a log are put into words: spans of numbers, durations, the first line of a long text.

What always holds: pure functions; a text that is cut says so.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from areal_async.core.waiting import duration
from areal_async.messages import SampleId, Version, group_of

TEXT: Final = 160  # characters of an error or another long text in a line
LAST_LINES: Final = 3  # of a text that has many
SPANS: Final = 8  # spans of numbers that are named before "and N more"


def clock(at: float) -> str:
    return f"{at:.3f} s"


def long(seconds: float) -> str:
    """Such as "18 ms", "4.13 s", "4 min 10 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 59.995 else duration(seconds)


def first_line(text: str, most: int = TEXT) -> str:
    """Where a Python traceback follows, its last line, too: what was raised."""
    line, _, rest = text.strip().partition("\n")
    if rest.startswith("Traceback (most recent call last)"):
        line = f"{line}: {rest.splitlines()[-1]}"
    if len(line) > most:
        return line[: most - 1] + "…"
    return line + (" …" if rest else "")


def tail(text: str) -> list[str]:
    """The last lines of a long text (of a lost process's stderr), where there are more than its first."""
    lines = [line.strip() for line in text.strip().splitlines()[1:] if line.strip()]
    return [first_line(line) for line in lines[-LAST_LINES:]]


def spans(numbers: Iterable[int]) -> str:
    """Such as "0 to 2, 6, 8, 9"; of many spans the first, and how many more numbers there are."""
    found = _spans(numbers)
    texts = [str(low) if low == high else f"{low} to {high}" for low, high in found[:SPANS]]
    more = sum(high - low + 1 for low, high in found[SPANS:])
    return ", ".join(texts) + (f" and {more} more" if more else "")


def members(names: Sequence[SampleId]) -> str:
    """Samples of one group, such as "3.0 to 3.7", "3.0, 3.2"."""
    if not names:
        return ""
    group = group_of(names[0])
    found = _spans(int(name.partition(".")[2]) for name in names)
    return ", ".join(f"{group}.{low}" if low == high else f"{group}.{low} to {group}.{high}" for low, high in found)


def _spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each; two that follow each other are no span."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [pair for run in found for pair in ([(run[0], run[-1])] if len(run) > 2 else [(each, each) for each in run])]


def samples(names: Sequence[SampleId]) -> str:
    """Such as "sample 3.0", "16 samples of groups 0, 1"."""
    if len(names) == 1:
        return f"sample {names[0]}"
    groups = {group_of(name) for name in names}
    return f"{len(names)} samples of group{'s' * (len(groups) > 1)} {spans(groups)}"


def versions(oldest: Version, newest: Version) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


def number(value: float | None) -> str:
    """Up to four digits, none that say nothing."""
    return "none" if value is None else f"{value:.4g}"


def count(amount: int, thing: str) -> str:
    """Such as "1 token", "812 tokens"."""
    return f"{amount:,} {thing}{'' if amount == 1 else 's'}"
