"""The command line: `areal-async run|check|eval|score|why|audit|replay|trace|view|simulate|worker`.

What always holds: exit code 0 where all is well, 1 where the thing failed, 2 where the command line or the
configuration is wrong; an error that was foreseen is a message, without a traceback.
"""

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from areal_async import __version__
from areal_async.cli_audit import add_audit
from areal_async.cli_output import any_letter, open_missing, page, printing
from areal_async.cli_replay import add_replay
from areal_async.cli_score import add_score
from areal_async.cli_simulate import add_simulate
from areal_async.cli_trace import add_trace
from areal_async.cli_view import add_view
from areal_async.cli_why import add_why
from areal_async.cli_worker import add_worker
from areal_async.errors import ArealError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from areal_async.config import Config

INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    open_missing()
    any_letter()
    parser = _parser()
    arguments, further = parser.parse_known_args(argv)
    if wrong := [text for text in further if text.startswith("-") or "overrides" not in arguments]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if further:  # argparse takes positionals from one place only: these stand behind an option
        arguments.overrides += further
    try:
        return int(arguments.do(arguments))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except ArealError as error:
        print(f"areal-async: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("areal-async: interrupted; all processes were ended", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-async",
        description="Fully asynchronous reinforcement learning for language models.",
        epilog="example: areal-async run configs/quickstart.yaml train.steps=10\n"
        "Each command has a --help with examples of its own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"areal-async {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_check(commands)
    _add_eval(commands)
    add_score(commands)
    add_audit(commands)
    add_replay(commands)
    add_simulate(commands)
    add_trace(commands)
    add_view(commands)
    add_why(commands)
    add_worker(commands)
    return parser


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(
    commands: "Commands[argparse.ArgumentParser]",
    name: str,
    do: Callable[[argparse.Namespace], int],
    about: str,
    examples: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=about,
        description=about,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="configuration file (YAML; docs/configuration.md)")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="options that differ from the file")
    parser.set_defaults(do=do)
    return parser


def _add_run(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = _command(
        commands,
        "run",
        run,
        "Train a model. Ctrl-C once: finish the step, save the model, leave; twice: leave now.",
        "  areal-async run configs/quickstart.yaml\n"
        "  areal-async run configs/quickstart.yaml train.steps=10 rollout.max_staleness=0\n"
        "  areal-async run configs/quickstart.yaml --run-dir runs/first\n"
        "  areal-async run configs/quickstart.yaml --resume\n",
    )
    parser.add_argument("--run-dir", type=Path, metavar="D", help="run folder (default: a new one under runs/)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --run-dir, or with the last one of this name (docs/resume.md)",
    )


def _add_check(commands: "Commands[argparse.ArgumentParser]") -> None:
    _command(
        commands,
        "check",
        check,
        "Find what is wrong with a configuration, its data and its reward, without starting anything.",
        "  areal-async check configs/quickstart.yaml\n"
        "  areal-async check configs/quickstart.yaml train.batch_groups=32\n",
    )


def _add_eval(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = _command(
        commands,
        "eval",
        evaluate,
        "Score a model on the configuration's held-out problems (data.eval), with a server of its own.",
        "  areal-async eval configs/quickstart.yaml --model configs/quickstart/model\n"
        "  areal-async eval configs/quickstart.yaml --model runs/quickstart-20260101-120000/model --json\n"
        "  areal-async eval configs/quickstart.yaml --model M eval.temperature=0 eval.limit=100\n",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="model folder in Hugging Face form")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")


# ---------------------------------------------------------------------------------------------------------- commands


def check(arguments: argparse.Namespace) -> int:
    """`areal-async check`."""
    from areal_async.config_rewards import protection

    config = _checked_config(arguments)
    rollout, train = config.rollout, config.train
    with printing():
        print(
            f"{arguments.config}: good. {train.steps} steps of {train.batch_groups} prompts × {rollout.group_size} "
            f"samples, η = {rollout.max_staleness}; servers: {config.own_servers + len(rollout.urls)}, trainer ranks: "
            f"{train.ranks}, reward: {config.reward.function} in {config.reward.workers} worker(s)"
        )
        for line in protection(config.reward):
            print(line)
    return 0


def run(arguments: argparse.Namespace) -> int:
    """`areal-async run`."""
    from rich.console import Console

    from areal_async.report import outlasting

    config = _checked_config(arguments)
    with outlasting(sys.stdout) as output:
        return _train(config, arguments, Console(file=output))


def _train(config: "Config", arguments: argparse.Namespace, console: "Console") -> int:
    from areal_async.config_rewards import protection
    from areal_async.controller.controller import Controller
    from areal_async.report import display, summary

    for line in protection(config.reward):
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    async def train() -> int:
        controller = Controller(config, run_dir=arguments.run_dir, resume=arguments.resume)
        async with controller as running:
            with _stop_on_signals(running.stop, console.print):
                console.print(f"run folder: {running.folder}", soft_wrap=True, highlight=False, markup=False)
                async with display(running, console) as shown:
                    async for row in running.steps():
                        shown.step(row)
        result = controller.result()
        summary(result, console)
        if result.model is not None:
            command = shlex.join(["areal-async", "eval", arguments.config, "--model", str(result.model)])
            console.print(f"score it: {command}", soft_wrap=True, markup=False)
        return 0

    return _in_loop(train())


def evaluate(arguments: argparse.Namespace) -> int:
    """`areal-async eval`."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress
    from rich.table import Table

    from areal_async.controller.evaluate import evaluate as score

    config = _checked_config(arguments)
    model = arguments.model.resolve()
    if not (model / "config.json").is_file():
        raise ConfigError(f"command line: --model: {arguments.model} holds no config.json; name a model's folder")
    with Progress(console=Console(stderr=True), disable=arguments.json, transient=True) as bar:
        task = bar.add_task("answers", total=None)
        work = score(config, model, progress=lambda done, whole: bar.update(task, completed=done, total=whole))
        result = _in_loop(work)
    if arguments.json:
        with printing():
            print(msgspec.json.encode(result).decode())
        return 0
    title = escape(f"{result.n} problems of {config.data.eval}")
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in msgspec.structs.asdict(result).items():
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        table.add_row(name, shown)
    with printing():
        page().print(table)
    return 0


def _checked_config(arguments: argparse.Namespace) -> "Config":
    """The configuration, with everything found that can be known before a process is started."""
    from areal_async.config_check import check
    from areal_async.config_file import load_with_sources
    from areal_async.rewards.loading import verify
    from areal_async.specs import reward_spec

    config, sources = load_with_sources(arguments.config, arguments.overrides)
    check(config, sources)
    try:
        verify(reward_spec(config, None))
    except ArealError as error:
        raise ConfigError(f"{sources.where('reward.function')}: reward.function: {error}") from error
    return config


Result = TypeVar("Result")


def _in_loop(work: Coroutine[object, object, Result]) -> Result:
    import uvloop

    from areal_async.controller.garbage import collect_rarely

    collect_rarely()
    return uvloop.run(work)


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """First Ctrl-C or SIGTERM: stop in order. Second: cancel the task that runs this, which ends everything."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked = False

    def interrupt() -> None:
        nonlocal asked
        if asked:
            assert task is not None
            task.cancel()
            return
        asked = True
        say("stopping after the step that is running; once more to leave now")
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


if __name__ == "__main__":
    sys.exit(main())
