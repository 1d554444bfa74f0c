"""A scripted stand-in for the DeepSpeed trainer: answers at once (or after a while), and keeps books of its own.

What always holds: it speaks the real wire and writes real files in shared memory, so the controller can't tell it from
the real one; what it has trained stands in its books (`--books`), a line of JSON a step and rank, written before it
answers: step and branch, the sample ids in order, their lengths, a checksum of their arrays, a digest of all frames of
the message, and `state`, a number that stands for the weights: it depends on what was trained in which order and on
nothing else (not on branch or ranks). The gradient's norm is made of `state`, the entropy of the arrays' checksum. A
trainer that begins with a checkpoint goes on from the checkpoint's number. Faults come on order (`TrainerOrder`).

As a program: `python -m areal_async.testing.trainer --connect A --spec F --ranks N [--step-s S] [--books FILE]
[--orders JSON] [--recorded LOG [--pace P]]` (with the last, metrics and durations of steps are those of that run).
"""

import argparse
import hashlib
import json
import os
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async import disk
from areal_async.errors import ArealError, TrainerError
from areal_async.messages import (
    PROTOCOL,
    AnyWire,
    CheckpointSaved,
    Goodbye,
    Hello,
    JoinServers,
    LeaveServers,
    ModelSaved,
    Probe,
    ProbeResult,
    Publish,
    Published,
    SaveCheckpoint,
    SaveModel,
    SendWeights,
    ServersJoined,
    ServersLeft,
    StepDone,
    Train,
    TrainerSpec,
    WeightsSent,
    WorkerError,
)
from areal_async.testing.given import NotGiven, Steps
from areal_async.testing.vllm_server import drawn_logprob, drawn_token
from areal_async.wire import frames
from areal_async.wire.dealer import Dealer, Request

POLL_S = 1.0
VOCAB_SIZE = 128  # of the scripted server
PROX_LOWER = 0.125  # log π_behav − log π_prox of every token


class Die(msgspec.Struct, frozen=True, tag=True):
    """The process ends at once, with all of its ranks. after: when everything is done and only the answer is missing;
    otherwise before anything is (of a checkpoint or a published file, a part is written then)."""

    after: bool = False


class Fail(msgspec.Struct, frozen=True, tag=True):
    """Do nothing and answer with an error; after a step (and instead of a Hello) the process ends, as the real one."""

    why: str = "by script"


class Silent(msgspec.Struct, frozen=True, tag=True):
    """Do nothing and never answer, neither this nor anything later; beats go on."""


class Late(msgspec.Struct, frozen=True, tag=True):
    """Wait so long, then do it."""

    seconds: float


class Skip(msgspec.Struct, frozen=True, tag=True):
    """Train the step, and say that its update was left out, as the real one does where a loss isn't finite."""

    why: str = "minibatch 1 of 1: loss is not finite"


TrainerFault: TypeAlias = Die | Fail | Silent | Late | Skip
Moment: TypeAlias = Literal["hello", "train", "publish", "probe", "checkpoint", "save"]


class TrainerOrder(msgspec.Struct, frozen=True):
    """What goes wrong. at: the step that is trained, or the version that is published or held; None: whichever it is.
    rank: whose; None: everybody's. times: how often."""

    on: Moment
    fault: TrainerFault
    at: int | None = None
    rank: int | None = None
    times: int = 1


EXIT_CODE: Final = 7  # of a death by order
_CRC: Final = 1 << 32  # above any checksum


class _Checkpointed(msgspec.Struct, frozen=True):
    """A rank's file of a checkpoint. books: bytes of the books so far."""

    version: int
    state: int
    rank: int
    world: int
    books: int


class ScriptedRank:
    """One rank. step_s: how long a step takes. books: file that its steps are written to. recording: whose metrics and
    durations its steps have. vocab_size: of the servers, whose probes it answers.

    Raises TrainerError if `spec.checkpoint` names no complete checkpoint.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        spec: TrainerSpec,
        step_s: float,
        books: Path | None,
        orders: Sequence[TrainerOrder] = (),
        recording: Steps | None = None,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.rank = rank
        self.world = world
        self._spec = spec
        self._step_s = step_s
        self._books = books
        self._orders = orders
        self._recording = recording
        self._vocab_size = vocab_size
        self._carried_out: Counter[int] = Counter()
        self._version, self._state = _begin(Path(spec.checkpoint)) if spec.checkpoint else (0, 0)

    def serve(self, connect: str, secret: str, server_key: str | None = None) -> None:
        """Answer until the controller says goodbye. Raises WireError when it is gone."""
        match self._order("hello", self._version):
            case Die():
                os._exit(EXIT_CODE)
            case Fail(why=why):
                print(f"trainer.{self.rank}: {why}", file=sys.stderr, flush=True)
                os._exit(1)
            case Silent():
                threading.Event().wait()
            case Late(seconds=seconds):
                time.sleep(seconds)
        hello = Hello(
            protocol=PROTOCOL,
            secret=secret,
            worker="trainer",
            name=f"trainer.{self.rank}",
            nonce=os.urandom(8).hex(),
            credits=2,
            rank=self.rank,
            world=self.world,
            version=self._version,
        )
        with Dealer(connect, hello, server_key=server_key) as dealer:
            ended = self._serve(dealer)
        if not ended:
            os._exit(1)  # the other ranks wait in a collective call; torchrun ends them

    def _serve(self, dealer: Dealer) -> bool:
        """Whether it ended well."""
        silent = False
        while True:
            request = dealer.receive(POLL_S)
            if request is None:
                continue
            if isinstance(request.message, Goodbye):
                return True
            fault = self._order(*_moment(request.message, self._version))
            silent = silent or isinstance(fault, Silent)
            if silent:
                continue
            match fault:
                case Fail(why=why):
                    dealer.reply(request, WorkerError(why=why))
                    if isinstance(request.message, Train):
                        return False
                    continue
                case Late(seconds=seconds):
                    time.sleep(seconds)
                case Die(after=False):
                    self._begin_writing(request.message)
                    os._exit(EXIT_CODE)
            try:
                message, arrays = self._answer(request)
            except (TrainerError, NotGiven, OSError) as error:  # a full disk, for one: the real ranks go on, too
                dealer.reply(request, WorkerError(why=str(error)))
                continue
            if isinstance(fault, Die):
                os._exit(EXIT_CODE)
            if isinstance(fault, Skip) and isinstance(message, StepDone):
                message = msgspec.structs.replace(message, skipped=fault.why)
            dealer.reply(request, message, arrays)

    def _order(self, on: Moment | None, at: int) -> TrainerFault | None:
        for number, order in enumerate(self._orders):
            mine = order.rank in (None, self.rank) and order.at in (None, at) and order.on == on
            if mine and self._carried_out[number] < order.times:
                self._carried_out[number] += 1
                return order.fault
        return None

    def _answer(self, request: Request) -> tuple[AnyWire, Sequence[npt.NDArray[np.generic]]]:
        match request.message:
            case Train() as train:
                return self._train(train, request), self._prox(request) if self._spec.keep_prox else []
            case Publish() as publish:
                return self._publish(publish), []
            case Probe() as probe:
                logprobs = logprobs_of(request.arrays[0], self._version, self._vocab_size)
                return ProbeResult(id=probe.id, version=self._version), [logprobs]
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
            case SaveCheckpoint(path=path):
                time.sleep(self._recording.checkpoint_s(self._version) if self._recording is not None else 0.0)
                nbytes = self._write_checkpoint(Path(path), self._checkpoint())
                return CheckpointSaved(path=path, version=self._version, nbytes=nbytes), []
            case other:
                raise ValueError(f"a trainer can't answer {other}")

    def _checkpoint(self) -> bytes:
        books = self._books.stat().st_size if self._books is not None and self._books.exists() else 0
        return msgspec.json.encode(_Checkpointed(self._version, self._state, self.rank, self.world, books))

    def _write_checkpoint(self, folder: Path, content: bytes) -> int:
        path = folder / f"rank-{self.rank}.json"
        path.write_bytes(content)
        disk.sync(path)
        disk.sync(folder)
        return len(content)

    def _begin_writing(self, message: AnyWire) -> None:
        match message:
            case SaveCheckpoint(path=path):
                self._write_checkpoint(Path(path), self._checkpoint()[:-20])
            case Publish(version=version) if self.rank == 0 and self._spec.transport != "nccl":
                self._location(version).with_suffix(".partial").write_text("vers")

    def _train(self, train: Train, request: Request) -> StepDone:
        if train.step != self._version:
            raise TrainerError(f"rank {self.rank} holds version {self._version} and was asked for step {train.step}")
        recorded = self._recording.step(train.step) if self._recording is not None else None
        time.sleep(self._step_s if recorded is None else recorded.seconds)
        trained = sorted((sample.sample, sample.advantage) for sample in train.samples)
        self._state = zlib.crc32(msgspec.json.encode((train.step, trained)), self._state)
        lengths, *rest = request.arrays
        checksum = zlib.crc32(b"".join(array.tobytes() for array in rest))
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
                "checksum": checksum,
                "frames": _digest(frames.pack(train, request.arrays, id=request.id)),
                "state": self._state,
            }
        )
        self._version = train.step + 1
        done = StepDone(at=0.0, step=train.step, branch=train.branch, metrics={})
        if recorded is not None:
            return msgspec.structs.replace(done, metrics=recorded.metrics, skipped=recorded.skipped)
        metrics = {
            "loss": 0.0,
            "grad_norm": self._state / _CRC,
            "entropy": checksum / _CRC,
            "behav_ess": 1.0,
            "train_s": self._step_s,
        }
        return msgspec.structs.replace(done, metrics=metrics)

    def _prox(self, request: Request) -> list[npt.NDArray[np.generic]]:
        """As if the policy had become a little less sure of every token."""
        lengths, _, loss_mask, logprobs, _ = request.arrays
        return [lengths, np.where(loss_mask, logprobs.astype(np.float32) - PROX_LOWER, np.nan).astype(np.float32)]

    def _publish(self, publish: Publish) -> Published:
        if publish.version != self._version:
            raise TrainerError(f"version {publish.version} can't be published: the trainer holds {self._version}")
        time.sleep(self._recording.publish_s(publish.version) if self._recording is not None else 0.0)
        if self._spec.transport == "nccl":
            there = f"nccl:{publish.version}"
            return Published(at=0.0, version=publish.version, branch=publish.branch, location=there, nbytes=0)
        location = self._location(publish.version)
        if self.rank == 0:
            for version in publish.free:
                self._location(version).unlink(missing_ok=True)
            location.write_text(f"version {publish.version}")
        return Published(
            at=0.0, version=publish.version, branch=publish.branch, location=str(location), nbytes=len(str(location))
        )

    def _location(self, version: int) -> Path:
        return Path(f"/dev/shm/{self._spec.shm_prefix}-v{version}.safetensors")

    def _write(self, line: dict[str, object]) -> None:
        if self._books is not None:
            with self._books.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _begin(folder: Path) -> tuple[int, int]:
    """Version and state of the checkpoint in `folder`."""
    try:
        files = [msgspec.json.decode(path.read_bytes(), type=_Checkpointed) for path in folder.glob("rank-*.json")]
    except (OSError, msgspec.DecodeError) as error:
        raise TrainerError(f"checkpoint {folder}: a rank's file is broken: {error}") from error
    if not files or {file.rank for file in files} != set(range(files[0].world)):
        raise TrainerError(f"checkpoint {folder}: the files of some ranks are missing")
    if len({(file.version, file.state) for file in files}) != 1:
        raise TrainerError(f"checkpoint {folder}: the ranks' files are not of one version")
    return files[0].version, files[0].state


def _digest(packed: Sequence[bytes | memoryview]) -> str:
    """Of the frames of a message, and where each ends."""
    digest = hashlib.blake2b(digest_size=16)
    for frame in packed:
        digest.update(memoryview(frame).nbytes.to_bytes(8, "little"))
        digest.update(frame)
    return digest.hexdigest()


def _moment(message: AnyWire, held: int) -> tuple[Moment | None, int]:
    match message:
        case Train(step=step):
            return "train", step
        case Publish(version=version):
            return "publish", version
        case Probe():
            return "probe", held
        case SaveCheckpoint():
            return "checkpoint", held
        case SaveModel():
            return "save", held
    return None, held


def logprobs_of(
    token_ids: npt.NDArray[np.generic], newest: int, vocab_size: int = VOCAB_SIZE
) -> npt.NDArray[np.float32]:
    """What the scripted server says of an answer without a seed, under a version up to `newest`: the longest end of the
    sequence that one of them can have drawn is the answer."""
    tokens = token_ids.tolist()
    out = np.zeros(len(tokens), np.float32)
    for begin in range(1, len(tokens)):
        for version in range(newest, -1, -1):
            if all(token == drawn_token(0, version, at, vocab_size) for at, token in enumerate(tokens[begin:])):
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
    parser.add_argument("--orders", default="[]", help="what goes wrong: a JSON list of TrainerOrder")
    parser.add_argument("--recorded", type=Path, help="log folder of a run whose steps it answers with")
    parser.add_argument("--pace", type=float, default=1.0, help="by which recorded durations are multiplied")
    arguments = parser.parse_args()
    spec = msgspec.json.decode(arguments.spec.read_bytes(), type=TrainerSpec)
    secret = os.environ["AREAL_ASYNC_SECRET"]
    orders = msgspec.json.decode(arguments.orders, type=list[TrainerOrder])
    recording, vocab_size = None, VOCAB_SIZE
    try:
        if arguments.recorded is not None:
            from areal_async.testing.recipes import vocabulary  # they are made of this module
            from areal_async.testing.recorded import RecordedRun

            recording, vocab_size = RecordedRun(arguments.recorded, arguments.pace), vocabulary(spec.model_path)
        ranks = [
            ScriptedRank(rank, arguments.ranks, spec, arguments.step_s, arguments.books, orders, recording, vocab_size)
            for rank in range(arguments.ranks)
        ]
    except ArealError as error:
        sys.exit(f"trainer: {error}")
    threads = [threading.Thread(target=rank.serve, args=(arguments.connect, secret)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
