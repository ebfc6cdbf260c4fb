"""SwiGLU on a fused projection whose first half is the gate. Called by models/layers. T rows, W width of one half."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from erniekit.kernels.available import runs_triton
from erniekit.kernels.kernel_op import KernelOp


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 W] -> [..., W]."""
    if not _on_card(gate_up):
        return reference(gate_up)
    flat = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
    result: torch.Tensor = _forward(flat).view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return result


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def pairs(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 W] of gates, then ups -> each gate next to its up."""
    return torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1)


def swiglu_gradient(grad: torch.Tensor, gate_up: torch.Tensor, paired: bool = False) -> torch.Tensor:
    """grad [T, W], gate_up [T, 2 W] -> of gates, then of ups [T, 2 W], for backward passes written by hand. paired:
    each gate lies next to its up."""
    return (_backward if _on_card(gate_up) else reference_gradient)(grad.contiguous(), gate_up, paired)


def reference_gradient(grad: torch.Tensor, gate_up: torch.Tensor, paired: bool = False) -> torch.Tensor:
    if paired:
        gate_up = gate_up.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    bent, g = torch.sigmoid(gate), grad.to(wide)
    return torch.cat((g * up * bent * (1 + gate * (1 - bent)), g * gate * bent), dim=-1).to(gate_up.dtype)


def _on_card(gate_up: torch.Tensor) -> bool:
    return runs_triton(gate_up) and gate_up.dtype in (torch.bfloat16, torch.float16)


def _halved(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _launch(launcher: Any, gate_up: torch.Tensor) -> torch.Tensor:
    from erniekit.kernels.triton import swiglu as kernels

    out = _halved(gate_up)
    rows, width = out.shape
    launcher(kernels.forward)[kernels.grid(rows, width)](gate_up, out, width, BLOCK=kernels.BLOCK)
    return out


def _of_both(grad: torch.Tensor, gate_up: torch.Tensor, paired: bool = False) -> torch.Tensor:
    return torch.empty_like(gate_up)


def _launch_backward(launcher: Any, grad: torch.Tensor, gate_up: torch.Tensor, paired: bool = False) -> torch.Tensor:
    from erniekit.kernels.triton import swiglu as kernels

    (rows, width), out = grad.shape, torch.empty_like(gate_up)
    launch = launcher(kernels.backward)[kernels.grid(rows, width)]
    launch(grad, gate_up, out, width, PAIRED=paired, BLOCK=kernels.BLOCK)
    return out


_forward = KernelOp("swiglu", _halved, _launch)
_backward = KernelOp("swiglu_backward", _of_both, _launch_backward)


def _keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (gate_up,) = ctx.saved_tensors
    result: torch.Tensor = _backward(grad.contiguous(), gate_up)
    return result


_forward.register_autograd(_gradient, _keep)
