"""The collectives that sit inside a forward pass, each with the backward that makes gradients right.

Used by tensor.py, context.py and vocab.py. `group` None means one rank: the value passes through untouched.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def _sum(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def _gather(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def _scatter_sum(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    parts = [p.contiguous() for p in x.chunk(group.size(), dim=dim)]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=group)
    return out


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _sum(grad, ctx.group), None


class _SumFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _scatter_sum(grad, ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter_sum(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _gather(grad, ctx.dim, ctx.group), None, None


def copy_to(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Forward as it is; backward sums: each rank used the value for a different part of the output."""
    return x if group is None else _CopyTo.apply(x, group)


def sum_from(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Forward sums partial results; backward as it is: every rank goes on with the same whole."""
    return x if group is None else _SumFrom.apply(x, group)


def gather_from(x: torch.Tensor, dim: int, group: ProcessGroup | None) -> torch.Tensor:
    """Forward joins the ranks' slices along dim; backward sums what each rank learnt of a slice and hands it back."""
    return x if group is None else _GatherFrom.apply(x, dim, group)


def scatter_sum(x: torch.Tensor, dim: int, group: ProcessGroup | None) -> torch.Tensor:
    """Forward sums partial results and keeps this rank's slice along dim; backward joins the slices' gradients."""
    return x if group is None else _ScatterSum.apply(x, dim, group)
