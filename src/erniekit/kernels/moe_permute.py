"""Tokens sorted by the experts they chose, and back. Called by models/layers/moe.py and, where rows
travel between ranks, by parallel/expert.py.

T tokens, K choices of each, R = T * K rows, E experts. Nothing here waits for the device: counts stay on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from erniekit.kernels import expert_reference, few_tokens
from erniekit.kernels.autograd_function import Function
from erniekit.kernels.available import runs_triton

MOST_CELLS = torch.iinfo(torch.int16).max  # experts, or experts times groups: rows are sorted by 16-bit numbers


class Order(NamedTuple):
    """A stable sort of the T * K choices by expert."""

    row_of: torch.Tensor  # int64 [T * K]: choice (t * K + k) of each sorted row
    place_of: torch.Tensor  # int64 [T * K]: the sorted row of each choice
    ends: torch.Tensor  # int32 [E]: one past the last row of each expert


def by_expert(ids: torch.Tensor, experts: int) -> Order:
    """ids [T, K] (values in [0, experts]; `experts` itself sorts last and is of no expert)."""
    if few_tokens.sorts(ids, experts):
        return Order(*few_tokens.order(ids, experts))
    flat = ids.reshape(-1)
    sorted_ids, row_of = torch.sort(flat.to(torch.int16), stable=True)
    place_of = torch.empty_like(row_of).scatter_(0, row_of, torch.arange(row_of.numel(), device=ids.device))
    if torch.compiler.is_compiling() or ids.device.type not in ("cpu", "cuda"):  # others may lack it for 16 bits
        return Order(row_of, place_of, count(ids, experts).cumsum(0).to(torch.int32))
    numbers = torch.arange(experts, device=ids.device, dtype=torch.int16)
    return Order(row_of, place_of, torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True))


def by_expert_and_group(
    ids: torch.Tensor, groups: torch.Tensor, experts: int, count_of_groups: int
) -> tuple[Order, torch.Tensor]:
    """The rows of each expert sorted by the group of their token, groups [T]: the order, and one past the last row of
    each group, int32 [experts * count_of_groups], expert after expert."""
    cells = experts * count_of_groups
    if cells > MOST_CELLS:
        raise ValueError(f"{experts} experts times {count_of_groups} groups are too many to sort by 16-bit numbers")
    fine = by_expert((ids * count_of_groups + groups[:, None]).clamp(max=cells), cells)
    return fine._replace(ends=fine.ends[count_of_groups - 1 :: count_of_groups].contiguous()), fine.ends


def count(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert was chosen, int64 [experts]; bincount would wait for the device."""
    if ids.device.type == "cpu":  # in one pass over the choices instead of one for each expert
        flat = ids.reshape(-1).long()
        return flat.new_zeros(experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:experts]
    numbers = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    return (ids.reshape(-1, 1) == numbers).sum(0)


def sum_choices(rows: torch.Tensor, order: Order, k: int) -> torch.Tensor:
    """[T, H]: each token's K rows added, in fp32 and in a fixed order: no atomics, the same bits always."""
    if runs_triton(rows) and rows.shape[0] and rows.dtype != torch.float64:
        from erniekit.kernels.triton import expert_rows

        return expert_rows.sum_choices(rows, order.place_of, k, order.ends)
    return expert_reference.sum_choices(rows, order.place_of, k, order.ends)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: int, *order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*order)
        ctx.k = k
        return x.index_select(0, order[0] // k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return sum_choices(grad.contiguous(), Order(*ctx.saved_tensors), ctx.k), None, None, None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, k: int, *order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order[0])
        ctx.k = k
        return sum_choices(rows.contiguous(), Order(*order), k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (row_of,) = ctx.saved_tensors
        return grad.index_select(0, row_of // ctx.k), None, None, None, None


class _WeightsOfRows(Function):
    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_of)
        ctx.shape = weights.shape
        return weights.reshape(-1).index_select(0, row_of)[:, None]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (row_of,) = ctx.saved_tensors
        whole = grad.new_zeros(ctx.shape.numel())  # a choice without a row has no share
        return whole.index_copy_(0, row_of, grad[:, 0]).view(ctx.shape), None


def gather(x: torch.Tensor, order: Order, k: int) -> torch.Tensor:
    """x [T, H] -> the rows of an order [R, H]; row_of may be cut short, where further choices have no expert."""
    result: torch.Tensor = _Gather.apply(x, k, *order)
    return result


def combine(rows: torch.Tensor, order: Order, k: int) -> torch.Tensor:
    """rows [R, H], each weighed already -> y [T, H], the sum over a token's choices that have a row."""
    result: torch.Tensor = _Combine.apply(rows, k, *order)
    return result


def weights_of_rows(weights: torch.Tensor, order: Order) -> torch.Tensor:
    """weights [T, K] of choices -> [R, 1] of an order's rows."""
    result: torch.Tensor = _WeightsOfRows.apply(weights, order.row_of)
    return result
