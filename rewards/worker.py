"""A reward worker: `python -m areal_async.rewards.worker --connect ADDRESS --spec FILE.json --name rewards.0`.

Takes `ScoreTask`s from the controller and answers each with a `ScoreResult`. Who judges: its sandbox (everything that
runs here), the judge behind `reward.http.url`, or in a sum both, at the same time.

What always holds: it grants as many credits as checks may run at the same time, so no check waits here for another;
it lives on whatever a check does; nothing in it waits for one; it ends by itself when the controller is gone or says
goodbye.
"""

import argparse
import os
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self

import msgspec

from areal_async.errors import ArealError, RewardError, WireError
from areal_async.messages import PROTOCOL, Goodbye, Hello, RewardSpec, ScoreResult, ScoreTask, WorkerError
from areal_async.rewards.limits import places
from areal_async.rewards.loading import http_term, local_terms
from areal_async.rewards.sandbox import SECRET, Sandbox
from areal_async.rewards.sums import total
from areal_async.rewards.verdicts import Outcome, result_of

if TYPE_CHECKING:
    from areal_async.wire.dealer import Dealer, Request

RECEIVE_S: Final = 0.5  # between looks whether the answering thread has failed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="areal_async.rewards.worker", description="Checks answers for a controller.")
    parser.add_argument("--connect", required=True, help="the controller's address, such as ipc:///run/x/wire")
    parser.add_argument("--spec", required=True, type=Path, help="JSON file of a RewardSpec")
    parser.add_argument("--name", required=True, help="such as rewards.0")
    options = parser.parse_args(arguments)
    try:
        run(options.connect, read_spec(options.spec), options.name, os.environ.get(SECRET, ""))
    except ArealError as error:
        print(f"reward worker {options.name}: {error}", file=sys.stderr)
        return 1
    return 0


def read_spec(path: Path) -> RewardSpec:
    """RewardError if the file isn't there or isn't a RewardSpec."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RewardSpec)
    except (OSError, msgspec.DecodeError) as error:
        raise RewardError(f"{path}: not a reward specification: {error}") from error


def run(address: str, spec: RewardSpec, name: str, secret: str) -> None:
    """Serve until the controller says goodbye. RewardError: the reward can't be loaded. WireError: no controller."""
    hello = Hello(
        protocol=PROTOCOL,
        secret=secret,
        worker="reward",
        name=name,
        nonce=uuid.uuid4().hex,
        credits=places(spec) if local_terms(spec) else spec.http.connections,
    )
    with ExitStack() as stack:
        judges = [stack.enter_context(judge) for judge in _judges(spec)]
        from areal_async.wire.dealer import Dealer  # after the sandbox, which must know nothing of ZeroMQ

        with Dealer(address, hello) as dealer, ThreadPoolExecutor(len(judges), "answers") as executor:
            checks = _Checks(dealer, judges, spec)
            # Threads, since the wire can't be waited for together with a socket
            answering = [executor.submit(checks.answer, place) for place in range(len(judges))]
            try:
                _take(dealer, checks, answering)
            finally:
                for judge in judges:
                    judge.close()


def _judges(spec: RewardSpec) -> "Iterator[Judge]":
    if local_terms(spec):
        yield Sandbox(spec)
    if http_term(spec):
        from areal_async.rewards import http  # aiohttp takes longer to load than most rewards

        yield http.Judge(spec)


def _take(dealer: "Dealer", checks: "_Checks", answering: "list[Future[None]]") -> None:
    while not any(thread.done() for thread in answering):
        request = dealer.receive(RECEIVE_S)
        if request is None:
            continue
        if isinstance(request.message, Goodbye):
            return
        if not isinstance(request.message, ScoreTask) or len(request.arrays) != 1:
            what = f"{type(request.message).__name__} with {len(request.arrays)} arrays"
            dealer.reply(request, WorkerError(why=f"a reward worker takes ScoreTask with one array, not {what}"))
            continue
        if request.arrays[0].dtype != "int32":
            why = f"token ids must be int32, not {request.arrays[0].dtype}"
            dealer.reply(request, WorkerError(why=why))
            continue
        checks.begin(request, request.message, request.arrays[0].tobytes())
    for thread in answering:
        if thread.done():
            thread.result()


class Judge(Protocol):
    """Judges checks, each by itself. `submit` doesn't wait; `next_result` waits for a result, or for `close` (None)."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def submit(self, number: int, task: ScoreTask, token_ids: bytes) -> None: ...
    def next_result(self) -> tuple[int, ScoreResult] | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Asked:
    """A check that isn't answered. results: what judges have said of it, by their places in the list."""

    request: "Request"
    task: ScoreTask
    results: dict[int, ScoreResult] = field(default_factory=dict)


class _Checks:
    """Has each check judged by all judges, and answers it once, when the last one has spoken."""

    def __init__(self, dealer: "Dealer", judges: Sequence[Judge], spec: RewardSpec) -> None:
        self._dealer = dealer
        self._judges = judges
        self._values = spec.values
        self._lock = threading.Lock()  # over `results`, which the threads of two judges add to
        self._asked: dict[int, _Asked] = {}
        self._number = 0

    def begin(self, request: "Request", task: ScoreTask, token_ids: bytes) -> None:
        self._number += 1
        self._asked[self._number] = _Asked(request, task)
        for judge in self._judges:
            judge.submit(self._number, task, token_ids)

    def answer(self, place: int) -> None:
        """Take the results of one judge until it is closed, or the controller is gone."""
        while (found := self._judges[place].next_result()) is not None:
            number, result = found
            asked = self._asked[number]
            with self._lock:
                asked.results[place] = result
                if len(asked.results) < len(self._judges):
                    continue
            del self._asked[number]
            try:
                self._dealer.reply(asked.request, self._sum(asked))
            except WireError:
                return  # `_take` gets the same from `receive`

    def _sum(self, asked: _Asked) -> ScoreResult:
        results = [asked.results[place] for place in range(len(self._judges))]
        if len(results) == 1:
            return results[0]
        summands = [
            Outcome(result.verdict, result.why, result.extracted, result.reward, result.settled) for result in results
        ]
        seconds = max(result.seconds for result in results)
        return result_of(asked.task, total(summands), self._values, seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
