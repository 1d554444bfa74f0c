"""Every objective, with every option of it, against formulas written down a second time.

Here each answer goes through transformers' own attention and log_softmax alone, and its loss is written as in the
papers, over its loss tokens only. The trainer must come to the same gradient from packed rows.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_async.engines.deepspeed import losses
from areal_async.engines.deepspeed.step import Trainer, objective_of
from areal_async.errors import TrainerError
from areal_async.messages import TrainerSpec

from .gradients import UNCLIPPED, Models, Plain, equal_cases
from .world import CONFIGS, flat_gradient, make_batch, save_tiny_model, spec_for

ESTIMATES = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: (-d).exp() - 1 + d}
CASES = {name: case for name, case in equal_cases().items() if "skip" not in name and case["batch"]["per_micro"] == 5}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    config = CONFIGS["qwen2, tied"]
    return Models(save_tiny_model(folder / "policy", config), save_tiny_model(folder / "reference", config, seed=1))


@pytest.fixture(scope="module")
def plain(models: Models) -> Plain:
    return Plain(models, {})


@pytest.fixture(scope="module")
def eager(models: Models) -> tuple[Any, Any]:
    paths = (models.policy, models.reference)
    return tuple(AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval() for path in paths)


def answer_loss(
    spec: TrainerSpec, logp: Tensor, behav: Tensor, reference: Tensor, kept: Tensor, reward: float
) -> Tensor:
    """Sum of the token losses of one answer, weighted by the aggregation. All tensors: its loss tokens."""
    count = len(logp)
    advantage = torch.full((count,), reward)
    prox = logp.detach() + 0.3 * torch.sin(100 * behav)  # as gradients.moved_prox
    if spec.kl_coef and spec.kl_in == "reward":
        costs = ESTIMATES[spec.kl_estimator](prox - reference)
        advantage = torch.stack([reward - spec.kl_coef * costs[t:].sum() for t in range(count)])
    if spec.loss == "gspo":
        ratio = ((logp - prox) * kept).sum().div(count).exp().expand(count)
        weight = ((prox - behav) * kept).sum().div(count).exp().expand(count)
        advantage, kept_in_sum = advantage[0].expand(count), torch.ones(count)
    else:
        ratio = (logp - (behav if spec.loss == "ppo" else prox)).exp()
        weight = torch.ones(count) if spec.loss == "ppo" else (prox - behav).exp()
        kept_in_sum = kept.float()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantage)
    if spec.dual_clip:
        gain = torch.where(advantage < 0, torch.maximum(gain, spec.dual_clip * advantage), gain)
    if spec.weight_cap and spec.over_cap == "mask":
        weight = torch.where(weight > spec.weight_cap, 0, weight)
    if spec.weight_cap and spec.over_cap == "clamp":
        weight = weight.clamp(max=spec.weight_cap)
    loss = -weight * gain * kept_in_sum
    if spec.kl_coef and spec.kl_in == "loss":
        loss = loss + spec.kl_coef * ESTIMATES[spec.kl_estimator](logp - reference) * kept
    return loss.mean() if spec.aggregation == "sequence_mean" else loss.sum()


def formula(spec: TrainerSpec, case: dict[str, Any], policy: Any, reference: Any) -> tuple[float, Tensor]:
    """Loss and gradient of the case's minibatch."""
    train, [arrays] = make_batch(**(case["batch"] | {"ranks": 1, "aggregation": spec.aggregation}))
    starts, total = np.cumsum([0, *arrays[0]]), torch.zeros(())
    order = [index for micro in train.minibatches[0].ranks[0] for index in micro]
    for place, index in enumerate(order):
        ids, mask, behav, versions = (torch.tensor(a[starts[place] : starts[place + 1]]) for a in arrays[1:])
        used = mask[1:].bool()
        logp, distant = (
            (model(input_ids=ids[None].long()).logits[0, :-1] / spec.temperature)
            .log_softmax(-1)
            .gather(1, ids[1:, None].long())[:, 0][used]
            for model in (policy, reference)
        )
        kept = versions[1:][used] >= train.mask_below
        advantage = train.samples[index].advantage
        total = total + answer_loss(spec, logp, behav[1:][used], distant.detach(), kept, advantage)
    policy.zero_grad()
    loss = total / train.minibatches[0].divisor
    loss.backward()
    return float(loss.detach()), flat_gradient(policy)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_the_gradient_is_that_of_the_formula(name: str, models: Models, plain: Plain, eager: tuple[Any, Any]) -> None:
    case = CASES[name]
    loss, expected = formula(spec_for(models.policy, **(UNCLIPPED | case["spec"])), case, *eager)
    gradient, metrics = plain.step(case)
    assert np.abs(gradient - expected.numpy()).max() < 1e-5 * float(expected.abs().max())
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(TrainerError, match="sequence_mean, not token_mean"):
        objective_of(spec_for(Path(), loss="gspo"))
    with pytest.raises(TrainerError, match=r"gspo's are those of answers"):
        objective_of(spec_for(Path(), loss="gspo", aggregation="sequence_mean", dual_clip=3.0))
    with pytest.raises(TrainerError, match="ppo has no behaviour weight"):
        objective_of(spec_for(Path(), loss="ppo", weight_cap=2.0))


def test_a_reference_of_another_vocabulary_is_refused(models: Models, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    from areal_async.engines.deepspeed.reference import load_reference

    other = save_tiny_model(
        tmp_path,
        LlamaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48),
    )
    spec = spec_for(models.policy, reference_path=str(other))
    policy = AutoModelForCausalLM.from_pretrained(models.policy)
    with pytest.raises(TrainerError, match=r"32 tokens in its vocabulary, .* 31; use a reference with the same"):
        load_reference(spec, policy, torch.device("cpu"))


def test_ppo_takes_no_pass_of_its_own_and_compares_the_first_minibatch_only(plain: Plain, models: Models) -> None:
    """The other minibatches' own forwards are under weights that have moved: what they give is not π_prox."""
    train, [arrays] = make_batch(samples=8, minibatches=4, ranks=1, per_micro=8)
    passes: list[bool] = []
    handle = plain.engine.module.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    done = Trainer(plain.engine, spec_for(models.policy, loss="ppo", lr=0.0), 0, 1).train(train, arrays)
    handle.remove()
    assert passes == [True] * 4
    assert done.metrics["tokens_trained"] == sum(m.divisor for m in train.minibatches)
    assert done.metrics["mismatch_tokens"] == train.minibatches[0].divisor


def test_older_tokens_are_counted_and_in_no_mean(plain: Plain, models: Models) -> None:
    batch = {"samples": 6, "minibatches": 1, "ranks": 1, "per_micro": 2, "step": 2, "versions": 3}
    reports = []
    for mask_below in (0, 2):
        train, [arrays] = make_batch(**batch, mask_below=mask_below)
        if mask_below:  # then nothing that stands at an older token is looked at
            arrays[3][(arrays[4] >= 0) & (arrays[4] < mask_below)] = -1000.0
        trainer = Trainer(plain.engine, spec_for(models.policy, lr=0.0), 0, 1)
        trainer.version = 2
        done = trainer.train(train, arrays)
        assert not done.skipped
        reports.append(done.metrics)
    older = int(((arrays[4] >= 0) & (arrays[4] < 2)).sum())
    assert older > 0
    assert [report["tokens_masked"] for report in reports] == [0, older]
    assert reports[0]["tokens_trained"] == reports[1]["tokens_trained"] + older
    assert 0 < reports[1]["behav_ess"] <= 1


def test_the_share_over_the_cap_is_told(plain: Plain, models: Models) -> None:
    train, [arrays] = make_batch(samples=6, minibatches=1, ranks=1, per_micro=2)
    for cap, low, high in ((1e-12, 0.99, 1.0), (1e12, 0.0, 0.0), (1.0, 0.01, 0.99)):
        spec = spec_for(models.policy, lr=0.0, weight_cap=cap)
        share = Trainer(plain.engine, spec, 0, 1).train(train, arrays).metrics["capped_share"]
        assert low <= share <= high


def test_a_sequence_is_never_split_by_its_loss() -> None:
    """gspo on two answers in one row is gspo on each."""
    torch.manual_seed(0)
    logp, prox, behav = (torch.randn(7, dtype=torch.float64) for _ in range(3))
    advantage = torch.tensor([1.0] * 3 + [-2.0] * 4, dtype=torch.float64)
    sequence, mask = torch.tensor([0] * 3 + [1] * 4), torch.ones(7, dtype=torch.bool)
    objective = losses.Objective(loss="gspo", clip_low=0.2, clip_high=0.2, aggregation="sequence_mean")
    together = losses.policy_loss(logp, prox, behav, advantage, mask, mask, sequence, objective).loss
    alone = [
        losses.policy_loss(
            logp[s], prox[s], behav[s], advantage[s], mask[s], mask[s], torch.zeros_like(sequence[s]), objective
        ).loss
        for s in (slice(0, 3), slice(3, 7))
    ]
    torch.testing.assert_close(together, torch.cat(alone))
