"""Checkpoints of the trainer: all that training needs to go on, in a form that doesn't depend on how it was split.

A folder holds `trainer.json` (which version, which parameters of which shape, in which file) and a safetensors file of
each rank that wrote it (`trainer-0.safetensors`, …). In these, for every parameter under its Hugging Face name, whole
and in float32: `weight/NAME` (the master weights), `exp_avg/NAME` and `exp_avg_sq/NAME` (Adam's; not there before the
first update); and `random/cpu`, `random/cuda`, that rank's generators.

What always holds:
- Any number of ranks, ZeRO stage and precision can begin with it. Master weights and Adam's states come back bit by
  bit, and low-precision weights are the rounded master weights, as after any update.
- A rank never holds more than one gathered tensor: parameters are shared out over the ranks, all gather one tensor
  together, and the one that it was given to writes it before the next is gathered.
- A rank that can't write takes part in the gathering to the end, so that nobody waits for it; then it raises.
- Whatever is missing, torn, of another checkpoint or of another model is refused by name before anything is changed.

DeepSpeed's own universal checkpoint isn't used: it is made from an ordinary one by another program that has to run
between saving and loading, and there is none of float32 without ZeRO.
"""

import contextlib
import json
import os
import struct
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec
import torch
import torch.distributed
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from areal_async import disk
from areal_async.errors import TrainerError
from areal_async.messages import Version

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

INDEX: Final = "trainer.json"
FORM: Final = 1  # of the folder; a reader refuses another
ALIGNMENT: Final = 8  # bytes; where safetensors' data begin

Kind: TypeAlias = Literal["weight", "exp_avg", "exp_avg_sq"]
MOMENTS: Final[tuple[Kind, ...]] = ("exp_avg", "exp_avg_sq")
DTYPES: Final = {torch.float32: "F32", torch.uint8: "U8"}

Shape: TypeAlias = tuple[int, ...]


class Placed(msgspec.Struct, frozen=True):
    """Where a parameter's tensors are: in the file of rank `rank`."""

    shape: Shape
    rank: int


class Index(msgspec.Struct, frozen=True):
    """`trainer.json`. id: the same in all files of a checkpoint, and in no others. version: training steps. updates:
    optimiser steps, which is Adam's step of every parameter and the place in the learning rate's schedule."""

    form: int
    id: str
    version: Version
    updates: int
    ranks: int
    parameters: dict[str, Placed]


# ----------------------------------------------------------------------------------------------------------- writing


def save(engine: "DeepSpeedEngine", folder: Path, version: Version, updates: int, rank: int, world: int) -> int:
    """Write a checkpoint to `folder`, which exists; all ranks together. Answers how many bytes this rank wrote; they
    are on the disk then. Raises TrainerError if it can't."""
    parameters = dict(engine.module.named_parameters())
    placed = share_out({name: _shape(parameter) for name, parameter in parameters.items()}, world)
    index = Index(FORM, _common_id(world), version, updates, world, placed)
    kinds = _kinds(updates)
    if updates:
        _link_moments(engine)
    random = _random_states()
    entries = {f"{kind}/{name}": (torch.float32, own.shape) for name, own in placed.items() for kind in kinds}
    mine = {key: entry for key, entry in entries.items() if placed[_name(key)].rank == rank}
    mine |= {key: (state.dtype, tuple(state.shape)) for key, state in random.items()}
    file = _Writer(folder / _file(rank), mine, {"id": index.id, "version": str(version)})
    for name, parameter in parameters.items():
        for kind in kinds:
            tensor = _gathered(engine, parameter, kind)
            if placed[name].rank == rank:
                file.write(tensor)
            del tensor
    for state in random.values():
        file.write(state)
    nbytes = file.close()
    if rank == 0:
        nbytes += _write_synced(folder / INDEX, msgspec.json.format(msgspec.json.encode(index)))
    disk.sync(folder)
    return nbytes


def share_out(shapes: Mapping[str, Shape], world: int) -> dict[str, Placed]:
    """Which rank writes which parameter: about as many bytes each."""
    load = [0] * world
    owner: dict[str, int] = {}
    for name in sorted(shapes, key=lambda name: -torch.Size(shapes[name]).numel()):
        owner[name] = load.index(min(load))
        load[owner[name]] += torch.Size(shapes[name]).numel()
    return {name: Placed(shape, owner[name]) for name, shape in shapes.items()}


class _Writer:
    """A safetensors file, written tensor by tensor in the order of `entries`. It raises nothing before `close`."""

    def __init__(
        self, path: Path, entries: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str]
    ) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        for key, (dtype, shape) in entries.items():
            begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[key] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._path = path
        self._error: OSError | None = None
        self._stack = contextlib.ExitStack()
        try:
            self._file = self._stack.enter_context(path.open("wb"))
            self._file.write(struct.pack("<Q", len(text)) + text)
        except OSError as error:
            self._error = error

    def write(self, tensor: Tensor) -> None:
        if self._error is not None:
            return
        try:
            self._file.write(tensor.detach().contiguous().cpu().numpy().data)
        except OSError as error:
            self._error = error

    def close(self) -> int:
        """Have it on the disk; its size. Raises TrainerError with the first thing that went wrong."""
        try:
            if self._error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                size = self._file.tell()
                self._stack.close()
        except OSError as error:
            self._error = error
        if self._error is not None:
            with contextlib.suppress(OSError):  # the same again
                self._stack.close()
            raise _not_written(self._path, self._error)
        return size


def _gathered(engine: "DeepSpeedEngine", parameter: Parameter, kind: Kind) -> Tensor:
    """The whole float32 tensor, on every rank; all ranks together."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if _is_bare(engine):
        whole: Tensor = parameter if kind == "weight" else engine.optimizer.state[parameter][kind]
    elif kind == "weight":
        whole = safe_get_full_fp32_param(parameter)
    else:
        whole = safe_get_full_optimizer_state(parameter, kind)
    return whole


def _common_id(world: int) -> str:
    ids: list[str] = [uuid.uuid4().hex]
    if world > 1:
        torch.distributed.broadcast_object_list(ids, src=0)
    return ids[0]


def _random_states() -> dict[str, Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random/cuda"] = torch.cuda.get_rng_state()
    return states


def _write_synced(path: Path, content: bytes) -> int:
    try:
        path.write_bytes(content)
        disk.sync(path)
    except OSError as error:
        raise _not_written(path, error) from error
    return len(content)


def _not_written(path: Path, error: OSError) -> TrainerError:
    return TrainerError(
        f"checkpoint: {path} can't be written: {error}; is there room, and may this process write there?"
    )


# ----------------------------------------------------------------------------------------------------------- reading


class Checkpoint:
    """One that a trainer begins with: `load_weights` before the model is split, `load_states` after it.

    Raises TrainerError if a file is missing, torn, or another checkpoint's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = _read_index(folder)
        for rank in range(self._index.ranks):
            self._check_file(rank)

    @property
    def version(self) -> Version:
        return self._index.version

    @property
    def updates(self) -> int:
        return self._index.updates

    @torch.no_grad()
    def load_weights(self, model: PreTrainedModel) -> None:
        """Set the model's weights, rounded to its precision. Raises TrainerError if it is another model's checkpoint;
        then nothing was changed."""
        parameters = dict(model.named_parameters())
        self._check_model(parameters)
        for name, tensor in self._tensors("weight"):
            parameters[name].copy_(tensor)

    @torch.no_grad()
    def load_states(self, engine: "DeepSpeedEngine", rank: int) -> None:
        """Set the master weights and Adam's states, in the engine around the model that has the weights already; and
        the generators, if there was such a rank."""
        parameters = dict(engine.module.named_parameters())
        if self.updates:
            _make_moments(engine, self.updates)
        for kind in _kinds(self.updates):
            for name, tensor in self._tensors(kind):
                _set(engine, parameters[name], kind, tensor, rank)
        if rank < self._index.ranks:
            with self._open(rank) as file:
                torch.set_rng_state(file.get_tensor("random/cpu"))
                if torch.cuda.is_available() and "random/cuda" in file.keys():  # noqa: SIM118  it isn't iterable
                    torch.cuda.set_rng_state(file.get_tensor("random/cuda"))

    def _tensors(self, kind: Kind) -> Iterable[tuple[str, Tensor]]:
        """All of a kind; each is read when it is used."""
        for rank in range(self._index.ranks):
            with self._open(rank) as file:
                for name, placed in self._index.parameters.items():
                    if placed.rank == rank:
                        yield name, file.get_tensor(f"{kind}/{name}")

    def _open(self, rank: int) -> safe_open:
        path = self._folder / _file(rank)
        try:
            return safe_open(path, "pt")
        except FileNotFoundError as error:
            raise TrainerError(f"checkpoint {self._folder}: {path.name} is missing") from error
        except (OSError, SafetensorError) as error:
            raise TrainerError(f"checkpoint {self._folder}: {path.name} is torn: {error}") from error

    def _check_file(self, rank: int) -> None:
        index, name = self._index, _file(rank)
        with self._open(rank) as file:
            if (file.metadata() or {}).get("id") != index.id:
                raise TrainerError(
                    f"checkpoint {self._folder}: {name} is another checkpoint's: its id is not {INDEX}'s"
                )
            there = set(file.keys())
            for parameter, placed in index.parameters.items():
                for key in [f"{kind}/{parameter}" for kind in _kinds(index.updates)] if placed.rank == rank else []:
                    if key not in there or tuple(file.get_slice(key).get_shape()) != placed.shape:
                        raise TrainerError(f"checkpoint {self._folder}: {name} has no {key} of shape {placed.shape}")

    def _check_model(self, parameters: Mapping[str, Parameter]) -> None:
        saved = self._index.parameters
        for name in sorted(saved.keys() | parameters.keys()):
            own = tuple(parameters[name].shape) if name in parameters else None
            there = saved[name].shape if name in saved else None
            if own != there:
                raise TrainerError(
                    f"checkpoint {self._folder} is another model's: {name} is {there or 'not there'}, in the model it "
                    f"is {own or 'not there'}; go on with the model that the run was started with (model.path)"
                )


def _read_index(folder: Path) -> Index:
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    except FileNotFoundError as error:
        raise TrainerError(f"checkpoint {folder}: {INDEX} is missing") from error
    except (OSError, msgspec.DecodeError) as error:
        raise TrainerError(f"checkpoint {folder}: {INDEX} can't be read: {error}") from error
    if index.form != FORM:
        raise TrainerError(f"checkpoint {folder}: it is of form {index.form}; this version reads form {FORM}")
    return index


def _make_moments(engine: "DeepSpeedEngine", updates: int) -> None:
    """Adam's states, which are otherwise made by the first update: of each tensor that the optimiser drives."""
    optimizer = engine.basic_optimizer
    driven: list[Tensor] = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3 gives them to it one at a time
        driven = engine.optimizer.fp32_partitioned_groups_flat
    for tensor in driven:
        state = {"step": torch.tensor(float(updates), dtype=torch.float32, device=tensor.device)}
        state |= {moment: torch.zeros_like(tensor, requires_grad=False) for moment in MOMENTS}
        optimizer.state[tensor] = state
    _link_moments(engine)


def _link_moments(engine: "DeepSpeedEngine") -> None:
    """Let DeepSpeed find a parameter's share of Adam's states. It does so itself, once, but when only those of the
    first parameter group are there: of the others it would say that there are none."""
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _set(engine: "DeepSpeedEngine", parameter: Parameter, kind: Kind, whole: Tensor, rank: int) -> None:
    """Set this rank's share of it."""
    from deepspeed import utils

    if _is_bare(engine):
        target = parameter if kind == "weight" else engine.optimizer.state[parameter][kind]
        target.copy_(whole)
    elif hasattr(parameter, "ds_id"):
        # not `safe_set_full_…`: it can't take numbers that don't divide by the ranks
        share = _padded_share(whole.flatten(), parameter.ds_tensor.numel(), rank)
        if kind == "weight":
            utils.safe_set_local_fp32_param(parameter, share)
        else:
            utils.safe_set_local_optimizer_state(parameter, share, kind)
    elif kind == "weight":
        utils.safe_set_full_fp32_param(parameter, whole)
    else:
        utils.safe_set_full_optimizer_state(parameter, whole, kind)


def _padded_share(flat: Tensor, numbers: int, rank: int) -> Tensor:
    """The rank's share of `numbers` numbers, with zeros where the tensor has ended."""
    own = flat[numbers * rank : numbers * (rank + 1)]
    return torch.cat([own, own.new_zeros(numbers - len(own))])


def _is_bare(engine: "DeepSpeedEngine") -> bool:
    """Float32 without ZeRO: torch's own optimiser on whole parameters."""
    return engine.optimizer is engine.basic_optimizer


def _kinds(updates: int) -> tuple[Kind, ...]:
    """Before the first update Adam has no states."""
    return ("weight", *MOMENTS) if updates else ("weight",)


def _shape(parameter: Parameter) -> Shape:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _name(key: str) -> str:
    return key.split("/", 1)[1]


def _file(rank: int) -> str:
    return f"trainer-{rank}.safetensors"
