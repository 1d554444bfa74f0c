"""Weights & Biases for a run: keeps the process that tells it (`areal_async.wandb_process`), and says how that went.

What always holds: nothing of W&B happens in this process, so its loop, threads and signals are none of W&B's; whatever
fails there is told once, and the run goes on; when the run has ended, so have all of W&B's processes.
"""

import logging
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from areal_async.config import MetricsConfig
from areal_async.controller.crew import Crew
from areal_async.errors import LaunchError
from areal_async.launch.child import Child, ChildSpec
from areal_async.wandb_process import Order, read_told

logger = logging.getLogger("areal_async")

FINISH_S: Final = 30.0  # to send what is left, over a network
LEAVE_S: Final = 5.0  # the same where the run fails, or is left at once: what isn't sent stays in its folder


async def tell_wandb(stack: AsyncExitStack, crew: Crew, metrics: MetricsConfig, folder: Path) -> None:
    """Begin, until `stack` ends it. folder: of the run, with `metrics.jsonl` and `stderr/`."""
    if metrics.wandb == "off":
        return
    order = Order(
        folder=str(folder), mode=metrics.wandb, project=metrics.wandb_project, entity=metrics.wandb_entity,
        name=metrics.wandb_name or folder.name,
    )  # fmt: skip
    argv = (sys.executable, "-m", "areal_async.wandb_process", msgspec.json.encode(order).decode())
    silent = (
        {"WANDB_ERROR_REPORTING": "false"} if metrics.wandb == "offline" else {}
    )  # else its errors go to its makers
    output = folder / "stderr" / "wandb.log"
    try:
        child = await Child.start(ChildSpec(name="W&B", argv=argv, env=silent, stderr_path=output))
    except LaunchError as error:
        logger.warning("W&B is told nothing of this run: %s", error)
        return
    telling = _Telling(child, folder)
    stack.push_async_exit(telling.leave)
    crew.start(telling.watch(), "watch W&B")


class _Telling:
    def __init__(self, child: Child, folder: Path) -> None:
        self._child = child
        self._folder = folder
        self._told = False

    async def watch(self) -> None:
        """Say so if it ends before the run does."""
        await self._child.wait()
        self._failed()

    async def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The run is over: all that it wrote is handed over, if that can be done in time."""
        if self._child.returncode is not None:
            self._failed()
            return
        grace_s = FINISH_S if error is None else LEAVE_S
        code = await self._child.stop(grace_s)
        told = read_told(self._folder)
        place = told.place if told is not None else f"{self._folder}/wandb/"
        if code != 0:
            logger.warning(
                "W&B has not taken everything in %g s (%s has what it said); `wandb sync %s` sends it; metrics.jsonl "
                "has everything", grace_s, self._child.spec.stderr_path, place,
            )  # fmt: skip
        elif told is not None:
            where = told.url or f"{place}; `wandb sync {place}` sends them"
            logger.info("W&B has %d entries: %s", told.entries, where)

    def _failed(self) -> None:
        if not self._told:
            last = self._child.tail(1).strip() or f"it ended with exit code {self._child.returncode}"
            logger.warning(
                "W&B is told nothing more of this run: %s (%s has what it said); metrics.jsonl has everything",
                last, self._child.spec.stderr_path,
            )  # fmt: skip
        self._told = True
