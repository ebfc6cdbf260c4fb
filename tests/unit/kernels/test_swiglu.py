"""SwiGLU on the fused projection against transformers' separate gate and up, to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from erniekit.kernels.swiglu import swiglu, swiglu_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers_with_the_gate_half_first(dtype):
    torch.manual_seed(0)
    act = LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2)).act_fn
    gate, up = (torch.randn(3, 5, 16).to(dtype).requires_grad_() for _ in range(2))
    fused = torch.cat([gate, up], dim=-1).detach().requires_grad_()
    theirs, ours = act(gate) * up, swiglu(fused)
    # A half of a row is a strided view: its remainder goes through exp one number at a time, which in fp32 may differ
    # from the vectorised one in the last bit; in 16 bit that is rounded away.
    last_bit = 2.4e-7 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(ours, theirs, atol=last_bit, rtol=last_bit)
    upstream = torch.randn(3, 5, 16).to(dtype)
    theirs.backward(upstream), ours.backward(upstream)
    torch.testing.assert_close(fused.grad, torch.cat([gate.grad, up.grad], dim=-1), atol=4 * last_bit, rtol=last_bit)


def test_the_gradient_written_by_hand_is_the_one_torch_finds():
    torch.manual_seed(0)
    fused = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(4, 5, dtype=torch.float64)
    swiglu(fused).backward(upstream)
    torch.testing.assert_close(swiglu_gradient(upstream, fused.detach()), fused.grad)
