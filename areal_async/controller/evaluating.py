"""Carries out evaluations in the middle of a run: held-out problems, asked of one server beside its rollouts.

What always holds: rollouts are never paused for it; it asks at most `eval.max_concurrent` answers at a time; every
token of its answers is of the version that was asked for, or it has failed; its answers are not in the ledger, nor in
the payload log. Each `Evaluate` ends in exactly one `EvaluationDone` or `Failed`, unless its server has died, which
`Lost` tells; what it found is on the disk before that.
"""

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from areal_async.config import Config
from areal_async.controller.crew import Crew
from areal_async.controller.examiner import Answered, Check, EvalResult, Examiner, Problems, Tally
from areal_async.errors import ServerError
from areal_async.messages import AnyEvent, Evaluate, EvaluationDone, Failed, Version
from areal_async.rollout.text import Text
from areal_async.rollout.vllm_http import VllmClient
from areal_async.rollout.workflow import Workflow

logger = logging.getLogger("areal_async")

ANSWER_BUFFER_BYTES = 1 << 20  # of the file of answers: it is written when the evaluation goes on anyway


class Evaluation(EvalResult, frozen=True, kw_only=True):
    """An `EvalResult` of a run. version: of the weights. server: that answered. time_s: run clock at its end."""

    version: Version
    server: str
    time_s: float


class AnswerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `eval/version-N.jsonl`. problem: number of the data row, from 0. member: which of its answers. length:
    response tokens. finish: `length` where the answer was cut. answer: the model's text; expected: the data's."""

    problem: int
    member: int
    prompt: str
    answer: str
    expected: str | None
    reward: float | None
    verdict: str
    length: int
    finish: str


class Evaluations:
    """folder: `eval/` of the run folder. clients: servers by name. done: told of each result, before its event."""

    def __init__(
        self,
        config: Config,
        text: Text,
        problems: Problems,
        workflow: Workflow,
        check: Check,
        clients: Mapping[str, VllmClient],
        folder: Path,
        crew: Crew,
        *,
        has_died: Callable[[str], Awaitable[bool]],
        done: Callable[[Evaluation], None],
        take: Callable[[AnyEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._text = text
        self._problems = problems
        self._clients = clients
        self._folder = folder
        self._crew = crew
        self._has_died = has_died
        self._done = done
        self._take = take
        self._now = now
        self._begun: Counter[Version] = Counter()
        self._running: dict[Version, tuple[asyncio.Task[None], Tally, str]] = {}  # and its server
        self._examiner = Examiner(config, text, problems, workflow, check, places=config.eval.max_concurrent)
        folder.mkdir(exist_ok=True)
        for unfinished in folder.glob("*.part"):  # of a controller that was killed in the middle of it
            unfinished.unlink()

    @property
    def progress(self) -> str:
        """`evaluates version 4: 23 of 64 answers`, empty while none runs."""
        told = [
            f"version {version}: {tally.answers} of {self._examiner.answers} answers"
            for version, (_, tally, _) in self._running.items()
        ]
        return f"evaluates {', '.join(told)}" if told else ""

    def start(self, command: Evaluate) -> None:
        """Begin; an evaluation of the same version that still runs (its server is lost) ends without a word."""
        if running := self._running.pop(command.version, None):
            running[0].cancel()
        tally = Tally(len(self._problems), self._config.eval.samples, self._config.rollout.success_above)
        task = self._crew.start(
            self._evaluate(command, tally), f"evaluation of version {command.version} on server {command.server}"
        )
        self._running[command.version] = (task, tally, command.server)
        task.add_done_callback(lambda task: self._forget(command.version, task))

    def lost(self, server: str) -> None:
        """Its server is gone: what is asked of it ends without a word."""
        for task, _, asked in list(self._running.values()):
            if asked == server:
                task.cancel()

    def _forget(self, version: Version, task: asyncio.Task[None]) -> None:
        if version in self._running and self._running[version][0] is task:
            del self._running[version]

    async def _evaluate(self, command: Evaluate, tally: Tally) -> None:
        begun = time.monotonic()
        attempt = self._begun[command.version]
        self._begun[command.version] += 1
        try:
            await self._examine(command, tally, attempt)
            seconds = time.monotonic() - begun
            result = Evaluation(
                version=command.version,
                server=command.server,
                time_s=round(self._now(), 3),
                **msgspec.structs.asdict(tally.result(seconds)),
            )
            self._write(result)
        except Exception as error:  # also of a workflow or the disk: the run goes on, the core decides about this one
            if isinstance(error, ServerError) and await self._has_died(command.server):
                return
            told = str(error) if isinstance(error, ServerError) else "".join(traceback.format_exception(error))
            why = f"evaluation of version {command.version} on server {command.server}: {told}"
            self._take(Failed(at=self._now(), of="evaluation", id=str(command.version), attempt=attempt, why=why))
            return
        self._done(result)
        logger.info("%s", in_words(result))
        self._take(
            EvaluationDone(
                at=self._now(),
                version=command.version,
                server=command.server,
                score=result.score,
                n=result.n,
                tokens=result.tokens,
                seconds=seconds,
            )
        )

    async def _examine(self, command: Evaluate, tally: Tally, attempt: int) -> None:
        """Ask; the answers' file appears when all are there."""
        name = f"eval-v{command.version}-{attempt}"
        client = self._clients[command.server]
        unfinished = self._folder / f"{name}.part"
        try:
            with unfinished.open("wb", buffering=ANSWER_BUFFER_BYTES) as file:

                def answered(answer: Answered) -> None:
                    check_version(answer, command.version)
                    tally.add(answer)
                    self._write_answer(file, answer)

                await self._examiner.examine(client, command.version, name, answered, attempt=attempt)
            unfinished.rename(self._folder / f"version-{command.version}.jsonl")
        finally:
            unfinished.unlink(missing_ok=True)

    def _write_answer(self, file: BinaryIO, answered: Answered) -> None:
        kept = answered.kept
        line = AnswerLine(
            problem=answered.problem,
            member=answered.member,
            prompt=kept.prompt.text,
            answer=self._text.decode(kept.sample.token_ids[kept.sample.prompt_tokens :].tolist()),
            expected=kept.prompt.answer,
            reward=answered.result.reward,
            verdict=answered.result.verdict,
            length=kept.length,
            finish=kept.sample.finish,
        )
        file.write(msgspec.json.encode(line) + b"\n")

    def _write(self, result: Evaluation) -> None:
        encoded = msgspec.json.encode(result)
        (self._folder / f"version-{result.version}.json").write_bytes(encoded + b"\n")
        with (self._folder / "results.jsonl").open("ab") as file:
            file.write(encoded + b"\n")


def check_version(answered: Answered, version: Version) -> None:
    """Raise ServerError where an answer has tokens of other weights than were to be evaluated."""
    versions = answered.kept.by_version
    if set(versions) != {version}:
        found = ", ".join(map(str, sorted(versions)))
        raise ServerError(
            f"problem {answered.problem + 1}, answer {answered.member + 1}: its tokens are of version {found}, not "
            f"{version}: the server was given other weights in the middle"
        )


def in_words(result: Evaluation) -> str:
    """`evaluation of version 40: score 0.953, pass@4 0.984 (64 problems × 4) in 3.2 s`."""
    asked = f"{result.n} problems" + (f" × {result.samples}" if result.samples > 1 else "")
    best = max(result.pass_at, default=1)
    passed = f", pass@{best} {result.pass_at[best]:.3f}" if best > 1 else ""
    unscored = f", {result.unscored} answers without a reward" if result.unscored else ""
    return (
        f"evaluation of version {result.version}: score {result.score:.3f}{passed} ({asked}{unscored}) in "
        f"{result.seconds:.1f} s"
    )
