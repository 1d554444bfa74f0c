"""`areal-async replay RUN --peer rewards`: the recorded answers graded again; which verdicts changed.

What always holds: the run's folder isn't changed; exit code 0 where no verdict and no reward changed, 1 where some did;
what is wrong with the command line, the configuration or the data is said before anything is started.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import msgspec

from areal_async.cli_output import page, printable, printing
from areal_async.errors import ArealError, ConfigError
from areal_async.messages import RewardOptions, RewardSpec, Verdict

if TYPE_CHECKING:
    from rich.console import Console

    from areal_async.config import Config
    from areal_async.config_file import Sources
    from areal_async.replay.rewards import Change, Regraded

OPTIONS: Final = (
    "reward",
    "data.train",
    "model.path",
    "import_path",
)  # that change anything here
SHOWN: Final = 20  # changes that are printed; --json has all
LINE: Final = 100  # characters of a reason, and of an answer's end, that are printed


def replay(log: Path, arguments: argparse.Namespace) -> int:
    """Of `cli_replay`."""
    import uvloop

    from areal_async.cli_score import ended_by_signals
    from areal_async.replay.finished import read_finished
    from areal_async.replay.rewards import grade_again
    from areal_async.replay.run_files import load_run_config, load_run_data

    config, sources = load_run_config(log, arguments.overrides, OPTIONS)
    config, spec = _reward(config, sources, arguments.overrides)
    finished = read_finished(log)
    data = load_run_data(config, finished.about)
    for line in _said_before(log, config):
        print(line, file=sys.stderr)

    async def grade() -> "Regraded":
        with ended_by_signals(), progress("answers", shown=not arguments.json) as done:
            return await grade_again(log, finished, config, spec, data, limit=arguments.limit, progress=done)

    result = uvloop.run(grade())
    with printing():
        if arguments.json:
            print(msgspec.json.encode({"run": printable(arguments.run), **msgspec.structs.asdict(result)}).decode())
        else:
            show(result, page(soft_wrap=True), arguments.run)
    return 1 if result.changed else 0


def _reward(config: "Config", sources: "Sources", overrides: Sequence[str]) -> "tuple[Config, RewardSpec]":
    """The reward's options, without those of the run that another function doesn't read; and what its workers are told.
    Errors: ConfigError."""
    from areal_async import config_rewards
    from areal_async.rewards.loading import verify
    from areal_async.specs import reward_spec

    used, defaults = config_rewards.names(config.reward), RewardOptions()
    unread = {
        name: getattr(defaults, name)
        for name, readers in config_rewards.READ_BY.items()
        if not set(readers) & set(used) and not any(text.startswith(f"reward.{name}") for text in overrides)
    }
    config = msgspec.structs.replace(config, reward=msgspec.structs.replace(config.reward, **unread))
    found = [*config_rewards.findings(config.reward), *config_rewards.machine(config.reward)]
    if found:
        raise ConfigError("\n".join(f"{sources.where(key)}: {key}: {what}" for key, what in found))
    spec = reward_spec(config, None)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's module prints is no result
            verify(spec)
    except ArealError as error:
        raise ConfigError(f"{sources.where('reward.function')}: reward.function: {error}") from error
    return config, spec


def _said_before(log: Path, config: "Config") -> Iterator[str]:
    from areal_async.config_rewards import protection
    from areal_async.replay.run_files import earlier_configs, load_run_config

    yield from protection(config.reward)
    last, _ = load_run_config(log, (), ())
    for path, earlier in earlier_configs(log):
        if _graded_by(earlier) != _graded_by(last):
            yield f"{path.name}: the run had another reward before a resume; all answers are graded by one reward here"


def _graded_by(config: "Config") -> list[object]:
    return [getattr(config.reward, name) for name in RewardOptions.__struct_fields__]


@contextlib.contextmanager
def progress(what: str, *, shown: bool) -> "Iterator[Callable[[int, int], None]]":
    """A bar on standard error where that is a terminal; its function takes (done, all)."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, whole: bar.update(task, completed=done, total=whole)


# ----------------------------------------------------------------------------------------------------------- telling


def show(result: "Regraded", console: "Console", path: Path) -> None:
    """For people."""
    from rich.markup import escape

    def say(text: str) -> None:
        console.print(escape(text))

    if result.graded:
        _table(result, console)
    for change in result.changes[:SHOWN]:
        _change(change, say)
    if result.changed > SHOWN:
        say(f"and {result.changed - SHOWN:,} more (--json has all)")
    left = [
        (result.released, "whose arrays are gone (nobody needs them again)"),
        (result.by_workflow, "rewarded by their workflow"),
        (result.unchecked, "never checked in the run"),
        (result.left, "beyond --limit"),
    ]
    if told := ", ".join(f"{count:,} {why}" for count, why in left if count):
        say(f"left out: {told}")
    if result.recorded_mean is not None and result.mean is not None:
        say(f"mean reward: {result.recorded_mean:.4f} recorded, {result.mean:.4f} now")
    say(f"{path}: {result.graded:,} answers graded again in {result.seconds:.1f} s: {result.changed:,} changed")


def _table(result: "Regraded", console: "Console") -> None:
    from rich.table import Table

    verdicts: Sequence[Verdict] = get_args(Verdict)
    now = [verdict for verdict in verdicts if any(verdict in row for row in result.counts.values())]
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("recorded, and now:")
    for verdict in now:
        table.add_column(verdict, justify="right")
    for recorded in verdicts:
        if row := result.counts.get(recorded):
            table.add_row(recorded, *(f"{row[verdict]:,}" if verdict in row else "" for verdict in now))
    console.print(table)


def _change(change: "Change", say: Callable[[str], None]) -> None:
    before = f"{change.recorded_verdict} {_number(change.recorded_reward)}"
    say(
        f"sample {change.sample} ({os.path.basename(change.where)}): {before} -> {change.verdict} "
        f"{_number(change.reward)}; extracted {change.extracted!r}"
    )
    if change.reason:
        say(f"  reason: {_line(change.reason[-LINE:])}")
    say(f"  answer: {_line(change.answer[-LINE:])}")


def _number(reward: float | None) -> str:
    return "without a reward" if reward is None else f"{reward:g}"


def _line(text: str) -> str:
    return " ".join(text.split())
