"""`areal-async view [RUN]`: a page that shows a run, live or finished, or all runs of a folder; or a report to hand on.

What always holds: nothing of a run is changed and its controller is asked nothing, so the run goes on as without it;
without a token only this machine is served; Ctrl-C ends it with exit code 0.
"""

import argparse
import getpass
import os
import resource
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_async.errors import ConfigError

if TYPE_CHECKING:
    from areal_async.view.runs import RunFolders
    from areal_async.view.token import Access

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

RUNS: Final = Path("runs")
PORT: Final = 8420
LAST_PORT: Final = 65_535
HOST: Final = "127.0.0.1"
NICE: Final = 10  # a run on the same cores goes first
CONNECTIONS: Final = 16_384  # and files, as far as the machine lets us: each browser keeps six connections

EXAMPLES: Final = """examples:
  areal-async view                                     all runs under runs/
  areal-async view runs/quickstart-20260101-120000     one run, live or finished
  areal-async view runs/first --port 0                 at any free port
  areal-async view runs --host 0.0.0.0 --token auto    for other machines, too; the address has a token in it
  areal-async view runs/first --export report.html     one file that opens anywhere, without a network
  areal-async view runs/first --png curves.png
"""


def add_view(commands: "Commands") -> None:
    about = "Show a run in the browser, live or finished; or all runs of a folder; or write a report of it."
    parser = commands.add_parser(
        "view",
        help=about,
        description=about + " docs/view.md shows its pages. Ctrl-C ends it; the run isn't touched.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        nargs="?",
        default=RUNS,
        help="run folder, or a folder of runs (default: runs/)",
    )
    parser.add_argument("--port", type=int, metavar="P", help=f"(default: {PORT}; 0: any that is free)")
    parser.add_argument("--host", metavar="H", help=f"address to listen on (default: {HOST}, this machine alone)")
    parser.add_argument(
        "--token",
        metavar="T",
        help="a secret that the page asks for; `auto` makes one (also: the variable AREAL_ASYNC_TOKEN, which other "
        "users of the machine can't see)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--export", type=Path, metavar="FILE.html", help="write a report of the run, and end")
    what.add_argument("--png", type=Path, metavar="FILE.png", help="write the run's main curves (also .svg), and end")
    parser.add_argument(
        "--samples", metavar="N|ID,ID", help="in a report: how many samples, or which (default: 12 that say much)"
    )
    parser.set_defaults(do=view)


def view(arguments: argparse.Namespace) -> int:
    """`areal-async view`."""
    from areal_async.view import token
    from areal_async.view.runs import RunFolders

    folders = RunFolders(arguments.run)
    if arguments.export or arguments.png:
        return _to_file(folders, arguments)
    if arguments.samples is not None:
        raise ConfigError("command line: view: --samples: is for --export FILE.html; the page shows all samples")
    port = PORT if arguments.port is None else arguments.port
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"command line: view: --port {port}: 0 … {LAST_PORT}")
    host = arguments.host or HOST
    host = HOST if host == "localhost" else host  # it may be two addresses, which --port 0 would give two ports
    serve(folders, token.access(host, arguments.token, os.environ), port)
    return 0


def _to_file(folders: "RunFolders", arguments: argparse.Namespace) -> int:
    """`--export`, `--png`."""
    from areal_async import cli_export

    for name in ("port", "host", "token", *(("samples",) if arguments.png else ())):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"command line: view: --{name}: {'--png' if arguments.png else '--export'} has no use of it"
            )
    os.nice(NICE)
    if arguments.png:
        cli_export.png(folders, arguments)
    else:
        cli_export.export(folders, arguments)
    return 0


def serve(folders: "RunFolders", access: "Access", port: int) -> None:
    """Until Ctrl-C."""
    import uvloop

    from areal_async.view.serving import serve

    os.nice(NICE)
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, CONNECTIONS)), most))
    uvloop.run(serve(folders, access, port, lambda bound: say(told(folders, access, bound))))


def say(text: str) -> None:
    """Where nobody reads it any more (`| head -1`, a full disk) the page is shown all the same."""
    try:
        print(text, flush=True)
    except OSError as error:
        sys.stdout = None  # what is left in its buffer would fail again at the end
        print(f"view: {error.strerror} on standard output: {text.splitlines()[0]}", file=sys.stderr)


def told(folders: "RunFolders", access: "Access", port: int) -> str:
    """What is shown, and where."""
    from areal_async.view.token import is_loopback

    what = "the run" if folders.single else "all runs in"
    everywhere = access.host in ("0.0.0.0", "::")
    host = socket.gethostname() if everywhere else f"[{access.host}]" if ":" in access.host else access.host
    query = f"?token={access.token}" if access.token else ""
    lines = [f"{what} {folders.path}: http://{host}:{port}/{query}"]
    if is_loopback(access.host):
        tunnel = f"ssh -N -L {port}:{host}:{port} {_user()}@{socket.gethostname()}"
        lines.append(f"from another machine: {tunnel}")
        lines.append(f"  and there http://localhost:{port}/{query}")
    else:
        lines.append("it isn't encrypted: through a network of others come by ssh instead (leave --host out)")
    return "\n".join([*lines, "Ctrl-C ends it; the run isn't touched"])


def _user() -> str:
    """In a container a number may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "USER"
