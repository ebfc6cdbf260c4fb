"""A frozen linear and the low-rank updates on its rows as one op: y = x W^T + bias + the sum of scale * (x A^T) B^T.

Every update is added to y by the product itself, so that nothing as wide as y is read or written once more, or kept for
backward. The weight may be of any stored kind: what its product rounds, the updates see as it was. Called by
lora/layers.py. T tokens, R the ranks of all updates together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels.available import shapes_of
from erniekit.kernels.op_arguments import WEIGHT, OpArguments
from erniekit.kernels.stored import PLAIN, Stored, kind_of
from erniekit.kernels.stored.plain import scaled_product

_TYPES = (torch.Tensor, nn.Parameter)  # no subclass: a DTensor computes by its own rules


class RowUpdate(NamedTuple):
    A: torch.Tensor  # [r, in]
    B: torch.Tensor  # [rows of all spans, r]
    scale: float
    spans: tuple[tuple[int, int], ...]  # the rows of the weight it adds to, (first, end) upwards, as B has them


def in_one_op(x: torch.Tensor, weight: Stored, bias: torch.Tensor | None, updates: Sequence[RowUpdate]) -> bool:
    """Whether the op takes these: plain tensors of one dtype, outside of autocast and of functional transforms."""
    given = [x, *(t for update in updates for t in (update.A, update.B)), *([] if bias is None else [bias])]
    if weight.kind == PLAIN:
        given.append(weight.data)
    if any(type(t) not in _TYPES or t.dtype != x.dtype for t in given):
        return False
    return not torch.is_autocast_enabled(x.device.type) and not torch._C._are_functorch_transforms_active()


def lora_linear(
    x: torch.Tensor, weight: Stored, bias: torch.Tensor | None, updates: Sequence[RowUpdate]
) -> torch.Tensor:
    """x [..., in], weight [out, in] -> [..., out]. Without updates: the bits that updates of zero give, which those of
    another product's kernel need not be."""
    out, width = kind_of(weight).shape(weight)
    if updates:
        A = updates[0].A if len(updates) == 1 else torch.cat([update.A for update in updates])
        B = placed(updates, out)
    else:
        A, B = x.new_empty(0, width), x.new_empty(out, 0)
    scales, ranks = [update.scale for update in updates], [update.A.shape[0] for update in updates]
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    given = {"x": rows, "weight": weight, "bias": bias, "A": A, "B": B, "scales": scales, "ranks": ranks}
    y, _ = torch.ops.erniekit.lora_linear(*ARGUMENTS.flat(given))
    result: torch.Tensor = y.view(*x.shape[:-1], out)
    return result


def placed(updates: Sequence[RowUpdate], out: int) -> torch.Tensor:
    """[out, R]: each B on the rows of its spans and the columns of its ranks, zero elsewhere."""
    columns = [_column(update.B, _joined(update.spans), out) for update in updates]
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def _column(B: torch.Tensor, spans: Sequence[tuple[int, int]], out: int) -> torch.Tensor:
    if len(spans) == 1:
        ((first, end),) = spans
        return B if B.shape[0] == out else F.pad(B, (0, 0, first, out - end))
    pieces, at = [], 0
    for (first, end), piece in zip(spans, B.split([end - first for first, end in spans])):
        pieces += [B.new_zeros(first - at, B.shape[1]), piece]
        at = end
    return torch.cat([*pieces, B.new_zeros(out - at, B.shape[1])])


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one."""
    out = [spans[0]]
    for first, end in spans[1:]:
        if first == out[-1][1]:
            out[-1] = (out[-1][0], end)
        else:
            out.append((first, end))
    return out


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor,
    scales: Sequence[float],
    ranks: Sequence[int],
) -> torch.Tensor:
    """The definition, for x [T, in], A [R, in] and B [out, R]; ranks: of R, the columns that each scale is of."""
    return F.linear(x, weight, bias) + F.linear(_scaled(F.linear(x, A), scales, ranks), B)


def _scaled(low: torch.Tensor, scales: Sequence[float], ranks: Sequence[int]) -> torch.Tensor:
    return torch.cat([columns * scale for columns, scale in zip(low.split(list(ranks), dim=1), scales)], dim=1)


ARGUMENTS = OpArguments(
    x="Tensor", weight=WEIGHT, bias="Tensor?", A="Tensor", B="Tensor", scales="float[]", ranks="int[]",
)  # fmt: skip
BACKWARD = OpArguments(
    grad="Tensor", x="Tensor", low="Tensor", weight=WEIGHT, A="Tensor", B="Tensor", scales="float[]", ranks="int[]",
    wanted="bool[]",
)  # fmt: skip
GRADED = ("x", "weight", "bias", "A", "B")  # what may need a gradient, in the order backward returns them
# Defined by hand: what `custom_op` wraps around a function costs the host as much as the launch itself.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_LIBRARY.define(f"lora_linear({ARGUMENTS.schema}) -> (Tensor, Tensor)")
_LIBRARY.define(f"lora_linear_backward({BACKWARD.schema}) -> Tensor[]")


def _common(scales: Sequence[float]) -> float | None:
    """The scale of all updates, which a product applies in fp32 before it rounds; None: they differ."""
    if not scales:
        return 1.0
    return scales[0] if len(set(scales)) == 1 else None


def _forward(*flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, out], x A^T [T, R], scaled already where scales differ)."""
    a = ARGUMENTS.named(flat)
    weight, low, alpha = a["weight"], F.linear(a["x"], a["A"]), _common(a["scales"])
    if alpha is None:
        low = _scaled(low, a["scales"], a["ranks"])
    y = kind_of(weight).product_plus(a["x"], weight, low, a["B"].t(), 1.0 if alpha is None else alpha)
    return y if a["bias"] is None else y.add_(a["bias"]), low


def _backward(*flat: Any) -> list[torch.Tensor]:
    """The gradients `wanted` of GRADED, only those."""
    a = BACKWARD.named(flat)
    x, weight, A, B, scales = a["x"], a["weight"], a["A"], a["B"], a["scales"]
    want = dict(zip(GRADED, a["wanted"], strict=True))
    grad, common, found = a["grad"].contiguous(), _common(scales), []
    alpha = 1.0 if common is None else common
    if want["x"] or want["A"]:
        grad_low = scaled_product(grad, B, alpha)
        if common is None:
            grad_low = _scaled(grad_low, scales, a["ranks"])
    if want["x"]:
        found.append(kind_of(weight).turned_product_plus(grad, weight, grad_low, A))
    if want["weight"]:
        found.append(kind_of(weight).weight_gradient(grad, x, weight))
    if want["bias"]:
        found.append(grad.sum(0))
    if want["A"]:
        found.append(grad_low.t().mm(x))
    if want["B"]:
        found.append(scaled_product(grad.t(), a["low"], alpha))
    return found


_LIBRARY.impl("lora_linear", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("lora_linear_backward", _backward, "CompositeExplicitAutograd")


@shapes_of("erniekit::lora_linear")
def _(*flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a = ARGUMENTS.named(flat)
    x, weight = a["x"], a["weight"]
    return x.new_empty(x.shape[0], kind_of(weight).shape(weight)[0]), x.new_empty(x.shape[0], a["A"].shape[0])


@shapes_of("erniekit::lora_linear_backward")
def _(*flat: Any) -> list[torch.Tensor]:
    a = BACKWARD.named(flat)
    data = a["weight"].data
    shapes = (a["x"].shape, data.shape, data.shape[:1], a["A"].shape, a["B"].shape)
    return [a["grad"].new_empty(shape) for shape, want in zip(shapes, a["wanted"]) if want]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ARGUMENTS.save(ctx, inputs, output[1])


def _gradient(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return ARGUMENTS.gradients({})
    wanted = ARGUMENTS.wanted(ctx.needs_input_grad, GRADED)
    flat, (low,) = ARGUMENTS.saved(ctx)
    a = {**ARGUMENTS.named(flat), "grad": grad, "low": low, "wanted": wanted}
    if torch.is_grad_enabled():
        found = _written_out(a)
    else:
        found = torch.ops.erniekit.lora_linear_backward(*BACKWARD.flat(a))
    return ARGUMENTS.gradients(dict(zip((name for name, want in zip(GRADED, wanted) if want), found)))


def _written_out(a: Mapping[str, Any]) -> list[torch.Tensor]:
    """What the backward op returns, made of ops that can be differentiated again. a: its arguments."""
    grad, x, weight, A, B, scales, ranks = (a[name] for name in ("grad", "x", "weight", "A", "B", "scales", "ranks"))
    low, grad_low = (_scaled(t, scales, ranks) for t in (F.linear(x, A), grad @ B))
    if weight.kind == PLAIN:
        grad_x = grad @ weight.data
    else:
        grad_x = torch.ops.erniekit.stored_linear(grad, *weight, True)
    every = (grad_x + grad_low @ A, grad.t() @ x, grad.sum(0), grad_low.t() @ x, grad.t() @ low)
    return [t for t, want in zip(every, a["wanted"]) if want]


torch.library.register_autograd("erniekit::lora_linear", _gradient, setup_context=_keep)
