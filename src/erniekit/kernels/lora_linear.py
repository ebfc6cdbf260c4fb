"""A frozen linear and the low-rank updates on its rows as one op: y = x W^T + bias + the sum of scale * (x A^T) B^T.

Every update is added to y by the product itself, so that nothing as wide as y is read or written once more, or kept for
backward. The weight may be of any stored kind: what its product rounds, the updates see as it was. Called by
lora/layers.py. T tokens, R the ranks of all updates together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels.available import shapes_of
from erniekit.kernels.stored import PLAIN, Stored, kind_of
from erniekit.kernels.stored.base import arguments
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
    y, _ = torch.ops.erniekit.lora_linear(rows, *weight, bias, A, B, scales, ranks)
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


# Defined by hand: what `custom_op` wraps around a function costs the host as much as the launch itself.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_WEIGHT = arguments("weight")
_LIBRARY.define(
    f"lora_linear(Tensor x, {_WEIGHT}, Tensor? bias, Tensor A, Tensor B, float[] scales, int[] ranks) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    f"lora_linear_backward(Tensor grad, Tensor x, Tensor low, {_WEIGHT}, Tensor A, Tensor B, float[] scales, "
    "int[] ranks, bool[] wanted) -> Tensor[]"
)
_NOT_GRADED = 2  # scales and ranks


def _common(scales: Sequence[float]) -> float | None:
    """The scale of all updates, which a product applies in fp32 before it rounds; None: they differ."""
    if not scales:
        return 1.0
    return scales[0] if len(set(scales)) == 1 else None


def _forward(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    extra: torch.Tensor | None,
    kind: str,
    bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor,
    scales: list[float],
    ranks: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, out], x A^T [T, R], scaled already where scales differ)."""
    weight, low, alpha = Stored(data, scale, extra, kind), F.linear(x, A), _common(scales)
    if alpha is None:
        low = _scaled(low, scales, ranks)
    y = kind_of(weight).product_plus(x, weight, low, B.t(), 1.0 if alpha is None else alpha)
    return y if bias is None else y.add_(bias), low


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    low: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    extra: torch.Tensor | None,
    kind: str,
    A: torch.Tensor,
    B: torch.Tensor,
    scales: list[float],
    ranks: list[int],
    wanted: list[bool],
) -> list[torch.Tensor]:
    """Of x, weight, bias, A, B: the gradients that are wanted, in this order."""
    weight = Stored(data, scale, extra, kind)
    want_x, want_weight, want_bias, want_A, want_B = wanted
    grad, common, found = grad.contiguous(), _common(scales), []
    alpha = 1.0 if common is None else common
    if want_x or want_A:
        grad_low = scaled_product(grad, B, alpha)
        if common is None:
            grad_low = _scaled(grad_low, scales, ranks)
    if want_x:
        found.append(kind_of(weight).turned_product_plus(grad, weight, grad_low, A))
    if want_weight:
        found.append(kind_of(weight).weight_gradient(grad, x, weight))
    if want_bias:
        found.append(grad.sum(0))
    if want_A:
        found.append(grad_low.t().mm(x))
    if want_B:
        found.append(scaled_product(grad.t(), low, alpha))
    return found


_LIBRARY.impl("lora_linear", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("lora_linear_backward", _backward, "CompositeExplicitAutograd")


@shapes_of("erniekit::lora_linear")
def _(x: torch.Tensor, data: Any, scale: Any, extra: Any, kind: str, bias: Any, A: torch.Tensor, *_: Any) -> Any:
    weight = Stored(data, scale, extra, kind)
    return x.new_empty(x.shape[0], kind_of(weight).shape(weight)[0]), x.new_empty(x.shape[0], A.shape[0])


@shapes_of("erniekit::lora_linear_backward")
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    low: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    extra: torch.Tensor | None,
    kind: str,
    A: torch.Tensor,
    B: torch.Tensor,
    scales: list[float],
    ranks: list[int],
    wanted: list[bool],
) -> list[torch.Tensor]:
    shapes = (x.shape, data.shape, data.shape[:1], A.shape, B.shape)
    return [grad.new_empty(shape) for shape, want in zip(shapes, wanted) if want]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, data, scale, extra, ctx.kind, _, A, B, ctx.scales, ctx.ranks = inputs
    low = output[1]
    ctx.mark_non_differentiable(low)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, low, data, scale, extra, A, B)


def _gradient(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    x_wanted, data_wanted, _, _, _, *rest = ctx.needs_input_grad
    wanted = [x_wanted, data_wanted, *rest[:-_NOT_GRADED]]
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    x, low, data, scale, extra, A, B = ctx.saved_tensors
    weight = Stored(data, scale, extra, ctx.kind)
    if torch.is_grad_enabled():
        found = _written_out(grad, x, weight, A, B, ctx.scales, ctx.ranks, wanted)
    else:
        found = torch.ops.erniekit.lora_linear_backward(grad, x, low, *weight, A, B, ctx.scales, ctx.ranks, wanted)
    each = iter(found)
    of_x, of_data, of_bias, of_A, of_B = (next(each) if want else None for want in wanted)
    return of_x, of_data, None, None, None, of_bias, of_A, of_B, None, None


def _written_out(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: Stored,
    A: torch.Tensor,
    B: torch.Tensor,
    scales: list[float],
    ranks: list[int],
    wanted: list[bool],
) -> list[torch.Tensor]:
    """What the backward op returns, made of ops that can be differentiated again."""
    low, grad_low = (_scaled(t, scales, ranks) for t in (F.linear(x, A), grad @ B))
    if weight.kind == PLAIN:
        grad_x = grad @ weight.data
    else:
        grad_x = torch.ops.erniekit.stored_linear(grad, *weight, True)
    every = (grad_x + grad_low @ A, grad.t() @ x, grad.sum(0), grad_low.t() @ x, grad.t() @ low)
    return [t for t, want in zip(every, wanted) if want]


torch.library.register_autograd("erniekit::lora_linear", _gradient, setup_context=_keep)
