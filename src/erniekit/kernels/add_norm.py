"""A residual and what a block adds to it, summed and normalised in one sweep, and back in one. Called by
models/layers/norm.py and by serve/engines, where a step is so short that its launches count. rms_norm.py is the
definition of the norm. H hidden."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from erniekit.kernels.autograd_function import Function
from erniekit.kernels.available import runs_triton, shapes_of
from erniekit.kernels.rms_norm import rms_norm


def add_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float, as_op: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, added [..., H] -> (x + added, its norm times weight), both in x's dtype; added None: x as it is.

    as_op: in a compiled layer, too, the kernel. What the compiler makes of a norm sums a row in an order that depends
    on what else is in the program: with and without gradients a few last bits differ, and routers choose otherwise.
    """
    if not runs_triton(x) or x.dtype == torch.float64:  # the kernel computes in fp32
        return reference(x, added, weight, eps)
    given = (x, weight) if added is None else (x, weight, added)
    if torch.compiler.is_compiling():
        # Else a compiled layer has it in its own sweeps.
        return (_as_op if as_op and in_16_bits(*given) else reference)(x, added, weight, eps)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in given):
        return _forward(x, added, weight, eps)
    if not in_16_bits(*given):
        return reference(x, added, weight, eps)
    both: tuple[torch.Tensor, torch.Tensor] = _AddNorm.apply(x, added, weight, eps)
    return both


def in_16_bits(*given: torch.Tensor) -> bool:
    """All of them, in one format: what the kernel computes alike with and without gradients."""
    return given[0].dtype in (torch.bfloat16, torch.float16) and all(each.dtype == given[0].dtype for each in given)


def reference(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x if added is None else x + added
    return x, rms_norm(x, weight, eps)


def _forward(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from erniekit.kernels.triton import add_norm as kernels

    return kernels.add_norm(x.contiguous(), None if added is None else added.contiguous(), weight, eps)


class _AddNorm(Function):
    """One op for the sum and its norm: backward adds the two gradients that meet there in the pass it makes anyway.
    Of the norm nothing is kept but what it is of."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = _forward(x, added, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return x if added is None else total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        from erniekit.kernels.triton import add_norm as kernels

        of_total, of_normed = grads
        of_x, of_weight = of_total, None
        if of_normed is not None:
            total, weight = ctx.saved_tensors
            of_x, of_weight = kernels.gradients(of_total, of_normed, total, weight, ctx.eps, ctx.needs_input_grad[2])
        return of_x, of_x if ctx.needs_input_grad[1] else None, of_weight, None


# --- as operators, which compiled layers call. Outputs of an operator are new tensors: x itself is none of them.

_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_LIBRARY.define("norm(Tensor x, Tensor weight, float eps) -> Tensor")
_LIBRARY.define("add_norm(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor)")
_LIBRARY.define(
    "add_norm_backward(Tensor? of_total, Tensor of_normed, Tensor total, Tensor weight, float eps, bool with_weight) "
    "-> (Tensor, Tensor)"
)


def _as_op(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if added is None:
        return x, torch.ops.erniekit.norm(x, weight, eps)
    total, normed = torch.ops.erniekit.add_norm(x, added, weight, eps)
    return total, normed


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _forward(x, None, weight, eps)[1]


def _backward(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As kernels/triton/add_norm.py has it; a weight without a gradient has an empty one."""
    from erniekit.kernels.triton import add_norm as kernels

    of_x, of_weight = kernels.gradients(*given)
    return of_x, of_x.new_empty(0) if of_weight is None else of_weight


for _name, _run in (("norm", _norm), ("add_norm", _forward), ("add_norm_backward", _backward)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")


@shapes_of("erniekit::norm")
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@shapes_of("erniekit::add_norm")
def _(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@shapes_of("erniekit::add_norm_backward")
def _(
    of_total: torch.Tensor | None, of_normed: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape if rest[-1] else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *given, ctx.eps = inputs
    ctx.save_for_backward(given[0] if len(given) == 2 else output[0], given[-1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *of_totals, of_normed = grads
    of_total, of_weight = of_totals[0] if of_totals else None, None
    of_x = of_total
    if of_normed is not None:
        with_weight = ctx.needs_input_grad[-2]
        of_x, of_weight = torch.ops.erniekit.add_norm_backward(
            of_total, of_normed, *ctx.saved_tensors, ctx.eps, with_weight
        )
        of_weight = of_weight if with_weight else None
    return *(of_x for _ in grads), of_weight, None  # as many are summed as come out


for _name in ("norm", "add_norm"):
    torch.library.register_autograd(f"erniekit::{_name}", _gradients, setup_context=_keep)
