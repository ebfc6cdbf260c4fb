"""Gate and up with SwiGLU in the same product, so that the activation is not a pass of its own. Called by
models/layers/mlp.py. T tokens, H hidden, W width.

On Hopper cards; measured against a product and a pass: 0.16 for 0.24 ms at H = 1024 and 8K tokens, no faster at
H = 5120, where the product is nearly all. The way back is a pass and two products, as ever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from erniekit.kernels import quack_gemm
from erniekit.kernels.available import shapes_of
from erniekit.kernels.swiglu import pairs, swiglu_gradient
from erniekit.kernels.swiglu import reference as swiglu


def gate_up_swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., H], weight [2 W, H] whose first half is the gate's -> [..., W]."""
    rows = x.reshape(-1, x.shape[-1])
    act, _ = torch.ops.erniekit.gate_up_swiglu(rows, weight)
    out: torch.Tensor = act.view(*x.shape[:-1], act.shape[-1])
    return out


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return swiglu(F.linear(x, weight))


# Defined by hand: what `custom_op` wraps around a function costs the host as much as a launch.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_LIBRARY.define("gate_up_swiglu(Tensor x, Tensor weight) -> (Tensor, Tensor)")


def _on_cpu(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    halves = F.linear(x, weight)
    return swiglu(halves), pairs(halves)


def _on_card(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quack_gemm.gated(x.contiguous(), weight)


_LIBRARY.impl("gate_up_swiglu", _on_cpu, "CPU")
_LIBRARY.impl("gate_up_swiglu", _on_card, "CUDA")


@shapes_of("erniekit::gate_up_swiglu")
def _(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0] // 2), x.new_empty(x.shape[0], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if grad is None:
        return None, None
    x, weight, paired = ctx.saved_tensors
    halves = swiglu_gradient(grad, paired, paired=True)
    want_x, want_weight = ctx.needs_input_grad
    return halves @ weight if want_x else None, halves.t() @ x if want_weight else None


torch.library.register_autograd("erniekit::gate_up_swiglu", _gradients, setup_context=_keep)
