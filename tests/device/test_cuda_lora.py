"""A linear and its LoRA pairs as one op, on a card: bf16 against fp32 with the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from device_cases.lora import QKV, RANK, adapted

from erniekit.kernels.lora_linear import in_one_op
from erniekit.lora.layers import SHARED, LoRALinear

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

GROUPS = {"each part": None, "two parts": ("q_proj", "v_proj"), "one A for all": (SHARED,)}


def answers(module: LoRALinear, x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of x and of every A and B."""
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.lora.parameters()], upstream)]


def in_fp32(module: LoRALinear, x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """From the merged weight, part by part."""
    x = x.float().requires_grad_()
    factors = [p.detach().float().requires_grad_() for p in module.lora.parameters()]
    updates = {}
    for pair, A, B in zip(module.pairs().values(), factors[::2], factors[1::2]):
        for (part, _), b in zip(pair.parts, B.split([n for _, n in pair.parts])):
            updates[part] = pair.scale * b @ A
    weights = module.weight.float().split([n for _, n in module.parts])
    merged = torch.cat([w + updates.get(part, 0.0) for (part, _), w in zip(module.parts, weights)])
    y = F.linear(x, merged, None if module.base.bias is None else module.base.bias.float())
    return [y.detach(), *torch.autograd.grad(y, [x, *factors], upstream.float())]


@pytest.mark.parametrize(
    ("group", "scales", "bias", "compiled"),
    [
        ("each part", (2.0,), False, False),
        ("each part", (0.7, 2.0, 1.3), True, False),
        ("two parts", (0.7,), True, False),
        ("one A for all", (2.0,), False, False),
        ("each part", (2.0,), False, True),
        ("two parts", (0.7, 1.3), True, True),
        ("one A for all", (0.7,), True, True),
    ],
)
def test_bf16_is_within_two_percent_of_fp32(group: str, scales: tuple[float, ...], bias: bool, compiled: bool) -> None:
    module = adapted(2560, QKV, GROUPS[group], scales, bias)
    x = torch.randn(1, 4096, 2560, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(1, 4096, 3584, device="cuda", dtype=torch.bfloat16)
    assert in_one_op(x, module.base.stored(), module.base.bias, module.row_updates())
    if compiled:
        module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False)
    names = ["y", "dx", *(name for name, _ in module.lora.named_parameters())]
    for name, got, want in zip(names, answers(module, x, upstream), in_fp32(module, x, upstream), strict=True):
        assert got.dtype == torch.bfloat16
        assert ((got.float() - want).norm() / want.norm()).item() < 0.02, name


def test_it_keeps_nothing_as_wide_as_its_output() -> None:
    """Of 8192 tokens: the output itself, the pairs' low-rank rows, and 8 MiB for the stacked pairs and cuBLAS."""
    module = adapted(2560, QKV)
    x = torch.randn(8192, 2560, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    module(x)  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = module(x)
    held = torch.cuda.memory_allocated() - before
    assert held <= 2 * (y.numel() + 8192 * 3 * RANK) + (8 << 20)
