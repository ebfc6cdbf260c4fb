"""A router's logits, x @ weight^T in fp32, at the price of a 16-bit product. Called by models/layers/router.py.

x is bf16 already. An fp32 weight is the sum of three bf16 parts (8 + 8 + 8 bits), products of bf16 are exact in fp32,
and so the sum over the parts is the fp32 product. T tokens, E experts, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from erniekit import capabilities
from erniekit.kernels.available import runs_triton, shapes_of
from erniekit.kernels.precision import at_least_fp32


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H], weight [E, H] -> fp32 [T, E]."""
    if x.is_cuda and capabilities.has("wide") and x.dtype == torch.bfloat16 and weight.dtype == torch.float32:
        result: torch.Tensor = torch.ops.erniekit.router_logits(x, weight)
        return result
    return F.linear(at_least_fp32(x), at_least_fp32(weight))


def parts_of(value: torch.Tensor, count: int) -> list[torch.Tensor]:
    """bf16 tensors whose sum is an fp32 one, the largest first; three leave nothing but what bf16 cannot hold."""
    out = []
    for _ in range(count):
        out.append(value.to(torch.bfloat16))
        value = value - out[-1].float()
    return out


def side_by_side(value: torch.Tensor, which: tuple[int, int, int], dim: int) -> torch.Tensor:
    """The parts `which` of an fp32 matrix (0 the largest), one after the other along `dim`."""
    if runs_triton(value):
        from erniekit.kernels.triton import bf16_split

        return bf16_split.side_by_side(value, which, dim)
    each = parts_of(value, max(which) + 1)
    return torch.cat([each[k] for k in which], dim)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of bf16 matrices, in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


# Defined by hand: what `custom_op` wraps around a function costs the host as much as a launch.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_LIBRARY.define("router_logits(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.define("router_logits_backward(Tensor grad, Tensor x, Tensor weight, bool[] wanted) -> Tensor[]")


def _forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts: torch.Tensor = _product(x, side_by_side(weight, (0, 1, 2), 0).t()).unflatten(1, (3, weight.shape[0]))
    return parts.sum(1)


@shapes_of("erniekit::router_logits")
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


def _backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool]) -> list[torch.Tensor]:
    out = []
    if wanted[0]:
        # The result is rounded to x's 8 bits: of the product of two sums, what is below 16 bits is left out.
        out.append(_product(side_by_side(grad, (0, 1, 0), 1), side_by_side(weight, (0, 0, 1), 0)).to(x.dtype))
    if wanted[1]:
        out.append(_product(side_by_side(grad, (0, 1, 2), 1).t(), x).view(3, *weight.shape).sum(0))
    return out


@shapes_of("erniekit::router_logits_backward")
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool]) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor, want in zip((x, weight), wanted) if want]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    wanted = [bool(want) for want in ctx.needs_input_grad[:2]]
    found = iter(torch.ops.erniekit.router_logits_backward(grad.contiguous(), *ctx.saved_tensors, wanted))
    return tuple(next(found) if want else None for want in wanted)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("router_logits", _forward, _device)
    _LIBRARY.impl("router_logits_backward", _backward, _device)
torch.library.register_autograd("erniekit::router_logits", _gradients, setup_context=_keep)
