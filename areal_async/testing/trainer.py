"""A scripted stand-in for the DeepSpeed trainer: answers at once (or after a while), and keeps books of its own.

What always holds: it speaks the real wire and writes real files in shared memory, so the controller can't tell it from
the real one; what it has trained stands in its books (`--books`), a line of JSON a step and rank, written before it
answers: the sample ids in order, their lengths, a checksum of their arrays.

As a program: `python -m areal_async.testing.trainer --connect A --spec F --ranks N [--step-s S] [--books FILE]`.
"""

import argparse
import json
import os
import threading
import time
import zlib
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.messages import (
    PROTOCOL,
    AnyWire,
    Goodbye,
    Hello,
    JoinServers,
    LeaveServers,
    ModelSaved,
    Probe,
    ProbeResult,
    Publish,
    Published,
    SaveModel,
    SendWeights,
    ServersJoined,
    ServersLeft,
    StepDone,
    Train,
    TrainerSpec,
    WeightsSent,
)
from areal_async.testing.vllm_server import drawn_logprob, drawn_token
from areal_async.wire.dealer import Dealer, Request

POLL_S = 1.0
VOCAB_SIZE = 128  # of the scripted server


class ScriptedRank:
    """One rank. step_s: how long a step takes. books: file that its steps are written to."""

    def __init__(self, rank: int, world: int, spec: TrainerSpec, step_s: float, books: Path | None) -> None:
        self.rank = rank
        self.world = world
        self._spec = spec
        self._step_s = step_s
        self._books = books
        self._version = 0

    def serve(self, connect: str, secret: str, server_key: str | None = None) -> None:
        """Answer until the controller says goodbye. Raises WireError when it is gone."""
        hello = Hello(
            protocol=PROTOCOL,
            secret=secret,
            worker="trainer",
            name=f"trainer.{self.rank}",
            nonce=os.urandom(8).hex(),
            credits=2,
            rank=self.rank,
            world=self.world,
        )
        with Dealer(connect, hello, server_key=server_key) as dealer:
            while True:
                request = dealer.receive(POLL_S)
                if request is None:
                    continue
                if isinstance(request.message, Goodbye):
                    return
                dealer.reply(request, *self._answer(request))

    def _answer(self, request: Request) -> tuple[AnyWire, list[npt.NDArray[np.float32]]]:
        match request.message:
            case Train() as train:
                return self._train(train, request), []
            case Publish() as publish:
                return self._publish(publish), []
            case Probe() as probe:
                return ProbeResult(id=probe.id, version=self._version), [logprobs_of(request.arrays[0], self._version)]
            case JoinServers():
                return ServersJoined(seconds=0.0), []
            case SendWeights(version=version):
                return WeightsSent(version=version, seconds=0.0), []
            case LeaveServers():
                return ServersLeft(), []
            case SaveModel(path=path):
                Path(path).mkdir(parents=True, exist_ok=True)
                (Path(path) / "version").write_text(str(self._version))
                return ModelSaved(path=path, version=self._version), []
            case other:
                raise ValueError(f"a trainer can't answer {other}")

    def _train(self, train: Train, request: Request) -> StepDone:
        time.sleep(self._step_s)
        lengths, *rest = request.arrays
        order = [index for minibatch in train.minibatches for micro in minibatch.ranks[self.rank] for index in micro]
        self._write(
            {
                "step": train.step,
                "branch": train.branch,
                "rank": self.rank,
                "groups": train.groups,
                "samples": [train.samples[index].sample for index in order],
                "advantages": [train.samples[index].advantage for index in order],
                "lengths": lengths.tolist(),
                "checksum": zlib.crc32(b"".join(array.tobytes() for array in rest)),
            }
        )
        self._version = train.step + 1
        metrics = {"loss": 0.0, "grad_norm": 1.0, "entropy": 1.0, "behav_ess": 1.0, "train_s": self._step_s}
        return StepDone(at=0.0, step=train.step, branch=train.branch, metrics=metrics)

    def _publish(self, publish: Publish) -> Published:
        if self._spec.transport == "nccl":
            there = f"nccl:{publish.version}"
            return Published(at=0.0, version=publish.version, branch=publish.branch, location=there, nbytes=0)
        location = Path(f"/dev/shm/{self._spec.shm_prefix}-v{publish.version}.safetensors")
        if self.rank == 0:
            for version in publish.free:
                Path(f"/dev/shm/{self._spec.shm_prefix}-v{version}.safetensors").unlink(missing_ok=True)
            location.write_text(f"version {publish.version}")
        return Published(
            at=0.0, version=publish.version, branch=publish.branch, location=str(location), nbytes=len(str(location))
        )

    def _write(self, line: dict[str, object]) -> None:
        if self._books is not None:
            with self._books.open("a") as file:
                file.write(json.dumps(line) + "\n")


def logprobs_of(token_ids: npt.NDArray[np.generic], newest: int) -> npt.NDArray[np.float32]:
    """What the scripted server says of an answer without a seed, under a version up to `newest`: the longest end of the
    sequence that one of them can have drawn is the answer."""
    tokens = token_ids.tolist()
    out = np.zeros(len(tokens), np.float32)
    for begin in range(1, len(tokens)):
        for version in range(newest, -1, -1):
            if all(token == drawn_token(0, version, at, VOCAB_SIZE) for at, token in enumerate(tokens[begin:])):
                out[begin:] = [drawn_logprob(0, version, at) for at in range(len(tokens) - begin)]
                return out
    return out


def main() -> None:
    """All ranks in one process, a thread each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds a step")
    parser.add_argument("--books", type=Path, help="file for what was trained")
    arguments = parser.parse_args()
    spec = msgspec.json.decode(arguments.spec.read_bytes(), type=TrainerSpec)
    secret = os.environ["AREAL_ASYNC_SECRET"]
    threads = [
        threading.Thread(
            target=ScriptedRank(rank, arguments.ranks, spec, arguments.step_s, arguments.books).serve,
            args=(arguments.connect, secret),
        )
        for rank in range(arguments.ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
