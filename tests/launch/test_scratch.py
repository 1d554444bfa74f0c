"""The folder of a run's sockets, when the controller is killed with -9: gone with all that is in it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..waiting import wait_until

CONTROLLER = """
import asyncio, sys
from pathlib import Path
from areal_async.launch.child import Child, ChildSpec

async def main():
    scratch = Path(sys.argv[1])
    code = "import os, time; os.makedirs('torchrun/1/attempt_0/0'); open('x.sock', 'w'); os.symlink('../../other', 'torchrun/link'); print('made', flush=True); time.sleep(60)"
    argv = (sys.executable, "-c", code)
    await Child.start(ChildSpec(name="ranks", argv=argv, env={}, cwd=scratch, scratch=scratch, stderr_path=Path(sys.argv[2])))
    await asyncio.sleep(60)

asyncio.run(main())
"""  # noqa: E501


@pytest.mark.slow
def test_folders_in_it_go_too(tmp_path: Path) -> None:
    scratch, said = tmp_path / "scratch", tmp_path / "said"
    scratch.mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(scratch), str(said)])
    try:
        wait_until(lambda: said.exists() and "made" in said.read_text(), 20)
        assert (scratch / "torchrun/1/attempt_0/0").is_dir()
        assert (scratch / "torchrun/link/file").exists()
    finally:
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    wait_until(lambda: not scratch.exists(), 20)
    assert (tmp_path / "other" / "file").exists()  # a link is removed, not what it names
