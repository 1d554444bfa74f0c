"""Checkpoints of real DeepSpeed ranks: whatever wrote one, any number of ranks, ZeRO stage and precision goes on.

In bfloat16 another split rounds differently, so a step is the same to 0.5 % of the loss and 2 % of what the weights
move (seen: 0.2 % and 0.8 %); what is read from the file is the same bit by bit there too.
"""

import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from areal_async.engines.deepspeed.checkpoint import Checkpoint, share_out
from areal_async.errors import TrainerError, WireError
from areal_async.messages import Publish, SaveCheckpoint

from .checkpoint_ranks import BATCH
from .processes import run_to_the_end, torchrun
from .test_deepspeed import trainer
from .world import CONFIGS, SHAPE, make_batch, save_tiny_model

pytestmark = pytest.mark.slow

RANKS = (1, 2)
# bfloat16 without ZeRO is DeepSpeed's optimiser of stage 1
STAGES = {"float32": (0, 1, 2, 3), "bfloat16": (1, 2, 3)}
# a rate that differs at every update, so that a wrong place in the schedule is seen; decay and clipping take part
SPEC = {"lr": 1e-2, "warmup_steps": 20, "weight_decay": 0.1, "max_grad_norm": 0.5}
BEFORE, AFTER = [0, 1], [2]
# One more step, against the run that wasn't interrupted, in whatever way either is split. Relative: the loss; what the
# weights moved, as norms (single weights of no gradient, such as key biases, move by their gradient's rounding).
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.005}
MOVE_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}
WEIGHT_TOLERANCE = 1e-6  # float32, each weight; a step moves some by 0.005


@dataclass(frozen=True)
class Split:
    """How training is split, and in which precision."""

    ranks: int
    stage: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}-{self.ranks}-{self.stage}"


SPLITS = [Split(ranks, stage, dtype) for dtype, stages in STAGES.items() for ranks in RANKS for stage in stages]
UNTRAINED, UNTRAINED_READER = Split(2, 3, "bfloat16"), Split(1, 2, "float32")


@dataclass
class Seen:
    folder: Path  # of its checkpoint
    held: dict[str, Tensor]
    masters: dict[str, Tensor]
    metrics: list[dict[str, float]]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Everything in a checkpoint but the generators."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys() if not key.startswith("random/")}  # noqa: SIM118
    return found


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trainer.json").read_text())


class Runs:
    """Entries, run together by number of ranks, in fresh processes."""

    def __init__(self, model: Path, root: Path) -> None:
        self.model, self._root = model, root

    def run(self, entries: dict[Any, tuple[Split, Path | None, list[int], list[int]]]) -> dict[Any, Seen]:
        """By a name: how it is split, what it begins with, steps before and after the checkpoint."""
        plans: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in RANKS}
        outs: dict[Any, Path] = {}
        for name, (split, load, before, after) in entries.items():
            outs[name] = out = self._root / str(len(list(self._root.iterdir())))
            (out / "checkpoint").mkdir(parents=True)
            plans[split.ranks].append(
                {
                    "model": str(self.model),
                    "spec": SPEC | {"zero_stage": split.stage, "dtype": split.dtype},
                    "load": str(load) if load else None,
                    "before": before,
                    "save": str(out / "checkpoint"),
                    "after": after,
                    "out": str(out),
                }
            )
        for ranks, plan in plans.items():
            if plan:
                path = self._root.with_name(f"plan-{len(outs)}-{ranks}.json")
                path.write_text(json.dumps(plan))
                run_to_the_end(torchrun(ranks, "tests.trainer.checkpoint_ranks", str(path)))
        return {name: self._seen(out) for name, out in outs.items()}

    def _seen(self, out: Path) -> Seen:
        return Seen(
            out / "checkpoint",
            load_file(out / "held.safetensors"),
            load_file(out / "masters.safetensors"),
            json.loads((out / "metrics.json").read_text()),
        )


@dataclass
class Ran:
    through: dict[Split, Seen]
    resumed: dict[tuple[Split, Split], Seen]  # by who wrote and who went on
    untrained: tuple[Seen, Seen]  # written before the first step, and by who read that


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    model = save_tiny_model(tmp_path_factory.mktemp("model"), CONFIGS["qwen2, tied"])
    return Runs(model, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def ran(runs: Runs) -> Ran:
    through = runs.run({split: (split, None, BEFORE, AFTER) for split in SPLITS} | {None: (UNTRAINED, None, [], [])})
    pairs = [(wrote, reads) for wrote in SPLITS for reads in readers_of(wrote)]
    entries = {pair: (pair[1], through[pair[0]].folder, [], AFTER) for pair in pairs}
    of_nothing = through.pop(None)
    resumed = runs.run(entries | {None: (UNTRAINED_READER, of_nothing.folder, [], [])})
    return Ran(through, resumed, (of_nothing, resumed.pop(None)))


def readers_of(wrote: Split) -> list[Split]:
    """Of another stage, on the other number of ranks; on one rank, itself too, and in the other precision."""
    stages = STAGES[wrote.dtype]
    place = stages.index(wrote.stage)
    further = 1 if wrote.ranks == 1 else 2
    across = Split(3 - wrote.ranks, stages[(place + further) % len(stages)], wrote.dtype)
    [other] = STAGES.keys() - {wrote.dtype}
    converted = Split(1, STAGES[other][-1 - place % 3], other)
    return [across, wrote, converted] if wrote.ranks == 1 and wrote.stage in (0, 2, 3) else [across]


def test_every_split_reads_what_another_wrote() -> None:
    """Of the test itself."""
    assert {reads for wrote in SPLITS for reads in readers_of(wrote) if reads.ranks != wrote.ranks} == set(SPLITS)


def test_all_that_was_written_comes_back_bit_by_bit(ran: Ran) -> None:
    """What a resumed trainer would write again is what it has read; master weights, Adam's states, steps."""
    for (wrote, reads), seen in ran.resumed.items():
        first, second = ran.through[wrote].folder, seen.folder
        before, after = tensors_of(first), tensors_of(second)
        assert before.keys() == after.keys(), (wrote, reads)
        for key in before:
            assert before[key].dtype == torch.float32
            assert torch.equal(before[key], after[key]), (wrote, reads, key)
        said = [(index["version"], index["updates"]) for index in map(index_of, (first, second))]
        assert said == [(len(BEFORE), len(BEFORE) * BATCH["minibatches"])] * 2


def test_nothing_trained_yet(ran: Ran) -> None:
    wrote, read = (tensors_of(seen.folder) for seen in ran.untrained)
    assert {key.split("/")[0] for key in wrote} == {"weight"}
    assert wrote.keys() == read.keys()
    assert all(torch.equal(wrote[key], read[key]) for key in wrote)
    assert [index_of(seen.folder)[key] for seen in ran.untrained for key in ("version", "updates")] == [0, 0, 0, 0]


def test_weights_are_the_rounded_master_weights(ran: Ran) -> None:
    for (wrote, reads), seen in ran.resumed.items():
        masters = tensors_of(seen.folder)
        for name, weight in seen.held.items():
            assert weight.dtype == getattr(torch, reads.dtype)
            assert torch.equal(weight, masters[f"weight/{name}"].to(weight.dtype)), (wrote, reads, name)


def test_the_next_step_is_that_of_the_uninterrupted_run(ran: Ran) -> None:
    for (wrote, reads), seen in ran.resumed.items():
        if wrote.dtype != reads.dtype:
            continue
        right, dtype = ran.through[wrote], wrote.dtype
        before = flat(tensors_of(right.folder), "weight/")
        loss, expected = seen.metrics[-1]["loss"], right.metrics[-1]["loss"]
        moved, off = flat(right.masters) - before, flat(seen.masters) - flat(right.masters)
        assert seen.metrics[-1]["lr"] == right.metrics[-1]["lr"], (wrote, reads)
        assert loss == pytest.approx(expected, rel=LOSS_TOLERANCE[dtype]), (wrote, reads)
        assert off.norm() < MOVE_TOLERANCE[dtype] * moved.norm(), (wrote, reads)
        if dtype == "float32":
            assert off.abs().max() < WEIGHT_TOLERANCE < 1e-3 * moved.abs().max(), (wrote, reads)
        if wrote == reads:
            assert not off.any(), wrote


def flat(tensors: dict[str, Tensor], prefix: str = "") -> Tensor:
    return torch.cat([tensors[key].flatten() for key in sorted(tensors) if key.startswith(prefix)])


# ------------------------------------------------------------------------------------- what can't be right is refused


@pytest.fixture
def copy(ran: Ran, tmp_path: Path) -> Path:
    """Of a checkpoint of two ranks."""
    return Path(shutil.copytree(ran.through[Split(2, 2, "float32")].folder, tmp_path / "copy"))


def tear(copy: Path, _: Ran) -> None:
    path = copy / "trainer-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def zero(copy: Path, _: Ran) -> None:
    path = copy / "trainer-1.safetensors"
    path.write_bytes(bytes(path.stat().st_size))


def put_another(copy: Path, ran: Ran) -> None:
    other = ran.through[Split(2, 1, "float32")].folder  # of the same version, and as many bytes
    shutil.copyfile(other / "trainer-1.safetensors", copy / "trainer-1.safetensors")


def drop_a_tensor(copy: Path, _: Ran) -> None:
    path = copy / "trainer-1.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del tensors["exp_avg/model.norm.weight" if "exp_avg/model.norm.weight" in tensors else sorted(tensors)[0]]
    save_file(tensors, path, metadata)


def of_another_form(copy: Path, _: Ran) -> None:
    (copy / "trainer.json").write_text((copy / "trainer.json").read_text().replace('"form": 1', '"form": 2'))


SPOILED = {
    "an empty folder": (lambda copy, _: [path.unlink() for path in copy.iterdir()], "trainer.json is missing"),
    "half an index": (lambda copy, _: os.truncate(copy / "trainer.json", 100), "trainer.json can't be read"),
    "another form": (of_another_form, "it is of form 2; this version reads form 1"),
    "a missing file": (lambda copy, _: (copy / "trainer-1.safetensors").unlink(), "trainer-1.safetensors is missing"),
    "a torn file": (tear, "trainer-1.safetensors is torn"),
    "a file of zeros": (
        lambda copy, _: (copy / "trainer-1.safetensors").write_bytes(bytes(99)),
        "1.safetensors is torn",
    ),
    "another's file": (put_another, "trainer-1.safetensors is another checkpoint's"),
    "a missing tensor": (drop_a_tensor, "trainer-1.safetensors has no exp_avg/"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_p10_what_is_not_whole_is_refused_by_name(ran: Ran, copy: Path, how: str) -> None:
    Checkpoint(copy)
    spoil, why = SPOILED[how]
    spoil(copy, ran)
    with pytest.raises(TrainerError, match=why):
        Checkpoint(copy)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("llama", "lm_head.weight is not there, in the model it is .31, 32."),
        ("qwen2, wider", "model.layers.0.mlp.down_proj.weight is .32, 48., in the model it is .32, 64."),
    ],
)
def test_another_models_checkpoint_is_refused(copy: Path, other: str, why: str) -> None:
    wider = Qwen2Config(**SHAPE, intermediate_size=64, num_key_value_heads=2, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config({"llama": CONFIGS["llama"], "qwen2, wider": wider}[other])
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(TrainerError, match=why):
        Checkpoint(copy).load_weights(model)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_the_parts_are_about_as_large() -> None:
    placed = share_out({"a": (100, 10), "b": (10, 90), "c": (200,), "d": (300,), "e": (7,)}, 2)
    sizes = [sum(math.prod(own.shape) for own in placed.values() if own.rank == rank) for rank in range(2)]
    assert max(sizes) - min(sizes) <= 7


# -------------------------------------------------------------------------------------------------- over the real wire


async def test_p08_ranks_begin_with_a_version_and_write_it_again(runs: Runs, ran: Ran, tmp_path: Path) -> None:
    """Two ranks begin with what one wrote; one of them can't write; then there is room."""
    wrote = Split(1, 1, "float32")
    changes = SPEC | {"zero_stage": 3, "checkpoint": str(ran.through[wrote].folder)}
    full, good = tmp_path / "full", tmp_path / "good"
    full.mkdir()
    good.mkdir()
    (full / "trainer-1.safetensors").symlink_to("/dev/full")
    with tempfile.TemporaryDirectory(prefix="aa-") as short:
        prefix = f"areal-test-{os.getpid()}"
        async with trainer(runs.model, f"ipc://{short}/w", tmp_path, 2, shm_prefix=prefix, **changes) as (ranks, _):
            assert {hello.version for hello in ranks.hellos.values()} == {2}
            with pytest.raises(WireError, match="the trainer holds version 2"):
                await ranks.ask(Publish(version=0, branch=1))
            [(published, _), _] = await ranks.ask(Publish(version=2, branch=1))
            assert (published.version, published.branch) == (2, 1)
            with pytest.raises(WireError, match=r"trainer-1\.safetensors can't be written: .*No space left"):
                await ranks.ask(SaveCheckpoint(path=str(full)))
            answers = [answer for answer, _ in await ranks.ask(SaveCheckpoint(path=str(good)))]
            assert [(saved.path, saved.version) for saved in answers] == [(str(good), 2)] * 2
            assert sum(saved.nbytes for saved in answers) == sum(path.stat().st_size for path in good.iterdir())
            train, arrays = make_batch(**BATCH, ranks=2, step=2, seed=2)
            done = await ranks.train(train, arrays)
    assert done.metrics["loss"] == pytest.approx(ran.through[wrote].metrics[-1]["loss"], rel=1e-5)
    before, after = tensors_of(ran.through[wrote].folder), tensors_of(good)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
