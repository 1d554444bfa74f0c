"""`rank.py` over the real wire: real DeepSpeed ranks under torchrun, and what they answer."""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from areal_async.engines.deepspeed.engine import RESIDENT_NUMBERS
from areal_async.errors import WireError
from areal_async.launch.recipes import trainer_command
from areal_async.messages import Hello, ModelSaved, Probe, ProbeResult, Publish, Published, SaveModel, StepDone, Train
from areal_async.wire.router import Router

from .processes import DEADLINE_S, process
from .world import CONFIGS, SHAPE, make_batch, save_tiny_model, spec_for

pytestmark = pytest.mark.slow

SECRET = "secret of the test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), CONFIGS["qwen2, tied"])


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="aa-") as short:  # pytest's own paths are too long for a socket
        yield f"ipc://{short}/w"


class Ranks:
    """Trainer ranks over the real wire, asked all at once."""

    def __init__(self, router: Router, ranks: int, hellos: dict[str, Hello]) -> None:
        self._router = router
        self._names = [f"trainer.{rank}" for rank in range(ranks)]
        self._asked = 0
        self.hellos = hellos
        self.kept: list[list[np.ndarray]] = []  # of each rank, beside its last `StepDone`

    async def ask(self, message: Any, arrays: list[list[np.ndarray]] | None = None) -> list[Any]:
        """Answers (message, arrays) of all ranks."""
        self._asked += 1
        each = arrays or [[]] * len(self._names)
        return await asyncio.gather(
            *(
                self._router.request(name, message, own, id=f"{self._asked}", deadline_s=DEADLINE_S)
                for name, own in zip(self._names, each, strict=True)
            )
        )

    async def train(self, train: Train, arrays: list[list[np.ndarray]]) -> StepDone:
        """What all ranks say, but for the time that each took."""
        told = await self.ask(train, arrays)
        answers, self.kept = [answer for answer, _ in told], [kept for _, kept in told]
        said = {json.dumps([a.metrics | {"train_s": 0.0}, a.skipped, a.step], sort_keys=True) for a in answers}
        assert len(said) == 1, said
        return answers[0]

    async def probe(self, token_ids: np.ndarray) -> np.ndarray:
        [(answer, [result]), *_] = await self.ask(Probe(id="p"), [[token_ids]] * len(self._names))
        assert isinstance(answer, ProbeResult)
        return np.array(result)


@asynccontextmanager
async def trainer(folder: Path, address: str, tmp_path: Path, ranks: int, **changes: Any) -> AsyncIterator[Any]:
    """Joined ranks and their process; on leaving they are said goodbye to and must end well."""
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(spec_for(folder, **changes)))
    argv, env = trainer_command(connect=address, spec=str(tmp_path / "spec.json"), ranks=ranks, cores=None)
    hellos: dict[str, Hello] = {}
    complete = asyncio.Event()

    def joined(hello: Hello) -> None:
        hellos[hello.name] = hello
        if len(hellos) == ranks:
            complete.set()

    async with process(argv, env | {"AREAL_ASYNC_SECRET": SECRET}) as child:
        async with Router(address, SECRET, joined, lambda name, why: None) as router:
            waiting = asyncio.create_task(complete.wait())
            ending = asyncio.create_task(child.wait())
            await asyncio.wait([waiting, ending], timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            ending.cancel()
            if not complete.is_set():
                pytest.fail((await child.communicate())[1].decode()[-4000:])
            yield Ranks(router, ranks, hellos), child
        _, stderr = await asyncio.wait_for(child.communicate(), DEADLINE_S)
        print(stderr.decode()[-4000:])


def log_probs_by_transformers(model: Any, token_ids: np.ndarray, temperature: float) -> np.ndarray:
    row = torch.tensor(token_ids).long()
    with torch.no_grad():
        logits = model(input_ids=row[None]).logits[0, :-1].float() / temperature
    return np.array([0, *logits.log_softmax(-1).gather(1, row[1:, None])[:, 0].tolist()])


def assert_prox(kept: list[list[np.ndarray]], sent: list[list[np.ndarray]], model: Any, temperature: float) -> None:
    """Each rank has sent log π_prox of its own samples' loss tokens, under the weights of `model`."""
    for (lengths, prox), (own, token_ids, mask, *_) in zip(kept, sent, strict=True):
        np.testing.assert_array_equal(lengths, own)
        rows = np.split(token_ids, np.cumsum(own)[:-1])
        expected = np.concatenate([log_probs_by_transformers(model, row, temperature) for row in rows])
        np.testing.assert_allclose(prox, np.where(mask, expected, np.nan), atol=2e-5)


@pytest.mark.parametrize("stage", [1, 3])
async def test_two_ranks_over_the_wire(stage: int, address: str, tmp_path: Path) -> None:
    """The model is wide enough for ZeRO 3 to split its large matrices and to leave the rest whole."""
    wide = LlamaConfig(**SHAPE | {"hidden_size": 128}, intermediate_size=2 * RESIDENT_NUMBERS // 128)
    folder = save_tiny_model(tmp_path / "model", wide)
    prefix = f"areal-test-{os.getpid()}"
    token_ids = np.arange(1, 20, dtype=np.int32)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    changes = {"zero_stage": stage, "shm_prefix": prefix, "temperature": 0.7, "kl_coef": 0.01, "keep_prox": True}
    async with trainer(folder, address, tmp_path, 2, **changes, gradient_checkpointing=stage == 3) as (ranks, child):
        assert {(p.name, p.shape, p.dtype) for p in ranks.hellos["trainer.0"].parameters} == {
            (name, tuple(parameter.shape), "F32") for name, parameter in base.named_parameters()
        }
        before = await ranks.probe(token_ids)
        np.testing.assert_allclose(before, log_probs_by_transformers(base, token_ids, 0.7), atol=2e-5)

        [(first, _), _] = await ranks.ask(Publish(version=0, branch=0))
        assert isinstance(first, Published)
        for step in range(2):
            train, arrays = make_batch(samples=8, minibatches=2, ranks=2, per_micro=2, step=step)
            done = await ranks.train(train, arrays)
            assert not done.skipped
            assert done.metrics["tokens_trained"] == sum(m.divisor for m in train.minibatches)
            assert done.metrics["kl_ref"] > 0
            if step == 0:
                assert_prox(ranks.kept, arrays, base, 0.7)

        train, arrays = make_batch(samples=8, minibatches=1, ranks=2, per_micro=2, step=2)
        arrays[1][3][np.flatnonzero(arrays[1][2])[0]] = -1000.0  # only rank 1 sees it
        held = await ranks.probe(token_ids)
        done = await ranks.train(train, arrays)
        assert done.skipped == "minibatch 1 of 1: the loss is not finite"
        np.testing.assert_array_equal(held, await ranks.probe(token_ids))

        with pytest.raises(WireError, match="the trainer holds version 3"):
            await ranks.ask(Publish(version=7, branch=0))
        [(published, _), (other, _)] = await ranks.ask(Publish(version=3, branch=0, free=(0,)))
        assert (published.location, other.location) == (f"/dev/shm/{prefix}-v3.safetensors", "")
        assert [p for p in os.listdir("/dev/shm") if p.startswith(prefix)] == [f"{prefix}-v3.safetensors"]
        base.load_state_dict(load_file(published.location))
        after = log_probs_by_transformers(base, token_ids, 0.7)
        np.testing.assert_allclose(held, after, atol=2e-5)
        assert np.abs(after - before).max() > 1e-3

        [(saved, _), _] = await ranks.ask(SaveModel(path=str(tmp_path / "saved")))
        assert saved == ModelSaved(path=str(tmp_path / "saved"), version=3)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        np.testing.assert_allclose(log_probs_by_transformers(again, token_ids, 0.7), after, atol=2e-5)
    assert child.returncode == 0
    assert not [p for p in os.listdir("/dev/shm") if p.startswith(prefix)]


async def test_bfloat16_keeps_small_updates_in_its_master_weights(folder: Path, address: str, tmp_path: Path) -> None:
    """Updates of 2e-6 are lost in a bfloat16 weight of 0.1 (its steps are 5e-4); float32 masters add them up."""
    token_ids = np.arange(1, 20, dtype=np.int32)
    changes = {"dtype": "bfloat16", "publish_dtype": "bfloat16", "lr": 2e-5}
    async with trainer(folder, address, tmp_path, 1, shm_prefix=f"areal-test-{os.getpid()}", **changes) as (
        ranks,
        child,
    ):
        before = await ranks.probe(token_ids)
        for step in range(40):
            train, arrays = make_batch(samples=8, minibatches=1, ranks=1, per_micro=4, step=step)
            assert not (await ranks.train(train, arrays)).skipped
        assert np.abs(await ranks.probe(token_ids) - before).max() > 1e-2
    assert child.returncode == 0


async def test_a_rank_whose_step_raised_says_why_and_ends(folder: Path, address: str, tmp_path: Path) -> None:
    async with trainer(folder, address, tmp_path, 1, shm_prefix=f"areal-test-{os.getpid()}") as (ranks, child):
        train, arrays = make_batch(samples=4, minibatches=1, ranks=1, per_micro=4, step=5)
        with pytest.raises(WireError, match="rank 0 holds version 0 and was asked for step 5"):
            await ranks.ask(train, arrays)
        await asyncio.wait_for(child.wait(), DEADLINE_S)
    assert child.returncode == 1
