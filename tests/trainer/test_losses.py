"""Eq. 5 against the reference numbers, through the functions that the trainer calls; and what masks hold off."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_async.engines.deepspeed import losses
from areal_async.engines.deepspeed.losses import Objective

PLAIN = Objective(clip_low=0.2, clip_high=0.2)


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(logp: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor, mask: Tensor, objective: Objective) -> Tensor:
    """Token losses [sequences, tokens], aggregated as the minibatch's divisor and the objective say."""
    token = losses.decoupled_ppo(logp, prox, behav, advantage, mask, objective)
    sequence = torch.arange(len(mask))[:, None].expand(mask.shape)
    weights = losses.token_weights(objective.aggregation, mask, sequence)
    divisor = {"token_mean": mask.sum(), "sequence_mean": mask.any(dim=1).sum()}[objective.aggregation]
    return losses.local_loss(token.loss, weights, float(divisor))


def test_oracle_decoupled_ppo(oracles: Path) -> None:
    cases = json.loads((oracles / "decoupled_ppo.json").read_text())["cases"]
    assert len(cases) >= 12
    for case in cases:
        logp, prox, behav = (double(case[name]) for name in ("logp", "prox_logp", "behav_logp"))
        advantage, mask = double(case["advantages"]), double(case["loss_mask"]).bool()
        logp.requires_grad_()
        objective = Objective(
            clip_low=case["eps_low"],
            clip_high=case["eps_high"],
            dual_clip=case["dual_clip"],
            weight_cap=case["behav_weight_cap"],
            over_cap=case["behav_weight_action"] or "mask",
            aggregation=case["aggregation"],
        )
        token = losses.decoupled_ppo(logp, prox, behav, advantage, mask, objective)
        sequence = torch.arange(len(mask))[:, None].expand(mask.shape)
        divisor = {
            "token_mean": float(mask.sum()),
            "sequence_mean": float(mask.any(dim=1).sum()),
            "constant": case["constant"],
        }[case["aggregation"]]
        loss = losses.local_loss(token.loss, losses.token_weights(objective.aggregation, mask, sequence), divisor)
        loss.backward()
        torch.testing.assert_close(loss.detach(), double(case["loss"]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(logp.grad, double(case["grad_logp"]), rtol=1e-9, atol=1e-9)
        weight = losses.behaviour_sums(prox, behav, mask).weight / mask.sum()
        torch.testing.assert_close(weight, double(case["mean_behav_weight"]), rtol=1e-9, atol=1e-9)


def test_oracle_k3(oracles: Path) -> None:
    case = json.loads((oracles / "kl.json").read_text())
    logp, reference, k3 = (double(case[name]) for name in ("logp", "ref_logp", "k3"))
    for index, expected in enumerate(k3):
        mask = torch.arange(len(k3)) == index
        torch.testing.assert_close(losses.behaviour_sums(reference, logp, mask).k3, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("split", [(2, 8), (1, 9), (5, 5), (1, 1, 8), (3, 3, 4)])
def test_p13_a_split_changes_no_loss(split: tuple[int, ...]) -> None:
    token_losses, total = torch.tensor([1.0, 1.0] + [0.0] * 8), 10.0
    parts = token_losses.split(list(split))
    shares = [losses.local_loss(part, torch.ones(len(part)), total) for part in parts]
    assert float(sum(shares)) == pytest.approx(0.2)
    assert float(sum(part.mean() for part in parts)) / len(parts) != pytest.approx(0.2) or len(set(split)) == 1


def test_p13_the_pad_is_in_no_mean() -> None:
    advantage, mask = double([[1, 1], [3, float("nan")]]), torch.tensor([[True, True], [True, False]])
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    assert float(loss_of(zeros, zeros, zeros, advantage, mask, PLAIN)) == pytest.approx(-5 / 3)


def test_p18_what_is_masked_reaches_nothing() -> None:
    infinity = float("inf")
    logp = double([[-1.0, 199.0, -infinity, -0.5, float("nan")]]).requires_grad_()
    prox = double([[-1.1, -1.0, -infinity, -0.5, -1.0]])
    behav = double([[-1.2, -201.0, -infinity, -0.5, -1.0]])
    mask = torch.tensor([[True, False, False, True, False]])
    for objective in (PLAIN, Objective(clip_low=0.2, clip_high=0.2, dual_clip=3.0, weight_cap=2.0)):
        logp.grad = None
        loss = loss_of(logp, prox, behav, torch.ones_like(prox), mask, objective)
        loss.backward()
        assert loss.isfinite()
        assert logp.grad is not None
        assert logp.grad.isfinite().all()
        assert (logp.grad[~mask] == 0).all()
        assert all(value.isfinite() for value in losses.behaviour_sums(prox, behav, mask))
        assert losses.largest_difference(prox, behav, mask).isfinite()


def test_p18_a_token_at_the_cap_is_kept_and_one_above_stays_in_the_divisor() -> None:
    weights = double([[2.0, 2.0 + 1e-9, 1.0]])
    zeros, mask = torch.zeros_like(weights), torch.ones(1, 3, dtype=torch.bool)
    capped = Objective(clip_low=0.2, clip_high=0.2, weight_cap=2.0)
    loss = loss_of(zeros, zeros, -weights.log(), torch.ones_like(zeros), mask, capped)
    assert float(loss) == pytest.approx(-(2.0 + 1.0) / 3)


def test_clipped_counts_only_where_the_clip_decides() -> None:
    ratio = double([1.3, 1.3, 0.7, 0.7, 1.1])
    advantage = double([1.0, -1.0, 1.0, -1.0, 1.0])
    zeros, mask = torch.zeros(5, dtype=torch.float64), torch.tensor([True] * 5)
    token = losses.decoupled_ppo(ratio.log(), zeros, zeros, advantage, mask, PLAIN)
    assert token.clipped.tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_log_softmax(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (7,))
    monkeypatch.setattr(losses, "LOGIT_CHUNK_ELEMENTS", 22)  # two rows at a time
    logp, entropy = losses.log_probs(logits, targets, temperature)
    expected = (logits / temperature).log_softmax(-1)
    torch.testing.assert_close(logp, expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1).detach())
    assert not entropy.requires_grad
    assert torch.autograd.gradcheck(lambda x: losses.log_probs(x, targets, temperature)[0], (logits,))


def test_a_word_that_can_not_be_sampled_leaves_the_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -float("inf")]])
    logp, entropy = losses.log_probs(logits, torch.tensor([0]), 1.0)
    assert entropy.item() == pytest.approx(0.6931472)
    assert logp.item() == pytest.approx(-0.6931472)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_effective_share_is_between_one_token_and_all(weights: list[float]) -> None:
    tokens = len(weights)
    share = losses.effective_share(sum(weights), sum(w * w for w in weights), tokens)
    assert 1 / tokens - 1e-9 <= share <= 1 + 1e-9
    assert losses.effective_share(tokens * 3.0, tokens * 9.0, tokens) == pytest.approx(1.0)
