"""Products in fp8 (e4m3), a scale for each row of both sides. Called by kernels/stored/fp8.py.

An H200 does these 1.3 to 1.5 times as fast as bf16; a product is off by 3.7 % (norm) where bf16 is off by 0.2 %. Other
devices run the definition: both sides turned back into fp32 and multiplied. R rows, E experts.
"""

from __future__ import annotations

import torch

from erniekit.kernels.available import runs_triton
from erniekit.kernels.grouped_gemm import spans
from erniekit.kernels.low_rank import Tail
from erniekit.kernels.quantised_rows import dequantised
from erniekit.kernels.selection import ExpertFacts, Fp8Facts, chosen


def transposed(image: torch.Tensor) -> torch.Tensor:
    """fp8 [.., out, in] -> [.., in, out], contiguous: both sides of a product lie along what it sums over."""
    if runs_triton(image):
        from erniekit.kernels.triton import fp8_rows

        return fp8_rows.transposed(image)
    return image.view(torch.uint8).transpose(-2, -1).contiguous().view(image.dtype)


def product(
    x8: torch.Tensor,
    xs: torch.Tensor,
    w8: torch.Tensor,
    ws: torch.Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x8 [R, K], xs [R, 1], w8 [N, K], ws [N, 1] (None: ones) -> x w^T [R, N]."""
    ws = _scales(w8, ws)
    if _emulated(x8, w8.shape[0]):
        return (dequantised(x8, xs) @ dequantised(w8, ws).t()).to(dtype)
    if not x8.shape[0]:
        return torch.empty(0, w8.shape[0], dtype=dtype, device=x8.device)
    # Without fast accumulation the product is as slow as bf16's, or slower.
    out = torch._scaled_mm(
        x8, w8.t(), scale_a=xs, scale_b=ws.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out.to(dtype)


def grouped(
    rows8: torch.Tensor,
    rs: torch.Tensor,
    w8: torch.Tensor,
    ws: torch.Tensor | None,
    ends: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """rows8 [R, K] sorted by expert, rs [R, 1], w8 [E, N, K], ws [E, N, 1] (None: ones), ends int32 [E] (one past each
    expert's last row) -> [R, N]. Past the last end: undefined on a card, zeros elsewhere."""
    if _emulated(rows8, w8.shape[1], experts=True):
        scales = _scales(w8, ws)
        out = rows8.new_zeros(rows8.shape[0], w8.shape[1], dtype=dtype)
        for e, span in spans(ends):
            out[span] = product(rows8[span], rs[span], w8[e], scales[e], dtype)
        return out
    if not rows8.shape[0]:
        return torch.empty(0, w8.shape[1], dtype=dtype, device=rows8.device)
    if _in_triton(rows8, w8.shape[1]):
        from erniekit.kernels.triton import grouped_products

        return grouped_products.in_fp8(rows8, rs, w8, ws, ends, [], 1.0).to(dtype)
    products = torch._scaled_grouped_mm(
        rows8, w8.transpose(1, 2), rs.view(-1), _scales(w8, ws).squeeze(-1), offs=ends, out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip
    return products.to(dtype)


def grouped_plus(
    rows8: torch.Tensor,
    rs: torch.Tensor,
    w8: torch.Tensor,
    ws: torch.Tensor | None,
    ends: torch.Tensor,
    tails: list[Tail],
    scale: float,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor | None:
    """`grouped` + scale * the sum of z factor over tails (z [R, n], factor [E, n, N]) in one pass, rounded once; None:
    nothing here does that, and the caller adds them."""
    if not adds_in_product(rows8, w8.shape[1], tails, scale, dtype):
        return None
    from erniekit.kernels.triton import grouped_products

    return grouped_products.in_fp8(rows8, rs, w8, ws, ends, tails, scale)


def adds_in_product(rows: torch.Tensor, out: int, tails: list[Tail], scale: float, dtype: torch.dtype) -> bool:
    """Whether updates can be added in the pass of a product that is `out` wide. rows: in fp8 or not yet."""
    if not rows.shape[0] or not _in_triton(rows, out):
        return False
    facts = ExpertFacts(rows.device, dtype, rows.shape[1], out, tuple(z.shape[1] for z, _ in tails))
    if chosen("experts' products with updates", facts) != "triton":
        return False
    from erniekit.kernels.triton import grouped_products

    return grouped_products.takes(tails, scale, dtype)


def _emulated(rows: torch.Tensor, out: int, experts: bool = False) -> bool:
    return chosen("fp8 products", Fp8Facts(rows.device, rows.shape[1], out, experts)) == "emulated"


def _in_triton(rows: torch.Tensor, out: int) -> bool:
    facts = Fp8Facts(rows.device, rows.shape[1], out, experts=True)
    return chosen("experts' fp8 products", facts) == "triton"


def _scales(w8: torch.Tensor, ws: torch.Tensor | None) -> torch.Tensor:
    return torch.ones(*w8.shape[:-1], 1, dtype=torch.float32, device=w8.device) if ws is None else ws
