"""RMSNorm against transformers' modules, to the bit in bf16: the cast comes before the weight."""

from __future__ import annotations

import pytest
import torch
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from erniekit.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("theirs", [Ernie4_5RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers_forward_and_backward(theirs, dtype):
    torch.manual_seed(0)
    x = (3 * torch.randn(4, 7, 64)).to(dtype)
    module = theirs(64, eps=1e-5).to(dtype)
    with torch.no_grad():
        module.weight.normal_(1.0, 0.3)
    results = []
    for function in (module, lambda t: rms_norm(t, module.weight, 1e-5)):
        leaf = x.clone().requires_grad_()
        module.weight.grad = None
        out = function(leaf)
        out.backward(torch.ones_like(out))
        results.append((out.detach(), leaf.grad, module.weight.grad))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_bf16_rounds_before_the_weight_and_not_after():
    """Rounding once at the end gives other bits somewhere in this sample; ours must be the twice-rounded ones."""
    torch.manual_seed(1)
    x, weight = torch.randn(64, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    ours = rms_norm(x, weight, 1e-5)
    assert torch.equal(ours, exact.bfloat16() * weight)
    assert not torch.equal(ours, (exact * weight.float()).bfloat16())
