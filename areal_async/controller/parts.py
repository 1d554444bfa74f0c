"""The parts of a run, put together: core, log, wire, children, rollouts, and what carries each command to its part.

What always holds: each command goes to exactly one part; the run ends by one outcome, the first.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

from areal_async.config import Config
from areal_async.config_check import check
from areal_async.config_file import Sources
from areal_async.controller import checkpoints, resuming
from areal_async.controller.check_file import CheckFile
from areal_async.controller.checkpoints import Checkpoints
from areal_async.controller.checks import Half, Pool
from areal_async.controller.crew import Crew
from areal_async.controller.evaluating import Evaluations
from areal_async.controller.examiner import Problems
from areal_async.controller.metrics import Meter, StepRow
from areal_async.controller.monitor import Monitor, open_monitoring
from areal_async.controller.proximal import Proximal
from areal_async.controller.record import Record
from areal_async.controller.result import RunResult
from areal_async.controller.resuming import Resumed
from areal_async.controller.rewarding import Rewards, check_answer
from areal_async.controller.rollouts import Prompts, Rollouts, RolloutSettings
from areal_async.controller.runfolder import RunFolder
from areal_async.controller.samples import Samples
from areal_async.controller.servers import Servers
from areal_async.controller.status import StatusFile
from areal_async.controller.trainer import Trainer
from areal_async.controller.turn import Turn
from areal_async.controller.wandb import tell_wandb
from areal_async.core.orchestrator import Orchestrator
from areal_async.errors import RunFailed
from areal_async.launch.recipes import Recipes
from areal_async.log.writer import RunLog
from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Cancel,
    Checkpoint,
    CheckpointDone,
    Evaluate,
    Fail,
    Failed,
    Finish,
    Forget,
    Hello,
    Joined,
    Lost,
    Note,
    Publish,
    ReadGroup,
    Release,
    Restart,
    RolledBack,
    Score,
    StartSample,
    StepDone,
    StopRequested,
    Swap,
    Train,
    Woke,
)
from areal_async.rollout.text import Text
from areal_async.rollout.training_data import load as load_training_data
from areal_async.rollout.workflow import Workflow, load_workflow
from areal_async.specs import reward_spec, run_sampling, server_identity
from areal_async.wire.router import Router

logger = logging.getLogger("areal_async")

WATCHDOG_S = 60.0  # nothing has happened for so long: say who waits for whom
LOOK_S = 0.25  # how often what the trainer waits for is put into words
PROBE_PROMPTS = 2  # prompts that a new server's log-probabilities are compared on


class Parts:
    """A run that can be lived once. Errors of the constructor: ConfigError; nothing has been started then."""

    def __init__(
        self,
        config: Config,
        workflow: Workflow | None,
        reward: Callable[..., object] | None,
        run_dir: Path | None,
        resume: bool,
        recipes: Recipes,
        on_row: Callable[[StepRow], None],
    ) -> None:
        check(config, Sources.in_code())  # a configuration made in a program has been looked at by nobody yet
        self._config = config
        self._workflow = workflow or load_workflow(config.rollout.workflow, config.import_path)
        self._reward_spec = reward_spec(config, reward)
        self._text = Text(config.model.path, config.data.chat_template)
        self._data = load_training_data(config, self._text, server_identity(config, self._text).context_tokens)
        self._on_row = on_row
        self._recipes = recipes
        self._prompts = Prompts(self._data)
        self._secret = secrets.token_hex(32)
        self._phase = "starting"  # nobody knows yet what is waited for
        self._stop = asyncio.Event()
        self._problems = Problems(config, self._text) if config.eval.every_steps else None
        self._evaluations: Evaluations | None = None
        self.metrics_url = ""
        self._status: StatusFile | None = None  # not before this run has the log's lock: the file may be another's
        self._past: Resumed | None = None
        with ExitStack() as opened:
            if resume:
                self._resume(RunFolder.find(config, run_dir), opened)
            else:
                self._begin(run_dir, opened)
            self._opened = opened.pop_all()

    def _begin(self, run_dir: Path | None, opened: ExitStack) -> None:
        self.folder = RunFolder.create(self._config, run_dir)
        opened.callback(self.folder.close)
        self._open_log(self.folder.root, opened)
        self._core = Orchestrator(self._config.rules)
        self._begun = self._last_event = time.monotonic()

    def _resume(self, root: Path, opened: ExitStack) -> None:
        """Go on with the run in `root`. Errors: ArealError that says why that can't be; nothing has been changed then,
        but for a torn end of its log."""
        self._open_log(root, opened)  # first: from here on nobody else writes there
        self._past = resuming.resume(root, self._samples, self._config, self._data)
        self.folder = RunFolder.reopen(self._config, root)
        opened.callback(self.folder.close)
        self._core = Orchestrator(self._config.rules) if self._past is None else self._past.core
        self._last_event = time.monotonic()
        self._begun = self._last_event - (0.0 if self._past is None else self._past.ended)

    def _open_log(self, root: Path, opened: ExitStack) -> None:
        self._log = RunLog(root / "log", self._config.log.segment_bytes)
        opened.callback(self._log.close)
        self._samples = Samples(self._log.get, self._prompts.at)

    def close(self) -> None:
        """Give back what the constructor has opened. Errors: LogError where the log can't be written."""
        self._opened.close()

    # ------------------------------------------------------------------------------------------------ a run's life

    async def live(self, group: asyncio.TaskGroup, stack: AsyncExitStack) -> RunResult:
        """From the first process to the saved model. Errors: the first cause."""
        self._over: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self._crew = Crew(group)
        stack.callback(self.close)
        self._write_beginning()
        self._address = f"ipc://{self.folder.socket('wire')}"
        router = await stack.enter_async_context(
            Router(self._address, self._secret, self._on_joined, self._on_lost, self._config.train.listen)
        )
        self._assemble(router)
        self._phase = ""
        for part in (self._record, self._checkpoints, self._check_file, self._proximal):
            stack.callback(part.close)
        self._status = self._status_file()
        stack.callback(group.create_task(self._status.keep(), name="status").cancel)
        monitor = Monitor(
            self._config,
            self._record,
            look=self._core.view,
            tokens_generated=lambda: self._rollouts.tokens_generated,
            now=self.now,
            last_event=lambda: self._last_event - self._begun,
        )
        self.metrics_url = await open_monitoring(stack, self._config, monitor, self._record, self.folder.root)
        await tell_wandb(stack, self._crew, self._config.metrics, self.folder.root)
        self._take(self._first_event())
        self._start_children(stack)
        self._crew.start(self._watch_for_standstill(), "watchdog")
        self._crew.start(self._stop_when_asked(), "stop on request")
        try:
            finish = await self._over
        finally:  # however it ends: no task may go on while what it uses is taken down
            self._turn.close()
            await self._crew.dismiss()
        await self._checkpoints.tidy()
        model = None
        if self._trainer.joined:
            model = self.folder.root / "model"
            self._phase = f"saving the model to {model}"
            await self._trainer.save(model)
            self._log.append(Note(at=self.now(), what=resuming.SAVED, data={"reason": finish.reason}))
            await self._trainer.leave()
        self._phase = "ending the processes"
        await self._servers.close()
        return self._outcome(finish.reason, model)

    def _assemble(self, router: Router) -> None:
        config, crew, samples, log = self._config, self._crew, self._samples, self._log
        self._turn = Turn(
            self._core, log, carry_out=self._carry_out, seen=self._seen, broken=self._broken, now=self.now
        )
        self._take = self._turn.take
        identity = server_identity(config, self._text)
        self._proximal = Proximal(self.folder.root, samples, crew, config.log.segment_bytes)
        self._trainer = Trainer(
            config, self._recipes, router, samples.part, crew,
            checkpoint_folder=partial(checkpoints.folder_of, self.folder.checkpoints), keep=self._proximal.keep,
            take=self._take, now=self.now,
        )  # fmt: skip
        self._checkpoints = Checkpoints(
            self.folder.checkpoints, config.name, crew, save=self._trainer.checkpoint, sync=self._turn.sync,
            log_bytes=lambda: log.position()[0], take=self._take, now=self.now,
        )  # fmt: skip
        self._checks = Pool(
            config.reward, self._reward_spec, self._recipes, router, crew,
            joined=self._on_worker_there, lost=self._on_worker_lost,
        )  # fmt: skip
        self._check_file = CheckFile(self.folder.root)
        self._rewards = Rewards(
            self._checks, self._reward_spec.function, samples, crew, self._check_file, take=self._take, now=self.now
        )
        self._servers = Servers(
            config,
            self._recipes,
            crew,
            identity,
            self.folder,
            probe_prompts=self._probe_prompts,
            probe_trainer=self._trainer.probe,
            take=self._take,
            now=self.now,
        )
        if config.weights.transport == "nccl" and config.weights.nccl_address is not None:
            self._servers.use_nccl(
                config.weights.nccl_address, self._trainer.ask_rank0,
                parameters=lambda: self._trainer.parameters, rank0=lambda: self._trainer.life,
            )  # fmt: skip
        settings = RolloutSettings(
            sampling=run_sampling(config, self._text),
            context=identity.context_tokens,
            vocab_size=identity.vocab_size,
            timeout_s=config.rollout.sample_timeout_s,
            seed=config.seed,
        )
        self._rollouts = Rollouts(
            self._prompts, self._workflow, self._servers.fleet, settings, samples, log, crew,
            take=self._take, now=self.now,
        )  # fmt: skip
        metrics = self.folder.root / "metrics.jsonl"
        self._meter = Meter(config.own_servers + len(config.rollout.urls), self.now())
        self._record = Record(
            metrics, config.rules, self._core, samples, self._rollouts, self._checks, self._meter, self._on_row
        )
        if self._past is not None:
            self._record.resume(self.now())
            self._proximal.resume()
        if self._problems is not None:
            self._evaluations = Evaluations(
                config, self._text, self._problems, self._workflow, partial(check_answer, Half(self._checks)),
                self._servers.clients,
                self.folder.root / "eval", crew, has_died=self._servers.has_died, done=self._record.evaluated,
                take=self._take, now=self.now,
            )  # fmt: skip

    def _start_children(self, stack: AsyncExitStack) -> None:
        folder, wire = self.folder, (self._address, self._secret)
        version = 0 if self._past is None else self._past.version
        self._crew.start(
            self._trainer.start(stack, *wire, folder.runtime, folder.stderr, folder.shm_prefix, version),
            "start of the trainer",
        )
        self._crew.start(self._checks.start(stack, *wire, folder.runtime, folder.stderr), "start of the reward workers")
        for name in self._servers.names():
            self._crew.start(self._servers.start(stack, name), f"start of server {name}")

    def _probe_prompts(self) -> list[list[int]]:
        """The first prompts of the run: what its servers will be asked."""
        prompts = [self._prompts.at(position) for position in range(PROBE_PROMPTS)]
        return [prompt.token_ids for prompt in prompts if prompt is not None]

    def _write_beginning(self) -> None:
        """What stands in the log before the first event of this controller."""
        log, data, config, past = self._log, self._data, self._config, self._past
        for record in (config.rules,) if past is None else past.missing:
            log.append(record)
        if past is None or not past.has_about:
            log.append(resuming.about(config, self.folder.config, data))
        if past is not None:
            log.append(resuming.resumed_with(self.folder.config, past.ended))
            checkpoints.clean(self.folder.checkpoints)
            return
        if data.left_out:
            logger.info("%s", data.left_out_in_words())
            long = {"left_out": data.left_out, "max_prompt_tokens": data.limit}
            log.append(Note(at=0.0, what="long_prompts", data={**long}))

    def _first_event(self) -> AnyEvent:
        if self._past is None:
            return Woke(at=self.now())
        return RolledBack(at=self.now(), to=self._past.version, why="resumed", resumed=self._config.rules)

    def _outcome(self, reason: str, model: Path | None) -> RunResult:
        rows, meter = self._record.rows, self._meter
        whole = max(meter.total_s, 1e-9)
        return RunResult(
            reason=reason,
            steps=self._core.view().version,
            folder=self.folder.root,
            model=model,
            seconds=self.now(),
            both_busy_share=meter.total_both_s / whole,
            trainer_idle_share=1 - meter.total_training_s / whole,
            rollout_idle_share=1 - meter.total_rollout_s / whole,
            rows=tuple(rows),
            evaluations=tuple(self._record.evaluations),
        )

    # ----------------------------------------------------------------------------------------------------- commands

    def _carry_out(self, command: AnyCommand) -> None:
        match command:
            case ReadGroup():
                self._rollouts.read_group(command)
            case StartSample():
                self._rollouts.start(command)
            case Score():
                self._rewards.score(command)
            case Train():
                self._trainer.train(command)
            case Publish():
                self._trainer.publish(command)
            case Swap():
                self._servers.swap(command)
            case Restart(peer="server"):
                self._servers.restart(command)
            case Restart(peer="trainer"):
                self._trainer.restart(command)
            case Restart():
                self._checks.restart(command.id)
            case Evaluate():
                assert self._evaluations is not None, "the core asks for evaluations where eval.every_steps does"
                self._evaluations.start(command)
            case Cancel():
                self._rewards.cancel(command)
                self._rollouts.cancel(command)
            case Checkpoint():
                self._checkpoints.start(command)
            case Forget():
                self._log.forget(command.samples)
                self._samples.drop(command.samples)
            case Release():
                self._log.release(command.samples)
                self._proximal.release(command.samples)
                self._samples.drop(command.samples)
            case Finish():
                self._end(command)
            case Fail():
                self._broken(RunFailed(command.why))

    def _end(self, finish: Finish) -> None:
        if not self._over.done():
            self._over.set_result(finish)

    def _broken(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    # ------------------------------------------------------------------------------------------------------- events

    def now(self) -> float:
        """The run clock, seconds."""
        return time.monotonic() - self._begun

    def request_stop(self) -> None:
        """After the step that is running, save and leave."""
        self._stop.set()

    async def _stop_when_asked(self) -> None:
        await self._stop.wait()
        self._take(StopRequested(at=self.now()))

    def _seen(self, event: AnyEvent, commands: list[AnyCommand]) -> None:
        self._last_event = time.monotonic()
        self._samples.seen(event, commands)
        self._record.seen(event, commands)
        if isinstance(event, Joined):
            name = event.id if event.peer != "server" else f"server {event.id}"
            began = 0.0 if self._past is None else self._past.ended  # of the run clock, when this controller did
            logger.info("%s is there after %.0f s", name, event.at - began)
        elif isinstance(event, StepDone) and event.skipped:
            logger.warning("step %d: the update was left out: %s", event.step, event.skipped)
        elif isinstance(event, Failed):
            logger.warning("%s", event.why)
        elif isinstance(event, Lost) and event.peer == "server":
            logger.warning("server %s is lost: %s", event.id, event.why)
            if self._evaluations is not None:
                self._evaluations.lost(event.id)
        elif isinstance(event, Lost) and event.peer == "rewards":
            logger.warning("reward worker %s is lost: %s", event.id, event.why)
        elif isinstance(event, Lost):
            logger.warning("the trainer is lost: %s", event.why)
        if isinstance(event, RolledBack):
            self._proximal.roll_back(event.to)
        if isinstance(event, RolledBack) and self._past is not None and event.resumed is not None:
            kept = resuming.kept_in_words(self._core, event.to, commands)
            logger.info("%s; %s", self._past.in_words, kept)
            self._checkpoints.resumed(self._core.returns)
        if isinstance(event, CheckpointDone):
            self._checkpoints.recorded(event)
        if isinstance(event, StepDone):
            self._crew.start(self._turn.sync(), f"sync of the log after step {event.step}")

    def _on_joined(self, hello: Hello) -> str | None:
        part = self._trainer if hello.worker == "trainer" else self._checks
        return part.on_joined(hello)

    def _on_worker_there(self, name: str) -> None:
        self._take(Joined(at=self.now(), peer="rewards", id=name))

    def _on_worker_lost(self, name: str, why: str) -> None:
        self._take(Lost(at=self.now(), peer="rewards", id=name, why=why))

    def _on_lost(self, name: str, why: str) -> None:
        if name.startswith("trainer"):
            self._trainer.on_lost(name, why)
        else:
            self._checks.on_lost(name, why)

    # ------------------------------------------------------------------------------------------------------ for people

    def phase(self) -> str:
        """What the run is doing, or what it waits for."""
        return self._phase or self._waiting()

    def tell_end(self, how: str) -> None:
        """For `areal-async why`."""
        if self._status is not None:
            self._status.end(how)

    def _waiting(self) -> str:
        return "; ".join([self._core.waiting(self.now()), *self._waits_outside()])

    def _waits_outside(self) -> list[str]:
        """Of the core: what it doesn't know."""
        evaluating = self._evaluations.progress if self._evaluations is not None else ""
        waits = (self._servers.waits(), self._servers.fleet.waits(), self._checks.waits(), evaluating)
        return [words for words in waits if words]

    def _status_file(self) -> StatusFile:
        return StatusFile(
            self.folder.root, self._config.name, self._config.train.steps, self._core,
            phase=lambda: self._phase, waits=self._waits_outside, addresses=self._servers.addresses,
            now=self.now, last_event=lambda: self._last_event - self._begun,
        )  # fmt: skip

    async def _watch_for_standstill(self) -> None:
        told_s = WATCHDOG_S
        while True:
            await asyncio.sleep(LOOK_S)
            self._record.put_waiting_into_words(self.now())
            silent_s = time.monotonic() - self._last_event
            if silent_s < WATCHDOG_S:
                told_s = WATCHDOG_S
            elif silent_s >= told_s:
                logger.warning("nothing has moved for %.0f s. %s", silent_s, self._waiting())
                told_s *= 2
