"""`areal-async view RUN`: a page that shows a run, live or finished, or all runs of a folder.

What always holds: nothing of a run is changed and its controller is asked nothing, so the run goes on as without it;
without a token only this machine is served; Ctrl-C ends it with exit code 0.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

PORT: Final = 8420
HOST: Final = "127.0.0.1"

EXAMPLES: Final = """examples:
  areal-async view runs/quickstart-20260101-120000
"""


def add_view(commands: "Commands") -> None:
    about = "Show a run in the browser, live or finished; or all runs of a folder."
    parser = commands.add_parser(
        "view",
        help=about,
        description=about,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        nargs="?",
        default=Path("runs"),
        help="run folder, or a folder of runs (default: runs/)",
    )
    parser.add_argument("--port", type=int, default=PORT, metavar="P")
    parser.add_argument("--host", default=HOST, metavar="H")
    parser.add_argument("--token", metavar="T")
    parser.set_defaults(do=view)


def view(arguments: argparse.Namespace) -> int:
    """`areal-async view`."""
    import asyncio

    from aiohttp import web

    from areal_async.view.runs import RunFolders
    from areal_async.view.server import Server
    from areal_async.view.token import access

    folders = RunFolders(arguments.run)
    access_ = access(arguments.host, arguments.token, os.environ)

    async def serve() -> None:
        runner = web.AppRunner(Server(folders, access_).application(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, arguments.host, arguments.port).start()
        print("open", f"http://{arguments.host}:{runner.addresses[0][1]}/", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())
    return 0
