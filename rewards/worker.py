"""A reward worker: `python -m areal_async.rewards.worker --connect ADDRESS --spec FILE.json --name rewards.0`.

Takes `ScoreTask`s from the controller, has them checked in its sandbox, answers each with a `ScoreResult`.

What always holds: it grants as many credits as checks may run at the same time, so no check waits here for another;
it lives on whatever a check does; it ends by itself when the controller is gone or says goodbye.
"""

import argparse
import os
import sys
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from areal_async.errors import ArealError, RewardError, WireError
from areal_async.messages import PROTOCOL, Goodbye, Hello, RewardSpec, ScoreTask, WorkerError
from areal_async.rewards.sandbox import SECRET, Sandbox

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
        credits=spec.concurrent,
    )
    with Sandbox(spec) as sandbox:
        from areal_async.wire.dealer import Dealer  # after the sandbox, which must know nothing of ZeroMQ

        with Dealer(address, hello) as dealer, ThreadPoolExecutor(1, "answers") as executor:
            asked: dict[int, Request] = {}
            # A thread, since the wire can't be waited for together with a socket
            answering = executor.submit(_answer, dealer, sandbox, asked)
            try:
                _take(dealer, sandbox, asked, answering)
            finally:
                sandbox.close()


def _take(dealer: "Dealer", sandbox: Sandbox, asked: "dict[int, Request]", answering: "Future[None]") -> None:
    number = 0
    while not answering.done():
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
        number += 1
        asked[number] = request
        sandbox.submit(number, request.message, request.arrays[0].tobytes())
    answering.result()


def _answer(dealer: "Dealer", sandbox: Sandbox, asked: "dict[int, Request]") -> None:
    while (found := sandbox.next_result()) is not None:
        number, result = found
        try:
            dealer.reply(asked.pop(number), result)
        except WireError:
            return  # `_take` gets the same from `receive`


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
