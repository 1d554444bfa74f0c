"""What a dashboard sees of a run: the families of metrics that `exporter` writes down.

What always holds: it only reads counters that are kept anyway; one look costs as much as there are servers, however
much is in flight; counters (`_total`) count from the start of this process and never fall.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from areal_async import __version__
from areal_async.config import Config
from areal_async.controller.exporter import Exporter, Family
from areal_async.controller.metrics import StepRow
from areal_async.controller.record import Record
from areal_async.controller.tensorboard import TensorBoard
from areal_async.core.lifecycle import SERVER, TRAINER
from areal_async.core.view import View

logger = logging.getLogger("areal_async")

PREFIX: Final = "areal_async_"

# Of the last row of metrics.jsonl: field -> name, help. Shares are called ratios, as Prometheus wants it.
LAST_STEP: Final[dict[str, tuple[str, str]]] = {
    "reward_mean": ("reward_mean", "Mean reward of the last step's samples."),
    "lag_mean": ("lag_mean_steps", "Mean lag of the last step's trained tokens, in training steps."),
    "lag_max": ("lag_max_steps", "Largest lag of the last step's trained tokens, in training steps."),
    "response_len_mean": ("response_length_mean_tokens", "Mean response length of the last step's samples."),
    "truncated_share": ("truncated_ratio", "Share of the last step's samples that were cut at the token limit."),
    "mixed_share": ("mixed_ratio", "Share of the last step's samples with tokens of two versions or more."),
    "step_s": ("step_seconds", "Wall time of the last step."),
    "train_s": ("train_seconds", "Time that the ranks took for the last step."),
    "trainer_idle_share": ("trainer_idle_ratio", "Share of the last step in which the trainer was idle."),
    "both_busy_share": ("both_busy_ratio", "Share of the last step in which trainer and servers worked."),
    "loss": ("loss", "Loss of the last step."),
    "grad_norm": ("gradient_norm", "Norm of the last step's gradient before clipping."),
    "entropy": ("entropy_nats", "Entropy of the policy in the last step."),
    "clip_share": ("clip_ratio", "Share of the last step's tokens whose ratio was clipped."),
    "behav_ess": ("behaviour_ess_ratio", "Effective sample size of the last step's behaviour weights."),
    "kl_ref": ("kl_reference_nats", "Distance to the reference model in the last step."),
    "lr": ("learning_rate", "Learning rate of the last step."),
}

# Of `metrics.Totals`: field -> name, help.
TOTALS: Final[dict[str, tuple[str, str]]] = {
    "tokens_trained": ("trained_tokens_total", "Tokens trained."),
    "tokens_masked": ("masked_tokens_total", "Tokens that got no gradient for their age."),
    "tokens_discarded": ("discarded_tokens_total", "Response tokens of answers that were filtered, failed, cancelled."),
    "tokens_stale": ("stale_tokens_total", "Response tokens of answers that were dropped for their age."),
    "tokens_evaluated": ("evaluated_tokens_total", "Response tokens of evaluations."),
    "trainer_wait_s": ("trainer_wait_seconds_total", "How long the trainer has stood idle before steps."),
    "swap_pause_s": ("swap_pause_seconds_total", "How long servers have stood still for new weights."),
    "restarts": ("server_restarts_total", "Servers that were told to start again."),
    "reward_restarts": ("reward_worker_restarts_total", "Reward workers that were told to start again."),
    "checks_again": ("repeated_checks_total", "Checks that could not be made, and were made again."),
    "continued": ("repeated_requests_total", "Requests that were sent again, to another server or the same one."),
}


async def open_monitoring(
    stack: AsyncExitStack, config: Config, monitor: "Monitor", record: Record, folder: Path
) -> str:
    """What the configuration asks for, until `stack` ends it. Returns the URL of the metrics, or "". Errors:
    ConfigError: the port was taken meanwhile."""
    if config.metrics.tensorboard:
        board = TensorBoard(folder / "tensorboard")
        stack.callback(board.close)
        record.readers.append(board)
    if config.metrics.port is None:
        return ""
    url = await Exporter(config.metrics.host, config.metrics.port, monitor.families).start(stack)
    logger.info("metrics: %s", url)
    return url


class Monitor:
    """look: the core's state. tokens_generated: by all finished answers. now: run clock. last_event: run clock of the
    last thing that happened."""

    def __init__(
        self,
        config: Config,
        record: Record,
        *,
        look: Callable[[], View],
        tokens_generated: Callable[[], int],
        now: Callable[[], float],
        last_event: Callable[[], float],
    ) -> None:
        self._config = config
        self._record = record
        self._look = look
        self._tokens_generated = tokens_generated
        self._now = now
        self._last_event = last_event

    def families(self) -> Iterator[Family]:
        """Everything, as it is now."""
        view = self._look()
        yield from self._run()
        yield from _trainer(view)
        yield from _flow(view)
        yield from _servers(view)
        yield from self._totals()
        yield from self._evaluation()
        if self._record.rows:
            yield from _last_step(self._record.rows[-1])

    def _run(self) -> Iterator[Family]:
        now, record = self._now(), self._record
        idle_since = record.waiting_since
        yield _gauge("info", "The run.", [({"run": self._config.name, "version": __version__}, 1)])
        yield _gauge("run_seconds", "Run clock.", [({}, now)])
        yield _gauge("last_event_age_seconds", "Since when nothing has happened.", [({}, now - self._last_event())])
        yield _gauge("steps_planned", "Training steps of the whole run.", [({}, self._config.train.steps)])
        waits = 0.0 if idle_since is None else now - idle_since
        yield _gauge(
            "trainer_waiting_seconds", "How long the trainer has stood idle by now; 0: it works.", [({}, waits)]
        )

    def _totals(self) -> Iterator[Family]:
        record = self._record
        yield _counter(
            "generated_tokens_total", "Response tokens of finished answers.", [({}, self._tokens_generated())]
        )
        for field, (name, help) in TOTALS.items():
            yield _counter(name, help, [({}, getattr(record.totals, field))])
        checks = [({"verdict": verdict}, float(count)) for verdict, count in record.verdicts.items()]
        yield _counter("checks_total", "Checks of answers that have ended, by verdict.", checks)

    def _evaluation(self) -> Iterator[Family]:
        done = self._record.evaluations
        yield _counter("evaluations_total", "Evaluations that have ended.", [({}, len(done))])
        if done:
            last = done[-1]
            yield _gauge("evaluation_score", "Mean reward of the last evaluation.", [({}, last.score)])
            yield _gauge("evaluation_version", "Version that was evaluated last.", [({}, last.version)])
            passed = [({"k": str(k)}, chance) for k, chance in last.pass_at.items()]
            yield _gauge("evaluation_pass_ratio", "pass@k of the last evaluation.", passed)


def _trainer(view: View) -> Iterator[Family]:
    yield _gauge("version", "Version of the trainer's weights: training steps done.", [({}, view.version)])
    yield _gauge("branch", "How often training went back to a checkpoint.", [({}, view.branch)])
    states = [({"state": state}, float(state == view.trainer_state)) for state in TRAINER.table]
    yield _gauge("trainer_state", "1 for the state that the trainer is in.", states)


def _flow(view: View) -> Iterator[Family]:
    yield _gauge("samples_in_flight", "Samples with a place at a server.", [({}, view.in_flight)])
    yield _gauge("groups_ready", "Groups that wait to be trained.", [({}, view.ready)])
    yield _gauge("groups_outstanding", "Groups that are admitted and not handed to training.", [({}, view.outstanding)])
    counts = [(name, float(count)) for name, count in view.balance.items() if not name.endswith("admitted")]
    groups = [({"state": name}, count) for name, count in counts if not name.startswith("samples_")]
    samples = [
        ({"state": name.removeprefix("samples_")}, count) for name, count in counts if name.startswith("samples_")
    ]
    yield _gauge("groups", "Groups of the run by what became of them: the ledger.", groups)
    yield _gauge("samples", "Samples of the run by what became of them: the ledger.", samples)


def _servers(view: View) -> Iterator[Family]:
    servers = view.servers
    yield _gauge("server_version", "Version that a server answers with; -1: none of this run.",
                 [({"server": server.name}, server.version) for server in servers])  # fmt: skip
    yield _gauge("server_samples", "Samples placed on a server.",
                 [({"server": server.name}, server.load) for server in servers])  # fmt: skip
    yield _gauge("server_state", "1 for the state that a server is in.",
                 [({"server": server.name, "state": state}, float(state == server.state))
                  for server in servers for state in SERVER.table])  # fmt: skip


def _last_step(row: StepRow) -> Iterator[Family]:
    for field, (name, help) in LAST_STEP.items():
        yield _gauge(name, help, [({}, getattr(row, field))])
    idle = [({"server": server}, share) for server, share in row.rollout_idle_by_server.items()]
    yield _gauge(
        "server_idle_ratio", "Share of the last step in which a server had nothing to do or stood still.", idle
    )
    lost = [({"quarter": str(number)}, share) for number, share in enumerate(row.lost_by_length, 1)]
    yield _gauge("lost_ratio", "Share of samples lost to age, by quarter of answer length, since the run began.", lost)


Samples = Iterable[tuple[dict[str, str], float]]


def _gauge(name: str, help: str, samples: Samples) -> Family:
    return Family(PREFIX + name, "gauge", help, tuple(samples))


def _counter(name: str, help: str, samples: Samples) -> Family:
    return Family(PREFIX + name, "counter", help, tuple(samples))
