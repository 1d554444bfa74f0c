"""A trainer rank: `python -m areal_async.engines.deepspeed.rank --connect ADDRESS --spec FILE`, under torchrun; on
another host than the controller's `… --connection FILE` (`areal-async worker trainer` comes to this).

What always holds: requests are done one after another in the order in which they come, which is the same for all ranks;
each is answered once, by its result or by a `WorkerError` with the traceback. After an error in a training step the
rank ends: its peers may wait for it in a collective call, and gradients may be half there. After any other error it
goes on. With the transport nccl, rank 0 sends weights to the servers beside all this (`nccl.Transfer`). What was
published is removed at the end.
"""

import argparse
import logging
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

import msgspec
import numpy as np

from areal_async.errors import ArealError, TrainerError
from areal_async.messages import (
    PROTOCOL,
    AnyWire,
    CheckpointSaved,
    Goodbye,
    Hello,
    ModelSaved,
    ParameterInfo,
    Probe,
    ProbeResult,
    Publish,
    Published,
    SaveCheckpoint,
    SaveModel,
    Train,
    TrainerConnection,
    TrainerSpec,
    Version,
    WorkerError,
)
from areal_async.wire.dealer import Dealer, Request

if TYPE_CHECKING:
    from areal_async.engines.deepspeed.batch import Array

log = logging.getLogger(__name__)

CREDITS: Final = 2  # one request in work, one that waits: the next step's arrays travel while a step is trained
TRANSFER_CREDITS: Final = 4  # further ones where weights are sent beside it: join, send, leave, and one that waits
WAIT_S: Final = 60.0  # only how often `receive` returns; a dead controller is noticed by the wire

Answer: TypeAlias = tuple[AnyWire, "Sequence[Array]"]


class Rank:
    """Does what messages ask, together with the other ranks; rank 0 alone writes files, but for checkpoints.

    Raises TrainerError if the model or the checkpoint of `spec` isn't there or can't be right.
    """

    def __init__(self, spec: TrainerSpec, rank: int, world: int, local_rank: int) -> None:
        import torch
        from transformers.utils.logging import disable_progress_bar

        from areal_async.engines.deepspeed.checkpoint import Checkpoint
        from areal_async.engines.deepspeed.engine import open_engine, start_ranks
        from areal_async.engines.deepspeed.model import load_model, save_activations
        from areal_async.engines.deepspeed.nccl import Transfer
        from areal_async.engines.deepspeed.publish import Publisher
        from areal_async.engines.deepspeed.reference import load_reference
        from areal_async.engines.deepspeed.step import Trainer

        device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.manual_seed(spec.seed)
        disable_progress_bar()  # stderr is read by people, and its tail stands in errors
        start_ranks(device)
        checkpoint = Checkpoint(Path(spec.checkpoint)) if spec.checkpoint else None
        model = load_model(spec.model_path, spec.dtype, device)
        if checkpoint is not None:
            checkpoint.load_weights(model)
        if spec.gradient_checkpointing:
            save_activations(model, spec.model_path)
        reference = load_reference(spec, model, device) if spec.kl_coef else None
        self._spec = spec
        self._rank = rank
        self._world = world
        self._trainer = Trainer(open_engine(model, spec), spec, rank, world, reference)
        if checkpoint is not None:
            checkpoint.load_states(self._trainer.engine, rank)
            self._trainer.version, self._trainer.updates = checkpoint.version, checkpoint.updates
        self._files = Publisher(spec.shm_prefix, Path(spec.publish_folder))
        self.transfer = Transfer(device, self.manifest()) if rank == 0 and spec.transport == "nccl" else None

    @property
    def version(self) -> Version:
        return self._trainer.version

    def manifest(self) -> tuple[ParameterInfo, ...]:
        from areal_async.engines.deepspeed.model import manifest

        return manifest(self._trainer.engine.module, self._spec.publish_dtype)

    def answer(self, request: Request) -> Answer:
        """Do what is asked. Raises whatever goes wrong."""
        match request.message:
            case Train() as train:
                return self._trainer.train(train, request.arrays), self._trainer.kept
            case Publish() as publish:
                return self._publish(publish), ()
            case Probe() as probe:
                return self._probe(probe, request.arrays)
            case SaveModel(path=path):
                return self._save(Path(path)), ()
            case SaveCheckpoint(path=path):
                return self._save_checkpoint(Path(path)), ()
            case other:
                raise TrainerError(f"a trainer rank can't answer {type(other).__name__}")

    def close(self) -> None:
        self._files.close()
        if self.transfer is not None:
            self.transfer.close()

    def _publish(self, publish: Publish) -> Published:
        from areal_async.engines.deepspeed.model import pass_tensors, published_tensors, whole_tensors

        held, module = self._trainer.version, self._trainer.engine.module
        if publish.version != held:
            raise TrainerError(f"version {publish.version} can't be published: the trainer holds version {held}")
        location, nbytes = "", 0
        if self._rank != 0:
            pass_tensors(module)
        elif self.transfer is not None:
            self.transfer.free(publish.free)
            location, nbytes = self.transfer.publish(publish.version, whole_tensors(module))
        else:
            self._files.free(publish.free)
            path, nbytes = self._files.publish(publish.version, published_tensors(module, self._spec.publish_dtype))
            location = str(path)
        return Published(at=0.0, version=publish.version, branch=publish.branch, location=location, nbytes=nbytes)

    def _probe(self, probe: Probe, arrays: "Sequence[Array]") -> Answer:
        import torch

        from areal_async.engines.deepspeed.model import sequence_log_probs

        if len(arrays) != 1 or arrays[0].ndim != 1 or not len(arrays[0]):
            raise TrainerError(f"probe {probe.id}: one array of token ids is needed")
        engine = self._trainer.engine
        token_ids = torch.from_numpy(arrays[0].astype(np.int64)).to(engine.module.device)
        result = sequence_log_probs(engine, token_ids, self._spec.temperature)
        return ProbeResult(id=probe.id, version=self._trainer.version), (result.to("cpu", torch.float32).numpy(),)

    def _save(self, path: Path) -> ModelSaved:
        from areal_async.engines.deepspeed.model import pass_tensors, save_model

        if self._rank == 0:
            save_model(self._trainer.engine.module, Path(self._spec.model_path), path)
        else:
            pass_tensors(self._trainer.engine.module)
        return ModelSaved(path=str(path), version=self._trainer.version)

    def _save_checkpoint(self, path: Path) -> CheckpointSaved:
        from areal_async.engines.deepspeed.checkpoint import save

        trainer = self._trainer
        nbytes = save(trainer.engine, path, trainer.version, trainer.updates, self._rank, self._world)
        return CheckpointSaved(path=str(path), version=trainer.version, nbytes=nbytes)


def serve(rank: Rank, dealer: Dealer) -> None:
    """Answer requests until `Goodbye`. Raises WireError when the controller is gone, and what a step raised."""
    while True:
        request = dealer.receive(WAIT_S)
        if request is None:
            continue
        if isinstance(request.message, Goodbye):
            return
        try:
            message, arrays = rank.answer(request)
        except Exception as error:
            why = str(error) if isinstance(error, ArealError) else traceback.format_exc()
            log.error("request %s failed: %s", request.id, why)
            dealer.reply(request, WorkerError(why=why))
            if isinstance(request.message, Train):
                raise
            continue
        dealer.reply(request, message, arrays)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_async.engines.deepspeed.rank", description=__doc__)
    parser.add_argument("--connect", metavar="ADDRESS", help="the controller's ZeroMQ address")
    parser.add_argument("--spec", metavar="FILE", help="JSON file with a TrainerSpec")
    parser.add_argument("--connection", metavar="FILE", help="in place of both: connect.json of the run folder")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if options.connection is not None:
        there = msgspec.json.decode(Path(options.connection).read_bytes(), type=TrainerConnection)
        # no guard is here to remove what was published: torchrun's SIGTERM must not end us before we have
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        return run(there.spec, there.address, there.secret, there.public_key)
    spec = msgspec.json.decode(Path(options.spec).read_bytes(), type=TrainerSpec)
    return run(spec, options.connect, os.environ["AREAL_ASYNC_SECRET"])


def run(spec: TrainerSpec, address: str, secret: str, server_key: str | None = None) -> int:
    """Be the rank that torchrun's environment says, until the controller says goodbye or is gone; the exit code."""
    number, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    try:
        rank = Rank(spec, number, world, local_rank)
    except ArealError as error:
        print(f"trainer.{number}: {error}", file=sys.stderr)
        return 1
    transfer = rank.transfer
    hello = Hello(
        protocol=PROTOCOL,
        secret=secret,
        worker="trainer",
        name=f"trainer.{number}",
        nonce=uuid.uuid4().hex,
        credits=CREDITS + (TRANSFER_CREDITS if transfer is not None else 0),
        rank=number,
        world=world,
        version=rank.version,
        parameters=rank.manifest() if number == 0 else (),
    )
    try:
        with Dealer(address, hello, server_key=server_key, aside=transfer.take if transfer else None) as dealer:
            serve(rank, dealer)
    except ArealError as error:
        print(f"trainer.{number}: {error}", file=sys.stderr)
        return 1
    finally:
        rank.close()
    return 0


def leave(code: int) -> NoReturn:
    """End this process, without Python's own end of everything.

    A thread of Gloo lets go of its last tensor some time after the collective call, by Python's lock. Where Python is
    ending by then, on a busy machine, that aborts a rank whose work is done (github.com/pytorch/pytorch/pull/179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
