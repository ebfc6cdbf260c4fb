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
from erniekit.kernels.op_arguments import WEIGHT, OpArguments
from erniekit.kernels.stored import PLAIN, Stored, kind_of


def linear(x: torch.Tensor, weight: Stored, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] -> x W^T + bias [..., out]."""
    if weight.kind == PLAIN:
        return F.linear(x, weight.data, bias)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y: torch.Tensor = torch.ops.erniekit.stored_linear(rows, *weight, False)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias


ARGUMENTS = OpArguments(x="Tensor", weight=WEIGHT, turned="bool")
OF_WEIGHT = OpArguments(grad="Tensor", x="Tensor", weight=WEIGHT)
# Defined by hand: what `custom_op` wraps around a function costs the host as much as a launch.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_LIBRARY.define(f"stored_linear({ARGUMENTS.schema}) -> Tensor")
_LIBRARY.define(f"stored_weight_gradient({OF_WEIGHT.schema}) -> Tensor")


def _forward(*flat: Any) -> torch.Tensor:
    a = ARGUMENTS.named(flat)
    kind = kind_of(a["weight"])
    return (kind.turned_product if a["turned"] else kind.product)(a["x"], a["weight"])


def _weight_gradient(*flat: Any) -> torch.Tensor:
    a = OF_WEIGHT.named(flat)
    return kind_of(a["weight"]).weight_gradient(a["grad"], a["x"], a["weight"])


_LIBRARY.impl("stored_linear", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("stored_weight_gradient", _weight_gradient, "CompositeExplicitAutograd")


@shapes_of("erniekit::stored_linear")
def _(*flat: Any) -> torch.Tensor:
    a = ARGUMENTS.named(flat)
    out, width = kind_of(a["weight"]).shape(a["weight"])
    made: torch.Tensor = a["x"].new_empty(a["x"].shape[0], width if a["turned"] else out)
    return made


@shapes_of("erniekit::stored_weight_gradient")
def _(*flat: Any) -> torch.Tensor:
    a = OF_WEIGHT.named(flat)
    return torch.empty_like(a["weight"].data, dtype=a["grad"].dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a = ARGUMENTS.named(inputs)
    ARGUMENTS.save(ctx, ARGUMENTS.flat({**a, "x": a["x"] if a["weight"].data.requires_grad else None}))


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a = ARGUMENTS.named(ARGUMENTS.saved(ctx)[0])
    of_x, of_weight = ARGUMENTS.wanted(ctx.needs_input_grad, ("x", "weight"))
    found, grad = dict[str, torch.Tensor](), grad.contiguous()
    if of_x:
        found["x"] = torch.ops.erniekit.stored_linear(grad, *a["weight"], not a["turned"])
    if of_weight:
        assert not a["turned"]
        found["weight"] = torch.ops.erniekit.stored_weight_gradient(grad, a["x"], *a["weight"])
    return ARGUMENTS.gradients(found)


torch.library.register_autograd("erniekit::stored_linear", _gradient, setup_context=_keep)
