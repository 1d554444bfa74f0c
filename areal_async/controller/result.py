"""How a run ended, for whoever asked for it."""

from dataclasses import dataclass
from pathlib import Path

from areal_async.controller.evaluating import Evaluation
from areal_async.controller.metrics import StepRow


@dataclass(frozen=True)
class RunResult:
    """reason: steps_done, data_ended or stopped. steps: training steps done. folder: the run folder. model: folder of
    the trained model, None where the run was stopped before there was one. seconds: run clock when the model is saved.
    Shares are of the time from this controller's start to the last step. rows: the steps of the history that survived.
    evaluations: in the order in which they ended, the one after the last step included."""

    reason: str
    steps: int
    folder: Path
    model: Path | None
    seconds: float
    both_busy_share: float
    trainer_idle_share: float
    rollout_idle_share: float
    rows: tuple[StepRow, ...]
    evaluations: tuple[Evaluation, ...] = ()
