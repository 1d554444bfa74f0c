"""A scripted stand-in for a reward worker: it answers with the verdicts of a recorded run when their time has come.

What always holds: it speaks the real wire; no check waits for another; a check that the record doesn't have is answered
with the verdict `infrastructure`, which gives no reward and says why.

As a program: `python -m areal_async.testing.rewards --connect A --spec F --name rewards.0 --recorded LOG [--pace P]`.
"""

import argparse
import heapq
import os
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from areal_async.errors import ArealError
from areal_async.messages import PROTOCOL, Goodbye, Hello, RewardSpec, ScoreResult, ScoreTask, WorkerError
from areal_async.rollout.text import Text
from areal_async.testing.given import NotGiven
from areal_async.testing.recorded import RecordedRun, Tokens
from areal_async.wire.dealer import Dealer, Request

POLL_S: Final = 0.5
CREDITS: Final = 4096  # the recorded durations have the waits for a place in them


class ScriptedRewards:
    """text: of the run's model; it makes prompts' text their tokens again."""

    def __init__(self, run: RecordedRun, text: Text) -> None:
        self._run = run
        self._text = text
        self._due: list[tuple[float, int, Request, ScoreResult]] = []
        self._asked = 0

    def serve(self, connect: str, secret: str, name: str) -> None:
        """Answer until the controller says goodbye. Raises WireError when it is gone."""
        hello = Hello(
            protocol=PROTOCOL, secret=secret, worker="reward", name=name, nonce=os.urandom(8).hex(), credits=CREDITS
        )
        with Dealer(connect, hello) as dealer:
            while True:
                now = time.monotonic()
                while self._due and self._due[0][0] <= now:
                    _, _, request, result = heapq.heappop(self._due)
                    dealer.reply(request, result)
                wait_s = min(POLL_S, self._due[0][0] - now) if self._due else POLL_S
                asked = dealer.receive(wait_s)
                if asked is None:
                    continue
                if isinstance(asked.message, Goodbye):
                    return
                self._take(dealer, asked)

    def _take(self, dealer: Dealer, request: Request) -> None:
        task = request.message
        if not isinstance(task, ScoreTask) or len(request.arrays) != 1:
            dealer.reply(request, WorkerError(why=f"a reward worker takes ScoreTask, not {type(task).__name__}"))
            return
        result = self._result(task, request.arrays[0].astype(np.int32))
        self._asked += 1
        heapq.heappush(self._due, (time.monotonic() + result.seconds, self._asked, request, result))

    def _result(self, task: ScoreTask, response: Tokens) -> ScoreResult:
        sample, attempt = task.sample, task.attempt
        try:
            verdict, reward, seconds = self._run.graded(sample, self._text.encode(task.prompt), response)
        except NotGiven as error:
            return ScoreResult(
                sample=sample, attempt=attempt, verdict="infrastructure", reward=None, why=str(error), settled=True
            )
        return ScoreResult(sample=sample, attempt=attempt, verdict=verdict, reward=reward, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--recorded", type=Path, required=True, help="log folder of the run that is played")
    parser.add_argument("--pace", type=float, default=1.0, help="by which recorded durations are multiplied")
    arguments = parser.parse_args()
    try:
        spec = msgspec.json.decode(arguments.spec.read_bytes(), type=RewardSpec)
        run = RecordedRun(arguments.recorded, arguments.pace)
        worker = ScriptedRewards(run, Text(spec.model_path, "plain"))
        worker.serve(arguments.connect, os.environ["AREAL_ASYNC_SECRET"], arguments.name)
    except ArealError as error:
        sys.exit(f"{arguments.name}: {error}")


if __name__ == "__main__":
    main()
