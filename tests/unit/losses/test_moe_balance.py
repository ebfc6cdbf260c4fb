"""Router losses: their values, what they feed into the gradient, and what they must not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from erniekit.data.collate import collate, collate_joined
from erniekit.data.types import IGNORE, Batch, Pack, Sample
from erniekit.devices import pick
from erniekit.losses.causal import causal_loss
from erniekit.losses.moe_balance import RouterLosses, RouterLossWeights, orthogonal
from erniekit.models.config import MoEShape
from erniekit.models.init import init_weights
from erniekit.models.layers.decoder import Decoder
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World
from erniekit.parallel.step_metrics import StepMetrics
from support.tiny_config import with_experts

MOE = MoEShape(experts=6, choices=2, width=16, shared_width=16, start=1, end=2)
CONFIG = with_experts(MOE, vocab_size=61, max_positions=128)
ALL = RouterLossWeights(aux=0.02, z=0.003, orthogonal=0.05)
METRICS = ("router_aux", "router_z", "router_ortho")


def model(weights: RouterLossWeights = ALL, compat: bool = False) -> tuple[Decoder, Engine]:
    built = Decoder(CONFIG)
    init_weights(built, seed=3, std=0.3)
    engine = Engine([(0, built)], World(), pick("cpu"), causal_loss)
    engine.step_metrics = StepMetrics(METRICS, engine.device)
    share = engine.router_share
    if compat:
        share = torch.ones(())
    built.records = []
    with torch.no_grad():
        for layer in built.layers[1:]:
            layer.mlp.router.bias.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
            layer.mlp.balance = RouterLosses(weights, share, whole_batch=compat)
    return built, engine


def packs(count: int = 4) -> list[Pack]:
    rng = np.random.default_rng(5)
    out = []
    for _ in range(count):
        n = int(rng.integers(5, 21))
        ids = rng.integers(3, 61, n).astype(np.int32)
        labels = rng.integers(3, 61, n).astype(np.int32)
        labels[:2] = IGNORE
        out.append(Pack((Sample(ids, labels),)))
    return out


def gradients(
    batches: list[Batch], weights: RouterLossWeights = ALL, compat: bool = False
) -> tuple[dict[str, torch.Tensor], float]:
    built, engine = model(weights, compat)
    total = sum(b.num_label_tokens for b in batches)
    loss = engine.forward_backward(batches, [total] * len(batches))
    return {n: p.grad for n, p in built.named_parameters() if p.grad is not None}, float(loss)


def plain_terms(batch: Batch, built: Decoder) -> torch.Tensor:
    """The same losses written out: layer by layer, row by row, token by token."""
    seen: list[torch.Tensor] = []
    handles = [
        layer.mlp.router.register_forward_hook(lambda m, args, out: seen.append(out.logits))
        for layer in built.layers[1:]
    ]
    causal_loss(built, batch)
    for handle in handles:
        handle.remove()
    B, L = batch.input_ids.shape
    total = torch.zeros(())
    for logits, layer in zip(seen, built.layers[1:]):
        rows = logits.view(B, L, -1)
        for b in range(B):
            real = rows[b] if batch.real is None else rows[b][batch.real[b]]
            probs = real.softmax(-1)
            counts = torch.zeros(MOE.experts)
            for row in probs.detach():
                for e in row.topk(MOE.choices).indices:
                    counts[e] += 1
            total = total + ALL.aux * MOE.experts * sum(counts[e] / len(real) * probs[:, e].mean() for e in range(6))
            total = total + ALL.z * torch.stack([torch.log(row.exp().sum()) ** 2 for row in real]).mean()
        w = layer.mlp.router.weight / layer.mlp.router.weight.norm(dim=1, keepdim=True)
        total = total + B * ALL.orthogonal * ((w @ w.T - torch.eye(MOE.experts)) ** 2).mean()
    return total / B


def test_gradients_are_those_of_the_losses_written_out_and_the_loss_told_is_the_bare_one() -> None:
    batch = collate(packs())
    ours, loss = gradients([batch])
    built, _ = model(RouterLossWeights())
    built.records = None
    bare = causal_loss(built, batch) / batch.num_label_tokens
    (bare + plain_terms(batch, built)).backward()
    assert loss == pytest.approx(float(bare.detach()), abs=1e-6)
    for name, grad in ours.items():
        expected = dict(built.named_parameters())[name].grad
        assert torch.allclose(grad, expected, atol=2e-6), name


@pytest.mark.parametrize("at_once", [1, 2])
def test_micro_batches_and_padding_change_no_gradient(at_once: int) -> None:
    rows = packs()
    whole, _ = gradients([collate(rows)])
    parts, _ = gradients([collate(rows[i : i + at_once], pad_to=40) for i in range(0, 4, at_once)])
    assert whole.keys() == parts.keys()
    for name in whole:
        assert torch.allclose(whole[name], parts[name], atol=2e-6), name


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_rows_that_were_joined_keep_terms_of_their_own(at_once: int) -> None:
    rows = packs()
    whole, loss = gradients([collate(rows)])
    joined = [collate_joined(rows[i : i + at_once], lengths=(24, 48, 96)) for i in range(0, 4, at_once)]
    assert sum(batch.rows for batch in joined) == 4
    assert all(batch.input_ids.shape[0] == 1 for batch in joined)
    parts, other = gradients(joined)
    assert other == pytest.approx(loss, rel=1e-6)
    for name in whole:
        assert torch.allclose(whole[name], parts[name], atol=2e-6), name


def test_in_erniekits_way_every_micro_batch_counts_whole_and_padding_counts_too() -> None:
    rows = packs()
    router = "layers.1.mlp.router.weight"
    only = RouterLossWeights(orthogonal=1.0)
    bare, _ = gradients([collate(rows)], RouterLossWeights())
    once, _ = gradients([collate(rows)], only, compat=True)
    twice, _ = gradients([collate(rows[:2]), collate(rows[2:])], only, compat=True)
    assert torch.allclose(2 * (once[router] - bare[router]), twice[router] - bare[router], atol=1e-5)
    short, _ = gradients([collate(rows)], RouterLossWeights(aux=1.0), compat=True)
    long, _ = gradients([collate(rows, pad_to=64)], RouterLossWeights(aux=1.0), compat=True)
    assert not torch.allclose(short[router], long[router], atol=1e-3)


def test_what_is_told_are_means_over_rows_and_layers() -> None:
    batch = collate(packs())
    _, engine = model()
    engine.forward_backward([batch, batch], [1.0, 1.0])
    twice = engine.metric_means()
    engine.forward_backward([batch], [1.0])
    assert torch.allclose(twice, engine.metric_means())
    assert 1.0 < float(twice[0]) < MOE.experts  # 2 of 6 chosen by an even router: 2


def test_evaluation_adds_nothing() -> None:
    built, engine = model()
    engine.evaluate(collate(packs()))
    assert built.records == []
    assert engine.usage == {}


def test_usage_counts_the_choices_of_real_tokens_only() -> None:
    batch = collate(packs(), pad_to=40)
    _, engine = model(RouterLossWeights())
    engine.forward_backward([batch], [1.0])
    assert set(engine.usage) == {1, 2}
    assert all(int(u.sum()) == batch.num_tokens * MOE.choices for u in engine.usage.values())


def test_recompute_tells_and_feeds_the_same() -> None:
    from erniekit.parallel.recompute import apply_recompute, recompute_blocks

    batch = collate(packs())
    expected, _ = gradients([batch])
    for wrap in (lambda m: apply_recompute(m, "full"), lambda m: recompute_blocks(x.mlp for x in m.layers[1:])):
        built, engine = model()
        wrap(built)
        engine.forward_backward([batch], [batch.num_label_tokens])
        assert int(engine.usage[1].sum()) == batch.num_tokens * MOE.choices
        for name, param in built.named_parameters():
            if param.grad is not None:
                assert torch.allclose(param.grad, expected[name], atol=1e-7), name


def test_a_frozen_router_has_no_orthogonal_loss_but_its_balance_still_reaches_the_layers_before() -> None:
    built, engine = model()
    built.requires_grad_(False)
    built.layers[0].mlp.down.weight.requires_grad_(True)
    batch = collate(packs())
    engine.forward_backward([batch], [batch.num_label_tokens])
    with_losses = built.layers[0].mlp.down.weight.grad.clone()
    assert torch.isnan(engine.metric_means()[2])
    bare, engine = model(RouterLossWeights())
    engine.forward_backward([batch], [batch.num_label_tokens])
    assert not torch.allclose(with_losses, bare.layers[0].mlp.down.weight.grad, atol=1e-6)


def test_orthogonal_is_zero_at_right_angles_and_largest_when_all_point_one_way() -> None:
    assert float(orthogonal(3.0 * torch.eye(4, 9))) == pytest.approx(0.0, abs=1e-12)
    assert float(orthogonal(torch.ones(4, 9))) == pytest.approx(12 / 16)


def test_an_even_router_has_an_aux_of_as_many_as_it_chooses() -> None:
    """Each expert's share of choices is K / E and of probability 1 / E, so E * sum is K."""

    class Routing:
        logits = torch.zeros(12, 6)
        probs = F.softmax(torch.zeros(12, 6), -1).requires_grad_()

    from erniekit.losses.moe_balance import _per_row

    router = type("R", (), {"experts": 6, "choices": 2})
    aux, z = _per_row(Routing, router, 3, None, lambda x: x)
    assert aux.tolist() == pytest.approx([2.0] * 3)
    assert z.tolist() == pytest.approx([float(np.log(6)) ** 2] * 3)
