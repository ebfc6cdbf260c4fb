"""The collectives that sit inside a forward pass, each with the backward that makes gradients right.

Used by tensor.py, context.py, expert.py and vocab.py. `group` None means one rank: the value passes through untouched.
Registered as custom ops, so that torch.compile keeps them in the graph; the process group is passed by name and size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from erniekit.kernels.autograd_function import Function
from erniekit.kernels.available import shapes_of
from erniekit.parallel import comm

# Defined by hand: what `custom_op` wraps around a function costs the host as much as a launch.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_LIBRARY.define("sum_over(Tensor x, str group) -> Tensor")
_LIBRARY.define("gather_over(Tensor x, int dim, str group, int ranks) -> Tensor")
_LIBRARY.define("scatter_sum_over(Tensor x, int dim, str group, int ranks) -> Tensor")


def copy_to(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Forward as it is; backward sums: each rank used the value for a different part of the output."""
    if group is None:
        return x
    out: torch.Tensor = _CopyTo.apply(x, group.group_name)
    return out


def sum_from(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Forward sums partial results; backward as it is: every rank goes on with the same whole."""
    if group is None:
        return x
    out: torch.Tensor = torch.ops.erniekit.sum_over(x, group.group_name)
    return out


def gather_from(x: torch.Tensor, dim: int, group: ProcessGroup | None) -> torch.Tensor:
    """Forward joins the ranks' slices along dim; backward sums what each rank learnt of a slice and hands it back."""
    if group is None:
        return x
    out: torch.Tensor = torch.ops.erniekit.gather_over(x, dim, group.group_name, group.size())
    return out


def scatter_sum(x: torch.Tensor, dim: int, group: ProcessGroup | None) -> torch.Tensor:
    """Forward sums partial results and keeps this rank's slice along dim; backward joins the slices' gradients."""
    if group is None:
        return x
    out: torch.Tensor = torch.ops.erniekit.scatter_sum_over(x, dim, group.group_name, group.size())
    return out


# What the ops do; a rehearsal, which would only see their shapes, calls these itself.


def sum_over(x: torch.Tensor, group: str) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(x, _resolve_process_group(group))  # type: ignore[arg-type]
    return x


def gather_over(x: torch.Tensor, dim: int, group: str, ranks: int) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
    comm.all_gather(parts, x.contiguous(), _resolve_process_group(group))  # type: ignore[arg-type]
    return torch.cat(parts, dim=dim)


def scatter_sum_over(x: torch.Tensor, dim: int, group: str, ranks: int) -> torch.Tensor:
    parts = [p.contiguous() for p in x.chunk(ranks, dim=dim)]
    out = torch.empty_like(parts[0])
    comm.reduce_scatter(out, parts, _resolve_process_group(group))  # type: ignore[arg-type]
    return out


class _CopyTo(Function):
    """Not an op: those return new memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.erniekit.sum_over(grad, ctx.group), None


_LIBRARY.impl("sum_over", sum_over, "CompositeExplicitAutograd")
_LIBRARY.impl("gather_over", gather_over, "CompositeExplicitAutograd")
_LIBRARY.impl("scatter_sum_over", scatter_sum_over, "CompositeExplicitAutograd")


@shapes_of("erniekit::sum_over")
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@shapes_of("erniekit::gather_over")
def _(x: torch.Tensor, dim: int, group: str, ranks: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= ranks
    return x.new_empty(shape)


@shapes_of("erniekit::scatter_sum_over")
def _(x: torch.Tensor, dim: int, group: str, ranks: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] //= ranks
    return x.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.given = inputs[1:]


def _as_it_is(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad, None


def _handed_back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return torch.ops.erniekit.scatter_sum_over(grad, *ctx.given), None, None, None


def _joined_again(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return torch.ops.erniekit.gather_over(grad, *ctx.given), None, None, None


torch.library.register_autograd("erniekit::sum_over", _as_it_is)
torch.library.register_autograd("erniekit::gather_over", _handed_back, setup_context=_keep)
torch.library.register_autograd("erniekit::scatter_sum_over", _joined_again, setup_context=_keep)
