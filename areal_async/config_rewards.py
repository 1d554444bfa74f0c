"""Whether the options of rewards go together, and with the data and this machine. Part of `config_check`; `score` asks
the same.

What always holds: nothing is started but a trial of the jail, and that only where model-written code is to be run; an
option that would do nothing, or can't be right with the others, is named together with what to set instead.
"""

import logging
import re
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from areal_async.config import Config, RewardConfig
from areal_async.config_options import IMPORT_PATH, Finding
from areal_async.errors import RewardError
from areal_async.messages import RewardOptions, RewardSpec
from areal_async.rewards import jail
from areal_async.rewards.loading import load
from areal_async.rewards.sums import LOCAL, terms
from areal_async.rewards.verdicts import Check, Outcome
from areal_async.rollout.data import Dataset

logger = logging.getLogger("areal_async")

READ_BY: Final = {
    "exact_after": ("exact", "numeric", "choice", "reasoning_gym"),
    "sandbox": ("code",),
    "math": ("math",),
    "code": ("code",),
    "numeric": ("numeric",),
    "regex": ("regex",),
    "http": ("http",),
}
"""Options, and sections of options, that only some rewards look at."""

ROWS_LOOKED_AT: Final = 5000  # of a file's rows
LOOK_S: Final = 1.0  # and for how long: nobody waits minutes for `check`
ROWS_SHOWN: Final = 3
UNREADABLE_SHARE: Final = 0.1  # more golds than these that `math` can't read: it must be another column, or no math

AGAINST_ATTACKERS: Final = "bubblewrap"  # the layer without which model-written code can do what the user can
COMPARED: Final = ("exact", "numeric", "choice", "math")
"""Rewards that compare with the answer of the data row."""

OF_TRAINING: Final = (
    "scale", "bias", "min_tokens", "max_tokens", "truncated_penalty", "overlong_tokens", "overlong_penalty",
)  # fmt: skip
"""Options that make advantages of what a check gave."""


def names(reward: RewardOptions) -> tuple[str, ...]:
    """Of the rewards that are summed; none where `reward.function` can't be read."""
    try:
        return tuple(term.name for term in terms(reward.function))
    except RewardError:
        return ()


def findings(reward: RewardConfig) -> Iterator[Finding]:
    """What the options alone say."""
    try:
        used = [term.name for term in terms(reward.function)]
    except RewardError as error:
        nearest = _nearest_import(reward.function)
        what = f"{reward.function!r} is no reward; try {nearest}" if nearest else str(error)
        yield "reward.function", what
        return
    yield from _unread(reward, used)
    if "regex" in used:
        yield from _pattern(reward.regex.pattern)
    if "http" in used and reward.http.url is None:
        yield "reward.http.url", "missing; the reward http sends answers there, such as http://127.0.0.1:8000/score"
    test, default = reward.code.test_timeout_s, RewardOptions().code.test_timeout_s
    if "code" in used and test > reward.timeout_s and test != default:
        what = f"{test:g} s of one test are more than reward.timeout_s ({reward.timeout_s:g}) has for all of them"
        yield "reward.code.test_timeout_s", f"{what}; try {reward.timeout_s / 2:g}, or a longer reward.timeout_s"


def of_training(reward: RewardConfig) -> Iterator[Finding]:
    """Options that do nothing where nothing is trained."""
    defaults = RewardConfig()
    for name in OF_TRAINING:
        if getattr(reward, name) != getattr(defaults, name):
            yield f"reward.{name}", "is about training; here a reward is what the check gave; leave it out"


def machine(reward: RewardConfig) -> Iterator[Finding]:
    """Whether this machine can hold model-written code as it is asked to."""
    if "code" in names(reward):
        try:
            jail.require(reward)
        except RewardError as error:
            yield "reward.sandbox", ". ".join(str(error).split("\n")).removeprefix("reward.sandbox is ")


def protection(reward: RewardOptions) -> list[str]:
    """Lines that say what is between model-written code and this machine; none where no such code is run."""
    if "code" not in names(reward):
        return []
    layers = jail.layers(reward)
    lines = [f"model-written code runs in: {', '.join(layer.name for layer in layers if layer.on)}"]
    lines += [f"{_loud(layer.name)}without {layer.name}: {layer.why}" for layer in layers if not layer.on]
    return lines


def _loud(layer: str) -> str:
    return "WARNING: " if layer == AGAINST_ATTACKERS else ""


def _unread(reward: RewardConfig, used: list[str]) -> Iterator[Finding]:
    defaults = RewardOptions()
    for option, readers in READ_BY.items():
        if not set(readers) & set(used):
            for key in _changed(getattr(reward, option), getattr(defaults, option), f"reward.{option}"):
                only = " and ".join(
                    ", ".join(f"`{name}`" for name in part) for part in (readers[:-1], readers[-1:]) if part
                )
                yield key, f"is only read by {only}, and reward.function is {reward.function}; leave it out"


def _changed(value: object, default: object, key: str) -> Iterator[str]:
    """Keys of the options, at `key` or under it, that are not as they are by default."""
    if isinstance(value, msgspec.Struct) and isinstance(default, msgspec.Struct):
        for name in default.__struct_fields__:
            yield from _changed(getattr(value, name), getattr(default, name), f"{key}.{name}")
    elif value != default:
        yield key


def _pattern(pattern: str | None) -> Iterator[Finding]:
    if pattern is None:
        yield "reward.regex.pattern", r"missing; the reward regex looks for it, such as 'answer is (\d+)'"
        return
    try:
        re.compile(pattern)
    except re.error as error:
        yield "reward.regex.pattern", f"{pattern!r} is no regular expression: {error}"


def _nearest_import(function: str) -> str | None:
    """What `my/rewards.py:score` and `my.rewards.score` are meant to be."""
    module, _, name = function.replace("/", ".").replace(".py:", ":").rpartition(":" if ":" in function else ".")
    nearest = f"{module}:{name}"
    return nearest if IMPORT_PATH.fullmatch(nearest) else None


# ---------------------------------------------------------------------------------------------------------------- data


def rows(config: Config, key: str, dataset: Dataset) -> Iterator[Finding]:
    """Whether the rows of the files of option `key` have what the reward compares with.

    Of much data some rows are looked at, evenly spread. Few golds that `math` can't read are no finding but a warning
    in the log: a run leaves their samples out, and counts them.
    """
    used = names(config.reward)
    yield from _lacking(config, dataset, [name for name in used if name in COMPARED])
    for name in used:
        if name in LOCAL and (look := _look(config, dataset, name)).bad:
            what = f"{len(look.bad)} of {look.looked} rows can't be checked by {name}: {look.examples()}"
            if name == "math" and len(look.bad) < UNREADABLE_SHARE * look.looked:
                logger.warning("%s: %s; their samples will be left out, and counted", key, what)
            else:
                yield key, what


def _lacking(config: Config, dataset: Dataset, comparing: list[str]) -> Iterator[Finding]:
    lacking = [number for number, row in enumerate(dataset.rows) if row.answer is None] if comparing else []
    if lacking:
        where = f"{len(lacking)} of {len(dataset)} rows have no {config.data.answer_key!r}"
        columns = ", ".join(dataset.rows[lacking[0]].columns) or "none"
        first = f"{dataset.where(lacking[0])} is the first; its other columns are {columns}"
        yield "data.answer_key", f"{where}, which reward.function {comparing[0]} compares with ({first})"


class _Look(NamedTuple):
    """looked: rows that were looked at. bad: where the others are that can't be checked, and why."""

    looked: int
    bad: list[tuple[str, str]]

    def examples(self) -> str:
        shown = "; ".join(f"{where}: {why}" for where, why in self.bad[:ROWS_SHOWN])
        return shown + (" …" if len(self.bad) > ROWS_SHOWN else "")


def _look(config: Config, dataset: Dataset, name: str) -> _Look:
    """An empty response to each row: `bad_data` says that no response could be judged by it."""
    look = _Look(0, [])
    options = {option: getattr(config.reward, option) for option in RewardOptions.__struct_fields__}
    try:
        grade = load(RewardSpec(**options | {"function": name}))
    except RewardError:
        return look  # it can't be used at all, which is said where it is loaded for itself
    begun = time.monotonic()
    for number in range(0, len(dataset), max(1, len(dataset) // ROWS_LOOKED_AT)):
        row = dataset.rows[number]
        if time.monotonic() - begun > LOOK_S:
            break
        if row.answer is None and name in COMPARED:
            continue
        check = Check(
            prompt=row.prompt if isinstance(row.prompt, str) else "",
            response="",
            answer=row.answer,
            finish="stop",
            columns={column: msgspec.msgpack.decode(raw) for column, raw in row.columns.items()},
        )
        try:
            outcome = grade(check)
        except Exception as error:  # in a run this is the verdict `crash`, of each answer to this row
            outcome = Outcome("bad_data", f"its check raises {error!r:.200}")
        look = _Look(look.looked + 1, look.bad)
        if outcome.verdict == "bad_data":
            look.bad.append((dataset.where(number), outcome.why))
    return look
