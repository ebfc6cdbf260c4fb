"""LoRA on routed experts on an NVIDIA card: right in 16 bit, for any rank, and without ever waiting for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from erniekit.lora.layers import LoRAExperts, Pair
from erniekit.models.layers.experts import ExpertLinear

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]


@pytest.mark.parametrize("rank", [3, 8, 32])
@pytest.mark.parametrize("parts", [(("gate_proj", 48), ("up_proj", 48)), (("down_proj", 64),)])
def test_updates_of_experts_in_16_bit_are_fp32s_to_rounding_and_nothing_waits_for_the_device(
    rank: int, parts: tuple[tuple[str, int], ...]
) -> None:
    torch.manual_seed(0)
    base = ExpertLinear(6, 32, parts)
    nn.init.normal_(base.weight, std=0.2).requires_grad_(False)
    pairs = {name: Pair(((name, rows),), rank, 2.0, base.weight, experts=6) for name, rows in parts}
    for pair in pairs.values():
        nn.init.normal_(pair.A, std=0.2), nn.init.normal_(pair.B, std=0.2)
    exact = LoRAExperts(base, base.parts, pairs).to(torch.bfloat16).float()  # the same numbers, computed in fp32
    rows = torch.randn(50, 32).bfloat16().float().requires_grad_()
    ends = torch.tensor([9, 9, 20, 21, 40, 50], dtype=torch.int32)  # one expert empty
    want = exact(rows, ends)
    upstream = torch.randn_like(want).bfloat16().float()
    inputs = [rows, *(p for pair in exact.pairs().values() for p in (pair.A, pair.B))]
    want_grads = torch.autograd.grad(want, inputs, upstream)

    module = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    there = rows.detach().to("cuda", torch.bfloat16).requires_grad_()
    ends, upstream = ends.cuda(), upstream.to("cuda", torch.bfloat16)
    inputs = [there, *(p for pair in module.pairs().values() for p in (pair.A, pair.B))]
    torch.autograd.grad(module(there, ends), inputs, upstream)  # the first call sets the library up
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = module(there, ends)
        got_grads = torch.autograd.grad(got, inputs, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, theirs in zip((got, *got_grads), (want, *want_grads)):
        # bf16 keeps 8 bits, and a few roundings follow one another
        assert (mine.float().cpu() - theirs).norm() <= 0.02 * theirs.norm()
