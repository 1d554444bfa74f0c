"""Carries out what the core says about prompts and samples: reads prompts, runs workflows, reports how they ended.

What always holds: each started sample ends in exactly one event (`SampleDone` or `Failed`) unless it is cancelled,
whatever becomes of its server; nothing runs past its deadline; an exception of a workflow is reported with its
traceback, never swallowed.
"""

import asyncio
import traceback
from collections.abc import Callable
from dataclasses import dataclass

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
    Note,
    ReadGroup,
    SampleDone,
    SampleId,
    StartSample,
)
from areal_async.rollout.data import Dataset
from areal_async.rollout.fleet import Fleet
from areal_async.rollout.session import Session
from areal_async.rollout.text import Text
from areal_async.rollout.training_data import TrainingData
from areal_async.rollout.types import Sampling
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

    def __init__(self, data: TrainingData) -> None:
        self._data = data
        self._kept: dict[int, Prompt] = {}

    def at(self, position: int) -> Prompt | None:
        """The prompt at a position of the data order; None past the last epoch. Errors: DataError with file:line."""
        if position not in self._kept:
            row = self._data.positions.row(position)
            if row is None:
                return None
            prompt = read_prompt(self._data.dataset, self._data.text, row, position)
            self._kept[position] = self._data.fitted(prompt)
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
    """The samples in flight.

    tokens_generated: response tokens of finished answers. tokens_inferred: tokens of streams that broke, which were
    kept and given the oldest version that can have drawn them. requests_again: requests that went to another server,
    or again to the same one.
    """

    def __init__(
        self,
        prompts: Prompts,
        workflow: Workflow,
        fleet: Fleet,
        settings: RolloutSettings,
        samples: Samples,
        log: RunLog,
        crew: Crew,
        *,
        take: Callable[[AnyEvent, PayloadRef | None], None],
        now: Callable[[], float],
    ) -> None:
        self._prompts = prompts
        self._workflow = workflow
        self._fleet = fleet
        self._settings = settings
        self._samples = samples
        self._log = log
        self._crew = crew
        self._take = take
        self._now = now
        self._running: dict[tuple[SampleId, int], asyncio.Task[None]] = {}
        self._sessions: dict[SampleId, Session] = {}
        self.tokens_generated = 0
        self.tokens_inferred = 0
        self.requests_again = 0

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def tokens_so_far(self, sample: SampleId) -> int:
        """Tokens sampled for a sample that is in memory, finished or not, partial answers included; else 0."""
        if sample in self._samples:
            return self._samples[sample].length
        session = self._sessions.get(sample)
        return session.tokens_so_far if session is not None else 0

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
        session = self._sessions[command.sample] = Session(
            self._fleet,
            server=command.server,
            floor=command.floor,
            sample=command.sample,
            attempt=command.attempt,
            run_seed=self._settings.seed,
            sampling=self._settings.sampling,
            context=self._settings.context,
            vocab_size=self._settings.vocab_size,
            deadline_s=self._settings.timeout_s,
            note=self._note,
        )
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                sample = await self._workflow.run(session, prompt)
            sample.check()
        except Exception as error:  # of a workflow: whatever it is, the sample has failed with it
            why = _why(error, command, self._settings.timeout_s)
            self._take(Failed(at=self._now(), of="sample", id=command.sample, attempt=command.attempt, why=why), None)
            return
        finally:
            if self._sessions.get(command.sample) is session:
                del self._sessions[command.sample]
        kept = Kept(sample, command.attempt, prompt, sample.reward)
        self._samples[command.sample] = kept
        self.tokens_generated += kept.length
        payload = self._log.put(
            command.sample,
            command.attempt,
            [sample.token_ids, sample.loss_mask, sample.logprobs, sample.versions],
        )
        self._take(_done(command, kept, self._now()), payload)

    def _note(self, what: str, data: dict[str, str | int]) -> None:
        inferred = data["inferred"]
        assert isinstance(inferred, int)
        self.tokens_inferred += inferred
        self.requests_again += what != "completed"
        self._log.append(Note(at=self._now(), what=what, data={**data}))


def _done(command: StartSample, kept: Kept, at: float) -> SampleDone:
    sample = kept.sample
    return SampleDone(
        at=at,
        sample=command.sample,
        attempt=command.attempt,
        oldest=min(kept.by_version),
        newest=max(kept.by_version),
        prompt_tokens=sample.prompt_tokens,
        length=kept.length,
        loss_tokens=sum(kept.by_version.values()),
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
