"""A run, as a library: `async with Controller(config) as run: async for step in run.steps(): …`.

What always holds: everything that a run starts (processes, tasks, sockets, files in shared memory) has ended when the
`async with` is left, however it is left; the first cause of a failure is what is raised; no signal handler, loop policy
or sub-reaper is installed, so a controller can live in somebody else's program.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from areal_async.config import Config
from areal_async.controller.metrics import StepRow
from areal_async.controller.parts import Parts
from areal_async.controller.result import RunResult
from areal_async.errors import ArealError
from areal_async.launch.recipes import Recipes
from areal_async.rollout.workflow import Workflow


class Controller:
    """One run.

    workflow: in place of `rollout.workflow`, an object with `async run(session, prompt) -> Sample`. reward: in place of
    `reward.function`, a function that its workers can import (defined at the top of a module). run_dir: in place of a
    new folder under `runs_dir`. resume: go on with the run in `run_dir`, or with the one of this name that was started
    last (docs/resume.md). recipes: how children are started; `areal_async.testing` has scripted ones.

    Errors: `ConfigError` from `async with` where the configuration can't be right; any `ArealError` from `steps()`,
    `run()` or the end of the `async with`.
    """

    def __init__(
        self,
        config: Config,
        *,
        workflow: Workflow | None = None,
        reward: Callable[..., object] | None = None,
        run_dir: Path | None = None,
        resume: bool = False,
        recipes: Recipes | None = None,
    ) -> None:
        self.config = config
        self._workflow = workflow
        self._reward = reward
        self._run_dir = run_dir
        self._resume = resume
        self._recipes = recipes or Recipes()
        self._rows: asyncio.Queue[StepRow | None] = asyncio.Queue()
        self._failure_told = False

    async def __aenter__(self) -> Self:
        self._parts = Parts(
            self.config, self._workflow, self._reward, self._run_dir, self._resume, self._recipes, self._rows.put_nowait
        )
        self._main = asyncio.create_task(self._supervise(), name=f"areal-async run {self.config.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._main.cancel()
        await asyncio.wait({self._main})
        self._parts.close()  # of a run that was left before it began
        if kind is None and not self._main.cancelled() and not self._failure_told:
            self._main.result()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._parts.folder.root

    @property
    def phase(self) -> str:
        """What the run is doing now, in words, with what it waits for."""
        return self._parts.phase()

    @property
    def metrics_url(self) -> str:
        """Where Prometheus reads, once the run has begun; empty without `metrics.port`."""
        return self._parts.metrics_url

    def stop(self) -> None:
        """Finish the training step that is running, save the model, leave. `steps()` and `run()` end as usual."""
        self._parts.request_stop()

    async def steps(self) -> AsyncIterator[StepRow]:
        """The training steps as they are done; ends when the run has ended and the model is saved."""
        while (row := await self._rows.get()) is not None:
            yield row
        self.result()

    async def run(self) -> RunResult:
        """All steps."""
        async for _ in self.steps():
            pass
        return self.result()

    def result(self) -> RunResult:
        """How the run ended, once `steps()` has ended. Raises what ended it, where it failed."""
        self._failure_told = True
        return self._main.result()

    async def _supervise(self) -> RunResult:
        parts = self._parts
        try:
            try:
                async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
                    result = await parts.live(group, stack)
            except BaseExceptionGroup as errors:
                raise first_cause(errors) from None
            parts.tell_end(result.reason)
            return result
        except BaseException as error:
            parts.tell_end(f"it failed: {error}" if isinstance(error, ArealError) else f"it was ended by {error!r}")
            raise
        finally:
            # The consumer of `steps` finds the task done, with its result or its error
            asyncio.get_running_loop().call_soon(self._rows.put_nowait, None)


def first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of what went wrong at the same time: the first error that was written for people, else the first."""
    leaves = list(_leaves(errors))
    return next((leaf for leaf in leaves if isinstance(leaf, ArealError)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
