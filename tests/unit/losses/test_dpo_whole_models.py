"""Preference losses through whole models: with experts against two sequences, and a row of 32K tokens in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from erniekit.data.preference import PairSample
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.types import IGNORE, Batch, Pack
from erniekit.losses.dpo import DpoSettings, dpo_loss, pair_log_probs
from erniekit.models.config import MoEShape
from erniekit.models.init import init_weights
from erniekit.models.layers.decoder import Decoder
from unit.kernels.test_token_losses import Memory
from unit.losses.test_dpo import CONFIG, LENGTH, ROWS, gradients, packed, two_sequence_loss

EXPERTS = replace(
    CONFIG,
    family="ernie4_5_moe",
    num_layers=3,
    moe=MoEShape(experts=6, choices=2, width=16, shared_width=16, start=1, end=2),
)


def with_experts(seed: int) -> Decoder:
    built = Decoder(EXPERTS)
    init_weights(built, seed=seed, std=0.3)
    return built


def test_with_experts_packed_rows_equal_two_sequences_in_loss_and_every_gradient():
    """Routers, every expert that is chosen, shared experts and all else; fp32: other orders of sums."""
    ours, theirs, reference = with_experts(1), with_experts(1), with_experts(2)
    batch = packed(ROWS, LENGTH)
    with torch.no_grad():
        known = pair_log_probs(reference, batch)
    loss = dpo_loss(ours, replace(batch, pairs=replace(batch.pairs, reference=known)), settings=DpoSettings())
    expected = two_sequence_loss(theirs, reference, [pair for row in ROWS for pair in row])
    loss.backward(), expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    wanted = {name: grad for name, grad in gradients(theirs).items() if grad is not None}
    got = {name: grad for name, grad in gradients(ours).items() if grad is not None}
    assert set(got) == set(wanted)
    assert any("router.weight" in name for name in got)
    for name, grad in got.items():
        torch.testing.assert_close(grad, wanted[name], atol=1e-5, rtol=1e-4, msg=name)
    assert float(got["layers.1.mlp.router.weight"].abs().max()) > 1e-4, "a router that the comparison would miss"


TOKENS, PAIR, VOCABULARY, CHUNK = 32768, 512, 8000, 64


def long_row() -> Batch:
    """64 pairs of 512 places: half a prompt, half two answers."""
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(TOKENS // PAIR):
        labels = rng.integers(1, VOCABULARY, PAIR).astype(np.int32)
        labels[: PAIR // 2] = IGNORE
        ids = rng.integers(1, VOCABULARY, PAIR).astype(np.int32)
        pairs.append(PairSample(ids, labels, PAIR // 2, PAIR * 3 // 4, PAIR * 3 // 4))
    batch = collate_pairs([Pack(tuple(pairs))])
    return replace(batch, pairs=replace(batch.pairs, reference=torch.zeros(2 * len(pairs))))


@pytest.mark.full
def test_a_row_of_32k_tokens_is_trained_without_a_tensor_of_tokens_by_vocabulary():
    """All logits would be 1000 MiB and those of the scored half 500. A chunk's are 2 MiB; the rest is activations of
    a narrow model, 2 MiB each, scores of one segment at a time, and gradients."""
    wide = replace(
        CONFIG, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=16, max_positions=PAIR,
    )  # fmt: skip
    built, batch = Decoder(wide), long_row()
    init_weights(built, seed=1, std=0.1)
    with Memory() as memory:
        loss = dpo_loss(built, batch, settings=DpoSettings(), chunk=CHUNK)
        loss.backward()
    assert torch.isfinite(loss)
    assert float(built.embed.weight.grad.abs().max()) > 0
    scored = int((batch.labels != IGNORE).sum())
    assert scored == TOKENS // 2
    assert memory.peak < 64 * 2**20  # 49 when it was written
    assert not any(VOCABULARY in shape and max(shape) >= scored for shape in memory.shapes)
