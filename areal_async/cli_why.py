"""`areal-async why [RUN]`: who waits for whom, since when; from outside, of a run that goes on, hangs or has ended.

What always holds: it changes nothing and asks the run nothing, so it answers also where the controller stands still; it
takes what the controller last wrote (`status.json`), the processes as the kernel knows them, and, where the controller
has not told how the run ended, the log.
"""

import argparse
import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from areal_async import run_processes
from areal_async.cli_output import page, printing
from areal_async.errors import ArealError, ConfigError
from areal_async.run_processes import OLD_S, Process

if TYPE_CHECKING:
    from areal_async.controller.status import Status
    from areal_async.core.view import PeerView

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

RUNS: Final = Path("runs")
LAST_WORDS: Final = 3  # lines of a lost child
LINE: Final = 300  # characters of each
# states that need no explanation
FINE: Final = ("serving", "updating", "working", "idle", "training", "publishing", "checkpointing")

EXAMPLES: Final = """examples:
  areal-async why                                      the newest run under runs/
  areal-async why runs/quickstart-20260101-120000
  areal-async why runs/first --json | jq .status.waits
"""


class Kept(msgspec.Struct, frozen=True):
    """The newest complete checkpoint."""

    folder: str
    age_s: float


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """controller: pid of the living one, None if there is none. age_s: of the status. end: what the log says of how
    the run ended, where the controller has not told. elsewhere: host of the controller, if it isn't this one."""

    run: str
    controller: int | None
    elsewhere: str
    age_s: float
    end: str
    status: "Status | None"
    children: tuple[Process, ...]
    checkpoint: Kept | None


def add_why(commands: "Commands") -> None:
    about = "Tell what a run waits for, and since when; or how it ended."
    parser = commands.add_parser(
        "why",
        help=about,
        description=about,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, nargs="?", help="run folder (default: the newest under runs/)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.set_defaults(do=why)


def why(arguments: argparse.Namespace) -> int:
    """`areal-async why`."""
    from rich.text import Text

    found = look(arguments.run or newest(RUNS))
    if arguments.json:
        with printing():
            print(msgspec.json.encode(found).decode())
        return 0
    lines = list(told(found))
    width = max(len(key) for key, _ in lines) + 2
    with printing():
        console = page(soft_wrap=True)
        for key, words in lines:
            console.print(Text.assemble((f"{key:<{width}}", "bold"), words))
    return 0


# ---------------------------------------------------------------------------------------------------------- looking


def newest(runs: Path) -> Path:
    """The run that was begun last. Errors: ConfigError."""
    found = [path.parent for path in runs.glob("*/config.yaml")]
    if not found:
        raise ConfigError(f"command line: why: there is no run under {runs}/; name a run folder")
    return max(found, key=lambda path: (path / "config.yaml").stat().st_mtime)


def look(run: Path) -> Found:
    """Everything that can be known from outside. Errors: ConfigError: this is no run folder."""
    from areal_async.controller import status

    if not (run / "log").is_dir():
        raise ConfigError(f"command line: why: {run} is no run folder: it has no log/")
    last = status.read(run)
    elsewhere = last.host if last is not None and last.host != socket.gethostname() else ""
    controller = None if elsewhere else run_processes.controller(run)
    ended = controller is None and not elsewhere and not (last is not None and last.ended)
    return Found(
        run=str(run),
        controller=controller,
        elsewhere=elsewhere,
        age_s=0.0 if last is None else time.time() - last.time,
        end=_end(run) if ended else "",
        status=last,
        children=() if controller is None else tuple(run_processes.children(controller, run)),
        checkpoint=_newest_checkpoint(run),
    )


def _newest_checkpoint(run: Path) -> Kept | None:
    """By its marker, which is written last."""
    found = {path.parent: path.stat().st_mtime for path in run.glob("checkpoints/step-*/COMPLETE")}
    if not found:
        return None
    folder = max(found, key=lambda folder: found[folder])
    return Kept(str(folder.relative_to(run)), time.time() - found[folder])


def _end(run: Path) -> str:
    """What the log says of the end of a run whose controller has not told it."""
    from areal_async.log.reader import read_records
    from areal_async.messages import Event, Fail, Finish

    at, end = 0.0, ""
    try:
        for record in read_records(run / "log", on_torn=lambda torn: None):
            match record.message:
                case Finish(reason=reason):
                    end = f"it was over ({reason}), and was killed before the model was saved"
                case Fail(why=cause):
                    end = f"it failed: {cause}"
                case Event(at=at):
                    end = ""
    except ArealError as error:
        return f"the log can't be read: {error}"
    return end or f"no end is told: the controller was killed, after {at:.1f} s of its clock"


# ---------------------------------------------------------------------------------------------------------- telling


def told(found: Found) -> Iterator[tuple[str, str]]:
    """Lines for people: (what it is about, words)."""
    status = found.status
    yield "run", found.run + ("" if status is None else f": {_progress(status)}")
    yield "controller", _alive(found)
    if status is None or _is_starting(found):
        return
    if status.ended or found.end:
        yield from _last(found, status)
        return
    ago = found.age_s + status.at  # what was at t on the run clock is (ago - t) s ago
    yield "last event", f"{ago - status.last_event:.1f} s ago"
    if status.phase:
        yield "phase", status.phase
    for number, words in enumerate(status.waits):
        yield "waits" if not number else "", words
    yield from _peers(found, status, ago)
    yield from _flow(found, status)


def _progress(status: "Status") -> str:
    times = "once" if status.branch == 1 else f"{status.branch} times"
    branch = f", gone back {times}" if status.branch else ""
    return f"{status.version} of {status.steps} steps{branch}; {status.at:.1f} s on its clock"


def _alive(found: Found) -> str:
    status = found.status
    if found.elsewhere:
        return (
            f"on host {found.elsewhere}: its processes can't be seen from here; its status is {found.age_s:.0f} s old"
        )
    if found.controller is None:
        return f"not running; {(status.ended if status is not None else '') or found.end}"
    if status is None or _is_starting(found):
        return f"pid {found.controller} is starting: it has told nothing yet"
    if found.age_s > OLD_S:
        return (
            f"pid {found.controller} lives, but its status is {found.age_s:.0f} s old: its loop stands still; "
            f"py-spy dump --pid {found.controller} shows where"
        )
    lag_ms = status.loop_lag_s * 1000
    return f"pid {found.controller} lives; the longest stop of its loop in 2 s was {lag_ms:.0f} ms"


def _is_starting(found: Found) -> bool:
    """Whether the controller lives, and what is told is another's: it goes on with a run that had ended."""
    return found.controller is not None and found.status is not None and found.status.pid != found.controller


def _last(found: Found, status: "Status") -> Iterator[tuple[str, str]]:
    """Of a run that has ended."""
    if not status.ended:
        kept = found.checkpoint.folder if found.checkpoint is not None else "its first weights"
        command = ["areal-async", "run", f"{found.run}/config.yaml", "--run-dir", str(found.run), "--resume"]
        yield "go on with", f"{shlex.join(command)} (from {kept})"
        yield "then", "; ".join(status.waits)
    yield "ledger", _ledger(status)


def _peers(found: Found, status: "Status", ago: float) -> Iterator[tuple[str, str]]:
    children = {child.name: child for child in found.children}
    servers = {f"server {server.name}": server for server in status.servers}
    for peer in status.peers:
        name = run_processes.file_of(peer.label)
        child = children.pop(name, None)
        words = [f"{peer.state} for {ago - peer.since:.1f} s"]
        if server := servers.get(peer.label):
            words.append(f"version {server.version}, {server.load} samples" if server.version >= 0 else "no weights")
        if peer.restart_at is not None:
            words.append(f"starts again in {max(0.0, peer.restart_at - ago):.1f} s")
        if peer.restarts:
            words.append(f"restart {peer.restarts}")
        if child is not None:
            words.append(_process(child))
        elif found.controller is not None and peer.state in FINE:
            words.append("no process of this host")
        yield peer.label, "; ".join(words)
        if peer.state not in FINE:
            yield from _last_words(found, peer, name)
    for child in children.values():  # has not joined
        yield child.name, f"has not joined yet; {_process(child)}"
        yield from _tail(found, child.name)


def _last_words(found: Found, peer: "PeerView", name: str) -> Iterator[tuple[str, str]]:
    if peer.why:
        yield "", f"it was lost: {peer.why.splitlines()[0]}"
    yield from _tail(found, name)


def _tail(found: Found, name: str) -> Iterator[tuple[str, str]]:
    for line in run_processes.last_lines(Path(found.run), name, LAST_WORDS):
        yield "", f"{name}.log: {line[:LINE]}"


def _process(child: Process) -> str:
    waits = ", waits in the kernel (state D)" if child.state == "D" else ""
    return (
        f"pid {child.pid}{waits}, {child.age_s:.0f} s old, {child.cpu_s:.0f} s of CPU, "
        f"{child.resident / 1e9:.1f} GB in {child.processes} processes"
    )


def _flow(found: Found, status: "Status") -> Iterator[tuple[str, str]]:
    yield "flow", f"{status.in_flight} samples in flight, {status.ready} groups ready, {status.outstanding} outstanding"
    if found.checkpoint is not None:
        yield "checkpoint", f"{found.checkpoint.folder}, {found.checkpoint.age_s:.0f} s old"
    yield "ledger", _ledger(status)


def _ledger(status: "Status") -> str:
    counts = {name: n for name, n in status.balance.items() if not name.startswith("samples_") and name != "admitted"}
    parts = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
    return f"{status.balance['admitted']} groups admitted: {parts or 'none yet'}"
