"""The steps of the expert op in plain torch: the definition of what kernels/triton/expert_*.py compute. Called by
expert_mlp.py where those cannot run: CPUs, fp32, high ranks, odd widths.

T tokens, K choices of each, R rows sorted by expert, E experts, `ends` int32 [E] one past each expert's last row. R is
T * K, or less where the experts of some choices are elsewhere. Rows past the last end are no expert's: never read.
"""

from __future__ import annotations

import torch

from erniekit.kernels.grouped_gemm import grouped_outer, grouped_product, implementation
from erniekit.kernels.low_rank import Low, Tail
from erniekit.kernels.precision import at_least_fp32
from erniekit.kernels.quantised_rows import Scaled


def take(
    x: torch.Tensor, row_of: torch.Tensor, k: int, ends: torch.Tensor, lows: list[Low], keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, W] of tokens x [T, W], and scale * rows @ factor^T of each of `lows` side by side [R, ranks].
    keep=False: only the second, the first empty."""
    rows = x.index_select(0, row_of // k)
    low = [grouped_product(rows, factor.transpose(1, 2), ends) * scale for factor, scale in lows]
    return (rows if keep else rows[:0].clone()), torch.cat([rows[:, :0], *low], dim=1)


def _halves(
    gate_up: torch.Tensor, z: torch.Tensor, gate: Low | None, up: Low | None, ends: torch.Tensor
) -> list[torch.Tensor]:
    """Gate and up in fp32, their updates (from z [R, rank of gate + rank of up]) added."""
    out, column = [], 0
    for half, low in zip(at_least_fp32(gate_up).chunk(2, dim=-1), (gate, up)):
        if low is not None:
            half = half + low[1] * _product_in_fp32(z[:, column : column + low[0].shape[1]], low[0], ends)
            column += low[0].shape[1]
        out.append(half.contiguous())  # with and without an update the same code computes what follows: the same bits
    return out


def _product_in_fp32(rows: torch.Tensor, factor: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """On a card rounded to 16 bit first: there is no grouped product in fp32 that does not wait for the ends."""
    if implementation(rows, factor) != "loop":
        return at_least_fp32(grouped_product(rows, factor, ends))
    return grouped_product(at_least_fp32(rows), at_least_fp32(factor), ends)


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
    act = (g * g.sigmoid() * u * at_least_fp32(weights[row_of])[:, None]).to(gate_up.dtype)
    low = act[:, :0].clone() if down is None else grouped_product(act, down[0].transpose(1, 2), ends)
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
    grad = at_least_fp32(grad)
    if down is not None:
        grad = grad + _product_in_fp32(grad_low, down[0], ends)
    s, weight = g.sigmoid(), at_least_fp32(weights[row_of])[:, None]
    dots = (grad * g * s * u).sum(-1)
    valid = _valid_rows(row_of.shape[0], ends)
    grad_weights = torch.zeros_like(weights).index_copy_(0, row_of, torch.where(valid, dots, 0.0).to(weights.dtype))
    grad = grad * weight
    d_gate, d_up = grad * u * (s + g * s * (1 - s)), grad * g * s
    out = torch.cat([d_gate, d_up], dim=-1).to(gate_up.dtype)
    d_z = [
        (grouped_product(half, low[0].transpose(1, 2), ends) * low[1]).to(z.dtype)
        for half, low in zip(out.chunk(2, dim=-1), (gate, up))
        if low is not None
    ]
    act = (g * s * u * weight).to(gate_up.dtype)
    return out, (act if keep else act[:0].clone()), grad_weights, torch.cat([z[:, :0], *d_z], dim=1)


def sum_choices(rows: torch.Tensor, place_of: torch.Tensor, k: int, ends: torch.Tensor) -> torch.Tensor:
    """[T, W]: each token's K rows added, in fp32 and in a fixed order; a place past the last end has no row."""
    if not rows.shape[0]:
        return rows.new_zeros(place_of.shape[0] // k, rows.shape[1])
    chosen = at_least_fp32(rows.index_select(0, place_of.clamp(max=rows.shape[0] - 1)))
    chosen = torch.where((place_of < ends[-1])[:, None], chosen, 0.0)
    return chosen.view(-1, k, rows.shape[1]).sum(1).to(rows.dtype)


def _valid_rows(rows: int, ends: torch.Tensor) -> torch.Tensor:
    """bool [R]: whether a row is some expert's."""
    return torch.arange(rows, device=ends.device) < ends[-1]


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
        each = grouped_outer(narrow, wide, ends) * scale
        out.append(each.transpose(1, 2).contiguous() if turned else each)
    return out


def outer_of_halves(
    wide: torch.Tensor, narrow: torch.Tensor, split: int, scales: tuple[float, float], ends: torch.Tensor
) -> list[torch.Tensor]:
    """Of each half of wide [R, 2 * W] and its columns of narrow [R, n], the first half's up to `split`: what `outer`
    returns, turned: [E, W, split] and [E, W, n - split]."""
    parts = zip(wide.chunk(2, dim=1), (narrow[:, :split], narrow[:, split:]), scales)
    return [outer(half, [(mine, scale)], ends, turned=True)[0] for half, mine, scale in parts]


def add_low(out: torch.Tensor, tails: list[Tail], scale: float, ends: torch.Tensor) -> torch.Tensor:
    """`out` [R, W] plus scale * narrow @ factor of each tail (two at most), in place."""
    for narrow, factor in tails:
        out.add_(grouped_product(narrow, factor, ends), alpha=scale)
    return out


def take_fp8(
    x: torch.Tensor, small: Scaled, row_of: torch.Tensor, k: int, ends: torch.Tensor, lows: list[Low]
) -> tuple[Scaled, torch.Tensor]:
    """Rows of tokens in fp8, `small`, with their scales; low ranks of the tokens x, as they were."""
    token = row_of // k
    x8, scale = small
    rows8 = x8.view(torch.uint8).index_select(0, token).view(x8.dtype)  # torch has no such selection of fp8
    _, low = take(x, row_of, k, ends, lows, keep=False)
    return (rows8, scale.index_select(0, token)), low
