"""The steps of the expert block in plain torch: what kernels/triton/expert_*.py compute. Called by expert_mlp.py.

T tokens, K choices of each, R = T * K rows sorted by expert, E experts, `ends` int32 [E] one past each expert's last
row. Loops over experts and waits for the device to know the ends: for CPUs and as the definition in tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

Low = tuple[torch.Tensor, float]  # a low-rank factor [E, rank, width], any strides, and what its product is scaled by
Tail = tuple[torch.Tensor, torch.Tensor]  # narrow rows [R, rank] and their factor [E, rank, width]


def spans(ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    bounds = [0, *ends.tolist()]
    return ((e, slice(a, b)) for e, (a, b) in enumerate(pairwise(bounds)))


def _by_expert(rows: torch.Tensor, factor: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, in], factor [E, in, out] -> [R, out]."""
    return torch.cat([rows[span] @ factor[e] for e, span in spans(ends)])


def take(
    x: torch.Tensor, row_of: torch.Tensor, k: int, ends: torch.Tensor, lows: list[Low], keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, W] of tokens x [T, W], and scale * rows @ factor^T of each of `lows` side by side [R, ranks].
    keep=False: the second alone, the first empty."""
    rows = x.index_select(0, row_of // k)
    low = [_by_expert(rows, factor.transpose(1, 2), ends) * scale for factor, scale in lows]
    return (rows if keep else rows[:0].clone()), torch.cat([rows[:, :0], *low], dim=1)


def _halves(
    gate_up: torch.Tensor, z: torch.Tensor, gate: Low | None, up: Low | None, ends: torch.Tensor
) -> list[torch.Tensor]:
    """Gate and up in fp32, their updates (from z [R, rank of gate + rank of up]) added."""
    out, column = [], 0
    for half, low in zip(gate_up.float().chunk(2, dim=-1), (gate, up)):
        if low is not None:
            mine = z[:, column : column + low[0].shape[1]].float()
            half = half + low[1] * _by_expert(mine, low[0].float(), ends)
            column += low[0].shape[1]
        out.append(half)
    return out


def activate(
    gate_up: torch.Tensor,
    z: torch.Tensor,
    gate: Low | None,
    up: Low | None,
    down: Low | None,
    weights: torch.Tensor,
    row_of: torch.Tensor,
    ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [R, 2 * W] -> act = weight of the row * silu(gate) * up [R, W], and act @ down's factor^T [R, rank].

    gate, up: B as [E, rank, W], whose products with their columns of z are added first; down: A as [E, rank, W].
    weights [T * K]: of choices, in the tokens' order.
    """
    g, u = _halves(gate_up, z, gate, up, ends)
    act = (g * g.sigmoid() * u * weights[row_of].float()[:, None]).to(gate_up.dtype)
    low = act[:, :0].clone() if down is None else _by_expert(act, down[0].transpose(1, 2), ends)
    return act, low


def activate_backward(
    grad: torch.Tensor,
    grad_low: torch.Tensor,
    gate_up: torch.Tensor,
    z: torch.Tensor,
    gate: Low | None,
    up: Low | None,
    down: Low | None,
    weights: torch.Tensor,
    row_of: torch.Tensor,
    ends: torch.Tensor,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the gradient of act, as the product with the weight left it [R, W], and of its low rank [R, rank of down]:
    the gradients of gate_up [R, 2 * W], act once more (keep=False: empty), and the gradients of weights and z."""
    g, u = _halves(gate_up, z, gate, up, ends)
    grad = grad.float()
    if down is not None:
        grad = grad + _by_expert(grad_low.float(), down[0].float(), ends)
    s, weight = g.sigmoid(), weights[row_of].float()[:, None]
    dots = (grad * g * s * u).sum(-1)
    grad_weights = torch.empty_like(weights).index_copy_(0, row_of, dots.to(weights.dtype))
    grad = grad * weight
    d_gate, d_up = grad * u * (s + g * s * (1 - s)), grad * g * s
    out = torch.cat([d_gate, d_up], dim=-1).to(gate_up.dtype)
    d_z = [
        (_by_expert(half, low[0].transpose(1, 2), ends) * low[1]).to(z.dtype)
        for half, low in zip(out.chunk(2, dim=-1), (gate, up))
        if low is not None
    ]
    act = (g * s * u * weight).to(gate_up.dtype)
    return out, (act if keep else act[:0].clone()), grad_weights, torch.cat([z[:, :0], *d_z], dim=1)


def sum_choices(rows: torch.Tensor, place_of: torch.Tensor, k: int) -> torch.Tensor:
    """[T, W]: each token's K rows added, in fp32 and in a fixed order."""
    return rows.index_select(0, place_of).view(-1, k, rows.shape[1]).float().sum(1).to(rows.dtype)


def outer(
    wide: torch.Tensor,
    narrows: list[tuple[torch.Tensor, float]],
    ends: torch.Tensor,
    row_of: torch.Tensor | None = None,
    k: int = 0,
    turned: bool = False,
) -> list[torch.Tensor]:
    """Of each narrow [R, n] and its scale: scale * narrow^T @ wide, expert by expert [E, n, W]; turned: [E, W, n].
    row_of: wide has tokens [T, W], of which row r is that of choice row_of[r]."""
    if row_of is not None:
        wide = wide.index_select(0, row_of // k)
    out = []
    for narrow, scale in narrows:
        each = torch.stack([narrow[span].t() @ wide[span] for _, span in spans(ends)]) * scale
        out.append(each.transpose(1, 2).contiguous() if turned else each)
    return out


def outer_of_halves(
    wide: torch.Tensor, narrow: torch.Tensor, split: int, scales: tuple[float, float], ends: torch.Tensor
) -> list[torch.Tensor]:
    """Of each half of wide [R, 2 * W] and its columns of narrow [R, n], the first half's up to `split`: what `outer`
    answers, turned: [E, W, split] and [E, W, n - split]."""
    parts = zip(wide.chunk(2, dim=1), (narrow[:, :split], narrow[:, split:]), scales)
    return [outer(half, [(mine, scale)], ends, turned=True)[0] for half, mine, scale in parts]


def add_low(out: torch.Tensor, tails: list[Tail], scale: float, ends: torch.Tensor) -> torch.Tensor:
    """`out` [R, W] plus scale * narrow @ factor of each tail (two at most), in place."""
    for narrow, factor in tails:
        out.add_(_by_expert(narrow, factor, ends), alpha=scale)
    return out


def product(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, tails: list[Tail], scale: float = 1.0
) -> torch.Tensor:
    """rows [R, D] @ weight [E, D, W] plus scale * the tails [R, W]."""
    return add_low(_by_expert(rows, weight, ends), tails, scale, ends)
