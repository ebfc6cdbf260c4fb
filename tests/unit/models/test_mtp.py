"""Layers that predict further tokens: against the computation written out, beside a trunk they leave alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from erniekit.data.collate import collate
from erniekit.data.types import IGNORE, Batch, Pack, Sample
from erniekit.losses.causal import causal_loss
from erniekit.models.config import DecoderConfig
from erniekit.models.init import init_weights
from erniekit.models.layers.decoder import Decoder

CONFIG = DecoderConfig(
    family="ernie4_5_moe", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", tie_word_embeddings=True,
    max_positions=128, mtp_layers=2,
)  # fmt: skip


def model(weight: float = 0.3) -> Decoder:
    built = Decoder(CONFIG)
    init_weights(built, seed=2, std=0.3)
    built.mtp_weight, built.records = weight, []
    return built


def documents() -> list[Sample]:
    rng = np.random.default_rng(9)
    out = []
    for n in (9, 2, 14, 1, 6):
        tokens = rng.integers(3, 61, n + 1).astype(np.int32)
        labels = tokens[1:].copy()
        labels[: n // 3] = IGNORE
        labels[n // 2] = IGNORE
        out.append(Sample(tokens[:-1], labels))
    return out


def batch() -> Batch:
    docs = documents()
    return collate([Pack(tuple(docs[:2])), Pack(tuple(docs[2:]))], ahead=2)


def further_loss(built: Decoder, depth: int) -> torch.Tensor:
    """Document by document, each alone: the state before the norm, the tokens ahead, a dense layer, the head."""
    total = torch.zeros(())
    for doc in documents():
        ids, labels = torch.from_numpy(doc.ids).long()[None], torch.from_numpy(doc.labels).long()
        n = ids.shape[1]
        ctx = built.context(torch.arange(n)[None])
        x = built.run_layers(built.embed(ids), ctx)
        for d in range(depth + 1):
            ahead = torch.zeros(1, n, dtype=torch.long)
            ahead[0, : max(0, n - d - 1)] = ids[0, d + 1 :]
            part = built.mtp[d]
            joined = torch.cat((part.emb_norm(built.embed(ahead)), part.hidden_norm(x)), -1)
            x = part.block(joined @ part.proj.weight.T, ctx)
        logits = built.norm(x)[0] @ built.embed.weight.T
        for t in range(n - depth - 1):
            if labels[t] != IGNORE and labels[t + depth + 1] != IGNORE:
                total = total - F.log_softmax(logits[t], -1)[labels[t + depth + 1]]
    return total


def test_the_further_losses_and_all_gradients_are_those_of_the_computation_written_out() -> None:
    ours, plain = model(), model()
    causal_loss(ours, batch()).backward()
    plain.records = None
    further = [further_loss(plain, depth) for depth in range(2)]
    (causal_loss(plain, batch()) + 0.3 * sum(further) / 2).backward()
    (record,) = ours.records or []
    for depth in range(2):
        total, count = record["mtp_loss", depth]
        assert float(total) == pytest.approx(float(further[depth].detach()), rel=1e-5)
        assert int(count) > 0
    for (name, a), b in zip(ours.named_parameters(), plain.parameters()):
        assert a.grad is not None, name
        assert torch.allclose(a.grad, b.grad, atol=2e-5), name
    assert float(ours.mtp[1].block.attn.qkv.weight.grad.abs().max()) > 0


def test_the_loss_told_is_the_trunks_alone() -> None:
    with_further, without = causal_loss(model(), batch()), causal_loss(model(weight=0.0), batch())
    assert float(with_further.detach()) == float(without.detach())


def test_at_rest_they_get_no_gradient() -> None:
    built = model(weight=0.0)
    causal_loss(built, batch()).backward()
    assert all(p.grad is None for p in built.mtp.parameters())


def test_evaluation_leaves_them_out() -> None:
    built = model()
    with torch.no_grad():
        causal_loss(built, batch())
    assert built.records == []
