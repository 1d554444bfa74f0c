"""The objectives against the reference numbers, through the functions that the trainer calls; what masks hold off;
and the memory of the log-softmax."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_async.engines.deepspeed import losses
from areal_async.engines.deepspeed.losses import Objective

PLAIN = Objective(clip_low=0.2, clip_high=0.2)


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(logp: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor, mask: Tensor, objective: Objective) -> Tensor:
    """Token losses [sequences, tokens], aggregated as the minibatch's divisor and the objective say."""
    sequence = torch.arange(len(mask))[:, None].expand(mask.shape)
    token = losses.policy_loss(logp, prox, behav, advantage, mask, mask, sequence, objective)
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


def test_oracle_gspo(oracles: Path) -> None:
    cases = json.loads((oracles / "gspo.json").read_text())["cases"]
    assert len(cases) >= 6
    for case in cases:
        logp, prox, behav = (double(case[name]) for name in ("logp", "prox_logp", "behav_logp"))
        mask = double(case["loss_mask"]).bool()
        advantage = double(case["advantages"])[:, None].expand(mask.shape)
        logp.requires_grad_()
        objective = Objective(
            loss="gspo", clip_low=case["eps_low"], clip_high=case["eps_high"], aggregation="sequence_mean"
        )
        loss = loss_of(logp, prox, behav, advantage, mask, objective)
        loss.backward()
        torch.testing.assert_close(loss.detach(), double(case["loss"]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(logp.grad, double(case["grad_logp"]), rtol=1e-9, atol=1e-9)


def test_oracle_kl(oracles: Path) -> None:
    case = json.loads((oracles / "kl.json").read_text())
    logp, reference = (double(case[name]) for name in ("logp", "ref_logp"))
    slopes = {"k1": lambda d: torch.ones_like(d), "k2": lambda d: d, "k3": lambda d: 1 - (-d).exp()}
    for estimator, slope in slopes.items():
        own = logp.clone().requires_grad_()
        estimate = losses.kl_estimate(own, reference, torch.ones(len(own), dtype=torch.bool), estimator)
        torch.testing.assert_close(estimate.detach(), double(case[estimator]), rtol=1e-9, atol=1e-9)
        estimate.sum().backward()
        torch.testing.assert_close(own.grad, slope(logp - reference), rtol=1e-9, atol=1e-9)


def test_oracle_gae(oracles: Path) -> None:
    cases = json.loads((oracles / "gae.json").read_text())["cases"]
    assert len(cases) >= 6
    for case in cases:
        inputs = (case[name] for name in ("rewards", "values", "bootstrap", "gamma", "lam"))
        advantages, returns = losses.gae(*inputs)
        assert advantages == pytest.approx(case["advantages"], rel=1e-9, abs=1e-9)
        assert returns == pytest.approx(case["returns"], rel=1e-9, abs=1e-9)


def test_gae_looks_at_what_comes_after_the_end() -> None:
    """The reference numbers all end in a state of value 0."""
    advantages, _ = losses.gae([1.0, 2.0], [0.5, 0.25], 4.0, 0.5, 0.5)
    assert advantages == pytest.approx([1 + 0.125 - 0.5 + 0.25 * 3.75, 2 + 2 - 0.25])


def test_each_token_pays_for_itself_and_for_what_follows_in_its_answer() -> None:
    estimates, sequence = double([1, 2, 4, 8, 16]), torch.tensor([0, 0, 0, 3, 3])
    lowered = losses.lowered_by(estimates, double([1] * 5), sequence, 0.5)
    assert lowered.tolist() == [1 - 3.5, 1 - 3, 1 - 2, 1 - 12, 1 - 8]


def test_ppo_is_its_formula() -> None:
    torch.manual_seed(0)
    logp, prox, behav, advantage = torch.randn(4, 3, 5, dtype=torch.float64).unbind()
    mask, sequence = torch.rand(3, 5) < 0.7, torch.arange(3)[:, None].expand(3, 5)
    logp.requires_grad_()
    for dual_clip in (None, 1.5):
        objective = Objective(loss="ppo", clip_low=0.2, clip_high=0.4, dual_clip=dual_clip)
        token = losses.policy_loss(logp, prox, behav, advantage, mask, mask, sequence, objective)
        ratio = (logp - behav).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.4) * advantage)
        if dual_clip:
            gain = torch.where(advantage < 0, torch.maximum(gain, dual_clip * advantage), gain)
        torch.testing.assert_close(token.loss, torch.where(mask, -gain, 0))
        found, right = (torch.autograd.grad(loss.sum(), logp) for loss in (token.loss, torch.where(mask, -gain, 0)))
        torch.testing.assert_close(found, right)
        assert torch.equal(token.clipped, mask & (right[0] == 0))  # where the clip decides there is no gradient


def test_oracle_k3(oracles: Path) -> None:
    case = json.loads((oracles / "kl.json").read_text())
    logp, reference, k3 = (double(case[name]) for name in ("logp", "ref_logp", "k3"))
    for index, expected in enumerate(k3):
        mask = torch.arange(len(k3)) == index
        torch.testing.assert_close(losses.behaviour_sums(reference, logp, mask).k3, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("ranks", "micros"), [(1, [[0, 1]]), (2, [[0], [1]]), (2, [[1], [0]])])
def test_p13_one_divisor_over_micro_batches_and_ranks(ranks: int, micros: list[list[int]]) -> None:
    """Two losses of 1 in one micro-batch, eight of 0 in the other: 0.2, where a mean of means is 0.5."""
    token_losses = [torch.ones(2), torch.zeros(8)]
    local = [sum(losses.local_loss(token_losses[i], torch.ones(1), 10.0) for i in own) * ranks for own in micros]
    assert float(sum(local)) / ranks == pytest.approx(0.2)  # what the average over ranks makes of it
    assert sum(float(part.mean()) for part in token_losses) / 2 == 0.5


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
    objectives = [
        Objective(loss=loss, clip_low=0.2, clip_high=0.2, dual_clip=dual, weight_cap=cap, aggregation="sequence_mean")
        for loss, (dual, cap) in itertools.product(("decoupled_ppo", "ppo", "gspo"), ((None, None), (3.0, 2.0)))
    ]
    for objective in (PLAIN, *objectives):
        logp.grad = None
        loss = loss_of(logp, prox, behav, torch.ones_like(prox), mask, objective)
        loss.backward()
        assert loss.isfinite()
        assert logp.grad is not None
        assert logp.grad.isfinite().all()
        assert (logp.grad[~mask] == 0).all()
        assert all(value.isfinite() for value in losses.behaviour_sums(prox, behav, mask))
        assert losses.largest_difference(prox, behav, mask).isfinite()
    for estimator in ("k1", "k2", "k3"):
        logp.grad = None
        estimate = losses.kl_estimate(logp, behav, mask, estimator)
        estimate.sum().backward()
        assert estimate.isfinite().all()
        assert logp.grad is not None
        assert (logp.grad[~mask] == 0).all()


def test_p18_a_token_at_the_cap_is_kept_and_one_above_stays_in_the_divisor() -> None:
    weights = double([[2.0, 2.0 + 1e-9, 1.0]])
    zeros, mask = torch.zeros_like(weights), torch.ones(1, 3, dtype=torch.bool)
    capped = Objective(clip_low=0.2, clip_high=0.2, weight_cap=2.0)
    loss = loss_of(zeros, zeros, -weights.log(), torch.ones_like(zeros), mask, capped)
    assert float(loss) == pytest.approx(-(2.0 + 1.0) / 3)
    token = losses.decoupled_ppo(zeros, zeros, -weights.log(), torch.ones_like(zeros), mask, capped)
    assert token.capped.tolist() == [[False, True, False]]


def test_what_an_older_token_holds_reaches_nothing() -> None:
    """It stays in its answer's count; its own numbers don't matter, and it has no gradient."""
    prox, behav = double([[-1.1, -1.0, -0.7]]), double([[-1.2, -0.9, -0.5]])
    mask, trained = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[True, False, True]])
    sequence = torch.zeros(1, 3, dtype=torch.int64)
    for loss in ("decoupled_ppo", "ppo", "gspo"):
        objective = Objective(loss=loss, clip_low=0.2, clip_high=0.2, aggregation="sequence_mean")
        found = []
        for odd in (-1.0, float("nan"), 300.0, -float("inf")):
            logp = double([[-1.1, odd, -0.6]]).requires_grad_()
            other = torch.where(trained, behav, odd)
            token = losses.policy_loss(logp, prox, other, torch.ones(1, 3), mask, trained, sequence, objective)
            total = (token.loss * losses.token_weights("sequence_mean", mask, sequence)).sum()
            found.append(torch.cat([total.detach()[None], torch.autograd.grad(total, logp)[0][0]]))
        assert all(torch.equal(one, found[0]) for one in found)
        assert found[0].isfinite().all()
        assert found[0][2] == 0
        assert found[0][1] != 0


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


@pytest.mark.parametrize("rows", [64, 512])
def test_log_probs_need_a_chunk_beside_the_logits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows there are, no temporary is larger than a chunk; logits and their gradient are in bfloat16."""
    words, chunk = 1000, 8 * 1000
    monkeypatch.setattr(losses, "LOGIT_CHUNK_ELEMENTS", chunk)
    logits = torch.randn(rows, words).bfloat16().requires_grad_()
    targets = torch.randint(0, words, (rows,))
    made: list[tuple[int, torch.dtype]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
                made.append((result.untyped_storage().nbytes() // result.element_size(), result.dtype))
            return result

    with Watch():
        logp, _ = losses.log_probs(logits, targets, 0.7)
        logp.sum().backward()
    full = [dtype for elements, dtype in made if elements > max(chunk, rows)]
    assert full == [torch.bfloat16]  # the gradient itself
    assert max(elements for elements, dtype in made if dtype == torch.float32) == chunk


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
