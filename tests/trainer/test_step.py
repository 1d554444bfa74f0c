"""A training step on one rank, with an engine that has nothing of DeepSpeed in it (test_deepspeed.py has the real one).

The right gradient is computed here a second time, sample by sample, by transformers' own attention and log_softmax.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_async.engines.deepspeed import losses
from areal_async.engines.deepspeed.engine import learning_rate
from areal_async.engines.deepspeed.model import load_model, sequence_log_probs
from areal_async.engines.deepspeed.step import Trainer
from areal_async.errors import TrainerError
from areal_async.messages import Train

from .world import CONFIGS, PlainEngine, flat_gradient, make_batch, save_tiny_model, spec_for

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), CONFIGS["qwen2, tied"])


@pytest.fixture
def trainer(folder: Path) -> Callable[..., Trainer]:
    def make(**changes: Any) -> Trainer:
        spec = spec_for(folder, **({"max_grad_norm": 1e9} | changes))
        return Trainer(PlainEngine(load_model(str(folder), "float32", CPU), spec), spec, rank=0, world=1)

    return make


def reference_gradient(
    folder: Path, train: Train, arrays: list[np.ndarray], temperature: float
) -> tuple[float, Tensor]:
    """Loss and gradient of the first minibatch at the starting weights, where u = 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    starts = np.cumsum([0, *arrays[0]])
    total = torch.zeros(())
    order = [index for micro in train.minibatches[0].ranks[0] for index in micro]
    for place, index in enumerate(order):
        token_ids, mask, behav, _ = (torch.tensor(a[starts[place] : starts[place + 1]]) for a in arrays[1:])
        logits = model(input_ids=token_ids[None].long()).logits[0, :-1] / temperature
        logp = logits.log_softmax(-1).gather(1, token_ids[1:, None].long())[:, 0]
        weight = (logp.detach() - behav[1:]).exp()
        surrogate = weight * (logp - logp.detach()).exp() * train.samples[index].advantage
        total = total - (surrogate * mask[1:]).sum()
    loss = total / train.minibatches[0].divisor
    loss.backward()
    return float(loss.detach()), flat_gradient(model)


@pytest.mark.parametrize("per_micro", [1, 3, 8])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_is_that_of_eq_5(trainer: Any, folder: Path, per_micro: int, temperature: float) -> None:
    ours = trainer(temperature=temperature)
    train, [arrays] = make_batch(samples=8, minibatches=1, ranks=1, per_micro=per_micro)
    loss, gradient = reference_gradient(folder, train, arrays, temperature)
    done = ours.train(train, arrays)
    difference = (ours.engine.gradients[0] - gradient).norm() / gradient.norm()
    assert difference < 1e-5
    assert done.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert done.metrics["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)


def test_a_trainer_that_ignores_the_temperature_is_off(trainer: Any, folder: Path) -> None:
    ours = trainer(temperature=1.0)
    train, [arrays] = make_batch(samples=8, minibatches=1, ranks=1, per_micro=8)
    _, gradient = reference_gradient(folder, train, arrays, temperature=0.6)
    ours.train(train, arrays)
    assert (ours.engine.gradients[0] - gradient).norm() / gradient.norm() > 0.1


def test_prox_costs_no_pass_for_the_first_minibatch(trainer: Any) -> None:
    for minibatches in (1, 4):
        ours = trainer()
        passes: list[bool] = []
        ours.engine.module.register_forward_hook(lambda *_, seen=passes: seen.append(torch.is_grad_enabled()))
        train, [arrays] = make_batch(samples=8, minibatches=minibatches, ranks=1, per_micro=1)
        ours.train(train, arrays)
        assert passes.count(True) == 8
        assert passes.count(False) == 8 * (minibatches - 1) // minibatches
        assert ours.engine.backwards.count(True) == minibatches


def test_prox_is_taken_with_the_weights_from_before_the_step(trainer: Any) -> None:
    """Behaviour is prox itself: then k3 is 0 and all weights 1, for all minibatches, though the weights move."""
    ours = trainer(lr=0.05)
    train, [arrays] = make_batch(samples=8, minibatches=4, ranks=1, per_micro=2)
    rows = np.split(arrays[1], np.cumsum(arrays[0])[:-1])
    prox = [sequence_log_probs(ours.engine.module, torch.tensor(row).long(), 1.0).numpy() for row in rows]
    arrays[3] = np.where(arrays[2], np.concatenate(prox), 0).astype(np.float32)
    before = flat_weights(ours)
    done = ours.train(train, arrays)
    assert (flat_weights(ours) - before).norm() > 0.1
    assert done.metrics["mismatch_max"] < 1e-4
    assert done.metrics["behav_k3"] < 1e-8
    assert done.metrics["behav_ess"] == pytest.approx(1.0, abs=1e-6)
    assert done.metrics["clip_share"] > 0.1


def test_metrics_have_their_denominators(trainer: Any) -> None:
    ours = trainer(warmup_steps=3)
    train, [arrays] = make_batch(samples=8, minibatches=2, ranks=1, per_micro=3)
    used = arrays[2].astype(bool)
    arrays[4][used] = 0
    done = ours.train(train, arrays)
    assert done.metrics["tokens_trained"] == used.sum() == done.metrics["mismatch_tokens"]
    assert done.metrics["lr"] == pytest.approx(learning_rate(spec_for(Path(), warmup_steps=3), 1)) == 5e-4
    assert 0 < done.metrics["entropy"] < math.log(31)
    assert done.metrics["train_s"] > 0
    assert ours.version == 1
    train, [arrays] = make_batch(samples=8, minibatches=2, ranks=1, per_micro=3, step=1)
    arrays[4][used] = 0  # all tokens are of lag 1
    done = ours.train(train, arrays)
    assert done.metrics["mismatch_tokens"] == done.metrics["mismatch_max"] == 0


def test_what_is_not_finite_is_skipped_and_the_step_counts(trainer: Any) -> None:
    ours = trainer()
    before = flat_weights(ours)
    train, [arrays] = make_batch(samples=8, minibatches=2, ranks=1, per_micro=2)
    arrays[3][np.flatnonzero(arrays[2])[0]] = -1000.0  # w = exp(1000) in the first minibatch
    done = ours.train(train, arrays)
    assert done.skipped == "minibatch 1 of 2: the loss is not finite"
    assert ours.version == 1
    assert len(ours.engine.gradients) == 1  # the second minibatch was trained, with its own gradient only
    assert flat_weights(ours).isfinite().all()
    assert (flat_weights(ours) - before).norm() > 0
    assert all(math.isfinite(value) for value in done.metrics.values())


def test_an_infinite_loss_of_finite_gradient_is_skipped(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = trainer()
    before = flat_weights(ours)
    real = losses.local_loss
    monkeypatch.setattr(losses, "local_loss", lambda *arguments: real(*arguments) + float("inf"))
    train, [arrays] = make_batch(samples=4, minibatches=1, ranks=1, per_micro=2)
    assert ours.train(train, arrays).skipped == "minibatch 1 of 1: the loss is not finite"
    assert torch.equal(flat_weights(ours), before)


def test_an_infinite_gradient_of_a_finite_loss_is_skipped(trainer: Any) -> None:
    ours = trainer()
    before = flat_weights(ours)
    handle = ours.engine.module.model.embed_tokens.weight.register_hook(lambda g: g * float("inf"))
    train, [arrays] = make_batch(samples=4, minibatches=1, ranks=1, per_micro=2)
    done = ours.train(train, arrays)
    handle.remove()
    assert done.skipped == "minibatch 1 of 1: the gradient is not finite"
    assert torch.equal(flat_weights(ours), before)
    assert all(p.grad is None for p in ours.engine.module.parameters())


def test_the_gradient_is_clipped_and_its_norm_before_is_told(trainer: Any) -> None:
    ours = trainer(max_grad_norm=0.01)
    train, [arrays] = make_batch(samples=4, minibatches=1, ranks=1, per_micro=2)
    done = ours.train(train, arrays)
    assert float(ours.engine.gradients[0].norm()) == pytest.approx(0.01, rel=1e-4)
    assert done.metrics["grad_norm"] > 0.02


def test_a_step_that_does_not_follow_is_refused(trainer: Any) -> None:
    train, [arrays] = make_batch(samples=4, minibatches=1, ranks=1, per_micro=2, step=3)
    with pytest.raises(TrainerError, match="holds version 0 and was asked for step 3"):
        trainer().train(train, arrays)


def test_training_raises_what_was_rewarded(trainer: Any) -> None:
    """Twenty steps on the same samples, rewarded for one of two: it becomes likely, the other unlikely."""
    ours = trainer(lr=3e-3)
    train, [arrays] = make_batch(samples=8, minibatches=1, ranks=1, per_micro=8)
    rows = np.split(arrays[1], np.cumsum(arrays[0])[:-1])

    def likely() -> np.ndarray:
        return np.array([sequence_log_probs(ours.engine.module, torch.tensor(r).long(), 1.0).mean() for r in rows])

    sign = np.sign([sample.advantage for sample in train.samples])
    before = likely()
    for step in range(20):
        train, [arrays] = make_batch(samples=8, minibatches=1, ranks=1, per_micro=8, step=step)
        ours.train(train, arrays)
    assert ((likely() - before) * sign).mean() > 0.3


def test_oracles_and_trainer_call_the_same_loss(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("policy_loss", "token_weights", "local_loss"):
        real = getattr(losses, name)
        monkeypatch.setattr(losses, name, lambda *a, real=real, name=name: (called.append(name), real(*a))[1])
    train, [arrays] = make_batch(samples=4, minibatches=1, ranks=1, per_micro=4)
    trainer().train(train, arrays)
    assert called == ["policy_loss", "token_weights", "local_loss"]


def flat_weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.engine.module.parameters()])
