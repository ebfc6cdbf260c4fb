"""A linear over a weight of any stored kind. Called by models/layers/linear.py; with adapters it is lora_linear.py.

A plain weight is torch's own linear. Any other is an op whose gradient goes to x by the turned product, and to the
weight where it is trained.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from erniekit.kernels.available import shapes_of
from erniekit.kernels.stored import PLAIN, Stored, kind_of
from erniekit.kernels.stored.base import arguments


def linear(x: torch.Tensor, weight: Stored, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] -> x W^T + bias [..., out]."""
    if weight.kind == PLAIN:
        return F.linear(x, weight.data, bias)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y: torch.Tensor = torch.ops.erniekit.stored_linear(rows, *weight, False)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias


# Defined by hand: what `custom_op` wraps around a function costs the host as much as a launch.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_LIBRARY.define(f"stored_linear(Tensor x, {arguments('weight')}, bool turned) -> Tensor")
_LIBRARY.define(f"stored_weight_gradient(Tensor grad, Tensor x, {arguments('weight')}) -> Tensor")


def _forward(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    extra: torch.Tensor | None,
    kind: str,
    turned: bool,
) -> torch.Tensor:
    weight = Stored(data, scale, extra, kind)
    return kind_of(weight).turned_product(x, weight) if turned else kind_of(weight).product(x, weight)


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, *weight: Any) -> torch.Tensor:
    held = Stored(*weight)
    return kind_of(held).weight_gradient(grad, x, held)


_LIBRARY.impl("stored_linear", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("stored_weight_gradient", _weight_gradient, "CompositeExplicitAutograd")


@shapes_of("erniekit::stored_linear")
def _(x: torch.Tensor, data: torch.Tensor, scale: Any, extra: Any, kind: str, turned: bool) -> torch.Tensor:
    weight = Stored(data, scale, extra, kind)
    out, width = kind_of(weight).shape(weight)
    return x.new_empty(x.shape[0], width if turned else out)


@shapes_of("erniekit::stored_weight_gradient")
def _(grad: torch.Tensor, x: torch.Tensor, data: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(data, dtype=grad.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *tensors, ctx.kind, ctx.turned = inputs
    ctx.save_for_backward(x if tensors[0].requires_grad else None, *tensors)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, *tensors = ctx.saved_tensors
    of_x = of_data = None
    grad = grad.contiguous()
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.erniekit.stored_linear(grad, *tensors, ctx.kind, not ctx.turned)
    if ctx.needs_input_grad[1]:
        assert not ctx.turned
        of_data = torch.ops.erniekit.stored_weight_gradient(grad, x, *tensors, ctx.kind)
    return of_x, of_data, None, None, None, None


torch.library.register_autograd("erniekit::stored_linear", _gradient, setup_context=_keep)
