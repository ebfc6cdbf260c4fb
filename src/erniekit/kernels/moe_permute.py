"""Tokens sorted by the experts they chose, and back. Called by models/layers/moe.py and parallel/expert.py.

T tokens, K choices of each, R = T * K rows, E experts. Nothing here waits for the device: counts stay on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Order(NamedTuple):
    """A stable sort of the T * K choices by expert."""

    row_of: torch.Tensor  # int64 [T * K]: choice (t * K + k) of each sorted row
    place_of: torch.Tensor  # int64 [T * K]: the sorted row of each choice
    ends: torch.Tensor  # int32 [E]: one past the last row of each expert


def by_expert(ids: torch.Tensor, experts: int) -> Order:
    """ids [T, K] (values in [0, experts]; `experts` itself sorts last and is of no expert)."""
    flat = ids.reshape(-1)
    row_of = torch.sort(flat.to(torch.int16), stable=True).indices
    place_of = torch.empty_like(row_of).scatter_(0, row_of, torch.arange(row_of.numel(), device=ids.device))
    return Order(row_of, place_of, count(ids, experts).cumsum(0).to(torch.int32))


def count(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert was chosen, int64 [experts]; bincount would wait for the device."""
    numbers = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    return (ids.reshape(-1, 1) == numbers).sum(0)


class Gather(torch.autograd.Function):
    """x [T, H] -> the rows of an order [R, H]; the order may be cut short, where further rows are of experts elsewhere.
    Backward sums each token's rows in a fixed order: no atomics, the same bits always."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row_of: torch.Tensor, place_of: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(place_of)
        ctx.k = k
        return x.index_select(0, row_of // k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (place_of,) = ctx.saved_tensors
        return _sum_choices(grad, place_of.view(-1, ctx.k)).to(grad.dtype), None, None, None


class Combine(torch.autograd.Function):
    """rows [R, H], weights [T, K] -> y [T, H] = sum of weight * row over the choices that have a row; in fp32."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, row_of: torch.Tensor, place_of: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, row_of)
        return _sum_choices(rows, place_of.view_as(weights), weights).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        rows, weights, row_of = ctx.saved_tensors
        per_row = grad.index_select(0, row_of // weights.shape[1]).float()
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_rows = (per_row * weights.reshape(-1)[row_of, None].float()).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            dots = (per_row * rows.float()).sum(-1).to(weights.dtype)
            grad_weights = weights.new_zeros(weights.numel()).index_copy_(0, row_of, dots).view_as(weights)
        return grad_rows, grad_weights, None, None


def _sum_choices(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 [T, H]: of each token the rows at place [T, K], none where that is past the last row. Choice by choice, in a
    fixed order: no atomics, and no [T * K, H] beside the rows."""
    out = rows.new_zeros(place.shape[0], rows.shape[1], dtype=torch.float32)
    if rows.shape[0] == 0:
        return out
    for k in range(place.shape[1]):
        there = place[:, k]
        part = rows.index_select(0, there.clamp(max=rows.shape[0] - 1)).float()
        if weights is not None:
            part = part * weights[:, k, None].float()
        out += torch.where((there < rows.shape[0])[:, None], part, 0.0)
    return out


def gather(x: torch.Tensor, order: Order, k: int) -> torch.Tensor:
    result: torch.Tensor = Gather.apply(x, order.row_of, order.place_of, k)
    return result


def combine(rows: torch.Tensor, weights: torch.Tensor, order: Order) -> torch.Tensor:
    result: torch.Tensor = Combine.apply(rows, weights, order.row_of, order.place_of)
    return result
