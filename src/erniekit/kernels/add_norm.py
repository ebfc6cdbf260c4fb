"""A residual and what a block adds to it, summed and normalised in one sweep, and back in one. Called by
models/layers/norm.py and by serve/engines, where a step is so short that its launches count. rms_norm.py is the
definition of the norm. H hidden."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from erniekit.kernels.autograd_function import Function
from erniekit.kernels.available import runs_triton
from erniekit.kernels.rms_norm import rms_norm


def add_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, added [..., H] -> (x + added, its norm times weight), both in x's dtype; added None: x as it is."""
    # A compiled layer has it in its own sweeps; the kernel computes in fp32.
    if not runs_triton(x) or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return reference(x, added, weight, eps)
    given = (x, weight) if added is None else (x, weight, added)
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
