"""`areal-async replay RUN`: the core's decisions again, from the log alone; with --peer, one kind of the run's workers.

What always holds: the run's folder isn't changed; exit code 0 where nothing differs, 1 where something does or the log
is damaged, 2 where the command line is wrong.
"""

import argparse
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from areal_async import cli_replay_server, cli_replay_trainer
from areal_async.cli_folder import LOG_NAME, log_folder
from areal_async.cli_output import page, printable, printing
from areal_async.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from areal_async.replay.deciding import Difference
    from areal_async.replay.replayed import Replayed, Standing, Until

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it
    Group = argparse._ArgumentGroup

SHOWN: Final = 12  # commands, and fields, that are printed; --json has all
VALUE: Final = 160  # characters of a printed value
LONG_BYTES: Final = 8 << 20  # a log from this size on takes long enough to show how far it is

EXAMPLES: Final = (
    """examples:
  areal-async replay runs/quickstart-20260101-120000
  areal-async replay runs/quickstart-20260101-120000 --until step=12
  areal-async replay runs/quickstart-20260101-120000 --until id=107.3
  areal-async replay runs/quickstart-20260101-120000 --json | python -m json.tool
  areal-async replay runs/quickstart-20260101-120000 --peer rewards
  areal-async replay runs/quickstart-20260101-120000 --peer rewards reward.function=math reward.math.last_number=true
"""
    + cli_replay_trainer.EXAMPLES
    + cli_replay_server.EXAMPLES
)


class Peer(NamedTuple):
    """A kind of workers that can be asked again. module: imported when it is asked for; its function `replay` takes the
    log folder and the command line's arguments, and returns the exit code. add_options: of its own."""

    module: str
    add_options: "Callable[[Group], None]"


def _no_options(group: "Group") -> None:
    pass


PEERS: Final[dict[str, Peer]] = {
    "trainer": Peer("areal_async.cli_replay_trainer", cli_replay_trainer.add_options),
    "rewards": Peer("areal_async.cli_replay_rewards", _no_options),
    "server": Peer("areal_async.cli_replay_server", cli_replay_server.add_options),
}


def add_replay(commands: "Commands") -> None:
    about = "Decide a run again from its log alone, and compare each decision with the recorded one."
    parser = commands.add_parser(
        "replay",
        help=about,
        description=about + " No GPU, model or data is needed; docs/replay.md says what it proves.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, a copy of it, or the log folder in it")
    parser.add_argument(
        "--until",
        metavar="WHERE",
        help="stop there and tell how the run stood: step=N (when step N was formed), event=N (after that event, the "
        "first is 0), id=X (when this group, sample or peer first appeared)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a page")
    parser.add_argument(
        "--peer", choices=tuple(PEERS), help="ask workers of this kind again instead, and compare their answers"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="with --peer rewards or server: ask for the first N samples only"
    )
    parser.add_argument(
        "overrides",
        metavar="key.path=value",
        nargs="*",
        help="with --peer: options that differ from the run's configuration, such as reward.timeout_s=10",
    )
    for name, peer in PEERS.items():
        peer.add_options(parser.add_argument_group(f"options of --peer {name}"))
    parser.set_defaults(do=run)


def run(arguments: argparse.Namespace) -> int:
    """`areal-async replay`."""
    folder = log_folder("replay", arguments.run)
    for name, options in (("trainer", cli_replay_trainer), ("server", cli_replay_server)):
        if arguments.peer != name and (other := options.given(arguments)) is not None:
            raise ConfigError(f"command line: replay: {other}: has a meaning only with --peer {name}")
    if arguments.peer is not None:
        if arguments.until is not None:
            raise ConfigError(f"command line: replay: --until has no meaning with --peer {arguments.peer}")
        if arguments.limit is not None and arguments.limit < 1:
            raise ConfigError(f"command line: replay: --limit {arguments.limit}: must be at least 1")
        return int(importlib.import_module(PEERS[arguments.peer].module).replay(folder, arguments))
    if arguments.limit is not None or arguments.overrides:
        what = "--limit" if arguments.limit is not None else arguments.overrides[0]
        raise ConfigError(f"command line: replay: {what}: has a meaning only with --peer")
    from areal_async.replay.replayed import replay

    until = parse_until(arguments.until) if arguments.until is not None else None
    with _progress(folder, shown=not arguments.json) as progress:
        done = replay(folder, until, progress)
    if until is not None and done.standing is None and done.difference is None:
        raise ConfigError(f"command line: replay: --until {arguments.until}: {_not_there(folder, done, until)}")
    with printing():
        if arguments.json:
            print(msgspec.json.encode({"run": printable(arguments.run), **figures(done)}).decode())
        else:
            show(done, page(soft_wrap=True), arguments.run)
    return 1 if done.difference is not None else 0


def parse_until(text: str) -> "Until":
    """Raises ConfigError."""
    from areal_async.replay.replayed import Until
    from areal_async.trace.things import LONGEST, thing

    kind, _, value = text.partition("=")
    if kind == "id" and value:
        about = thing(value, "replay: --until")
        return Until("step", int(about.name)) if about.kind == "step" else Until("id", about.label)
    if kind in ("step", "event") and value.isascii() and value.isdecimal() and len(value) <= LONGEST:
        return Until("step" if kind == "step" else "event", int(value))
    raise ConfigError(
        f"command line: replay: --until {text[:40]}: should be step=N, event=N or id=X, such as step=12 or id=107.3"
    )


def _not_there(folder: Path, done: "Replayed", until: "Until") -> str:
    match until.kind:
        case "step" if done.last_step is None:
            return "no step was formed"
        case "step":
            return f"that step was never formed; the last one was {done.last_step}"
        case "event":
            return f"the log has {done.events} events, the first is 0"
        case "id":
            from areal_async.trace.story import nearest
            from areal_async.trace.things import thing

            return f"nothing in the log has this id; {nearest(folder, thing(str(until.value)))}"


def figures(done: "Replayed") -> dict[str, object]:
    """For --json."""
    return {
        **msgspec.structs.asdict(done),
        "events_per_s": done.events_per_s,
        "times_faster": done.times_faster,
        "differences": 0 if done.difference is None else 1,
    }


@contextmanager
def _progress(folder: Path, *, shown: bool) -> "Iterator[Callable[[int], None]]":
    """A bar on a terminal, where it takes long."""
    size = (folder / LOG_NAME).stat().st_size
    if not shown or size < LONG_BYTES:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("replay", total=size)
        yield lambda offset: bar.update(task, completed=offset)


# ---------------------------------------------------------------------------------------------------------- telling


def show(done: "Replayed", console: "Console", path: Path) -> None:
    """For people: what was asked for, then how much it was, the verdict last."""
    if done.standing is not None:
        _show_standing(done.standing, console)
    if done.torn:
        _say(console, f"{done.torn}; left out")
    if done.difference is not None:
        _show_difference(done.difference, console)
    if done.missing:
        commands = _count("command", len(done.missing))
        _say(console, f"of the last event the log lacks {commands}: the controller was ended there, or is writing them")
    _say(
        console,
        f"{path}: {done.events:,} events and {done.commands:,} commands of {done.run_s:.1f} s of the run, decided again"
        f" in {done.took_s:.2f} s: {done.events_per_s:,.0f} events/s, {done.times_faster:,.0f} times faster than the"
        " run",
    )
    if done.difference is not None:
        _say(console, f"it differs at event {done.difference.number}", "bold red")
        return
    if done.standing is None:
        _say(console, f"at its end: {done.over}" if done.events else "nothing was recorded")
    _say(console, "0 differences", "bold")


def _show_standing(standing: "Standing", console: "Console") -> None:
    view = standing.view
    _say(
        console,
        f"event {standing.number}, at {standing.event.at:.3f} s of the run, offset {standing.offset}: "
        f"{type(standing.event).__name__}",
        "bold",
    )
    _say(console, f"  {_short(standing.event)}")
    _say(console, f"{_count('command', len(standing.commands))}{':' if standing.commands else ''}", "bold")
    for command in standing.commands[:SHOWN]:
        _say(console, f"  {_short(command)}")
    if len(standing.commands) > SHOWN:
        _say(console, f"  and {len(standing.commands) - SHOWN} more (--json has all)")
    _say(
        console,
        f"trainer {view.trainer_state}, version {view.version}, branch {view.branch}; {view.in_flight} samples in "
        f"flight, {view.held} held; {view.ready} groups ready, {view.outstanding} outstanding",
    )
    for server in view.servers:
        version = f"version {server.version}" if server.version >= 0 else "no weights of the run"
        _say(console, f"server {server.name} {server.state}, {version}, {server.load} samples")
    for peer in view.peers:
        if peer.why:
            lost = _count("restart", peer.restarts)
            _say(console, f"{peer.label}: {peer.state} since {peer.since:.1f} s, {lost}, last lost: {_short(peer.why)}")
    _say(console, f"waiting: {standing.waiting}")
    for story in standing.stories:
        _say(console, story)


def _show_difference(found: "Difference", console: "Console") -> None:
    head = f"event {found.number}, at {found.event.at:.3f} s of the run, offset {found.offset}"
    _say(console, f"the first difference: {head}: {type(found.event).__name__}", "bold")
    _say(console, f"  {_short(found.event)}")
    if found.impossible:
        _say(console, f"this core can't take it: {found.impossible}")
        if found.last and not found.all_recorded:
            _say(console, "the log ends with it: the run has most likely ended with this very error")
    elif found.fields:
        of = f"{found.place + 1} of {len(found.all_recorded)}"
        _say(console, f"command {of}, {type(found.expected).__name__}, offset {found.found_at}, differs in", "bold")
        _show_fields(found, console)
    else:
        counts = f"{len(found.all_expected)} expected, {len(found.all_recorded)} recorded"
        _say(console, f"command {found.place + 1} ({counts}), offset {found.found_at}", "bold")
        for name, command in (("expected", found.expected), ("recorded", found.recorded)):
            _say(console, f"  {name}: {_short(command) if command is not None else 'no further command'}")
    for story in found.stories:
        _say(console, story)
    _say(console, f"waiting: {found.waiting}")


def _show_fields(found: "Difference", console: "Console") -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), show_edge=False)
    for name in ("field", "expected (this core)", "recorded (the log)"):
        table.add_column(name, overflow="fold")
    for field in found.fields[:SHOWN]:
        table.add_row(*(escape(text) for text in (field.name, _short(field.expected), _short(field.recorded))))
    console.print(table)
    if len(found.fields) > SHOWN:
        _say(console, f"  and {len(found.fields) - SHOWN} more fields (--json has all)")


def _say(console: "Console", text: str, style: str | None = None) -> None:
    from rich.text import Text

    console.print(Text(text, style or ""))


def _count(what: str, number: int) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= VALUE else f"{text[:VALUE]}…"
