"""What the plain path keeps of a token, by the planner's account, against a walk that counts saved tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from erniekit.data.collate import one_document
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.planner.activations import UNCUT, ActivationCuts, LayerKernels, kept, part_kept, start

DENSE = DecoderConfig(
    family="ernie4_5", vocab_size=61, hidden_size=320, intermediate_size=768, num_layers=2, num_heads=8,
    num_kv_heads=2, head_dim=32, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", max_positions=4096,
    tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = replace(
    DENSE, family="ernie4_5_moe", moe=MoEShape(experts=8, choices=3, width=128, shared_width=256, start=0, end=1)
)


def walked(config: DecoderConfig, tokens: int, itemsize: int) -> int:
    """Bytes of all tensors that backward of the first layer wants, weights apart, each storage once."""
    spec = MODELS.get(config.family)
    model = spec.cast(spec.build(config), torch.float32 if itemsize == 4 else torch.bfloat16)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}
    forward = model.layers[0].forward

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage  # held, so that no other takes its place
        return tensor

    def watched(x: torch.Tensor, ctx: Any) -> torch.Tensor:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(x.detach().requires_grad_(), ctx)

    model.layers[0].forward = watched
    batch = one_document(torch.randint(1, 60, (1, tokens)), tokens)
    model(batch.input_ids, batch.positions, batch.documents(), batch.max_doc, more=batch.more())
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_plain_path_keeps_what_a_walk_counts(config: DecoderConfig) -> None:
    a_token = (walked(config, 256, 2) - walked(config, 128, 2)) / 128
    assert kept(config, config.sparse(0), UNCUT, LayerKernels(fused=False)) == pytest.approx(a_token, rel=0.02)


def test_fused_kernels_keep_less_and_every_cut_less_still() -> None:
    for config in (DENSE, EXPERTS):
        sparse = config.sparse(0)
        fused = kept(config, sparse)
        assert start(config) < fused < kept(config, sparse, UNCUT, LayerKernels(fused=False))
        assert (
            kept(config, sparse, ActivationCuts(2, True, 2)) < kept(config, sparse, ActivationCuts(2, False, 2)) < fused
        )
        parts = [part_kept(config, sparse, how, UNCUT, LayerKernels()) for how in ("full", "full_attn", "core_attn")]
        assert parts == sorted(parts)
        assert parts[-1] < fused
