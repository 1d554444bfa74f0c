"""Prints the figures of a run in which much happens; to be started with different PYTHONHASHSEEDs."""

import sys

import msgspec

from areal_async.simulate.engine import simulate
from areal_async.simulate.models import FailureModel, RewardModel, SwapModel, TrainerModel

from .models import Told, cluster, rules, scattered

FIGURES = simulate(
    rules(steps=30, when_older="drop", requeue=True, max_staleness=1, max_restarts=100, checkpoint_steps=4, ranks=2),
    cluster(
        servers=5,
        swap=SwapModel(0.3),
        trainer=TrainerModel(0.5, 0.1, 0.05, 1e-4, 1e-7, publish_s=0.1, checkpoint_s=0.2),
        rewards=RewardModel(0.05, 2),
        answers=Told(scattered, 20),
        failures=FailureModel(20 / 3600, 3.0),
    ),
    seed=5,
)
sys.stdout.buffer.write(msgspec.json.encode(FIGURES))
