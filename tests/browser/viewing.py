"""`areal-async view` as a process of its own, on a free port, and what is left of it afterwards: nothing."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

# Ends of waits for what never comes; its priority is low, so that other work on the machine makes it very slow
UP_S: Final = 120.0  # until it has said its address
READ_S: Final = 120.0  # until it has read a small log
DOWN_S: Final = 30.0


class Viewer:
    """address: of its page, with the token if there is one."""

    def __init__(self, folder: Path, arguments: Sequence[str], scratch: Path) -> None:
        """scratch: empty folder for its temporary files and what it says."""
        self.temporary = scratch / "tmp"
        self.temporary.mkdir()
        self.said = scratch / "said.txt"
        argv = [sys.executable, "-m", "areal_async", "view", str(folder), "--port", "0", *arguments]
        with self.said.open("wb") as file:
            self.process = subprocess.Popen(
                argv, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=_hears_ctrl_c, env={**os.environ, "TMPDIR": str(self.temporary)},
            )  # fmt: skip
        try:
            self.address = self._wait()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def at(self, place: str) -> str:
        """The address of `#/place`."""
        return f"{self.address}#/{place}"

    def asked(self, path: str) -> Any:
        """Its answer to GET /api/runs/PATH."""
        with urllib.request.urlopen(f"{self.address}api/runs/{path}", timeout=READ_S) as answer:
            return json.load(answer)

    def has_read(self, *runs: str) -> None:
        """Return when it has read the logs of these runs, which don't go on, to their ends.

        Before that a page shows what is known so far, and a question about a sample may have no answer yet.
        """
        deadline = time.monotonic() + READ_S
        for run in runs:
            while not self.asked(f"{run}/overview")["reading"]["done"]:
                assert time.monotonic() < deadline, f"it has not read the log of {run}:\n{self.text()}"
                time.sleep(0.02)

    def _wait(self) -> str:
        deadline = time.monotonic() + UP_S
        while not (found := re.search(r"https?://\S+", self.text())):
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"it says no address:\n{self.text()}"
            time.sleep(0.02)
        return found.group()

    def text(self) -> str:
        return self.said.read_text(errors="replace")


def _hears_ctrl_c() -> None:
    """Tests that were started in the background of a shell inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(viewer: Viewer) -> None:
    """Ctrl-C ends it with 0; then no child and no temporary file of it is there."""
    family = []
    if viewer.process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            family = psutil.Process(viewer.process.pid).children(recursive=True)
        viewer.process.send_signal(signal.SIGINT)
    try:
        code = viewer.process.wait(DOWN_S)
    except subprocess.TimeoutExpired:
        viewer.process.kill()
        viewer.process.wait()
        raise AssertionError(f"the viewer lives on after Ctrl-C:\n{viewer.text()}") from None
    _, alive = psutil.wait_procs(family, timeout=DOWN_S)
    assert (code, alive) == (0, []), viewer.text()
    assert list(viewer.temporary.iterdir()) == []


@contextlib.contextmanager
def viewers(place: Path) -> Iterator[Callable[..., Viewer]]:
    """view(RUN, "--token", "T"): a viewer on a free port; afterwards nothing of it is left. place: of its files."""
    with contextlib.ExitStack() as started:

        def start(folder: Path, *arguments: str) -> Viewer:
            scratch = place / f"viewer-{len(list(place.glob('viewer-*')))}"
            scratch.mkdir()
            viewer = Viewer(folder, arguments, scratch)
            started.callback(ended, viewer)
            return viewer

        yield start
