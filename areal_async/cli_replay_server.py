"""`areal-async replay RUN --peer server`: a real server's log-probabilities of recorded tokens, beside the recorded.

What always holds: the run's folder isn't changed; exit code 0 where each token is within the tolerance, 1 where one
isn't or the server can't be used, 2 where the command line is wrong or the weights aren't at hand.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from areal_async.cli_output import page, printable, printing
from areal_async.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from areal_async.replay.server import Compared, TokenDifference

    Group = argparse._ArgumentGroup

OPTIONS: Final = ("server", "model.path", "runtime_dir")  # of the configuration, that change anything here

EXAMPLES: Final = """  areal-async replay runs/quickstart-20260101-120000 --peer server
  areal-async replay runs/quickstart-20260101-120000 --peer server --version 85 --limit 100
  areal-async replay runs/quickstart-20260101-120000 --peer server --version 90 --model kept/model server.cores=0-3
"""


def add_options(group: "Group") -> None:
    group.add_argument(
        "--version",
        dest="weights_version",
        type=int,
        metavar="N",
        help="ask about the samples that version N drew (default: 0); its weights are those of model.path, of a "
        "checkpoint, or of RUN/model",
    )
    group.add_argument("--model", type=Path, metavar="DIR", help="a model's folder with the weights of --version")


def given(arguments: argparse.Namespace) -> str | None:
    """An option of this peer that was given."""
    options = {"--version": arguments.weights_version, "--model": arguments.model}
    return next((name for name, value in options.items() if value is not None), None)


def replay(log: Path, arguments: argparse.Namespace) -> int:
    """log: its folder. Errors: any ArealError."""
    import uvloop

    from areal_async.cli_replay_rewards import progress
    from areal_async.cli_score import ended_by_signals
    from areal_async.replay.finished import read_finished
    from areal_async.replay.run_files import load_run_config
    from areal_async.replay.server import TOLERANCE, Compared, ask_server, chosen
    from areal_async.replay.weights import folder_of
    from areal_async.trace.words import spans

    version, given_model = arguments.weights_version or 0, arguments.model
    if given_model is not None and arguments.weights_version is None:
        raise ConfigError("command line: replay: --model: of which version? name it: --version N")
    config, _ = load_run_config(log, arguments.overrides, OPTIONS)
    tolerance = _tolerance(arguments.tolerance, TOLERANCE[config.model.dtype])
    finished = read_finished(log)
    result = Compared(
        version=version, model="", dtype=config.model.dtype, temperature=config.rollout.temperature, tolerance=tolerance
    )
    answers = chosen(finished, version, arguments.limit, result)
    if not answers:
        drawn = f"{result.mixed:,} samples have tokens of several versions, {result.other_version:,} of another one"
        others = sorted({answer.newest for answer in finished.answers if answer.oldest == answer.newest})
        have = f"; try one of {spans(others)}" if others else ""
        raise ConfigError(
            f"command line: --version {version}: no sample has only tokens that this version drew ({drawn}){have}"
        )

    async def ask(model: Path) -> None:
        with ended_by_signals(), progress("samples", shown=not arguments.json) as done:
            await ask_server(log, answers, config, model, result, progress=done)

    with tempfile.TemporaryDirectory(prefix="areal-") as work:
        model = folder_of(version, given_model, log.parent, config, finished, Path(work))
        result.model = str(model) if Path(work) != model else str(log.parent / "checkpoints" / f"step-{version}")
        uvloop.run(ask(model))
    with printing():
        if arguments.json:
            print(msgspec.json.encode({"run": printable(arguments.run), **msgspec.structs.asdict(result)}).decode())
        else:
            show(result, page(soft_wrap=True), arguments.run)
    return 1 if result.over else 0


def _tolerance(given: Sequence[str], default: float) -> float:
    """Raises ConfigError."""
    if not given:
        return default
    try:
        value = float(given[-1])
    except ValueError:
        value = math.nan
    if len(given) > 1 or not value >= 0.0:
        raise ConfigError(f"command line: replay: --tolerance {given[-1]}: must be one number that isn't negative")
    return value


# ----------------------------------------------------------------------------------------------------------- telling


def show(result: "Compared", console: "Console", path: Path) -> None:
    """For people."""
    from rich.markup import escape

    def say(text: str) -> None:
        console.print(escape(text))

    if result.max_difference > 0.0:
        _tokens("the largest differences", result.worst, console, say)
    if result.over:
        _tokens(
            f"over the tolerance: {result.over:,} tokens of {result.samples_over:,} samples; the first one of each "
            "sample, since those behind it were read with it",
            result.first_over,
            console,
            say,
        )
    left = [
        (result.mixed, "with tokens of several versions"),
        (result.other_version, "of another version"),
        (result.lost_branch, "of a branch that training left"),
        (result.released, "whose arrays are gone (nobody needs them again)"),
        (result.unused, "that the run did not use"),
        (result.left, "beyond --limit"),
    ]
    if told := ", ".join(f"{count:,} {why}" for count, why in left if count):
        say(f"left out: {told}")
    say(f"weights: version {result.version}, {result.model}, {result.dtype}; temperature {result.temperature:g}")
    say(
        f"|log-probability now − recorded|: mean {result.mean_difference:.2g}, largest {result.max_difference:.2g} "
        f"(tolerance {result.tolerance:g})"
    )
    say(
        f"{path}: {result.tokens:,} tokens of {result.samples:,} samples asked about in {result.seconds:.1f} s: "
        f"{result.over:,} over the tolerance"
    )


def _tokens(title: str, tokens: "Sequence[TokenDifference]", console: "Console", say: Callable[[str], None]) -> None:
    from rich.markup import escape
    from rich.table import Table

    say(f"{title}:")
    table = Table(show_edge=False, pad_edge=False)
    for name in ("sample", "token", "id", "recorded", "now", "difference"):
        table.add_column(name, justify="right")
    table.add_column("text")
    for token in tokens:
        table.add_row(
            token.sample, str(token.place), str(token.token_id), f"{token.recorded:.6f}", f"{token.server:.6f}",
            f"{token.difference:.2g}", escape(repr(token.text)),
        )  # fmt: skip
    console.print(table)
