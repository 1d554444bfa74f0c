"""`areal-async trace`: look into the log of a run: its records, what became of one thing, the samples themselves.

What always holds: only the files that are named are written, the run is not changed; nothing is started, so it works on
any machine, and while the run goes on; a torn end is said, corruption ends it with the file and the offset.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from areal_async import output_file
from areal_async.cli_folder import log_folder
from areal_async.cli_output import ended_by_sigterm, printing
from areal_async.errors import ConfigError

if TYPE_CHECKING:
    from areal_async.log.format import Torn
    from areal_async.trace.things import Thing

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

USAGE: Final = """areal-async trace RUN [ls] [--kind K] [--id ID] [--from S] [--to S] [--limit N] [--json]
       areal-async trace RUN --story ID [--json]
       areal-async trace RUN --samples FILE.jsonl [--step N] [--id ID] [--verdict V]
       areal-async trace RUN --perfetto FILE.json [--id SAMPLE]
       areal-async trace RUN --anonymize OUT"""

EXAMPLES: Final = """ids: 12 (a group, with its samples), 12.3 (a sample), "step 6", "server 0", rewards.0, trainer

examples:
  areal-async trace runs/first ls --limit 50
  areal-async trace runs/first ls --kind lost --kind restart --from 60 --to 120
  areal-async trace runs/first ls --id 12 --json | jq .record
  areal-async trace runs/first --story 12.3
  areal-async trace runs/first --story "step 6"
  areal-async trace runs/first --samples - --step 6 --verdict wrong | jq -r .response
  areal-async trace runs/first --samples samples.jsonl
  areal-async trace runs/first --perfetto first.json     (open it at https://ui.perfetto.dev)
  areal-async trace runs/first --anonymize first-anonymous && tar czf report.tar.gz first-anonymous
"""
# which filter belongs to what
_FILTERS: Final = {
    "ls": ("kind", "id", "begin", "end", "limit", "json"),
    "story": ("json",),
    "samples": ("step", "id", "verdict"),
    "perfetto": ("id",),
    "anonymize": (),
}
_NAMES: Final = {"begin": "from", "end": "to"}


def add_trace(commands: "Commands") -> None:
    about = "Look into a run: its records, the story of one thing, its samples, a timeline; or make it anonymous."
    parser = commands.add_parser(
        "trace",
        help=about,
        usage=USAGE,
        description=about + " docs/trace.md shows what it prints.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or the log folder in it")
    parser.add_argument("ls", nargs="?", choices=["ls"], help="a line a record (this is what it does by itself, too)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--story", metavar="ID", help="everything that happened to one thing, in words")
    what.add_argument("--samples", metavar="FILE.jsonl", help="a line of JSON a finished sample; - is the terminal")
    what.add_argument("--perfetto", type=Path, metavar="FILE.json", help="a timeline for https://ui.perfetto.dev")
    what.add_argument("--anonymize", type=Path, metavar="OUT", help="a new run folder without texts, tokens hashed")
    few = parser.add_argument_group("filters")
    few.add_argument("--kind", action="append", metavar="K", help="of event, command or note, such as sample_done")
    few.add_argument("--id", action="append", metavar="ID", help="records, or samples, of this thing")
    few.add_argument("--from", dest="begin", type=float, metavar="S", help="run clock in seconds, from")
    few.add_argument("--to", dest="end", type=float, metavar="S", help="run clock in seconds, up to")
    few.add_argument("--limit", type=int, metavar="N", help="so many records at most")
    few.add_argument("--step", type=int, metavar="N", help="samples that this step trained")
    few.add_argument("--verdict", action="append", metavar="V", help="samples whose check gave it, such as wrong")
    parser.add_argument("--json", action="store_true", default=None, help="a line of JSON a record or happening")
    parser.set_defaults(do=run)


def run(arguments: argparse.Namespace) -> int:
    """`areal-async trace`."""
    folder = log_folder("trace", arguments.run)
    what = next((name for name in _FILTERS if name != "ls" and getattr(arguments, name) is not None), "ls")
    if what != "ls" and arguments.ls:
        raise ConfigError(f"command line: trace: ls and --{what}: name one of them")
    given = {name for names in _FILTERS.values() for name in names if getattr(arguments, name) is not None}
    if wrong := sorted(given - set(_FILTERS[what])):
        option = _NAMES.get(wrong[0], wrong[0])
        raise ConfigError(f"command line: trace: --{option} is no filter of {'ls' if what == 'ls' else '--' + what}")
    with printing(), ended_by_sigterm():
        match what:
            case "ls":
                _list(folder, arguments)
            case "story":
                _story(folder, arguments)
            case "samples":
                _samples(folder, arguments)
            case "perfetto":
                _perfetto(folder, arguments)
            case "anonymize":
                _anonymize(folder, arguments)
    return 0


def _say_torn(torn: "Torn") -> None:
    print(f"{torn}; it was being written, and is left out", file=sys.stderr)


def _list(folder: Path, arguments: argparse.Namespace) -> None:
    from areal_async.trace import listing
    from areal_async.trace.things import thing

    things = list(map(thing, arguments.id or ()))
    begin, end, left = arguments.begin, arguments.end, arguments.limit
    wanted = listing.Filter(
        kinds=tuple(map(listing.kind_named, arguments.kind or ())),
        things=tuple(things),
        begin=float("-inf") if begin is None else begin,
        end=float("inf") if end is None else end,
    )
    if not wanted.begin <= wanted.end:
        raise ConfigError(f"command line: trace: --from {wanted.begin:g} --to {wanted.end:g}: no time is between them")
    if left is not None and left < 1:
        raise ConfigError(f"command line: trace: --limit {left}: at least 1")
    listed = 0
    for item in listing.read_items(folder, _say_torn):
        if not wanted.wants(item):
            continue
        print(listing.json_line(item).decode() if arguments.json else listing.line(item))
        listed += 1
        if listed == left:
            return
        things = [each for each in things if not each.is_in(item.record)]
    _must_be_there(folder, things)
    if not listed:
        print("no record is wanted by all of these filters", file=sys.stderr)


def _must_be_there(folder: Path, things: "list[Thing]") -> None:
    """Of things that nothing was found of. Raises ConfigError: the log has no such thing at all."""
    from areal_async.trace import story

    for each in things:
        for _ in story.tell(folder, each, lambda torn: None):
            break


def _story(folder: Path, arguments: argparse.Namespace) -> None:
    import msgspec

    from areal_async.trace import story
    from areal_async.trace.things import thing

    about = thing(arguments.story)
    lines = story.tell(folder, about, _say_torn)
    for text in (msgspec.json.encode(line).decode() for line in lines) if arguments.json else story.shown(about, lines):
        print(text)


def _samples(folder: Path, arguments: argparse.Namespace) -> None:
    import msgspec

    from areal_async.trace import samples
    from areal_async.trace.things import thing, wrong

    verdicts = tuple(map(samples.verdict_named, arguments.verdict or ()))
    things = list(map(thing, arguments.id or ()))
    if wrong_kind := next((each for each in things if each.kind in ("trainer", "worker")), None):
        raise wrong(f"--samples --id: no sample is of the {wrong_kind.label}; name a group, a sample, a server, a step")
    if arguments.step is not None:
        if arguments.step < 0:
            raise wrong(f"--step {arguments.step}: the first one is 0")
        things.append(thing(f"step {arguments.step}"))
    wanted = samples.Wanted(tuple(things[: len(arguments.id or ())]), arguments.step, verdicts)
    if arguments.samples != "-":
        output_file.check("trace: --samples", Path(arguments.samples))
    decode, why = samples.find_decoder(folder)
    if decode is None:
        print(f"no texts, tokens only: {why}", file=sys.stderr)
    written = gone = 0
    encoder = msgspec.json.Encoder()
    with _output(arguments.samples) as file, _progress(folder, "samples") as read:
        for record in samples.read_samples(folder, wanted, decode, _say_torn, read):
            file.write(encoder.encode(record) + b"\n")
            written += 1
            gone += bool(record.missing)
    without = f", {gone} of them without arrays: their `missing` says why" if gone else ""
    if not written:
        _must_be_there(folder, things)
    print(f"{written} finished samples{without}", file=sys.stderr)


def _perfetto(folder: Path, arguments: argparse.Namespace) -> None:
    from areal_async.trace import perfetto
    from areal_async.trace.things import thing, wrong

    things = [thing(text) for text in arguments.id or ()]
    if len(things) > 1 or any(each.kind != "sample" for each in things):
        raise wrong("--perfetto --id: name one sample, such as 12.3: its way is drawn, and no other")
    output_file.check("trace: --perfetto", arguments.perfetto)
    drawn = perfetto.write(folder, arguments.perfetto, sample=things[0].name if things else None, on_torn=_say_torn)
    size = f", {drawn.nbytes:,} bytes" if drawn.nbytes else ""
    print(
        f"{arguments.perfetto}: {drawn.seconds:.1f} s of the run, {drawn.samples} samples, {drawn.steps} steps{size}; "
        "open it at https://ui.perfetto.dev",
        file=sys.stderr,
    )


def _anonymize(folder: Path, arguments: argparse.Namespace) -> None:
    from areal_async.trace.anonymize import anonymize

    out = arguments.anonymize
    with _share_done("anonymize") as read:
        copied = anonymize(folder, out, _say_torn, read)
    replays = "`areal-async replay` gives the same decisions of both"
    if copied.differs_at is not None:
        replays = f"`areal-async replay` finds the difference of both, after event {copied.differs_at}"
    print(
        f"{out}: {copied.records:,} records, arrays of {copied.samples:,} samples, {copied.nbytes:,} bytes; tokens and "
        f"texts are hashed with a key that is gone; {replays}. docs/trace.md says what stays",
        file=sys.stderr,
    )


@contextlib.contextmanager
def _output(name: str) -> Iterator[BinaryIO]:
    """`-`: the standard output."""
    if name == "-":
        yield sys.stdout.buffer
        return
    with output_file.whole(Path(name)) as file:
        yield file


@contextlib.contextmanager
def _progress(folder: Path, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; it is told bytes of the decision log that were read."""
    from areal_async.log.format import DECISIONS_NAME

    whole = max(1, (folder / DECISIONS_NAME).stat().st_size)
    with _share_done(what) as told:
        yield lambda count: told(count / whole)


@contextlib.contextmanager
def _share_done(what: str) -> Iterator[Callable[[float], None]]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)
