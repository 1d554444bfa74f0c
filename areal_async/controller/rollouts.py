"""Carries out what the core says about prompts and samples: reads prompts, runs workflows, reports how they ended.

What always holds: each started sample ends in exactly one event (`SampleDone` or `Failed`) unless it is cancelled or
its server has died, which `Lost` tells; nothing runs past its deadline; an exception of a workflow is reported with
its traceback, never swallowed.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import numpy as np

from areal_async.controller.crew import Crew
from areal_async.controller.samples import Kept, Samples
from areal_async.errors import DataError, ServerError
from areal_async.log.format import PayloadRef
from areal_async.log.writer import RunLog
from areal_async.messages import (
    AnyEvent,
    Cancel,
    DataEnded,
    Failed,
    GroupRead,
    ReadGroup,
    SampleDone,
    SampleId,
    StartSample,
)
from areal_async.rollout.data import Dataset, Positions
from areal_async.rollout.session import Session
from areal_async.rollout.text import Text
from areal_async.rollout.types import Sampling
from areal_async.rollout.vllm_http import VllmClient
from areal_async.rollout.workflow import Prompt, Workflow

KEPT_PROMPTS = 256  # a group's samples start together; a later attempt may read its row again


@dataclass(frozen=True)
class RolloutSettings:
    """What every rollout of a run has in common. context: tokens. vocab_size: entries. timeout_s: of one attempt."""

    sampling: Sampling
    context: int
    vocab_size: int
    timeout_s: float
    seed: int


class Prompts:
    """The run's data in the order in which it is asked; the latest rows are kept tokenized for their samples."""

    def __init__(self, dataset: Dataset, positions: Positions, text: Text) -> None:
        self._dataset = dataset
        self._positions = positions
        self._text = text
        self._kept: dict[int, Prompt] = {}

    def at(self, position: int) -> Prompt | None:
        """The prompt at a position of the data order; None past the last epoch. Errors: DataError with file:line."""
        if position not in self._kept:
            row = self._positions.row(position)
            if row is None:
                return None
            self._kept[position] = read_prompt(self._dataset, self._text, row, position)
            if len(self._kept) > KEPT_PROMPTS:
                del self._kept[next(iter(self._kept))]
        return self._kept[position]


def read_prompt(dataset: Dataset, text: Text, row: int, position: int) -> Prompt:
    """Render and tokenize one row. Errors: DataError with file and line."""
    record = dataset.rows[row]
    try:
        rendered = text.render(record.prompt)
        token_ids = text.encode(record.prompt)
    except Exception as error:  # a chat template is user code
        raise DataError(f"{dataset.where(row)}: the prompt can't be rendered: {error}") from error
    return Prompt(token_ids, rendered, record.answer, position, row, record.columns)


class Rollouts:
    """The samples in flight."""

    def __init__(
        self,
        prompts: Prompts,
        workflow: Workflow,
        clients: Mapping[str, VllmClient],
        settings: RolloutSettings,
        samples: Samples,
        log: RunLog,
        crew: Crew,
        *,
        has_died: Callable[[str], Awaitable[bool]],
        take: Callable[[AnyEvent, PayloadRef | None], None],
        now: Callable[[], float],
    ) -> None:
        self._prompts = prompts
        self._workflow = workflow
        self._clients = clients
        self._settings = settings
        self._samples = samples
        self._log = log
        self._crew = crew
        self._has_died = has_died
        self._take = take
        self._now = now
        self._running: dict[tuple[SampleId, int], asyncio.Task[None]] = {}
        self.tokens_generated = 0

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def read_group(self, command: ReadGroup) -> None:
        """Answer with GroupRead, DataEnded, or Failed where the prompt can't be used."""
        try:
            prompt = self._prompts.at(command.position)
        except DataError as error:
            self._fail_group(command, str(error))
            return
        if prompt is None:
            self._take(DataEnded(at=self._now(), group=command.group), None)
        elif len(prompt.token_ids) >= self._settings.context:
            self._fail_group(
                command,
                f"the prompt at row {prompt.row + 1} has {len(prompt.token_ids)} tokens, the context "
                f"{self._settings.context}: there is no room for an answer",
            )
        else:
            event = GroupRead(at=self._now(), group=command.group, row=prompt.row, prompt_tokens=len(prompt.token_ids))
            self._take(event, None)

    def _fail_group(self, command: ReadGroup, why: str) -> None:
        self._take(Failed(at=self._now(), of="group", id=str(command.group), why=why), None)

    def start(self, command: StartSample) -> None:
        task = self._crew.start(self._roll(command), f"sample {command.sample}, attempt {command.attempt}")
        key = (command.sample, command.attempt)
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))

    def cancel(self, command: Cancel) -> None:
        if task := self._running.get((command.sample, command.attempt)):
            task.cancel()
        self._samples.pop(command.sample, None)

    async def _roll(self, command: StartSample) -> None:
        prompt = self._prompts.at(command.position)
        assert prompt is not None, f"sample {command.sample} was started before its prompt was read"
        session = Session(
            self._clients[command.server],
            sample=command.sample,
            attempt=command.attempt,
            run_seed=self._settings.seed,
            sampling=self._settings.sampling,
            context=self._settings.context,
            vocab_size=self._settings.vocab_size,
            deadline_s=self._settings.timeout_s,
        )
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                sample = await self._workflow.run(session, prompt)
            sample.check()
        except Exception as error:  # of a workflow: whatever it is, the sample has failed with it
            if isinstance(error, ServerError) and await self._has_died(command.server):
                return
            why = _why(error, command, self._settings.timeout_s)
            self._take(Failed(at=self._now(), of="sample", id=command.sample, attempt=command.attempt, why=why), None)
            return
        kept = Kept(sample, command.attempt, prompt, sample.reward)
        self._samples[command.sample] = kept
        self.tokens_generated += kept.length
        payload = self._log.put(
            command.sample,
            command.attempt,
            [sample.token_ids, sample.loss_mask, sample.logprobs, sample.versions],
        )
        self._take(_done(command, kept, self._now()), payload)


def _done(command: StartSample, kept: Kept, at: float) -> SampleDone:
    sample = kept.sample
    versions = sample.versions[sample.loss_mask != 0]
    return SampleDone(
        at=at,
        sample=command.sample,
        attempt=command.attempt,
        oldest=int(versions.min()),
        newest=int(versions.max()),
        prompt_tokens=sample.prompt_tokens,
        length=kept.length,
        loss_tokens=int(np.count_nonzero(sample.loss_mask)),
        finish=sample.finish,
        reward=sample.reward,
    )


def _why(error: Exception, command: StartSample, timeout_s: float) -> str:
    where = f"sample {command.sample}, attempt {command.attempt}, on {command.server}"
    if isinstance(error, TimeoutError):
        return f"{where}: not done within rollout.sample_timeout_s = {timeout_s:g} s"
    if isinstance(error, ServerError):
        return f"{where}: {error}"
    return f"{where}: the workflow raised\n{''.join(traceback.format_exception(error))}"
