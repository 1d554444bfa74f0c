"""log π_prox beside `StepDone`: where each number stands, that it is the right one, and that nothing else notices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_async.engines.deepspeed.model import load_model, sequence_log_probs
from areal_async.engines.deepspeed.reference import load_reference
from areal_async.engines.deepspeed.step import Trainer
from areal_async.messages import StepDone

from .world import CONFIGS, PlainEngine, make_batch, save_tiny_model, spec_for

CPU = torch.device("cpu")
Make = Callable[..., Trainer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), CONFIGS["qwen2, tied"])


@pytest.fixture
def trainer(folder: Path) -> Make:
    def make(**changes: Any) -> Trainer:
        spec = spec_for(folder, keep_prox=True, temperature=0.7, lr=1e-2, **changes)
        model = load_model(str(folder), "float32", CPU)
        reference = load_reference(spec, model, CPU) if spec.kl_coef else None
        return Trainer(PlainEngine(model, spec), spec, 0, 1, reference)

    return make


def expected(folder: Path, arrays: list[np.ndarray]) -> np.ndarray:
    """Under the first weights, sample by sample; NaN where no loss token is."""
    engine = PlainEngine(load_model(str(folder), "float32", CPU), spec_for(folder))
    found, begin = [], 0
    for length in arrays[0]:
        token_ids = torch.from_numpy(arrays[1][begin : begin + length].astype(np.int64))
        found.append(sequence_log_probs(engine, token_ids, 0.7).numpy())
        begin += length
    return np.where(arrays[2], np.concatenate(found), np.nan)


@pytest.mark.parametrize(
    ("minibatches", "per_micro"),
    [(2, 3), pytest.param(1, 8, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_each_number_is_that_of_its_token_under_the_steps_first_weights(
    trainer: Make, folder: Path, minibatches: int, per_micro: int
) -> None:
    ours = trainer()
    train, [arrays] = make_batch(samples=8, minibatches=minibatches, ranks=1, per_micro=per_micro)
    ours.train(train, arrays)
    lengths, prox = ours.kept
    assert (lengths.dtype, prox.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(lengths, arrays[0])
    np.testing.assert_allclose(prox, expected(folder, arrays), atol=2e-5)
    again, [other] = make_batch(samples=8, minibatches=minibatches, ranks=1, per_micro=per_micro, step=1, seed=1)
    ours.train(again, other)  # the weights have moved, and nothing of the step before is left
    np.testing.assert_array_equal(np.isnan(ours.kept[1]), other[2] == 0)
    assert np.nanmax(np.abs(ours.kept[1] - expected(folder, other))) > 1e-3


def test_tokens_too_old_for_a_gradient_have_theirs_and_empty_microbatches_add_nothing(
    trainer: Make, folder: Path
) -> None:
    ours = trainer()
    ours.version, ours._rank = 2, 1
    train, parts = make_batch(samples=5, minibatches=1, ranks=2, per_micro=1, versions=3, step=2, mask_below=2)
    assert train.minibatches[0].ranks[1][-1] == ()  # rank 1 has two samples of the five
    done = ours.train(train, parts[1])
    assert done.metrics["tokens_masked"] > 0
    np.testing.assert_allclose(ours.kept[1], expected(folder, parts[1]), atol=2e-5)


def test_ppo_has_it_of_the_first_minibatch_alone(trainer: Make, folder: Path) -> None:
    ours = trainer(loss="ppo")
    train, [arrays] = make_batch(samples=6, minibatches=3, ranks=1, per_micro=2)
    ours.train(train, arrays)
    first = arrays[0][:2].sum()
    np.testing.assert_allclose(ours.kept[1][:first], expected(folder, arrays)[:first], atol=2e-5)
    assert np.isnan(ours.kept[1][first:]).all()


def test_with_nothing_asked_for_nothing_is_kept(trainer: Make, folder: Path) -> None:
    spec = spec_for(folder)
    assert not spec.keep_prox
    ours = Trainer(PlainEngine(load_model(str(folder), "float32", CPU), spec), spec, 0, 1)
    train, [arrays] = make_batch(samples=2, minibatches=1, ranks=1, per_micro=2)
    ours.train(train, arrays)
    assert ours.kept == ()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="decoupled"),
        pytest.param({"loss": "ppo"}, id="ppo", marks=pytest.mark.slow),
        pytest.param({"kl_coef": 0.1, "kl_in": "reward"}, id="reference", marks=pytest.mark.slow),
        pytest.param(
            {"loss": "gspo", "aggregation": "sequence_mean", "weight_cap": 1.5}, id="gspo", marks=pytest.mark.slow
        ),
    ],
)
def test_no_gradient_loss_or_figure_is_another_by_a_bit(folder: Path, changes: dict[str, Any]) -> None:
    def two_steps(keep: bool) -> tuple[list[StepDone], list[torch.Tensor], torch.Tensor]:
        spec = spec_for(folder, keep_prox=keep, **changes)
        model = load_model(str(folder), "float32", CPU)
        reference = load_reference(spec, model, CPU) if spec.kl_coef else None
        engine = PlainEngine(model, spec)
        ours, told = Trainer(engine, spec, 0, 1, reference), []
        for step in range(2):
            aggregation = changes.get("aggregation", "token_mean")
            train, [arrays] = make_batch(
                samples=8, minibatches=2, ranks=1, per_micro=3, step=step, seed=step, aggregation=aggregation
            )
            told.append(ours.train(train, arrays))
            told[-1].metrics.pop("train_s")
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return told, engine.gradients, weights

    with_it, without = two_steps(True), two_steps(False)
    assert with_it[0] == without[0]
    assert len(with_it[1]) == len(without[1]) == 4
    for one, other in zip(with_it[1], without[1], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(with_it[2], without[2])
