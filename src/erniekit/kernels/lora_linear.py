"""A frozen linear and the low-rank updates on its rows as one op: y = x W^T + bias + the sum of scale * (x A^T) B^T.

Every update is added to y by the product itself, so that nothing as wide as y is read or written once more, or kept for
backward. A weight in fp8 is multiplied in fp8, x and the gradient rounded row by row for it; the updates see both as
they are. Called by lora/layers.py. T tokens, R the ranks of all updates together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels.fp8_product import Fp8Weight, fp8_linear, product, quantised

PLAIN = (torch.Tensor, nn.Parameter)  # no subclass: what a DTensor or a quantised weight does is its own affair


class RowUpdate(NamedTuple):
    A: torch.Tensor  # [r, in]
    B: torch.Tensor  # [rows of all spans, r]
    scale: float
    spans: tuple[tuple[int, int], ...]  # the rows of the weight it adds to, (first, end) upwards, as B has them


def in_one_op(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, bias: torch.Tensor | None, updates: Sequence[RowUpdate]
) -> bool:
    """Whether the op takes these: plain tensors of one dtype, and nobody casts or transforms what is computed."""
    given = [x, *(t for update in updates for t in (update.A, update.B)), *([] if bias is None else [bias])]
    if not isinstance(weight, Fp8Weight):
        given.append(weight)
    if any(type(t) not in PLAIN or t.dtype != x.dtype for t in given):
        return False
    return not torch.is_autocast_enabled(x.device.type) and not torch._C._are_functorch_transforms_active()


def lora_linear(
    x: torch.Tensor, weight: torch.Tensor | Fp8Weight, bias: torch.Tensor | None, updates: Sequence[RowUpdate]
) -> torch.Tensor:
    """x [..., in], weight [out, in] -> [..., out]."""
    held, A, B, scales, ranks, *in_fp8 = as_given(weight, updates)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y, _ = torch.ops.erniekit.lora_linear(rows, held, bias, A, B, scales, ranks, *in_fp8)
    return y.view(*x.shape[:-1], held.shape[0])


def as_given(weight: torch.Tensor | Fp8Weight, updates: Sequence[RowUpdate]) -> tuple[Any, ...]:
    """What the op is called with: the weight, all A and B as one, scales, ranks, and the rest of an fp8 weight."""
    held, *in_fp8 = weight if isinstance(weight, Fp8Weight) else (weight, None, None, None)
    A = updates[0].A if len(updates) == 1 else torch.cat([update.A for update in updates])
    scales, ranks = [update.scale for update in updates], [update.A.shape[0] for update in updates]
    return held, A, placed(updates, held.shape[0]), scales, ranks, *in_fp8


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
_IN_FP8 = "Tensor? row_scale=None, Tensor? columns=None, Tensor? column_scale=None"  # as Fp8Weight; weight is its rows
_LIBRARY.define(
    "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor A, Tensor B, float[] scales, int[] ranks, "
    f"{_IN_FP8}) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "lora_linear_backward(Tensor grad, Tensor x, Tensor low, Tensor weight, Tensor A, Tensor B, float[] scales, "
    f"int[] ranks, bool[] wanted, {_IN_FP8}) -> Tensor[]"
)


def _common(scales: Sequence[float]) -> float | None:
    """The scale of all updates, which a product applies in fp32 before it rounds; None: they differ."""
    return scales[0] if len(set(scales)) == 1 else None


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor,
    scales: list[float],
    ranks: list[int],
    row_scale: torch.Tensor | None = None,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, out], x A^T [T, R], scaled already where scales differ)."""
    low, scale = F.linear(x, A), _common(scales)
    if scale is None:
        low = _scaled(low, scales, ranks)
    y = _sum(x, weight.t(), weight, row_scale, low, B.t(), 1.0 if scale is None else scale)
    return y if bias is None else y.add_(bias), low


def _sum(
    x: torch.Tensor,
    plain: torch.Tensor,
    held: torch.Tensor,
    scales: torch.Tensor | None,
    low: torch.Tensor,
    factor: torch.Tensor,
    alpha: float,
) -> torch.Tensor:
    """x [T, in] times a frozen matrix, `plain` [in, out] or with its scales `held` in fp8 [out, in], plus
    alpha * low @ factor. In place: else the card would first copy the one to where the sum goes."""
    if scales is None:
        # The small product first: the large one then adds to it at the end of its own work, which measured quicker.
        return _product(low, factor, alpha).addmm_(x, plain)
    return product(*quantised(x), held, scales, x.dtype).addmm_(low, factor, alpha=alpha)


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    low: torch.Tensor,
    weight: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    scales: list[float],
    ranks: list[int],
    wanted: list[bool],
    row_scale: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Of x, weight, bias, A, B: the gradients that are wanted, in this order."""
    want_x, want_weight, want_bias, want_A, want_B = wanted
    grad, scale, found = grad.contiguous(), _common(scales), []
    alpha = 1.0 if scale is None else scale
    if want_x or want_A:
        grad_low = _product(grad, B, alpha)
        if scale is None:
            grad_low = _scaled(grad_low, scales, ranks)
    if want_x:
        held = weight if columns is None else columns
        found.append(_sum(grad, weight, held, column_scale, grad_low, A, 1.0))
    if want_weight:
        found.append(grad.t().mm(x))
    if want_bias:
        found.append(grad.sum(0))
    if want_A:
        found.append(grad_low.t().mm(x))
    if want_B:
        found.append(_product(grad.t(), low, alpha))
    return found


def _product(a: torch.Tensor, b: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha * a b, rounded once."""
    return a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=alpha)


_LIBRARY.impl("lora_linear", forward, "CompositeExplicitAutograd")
_LIBRARY.impl("lora_linear_backward", backward, "CompositeExplicitAutograd")


@torch.library.register_fake("erniekit::lora_linear")
def _(x: torch.Tensor, weight: torch.Tensor, bias: Any, A: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], A.shape[0])


@torch.library.register_fake("erniekit::lora_linear_backward")
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    low: torch.Tensor,
    weight: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    scales: list[float],
    ranks: list[int],
    wanted: list[bool],
    *_: Any,
) -> list[torch.Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1], A.shape, B.shape)
    return [grad.new_empty(shape) for shape, want in zip(shapes, wanted) if want]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _, A, B, ctx.scales, ctx.ranks, *in_fp8 = inputs
    low = output[1]
    ctx.mark_non_differentiable(low)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, low, weight, A, B, *in_fp8)


def _gradient(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:5])
    if grad is None:
        return (None,) * 10
    x, low, weight, A, B, *in_fp8 = ctx.saved_tensors
    given = (weight, A, B, ctx.scales, ctx.ranks, wanted, *in_fp8)
    if torch.is_grad_enabled():
        found = _written_out(grad, x, *given)
    else:
        found = torch.ops.erniekit.lora_linear_backward(grad, x, low, *given)
    each = iter(found)
    return *(next(each) if want else None for want in wanted), None, None, None, None, None


def _written_out(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    scales: list[float],
    ranks: list[int],
    wanted: list[bool],
    row_scale: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """What the backward op answers, for somebody who differentiates that as well."""
    low, grad_low = (_scaled(t, scales, ranks) for t in (F.linear(x, A), grad @ B))
    if row_scale is None or columns is None or column_scale is None:
        grad_x = grad @ weight
    else:
        grad_x = fp8_linear(grad, Fp8Weight(columns, column_scale, weight, row_scale))
    every = (grad_x + grad_low @ A, grad.t() @ x, grad.sum(0), grad_low.t() @ x, grad.t() @ low)
    return [t for t, want in zip(every, wanted) if want]


torch.library.register_autograd("erniekit::lora_linear", _gradient, setup_context=_keep)
